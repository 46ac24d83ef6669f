"""Measure the GPU memory of each variant of a graph in a CUDA session, and the speed of attention kernels for short rows.

    python benchmarks/gpu_forms.py [OUT.json]

The models are the models of `gpu.py`. A CUDA session opens several variants (called forms) of one graph, for example with and without a
mask. The script measures the GPU memory that the first calls of each form need, with weights that all forms share and with separate
weights. Times are medians of the CUDA graph alone, and the two kernels take turns.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu import make_inputs, make_model

from accel import ORTModelForSequenceClassification, export, optimize
from accel_plugins.cuda.forms import padding_variants
from accel_plugins.cuda.weights import SharedWeights

SHAPES = [(1, 16), (1, 32), (1, 64), (1, 96), (4, 32), (8, 64), (16, 64), (32, 64), (8, 96), (64, 32), (128, 16)]
CALLS, ROUNDS = 60, 3


def microseconds(call: Callable[[], object]) -> list[float]:
    """Return the times of single calls in microseconds. Each time ends when the GPU has finished."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def used_mb() -> float:
    """Return the GPU memory in use, in units of 10^6 bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def memory(folder: Path, name: str) -> list[float]:
    """Return the GPU memory in use after loading, and after calls that need the forms `short`, `lengths` and `general`."""
    before = used_mb()
    model = ORTModelForSequenceClassification.from_pretrained(
        folder, backend="cuda", provider_options={"packing": False}
    )
    full, right = make_inputs(name, 4, 64, 1.0), make_inputs(name, 4, 64, 0.7)
    left = {**right, "attention_mask": right["attention_mask"].flip(1)}
    used = [used_mb() - before]
    for inputs in (full, right, left):
        for _ in range(3):
            model(**inputs)
        used.append(used_mb() - before)
    return [round(megabytes) for megabytes in used]


def no_weights(_: SharedWeights) -> Mapping[str, Any]:
    """Return no shared weights. This function replaces `SharedWeights.values`, so that every form loads its own weights."""
    return {}


@torch.inference_mode()
def main(out: Path) -> None:
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "memory_mb": {}, "replay_us": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("MiniLM-L6", "roberta-base"):
            artifact = export(make_model(name), Path(temporary) / name, task="text-classification")
            folder = optimize(artifact, Path(temporary) / f"{name}-o4", backend="cuda", level="O4").path
            sharing = SharedWeights.values
            for label, values in (("own weights", no_weights), ("shared weights", sharing)):
                SharedWeights.values = values  # type: ignore[method-assign]
                report["memory_mb"][f"{name}, {label}"] = memory(folder, name)
                gc.collect()
            replays: dict[tuple[int, int], dict[str, Callable[[], object]]] = collections.defaultdict(dict)
            models = []
            for label, limit in (("cuDNN", 0), ("memory-efficient", 1 << 20)):
                padding_variants.SHORT_UP_TO = limit
                model = ORTModelForSequenceClassification.from_pretrained(
                    folder, backend="cuda", provider_options={"cuda_graphs": 64, "packing": label == "cuDNN"}
                )
                models.append(model)
                for shape in SHAPES:
                    for _ in range(4):
                        model(**make_inputs(name, *shape, 1.0))
                    replays[shape][label] = model.sessions["model"].last_graph.replay
            for shape, calls in replays.items():
                times: dict[str, list[float]] = collections.defaultdict(list)
                for _ in range(ROUNDS):
                    for label, call in calls.items():
                        times[label] += microseconds(call)
                medians = {label: round(statistics.median(durations), 1) for label, durations in times.items()}
                report["replay_us"][f"{name} {shape[0]}x{shape[1]}"] = medians
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_suffix(".json"))
    main(parser.parse_args().out)
