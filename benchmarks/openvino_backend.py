"""Measure the OpenVINO backend: the latency of DistilBERT, the time of accel's code in a call, threads, memory of buckets, and accuracy.

    python benchmarks/openvino_backend.py latency  --work FOLDER
    python benchmarks/openvino_backend.py wrapper  --work FOLDER --model MODEL_FOLDER
    python benchmarks/openvino_backend.py threads  --work FOLDER --model MODEL_FOLDER
    python benchmarks/openvino_backend.py memory   --work FOLDER --model MODEL_FOLDER
    python benchmarks/openvino_backend.py accuracy --work FOLDER --model MODEL_FOLDER --data FOLDER_WITH_TRAIN_AND_TEST_CSV

Each command prints one JSON object. `latency` creates a model in the shape of DistilBERT with random weights and non-zero biases. Each
variant runs in its own process, and the processes take turns. `accuracy` calibrates with 256 training rows and measures on all test rows.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import random
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from accel import Artifact, ORTModelForSequenceClassification, SessionOptions, benchmark, export, quantize
from accel.measuring.latency.results import Cell
from accel.measuring.latency.variants import Variant

TASK = "text-classification"
MAX_LENGTH = 64


def create_once(folder: Path, make) -> Artifact:  # type: ignore[no-untyped-def]
    """Return the artifact in a folder. If it does not exist, create it."""
    return Artifact.load(folder) if folder.exists() else make(folder)


def distilbert(folder: Path) -> Path:
    if not folder.exists():
        torch.manual_seed(0)
        model = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(num_labels=2)).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def token_rows(count: int, batch: int, sequence: int, types: bool = False) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        ids = torch.randint(1000, 30000, (batch, sequence), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows.append(row | ({"token_type_ids": torch.zeros_like(ids)} if types else {}))
    return rows


def int8_of(ir: Artifact, folder: Path, sequence: int, types: bool = False) -> Artifact:
    """Quantize to 8 bits with random token ids for calibration. The calibrated ranges do not affect the speed."""
    return create_once(
        folder, lambda out: quantize(ir, out, scheme="static-int8", calibration=token_rows(16, 2, sequence, types))
    )


def latency(args: argparse.Namespace) -> dict[str, object]:
    original = distilbert(args.work / "distilbert")
    ir = create_once(args.work / "distilbert-ir", lambda out: export(original, out, backend="openvino"))
    int8 = int8_of(ir, args.work / "distilbert-int8", 128)
    buckets, bf16 = {"buckets": (32, 64, 128)}, {"compute_dtype": "bfloat16"}
    variants = [
        Variant(name="PyTorch float32", path=original, task=TASK, backend="pytorch"),
        Variant(name="float32", path=ir.path, task=TASK),
        Variant(name="bfloat16", path=ir.path, task=TASK, options=SessionOptions(**bf16)),
        Variant(name="int8", path=int8.path, task=TASK),
        Variant(name="int8, bfloat16 elsewhere", path=int8.path, task=TASK, options=SessionOptions(**bf16)),
        Variant(name="int8, buckets", path=int8.path, task=TASK, options=SessionOptions(**buckets)),
        Variant(
            name="int8, buckets, bfloat16 elsewhere",
            path=int8.path,
            task=TASK,
            options=SessionOptions(**buckets, **bf16),
        ),
    ]
    cells = time_variants(variants, 1, 128, args.rounds, args.calls)
    base = cells["PyTorch float32"]
    return {
        name: {
            "median_ms": round(cell.latency.median, 2),
            "p5_ms": round(cell.p5, 2),
            "times_pytorch": round(base.latency.median / cell.latency.median, 2),
            "times_pytorch_p5": round(base.p5 / cell.p5, 2),
        }
        for name, cell in cells.items()
    }


def time_variants(variants: list[Variant], batch: int, sequence: int, rounds: int, calls: int) -> dict[str, Cell]:
    """Measure variants for one input shape. Their outputs may differ, because the calibrated ranges are random."""
    timed = benchmark(variants, batch=batch, sequence=sequence, rounds=rounds, calls=calls, processes=1, atol=math.inf)
    return {variant.name: variant.cells[0] for variant in timed.variants}


def model_ir(args: argparse.Namespace) -> Artifact:
    return create_once(args.work / "model-ir", lambda out: export(args.model, out, backend="openvino"))


def wrapper(args: argparse.Namespace) -> dict[str, object]:
    """Measure calls of `model(**inputs)` and calls of an infer request of the same OpenVINO model, in turns."""
    torch.set_num_threads(1)
    model = ORTModelForSequenceClassification.from_pretrained(
        model_ir(args).path, session_options=SessionOptions(threads=1)
    )
    inputs = token_rows(1, 1, 16, types=True)[0]
    session = model.sessions["model"]
    request = session.runtime.create_infer_request()
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    columns: dict[str, list[int]] = {"model": [], "session": [], "request": []}
    with torch.inference_mode():
        for _ in range(args.calls * args.rounds):
            for name, call in (
                ("model", lambda: model(**inputs)),
                ("request", lambda: request.infer(arrays, share_inputs=True, share_outputs=True)),
                ("session", lambda: session.run(inputs)),
            ):
                started = time.perf_counter_ns()
                call()
                columns[name].append(time.perf_counter_ns() - started)
    measured = {name: column[50:] for name, column in columns.items()}
    return {
        "request_us": statistics.median(measured["request"]) / 1e3,
        "model_minus_request_us": statistics.median(
            a - b for a, b in zip(measured["model"], measured["request"], strict=True)
        )
        / 1e3,
        "session_minus_request_us": statistics.median(
            a - b for a, b in zip(measured["session"], measured["request"], strict=True)
        )
        / 1e3,
    }


def _call(model: ORTModelForSequenceClassification, case: dict[str, torch.Tensor]) -> None:
    model(**case)


def threads(args: argparse.Namespace) -> dict[str, object]:
    """Measure the calls per second of one model from one thread and from ten threads, in turns."""
    rates: dict[str, float] = {}
    for name, options in (("latency", {}), ("throughput", {"performance_hint": "throughput"})):
        model = ORTModelForSequenceClassification.from_pretrained(model_ir(args).path, provider_options=options)
        cases = token_rows(200, 1, 32, types=True)
        throughputs: dict[int, list[float]] = {1: [], 10: []}
        for _ in range(args.rounds):
            for count in throughputs:
                with ThreadPoolExecutor(count) as pool:
                    started = time.perf_counter()
                    list(pool.map(functools.partial(_call, model), cases))
                    throughputs[count].append(len(cases) / (time.perf_counter() - started))
        rates |= {f"{name}, {count} threads": round(statistics.median(v), 1) for count, v in throughputs.items()}
    return dict(rates)


def memory(args: argparse.Namespace) -> dict[str, object]:
    """Measure the private memory of the process, in MB, after each bucket is opened."""

    def private() -> int:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        return sum(int(n) for n in re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+)", text, re.MULTILINE)) // 1024

    result: dict[str, object] = {"weights_mb": model_ir(args).bytes >> 20, "before_mb": private()}
    model = ORTModelForSequenceClassification.from_pretrained(
        model_ir(args).path, session_options=SessionOptions(buckets=(16, 32, 64, 128))
    )
    for bucket in (16, 32, 64, 128):
        model(**token_rows(1, 1, bucket, types=True)[0])
        result[f"bucket_{bucket}_mb"] = private()
    return result


def accuracy(args: argparse.Namespace) -> dict[str, object]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)

    def read(name: str) -> list[tuple[str, str]]:
        with (args.data / name).open(encoding="utf-8") as file:
            return [(row["text"], row["category"]) for row in csv.DictReader(file)]

    def calibration() -> list[dict[str, torch.Tensor]]:
        chosen = random.Random(0).sample(read("train.csv"), 256)
        return [
            dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_LENGTH)) for text, _ in chosen
        ]

    test = sorted(read("test.csv"), key=lambda row: len(row[0]))
    ir = model_ir(args)
    schemes = {
        "int8": {"scheme": "static-int8"},
        "int8, SmoothQuant 0.95": {"scheme": "static-int8", "smooth_quant": 0.95},
        "weights int8": {"scheme": "weight-int8"},
        "weights int4": {"scheme": "weight-int4", "block_size": 64},
        "weights int4, AWQ, scale estimation": {
            "scheme": "weight-int4",
            "block_size": 64,
            "algorithm": "awq",
            "scale_estimation": True,
        },
    }

    def score(artifact: Artifact, **options: str) -> float:
        model = ORTModelForSequenceClassification.from_pretrained(
            artifact.path, backend="openvino", session_options=SessionOptions(**options)
        )
        right = 0
        for start in range(0, len(test), 16):
            texts, labels = zip(*test[start : start + 16], strict=True)
            batch = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
            predictions = model(**batch).logits.argmax(-1).tolist()
            right += sum(model.config.id2label[i] == label for i, label in zip(predictions, labels, strict=True))
        return round(100 * right / len(test), 2)

    result: dict[str, object] = {"float32": score(ir), "bfloat16": score(ir, compute_dtype="bfloat16")}
    for name, settings in schemes.items():
        folder = args.work / re.sub(r"\W+", "-", name)
        artifact = create_once(
            folder,
            lambda out, s=settings: quantize(  # type: ignore[misc]
                ir, out, **s, calibration=calibration() if s["scheme"] != "weight-int8" else None
            ),
        )
        result[name] = score(artifact)
        if settings["scheme"] == "static-int8":
            result[f"{name}, bfloat16 elsewhere"] = score(artifact, compute_dtype="bfloat16")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = {f.__name__: f for f in (latency, wrapper, threads, memory, accuracy)}
    parser.add_argument("what", choices=modes)
    parser.add_argument("--work", type=Path, required=True, help="folder for exported and quantized models")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=25)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(json.dumps(modes[arguments.what](arguments), indent=1))
