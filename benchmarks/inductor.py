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
            logits = model(**feeds).logits
            ready = {
                "ready_s": round(time.perf_counter() - started, 1),
                "error": float((logits - expected).abs().max() / expected.abs().max()),
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
    args = parser.parse_args()
    rows, tokens = (int(part) for part in args.shape.split("x"))
    if args.worker:
        work(args.worker, (rows, tokens), args.layers)
        return
    workers: dict[str, subprocess.Popen[str]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in args.variants.split(","):
        # The variants compile one after another. If a variant fails, the script continues with the next variant.
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", name, "--shape", args.shape, "--layers", str(args.layers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            results[name] = {"failed": f"exit code {worker.wait()}"}
            continue
        workers[name] = worker
        results[name] = {**json.loads(line), "ms": []}
        print(f"{name}: ready in {results[name]['ready_s']} s", file=sys.stderr)
    for _ in range(args.rounds):
        for name, worker in workers.items():
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            results[name]["ms"].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    base = statistics.median(results["eager"]["ms"]) if "eager" in workers else None
    for name in workers:
        times = results[name].pop("ms")
        results[name] |= {"median_ms": statistics.median(times), "best_ms": min(times)}
        if base is not None:
            results[name]["times_eager"] = base / results[name]["median_ms"]
    import torch
    import transformers

    report = {
        "shape": args.shape, "layers": args.layers, "rounds": args.rounds,
        "processor": platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "torch": torch.__version__,
        "transformers": transformers.__version__, "amx": "amx_bf16" in Path("/proc/cpuinfo").read_text(), "variants": results,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, result in results.items():
        if "failed" in result:
            print(f"{name:<10} {result['failed']}")
            continue
        print(
            f"{name:<10} {result['median_ms']:8.2f} ms  {result.get('times_eager', 0):5.2f}x eager  "
            f"error {result['error']:.2g}  ready in {result['ready_s']} s"
        )


if __name__ == "__main__":
    main()
