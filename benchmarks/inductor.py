"""Compare encoders that `accel.accelerate` compiled with eager PyTorch, and check their outputs.

    python benchmarks/inductor.py [OUT.json] [--shape 1x128] [--layers 6] [--rounds 12] [--variants eager,float32,...]

The model has the shape of DistilBERT and random weights from a fixed seed. Each variant runs in a separate process that first compiles
and warms up. Then the processes take turns, so that two thread pools never work at the same time. A time is the median over all rounds of
the fastest call in a round. The error is the largest difference from the outputs of eager PyTorch in float32, divided by the largest value
of these outputs.
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
import time
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}


def work(name: str, shape: tuple[int, int], layers: int) -> None:
    """Run one variant. Print a line of JSON when it is ready, and another line for each line of the standard input."""
    say = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        import torch
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        import accel
        from accel.config import available_processors

        torch.set_num_threads(available_processors())
        torch.manual_seed(0)
        model: Any = DistilBertForSequenceClassification(DistilBertConfig(n_layers=layers)).eval()
        ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(1))
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            expected = model(**feeds).logits
            started = time.perf_counter()
            settings = VARIANTS[name]
            if settings is not None:
                accel.accelerate(model, keep_slower=True, **settings)
            found = model(**feeds).logits
            ready = {
                "ready_s": round(time.perf_counter() - started, 1),
                "error": float((found - expected).abs().max() / expected.abs().max()),
            }
            print(json.dumps(ready), file=say, flush=True)
            for _ in sys.stdin:
                times = []
                for _ in range(5):
                    begun = time.perf_counter()
                    model(**feeds)
                    times.append((time.perf_counter() - begun) * 1e3)
                print(json.dumps(min(times)), file=say, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--shape", default="1x128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--worker")
    given = parser.parse_args()
    rows, tokens = (int(part) for part in given.shape.split("x"))
    if given.worker:
        work(given.worker, (rows, tokens), given.layers)
        return
    workers: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in given.variants.split(","):
        # The variants compile one after another. If a variant fails, the script continues with the next variant.
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, "--shape", given.shape, "--layers", str(given.layers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            found[name] = {"failed": f"exit code {worker.wait()}"}
            continue
        workers[name] = worker
        found[name] = {**json.loads(line), "ms": []}
        print(f"{name}: ready in {found[name]['ready_s']} s", file=sys.stderr)
    for _ in range(given.rounds):
        for name, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            found[name]["ms"].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    base = statistics.median(found["eager"]["ms"]) if "eager" in workers else None
    for name in workers:
        times = found[name].pop("ms")
        found[name] |= {"median_ms": statistics.median(times), "best_ms": min(times)}
        if base is not None:
            found[name]["times_eager"] = base / found[name]["median_ms"]
    import torch
    import transformers

    report = {
        "shape": given.shape, "layers": given.layers, "rounds": given.rounds,
        "processor": platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "torch": torch.__version__,
        "transformers": transformers.__version__, "amx": "amx_bf16" in Path("/proc/cpuinfo").read_text(), "variants": found,
    }  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, one in found.items():
        if "failed" in one:
            print(f"{name:<10} {one['failed']}")
            continue
        print(
            f"{name:<10} {one['median_ms']:8.2f} ms  {one.get('times_eager', 0):5.2f}x eager  "
            f"error {one['error']:.2g}  ready in {one['ready_s']} s"
        )


if __name__ == "__main__":
    main()
