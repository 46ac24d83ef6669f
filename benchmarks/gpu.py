"""Compare encoders on an NVIDIA GPU in one process: PyTorch, PyTorch with a CUDA graph, torch.compile and accel.

    python benchmarks/gpu.py [OUT.json] [--quick] [--modes reduce-overhead,max-autotune] [--models MiniLM-L6] [--bars]
    python benchmarks/gpu.py [OUT.json] --benchmark      # only `accel benchmark`'s own variants, one process each

The models have the shapes of MiniLM-L6 and roberta-base, random weights from a fixed seed, and non-zero biases. The inputs are in GPU
memory and equal for all variants. The variants take turns in rounds. A time is the median over all rounds of the time of one call, from its
start until the GPU has finished. Batches with padding are also compared with PyTorch in a CUDA graph and with accel without packed
execution. Shapes with a target are also compared with `torch.compile` in the modes of `--modes`. An error is the Euclidean norm of the
difference from PyTorch in float32, divided by the norm of the outputs of PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
import transformers

import accel
from accel import ORTModelForSequenceClassification, benchmark, export, optimize
from accel_plugins.pytorch.cuda_graphs import captured

os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.getLogger("torch._inductor").setLevel(logging.ERROR)

CASES = [
    ("MiniLM-L6", 1, 16, 1.0),
    ("roberta-base", 1, 128, 1.0),
    ("roberta-base", 16, 384, 1.0),
    ("roberta-base", 16, 384, 0.65),
    ("roberta-base", 32, 256, 1.0),
    ("roberta-base", 32, 256, 0.65),
]
# Shares of tokens in a batch near which packed execution becomes faster or slower than padded execution.
FILLS = [
    ("roberta-base", 16, 384, 0.8),
    ("roberta-base", 16, 384, 0.5),
    ("roberta-base", 32, 128, 0.51),
    ("roberta-base", 8, 128, 0.51),
]
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
ROUNDS, CALLS, WARM_UP = 5, 40, 10
Call = Callable[[], torch.Tensor]


def make_model(name: str) -> Any:
    """Return a classifier of this shape with random weights from a fixed seed."""
    torch.manual_seed(0)
    if name == "MiniLM-L6":
        config: Any = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        model: Any = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
        model = transformers.RobertaForSequenceClassification(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.eval()


def make_inputs(name: str, batch: int, sequence: int, fill: float) -> dict[str, torch.Tensor]:
    """Return token ids and a mask with padding on the right. About the share `fill` of all positions are tokens."""
    generator = torch.Generator().manual_seed(1)
    pad = 0 if name == "MiniLM-L6" else 1
    ids = torch.randint(5, 30000, (batch, sequence), generator=generator)
    mask = torch.ones_like(ids)
    if fill < 1:
        lengths = torch.randint(int(sequence * (2 * fill - 1)), sequence + 1, (batch,), generator=generator)
        mask = (torch.arange(sequence) < lengths.clamp(min=1)[:, None]).long()
        ids[mask == 0] = pad
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "MiniLM-L6":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return {key: value.cuda() for key, value in inputs.items()}


def in_cuda_graph(model: Any, inputs: dict[str, torch.Tensor]) -> Call:
    """Return a function that runs the model as a CUDA graph. Each call copies its inputs into the buffers of the graph."""
    fixed = {key: value.clone() for key, value in inputs.items()}
    graph, result = captured(lambda: model(**fixed).logits, torch.device("cuda"))

    def call() -> torch.Tensor:
        torch._foreach_copy_(list(fixed.values()), list(inputs.values()))
        graph.replay()
        return result

    return call


def compiled(model: Any, mode: str, inputs: dict[str, torch.Tensor]) -> Call:
    """Return a function that runs the model, compiled with torch.compile for this shape only."""
    torch.compiler.reset()
    fast = torch.compile(copy.deepcopy(model), mode=mode, dynamic=False, fullgraph=False)

    def call() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(**inputs).logits  # type: ignore[no-any-return]

    for _ in range(3):
        call()
    return call


def accelerated(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> Call:
    """Return a function that runs a copy of the model, which `accel.accelerate` compiled for this shape only."""
    fast = accel.accelerate(copy.deepcopy(model), shapes=[inputs], keep_slower=True, **settings)
    return lambda: fast(**inputs).logits


def milliseconds(call: Call, calls: int) -> list[float]:
    """Return the times of single calls in milliseconds. Each time ends when the GPU has finished."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def raw_replay(model: Any) -> Callable[[], None]:
    """Return a function that replays the CUDA graph of the model's last call without any other code of accel."""
    replay: Callable[[], None] = model.sessions["model"].last_graph.replay
    return replay


def copies(call: Call) -> list[str]:
    """Return the copies between CPU and GPU memory during one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sorted(event.name for event in profiled.events() if "HtoD" in event.name or "DtoH" in event.name)


@torch.inference_mode()
def measure(
    name: str,
    models: dict[str, Any],
    folder: Path,
    shape: tuple[int, int, float],
    modes: Sequence[str],
    rounds: int,
    in_place: bool,
) -> dict[str, Any]:
    """Measure all variants at one shape."""
    inputs = make_inputs(name, *shape)
    variants: dict[str, Call] = {
        "pytorch float32": lambda: models["float32"](**inputs).logits,
        "pytorch float16": lambda: models["float16"](**inputs).logits,
    }
    failed: dict[str, str] = {}
    builders: dict[str, Callable[[], Call]] = {
        "pytorch float16 in a CUDA graph": lambda: in_cuda_graph(models["float16"], inputs)
    }
    for mode in modes:
        builders[f"torch.compile {mode}"] = lambda mode=mode: compiled(models["float16"], mode, inputs)  # type: ignore[misc]
    if in_place:
        half = {"dtype": "float16"}
        builders["accel.accelerate"] = lambda: accelerated(models["float32"], inputs, **half)
        if shape[2] < 1:
            builders["accel.accelerate, packing=False"] = lambda: accelerated(
                models["float32"], inputs, **half, packing=False
            )
        elif shape[0] > 1:
            builders["accel.accelerate float8"] = lambda: accelerated(
                models["float32"], inputs, **half, quantization="float8"
            )
    for label, build in builders.items():
        try:
            variants[label] = build()
        except Exception as error:  # noqa: BLE001  # a baseline that fails is reported as such
            failed[label] = f"{type(error).__name__}: {str(error)[:200]}"
    ours_options: dict[str, dict[str, Any]] = {"accel": {}, "accel, padding='right'": {"padding": "right"}}
    if shape[2] < 1:
        ours_options["accel, packing=False"] = {"packing": False}
    for label, options in ours_options.items():
        ours = ORTModelForSequenceClassification.from_pretrained(folder, backend="cuda", provider_options=options)
        variants[label] = lambda ours=ours: ours(**inputs).logits  # type: ignore[misc]
        for _ in range(4):
            variants[label]()
        replay = raw_replay(ours)
        variants[f"{label}, replay alone"] = lambda replay=replay: replay()  # type: ignore[misc]
    expected = variants["pytorch float32"]().float()
    rows: dict[str, Any] = {}
    for label, call in variants.items():
        rows[label] = {"ms": []}
        if not label.endswith("alone"):
            output = call().float()
            rows[label]["error"] = float((output - expected).norm() / expected.norm())
    rows["accel"]["host copies"] = copies(variants["accel"])
    for _ in range(rounds):
        for label, call in variants.items():
            rows[label]["ms"] += milliseconds(call, CALLS)
    for row in rows.values():
        times = sorted(row.pop("ms"))
        row["median_ms"] = round(statistics.median(times), 4)
        row["p95_ms"] = round(times[int(0.95 * len(times))], 4)
    return {
        "model": name,
        "batch": shape[0],
        "sequence": shape[1],
        "fill": shape[2],
        "variants": rows,
        "failed": failed,
    }


def by_benchmark(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure the shapes without padding with `accel.benchmark`: eager PyTorch, PyTorch with a CUDA graph, and accel."""
    model = make_model(name)
    model.save_pretrained(folder / f"{name}-model")
    artifact = export(folder / f"{name}-model", folder / f"{name}-onnx", task="text-classification")
    optimized = optimize(artifact, folder / f"{name}-onnx-o4", backend="cuda", level="O4")
    shapes = [(batch, sequence) for model_name, batch, sequence, fill in CASES if model_name == name and fill == 1.0]
    cells: dict[str, Any] = {}
    for batch, sequence in shapes[:1] if quick else shapes:
        report = benchmark(
            optimized, device="cuda", pytorch=["float32", "float16"], batch=[batch], sequence=[sequence],
            rounds=ROUNDS, calls=CALLS, warmup=WARM_UP,
        )  # fmt: skip
        cells[f"{batch}x{sequence}"] = {
            variant.name: {
                "median_ms": round(variant.cells[0].latency.median, 4),
                "ratio": asdict(variant.cells[0].ratio) if variant.cells[0].ratio else None,
                "max_abs_difference": variant.max_abs_difference,
                "notes": list(variant.notes),
            }
            if variant.error is None
            else {"error": variant.error}
            for variant in report.variants
        }
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "gpu.json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--modes", default=",".join(COMPILE_MODES))
    parser.add_argument("--models", default=",".join(dict.fromkeys(case[0] for case in CASES)))
    parser.add_argument("--bars", action="store_true", help="measure only the shapes with a target speed")
    parser.add_argument("--benchmark", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    modes = [COMPILE_MODES[1]] if arguments.quick else [mode for mode in arguments.modes.split(",") if mode]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__, "cuda": torch.version.cuda, "onnxruntime": ort.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
        },
        "rows": [],
    }  # fmt: skip
    if arguments.benchmark:
        report = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else report
        with tempfile.TemporaryDirectory() as temporary:
            report["benchmark"] = {
                name: by_benchmark(name, Path(temporary), arguments.quick)
                for name in dict.fromkeys(case[0] for case in CASES)
            }
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report["benchmark"], indent=1))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models.split(","):
            model = make_model(name)
            artifact = export(model, Path(temporary) / name, task="text-classification")
            optimized = optimize(artifact, Path(temporary) / f"{name}-o4", backend="cuda", level="O4")
            models = {"float32": model.cuda(), "float16": copy.deepcopy(model).half().cuda()}
            for case in CASES if arguments.bars else (*CASES, *FILLS):
                if case[0] == name:
                    rounds = 2 if arguments.quick else ROUNDS
                    row = measure(
                        name, models, optimized.path, case[1:], modes if case in CASES else (), rounds, in_place=case in CASES
                    )  # fmt: skip
                    report["rows"].append(row)
                    print(json.dumps(row, indent=1), flush=True)
                    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            del models
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
