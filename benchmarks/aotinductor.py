"""Compare AOTInductor packages with eager PyTorch and `torch.compile`: the time to the first answer and the time of a call.

    python benchmarks/aotinductor.py [OUT.json] [--shape 1x128] [--rounds 10]

The model is a classifier in the shape of DistilBERT with random weights from a fixed seed. Each variant runs in its own process, and the
processes take turns. The time to the first answer starts with the import of `accel`, and the cache of the compiler is empty. The time of a
call is the median over all rounds of the fastest call in a round. The error is the largest difference from the outputs of eager PyTorch in
float32, divided by the largest value of these outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VARIANTS = {"eager": "pytorch", "compiled in the process": "inductor", "package": "aotinductor"}
CALLS = 10


def make_model() -> Any:
    """Return a classifier with random weights from a fixed seed and with non-zero biases."""
    import torch
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.eval()


def work(backend: str, folder: Path, shape: tuple[int, int], dtype: str) -> None:
    """Run one variant. Print a line of JSON after the first answer, and another line for each line of the standard input."""
    say = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        import accel

        ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(1))
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        started = time.perf_counter()
        options = accel.SessionOptions(compute_dtype=None if backend == "aotinductor" else dtype)
        model = accel.ORTModelForSequenceClassification.from_pretrained(
            folder, backend=backend, session_options=options
        )
        logits = model(**feeds).logits
        first_s = time.perf_counter() - started
        print(
            json.dumps({"first_answer_s": round(first_s, 2), "logits": logits.float().tolist()}), file=say, flush=True
        )
        for _ in range(CALLS):
            model(**feeds)
        for _ in sys.stdin:
            times = []
            for _ in range(CALLS):
                begun = time.perf_counter()
                model(**feeds)
                times.append(time.perf_counter() - begun)
            print(json.dumps(1e3 * min(times)), file=say, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "aotinductor.json")
    parser.add_argument("--shape", default="1x128")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", nargs=2, metavar=("BACKEND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtype = arguments.dtype
    batch, _, length = arguments.shape.partition("x")
    shape = (int(batch), int(length))
    if arguments.work:
        work(arguments.work[0], Path(arguments.work[1]), shape, dtype)
        return
    import torch

    import accel

    with tempfile.TemporaryDirectory() as temporary:
        model = make_model()
        plain, package = Path(temporary) / "plain", Path(temporary) / "package"
        model.save_pretrained(plain)
        ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(1))
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.detach()
        started = time.perf_counter()
        artifact = accel.export(plain, package, task="text-classification", backend="aotinductor", dtype=dtype)
        report: dict[str, Any] = {
            "processors": len(os.sched_getaffinity(0)),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "shape": arguments.shape,
            "dtype": dtype,
            "export_s": round(time.perf_counter() - started, 1),
            "package_bytes": sum(file.stat().st_size for file in artifact.path.glob("*.pt2")),
            "weights_bytes": (plain / "model.safetensors").stat().st_size,
            "variants": {},
        }
        processes: dict[str, subprocess.Popen[str]] = {}
        for name, backend in VARIANTS.items():
            folder = package if backend == "aotinductor" else plain
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(temporary) / f"cache-{backend}")}
            process = subprocess.Popen(
                [sys.executable, __file__, "--work", backend, str(folder), "--shape", arguments.shape, "--dtype", dtype],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            assert process.stdout is not None
            answer = json.loads(process.stdout.readline())
            logits = torch.tensor(answer.pop("logits"))
            report["variants"][name] = {
                **answer, "error": float((logits - expected).abs().max() / expected.abs().max()), "ms": []
            }  # fmt: skip
            processes[name] = process
        for _ in range(arguments.rounds):
            for name, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                report["variants"][name]["ms"].append(json.loads(process.stdout.readline()))
        for name, process in processes.items():
            process.communicate()
            times = report["variants"][name].pop("ms")
            report["variants"][name] |= {
                "median_ms": round(statistics.median(times), 3), "fastest_ms": round(min(times), 3)
            }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
