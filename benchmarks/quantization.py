"""Compare the speed of optimization levels and quantization schemes with PyTorch and with ONNX Runtime's own quantization.

    python benchmarks/quantization.py [MODEL] [--batch 1] [--sequence 128] [--keep FOLDER] [--prepare]

MODEL is a transformers folder of a text classifier. By default, the script creates a model with random weights in the shape of DistilBERT.
Its biases are not zero, because some kernels are faster with zero biases than with the biases of trained models. Calibration uses random
tokens, which is enough to measure speed, but not accuracy. `--keep` stores the artifacts in a folder. `--prepare` creates the artifacts
without measuring them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from openvino_backend import time_variants

from accel.artifact.checksums import record_files
from accel.artifact.manifest import Artifact
from accel.config import QuantizeConfig
from accel.measuring.latency.variants import Variant
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize

Feeds = dict[str, torch.Tensor]


def random_model(folder: Path) -> Path:
    """Return the folder of a model in the shape of DistilBERT, with random weights from a fixed seed and non-zero biases."""
    import transformers

    torch.manual_seed(0)
    model = transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(num_labels=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    model.eval().save_pretrained(folder)
    return folder


def feeds_for(artifact: Artifact, batch: int, sequence: int, seed: int = 0) -> Feeds:
    """Return inputs with random tokens and without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 20_000, (batch, sequence), generator=generator)
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {spec.name: values[spec.name] for spec in artifact.component().inputs}


def runtime_defaults(parent: Artifact, folder: Path) -> Artifact:
    """Run `onnxruntime.quantization.quantize_dynamic` with its defaults, on a graph with ONNX Runtime's own fusions.

    The function saves the fused graph, because sessions of accel turn off slow fusions such as SkipLayerNormalization.
    """
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    folder.mkdir()
    model = onnx.load(parent.file())
    # ONNX Runtime's shape inference computes other shapes than the exporter stored, so the stored shapes are removed.
    del model.graph.value_info[:]
    onnx.save(model, folder / "plain.onnx")
    quantize_dynamic(folder / "plain.onnx", folder / "quantized.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "model.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(folder / "quantized.onnx"), options, providers=["CPUExecutionProvider"])
    for name in ("plain.onnx", "quantized.onnx"):
        (folder / name).unlink()
    (folder / "config.json").write_bytes((parent.path / "config.json").read_bytes())
    component = replace(parent.component(), files=record_files(folder, ["model.onnx"]))
    return Artifact.create(folder, replace(parent.manifest, components=(component,)))


def prepare(model: Path, root: Path, sequence: int) -> dict[str, Path]:
    """Return the folder of each variant by name. Existing folders are not created again."""
    plain = root / "plain"
    parent = Artifact.load(plain) if plain.exists() else export(model, plain)
    paths = {"ONNX": plain}
    for level in ("O1", "O2", "O3"):
        paths[level] = root / level
        if not paths[level].exists():
            optimize(parent, paths[level], level=level)
    paths["int8, ORT defaults"] = root / "defaults"
    if not paths["int8, ORT defaults"].exists():
        runtime_defaults(parent, paths["int8, ORT defaults"])
    calibration = [feeds_for(parent, 4, sequence, seed) for seed in range(4)]
    recipes = {
        "dynamic": ("ONNX", QuantizeConfig()),
        "dynamic on O2": ("O2", QuantizeConfig()),
        "dynamic on O3": ("O3", QuantizeConfig()),
        "static on O2": ("O2", QuantizeConfig(scheme="static-int8")),
        "static, qoperator on O2": ("O2", QuantizeConfig(scheme="static-int8", format="qoperator")),
        "weight-int8 on O2": ("O2", QuantizeConfig(scheme="weight-int8")),
        "weight-int4 on O2": ("O2", QuantizeConfig(scheme="weight-int4")),
    }
    for name, (base, config) in recipes.items():
        paths[name] = root / name.replace(" ", "-").replace(",", "")
        if not paths[name].exists():
            data = calibration if config.scheme == "static-int8" else None
            quantize(paths[base], paths[name], calibration=data, config=config)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--only", help="names of variants, separated by semicolons")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        model = arguments.model or root / "model"
        if not model.exists():
            random_model(model)
        paths = prepare(model, root, arguments.sequence)
        if arguments.prepare:
            return
        task = "text-classification"
        variants = [Variant(name="PyTorch float32", path=model, task=task, backend="pytorch")]
        variants += [Variant(name=name, path=path, task=task) for name, path in paths.items()]
        if arguments.only:
            variants = [v for v in variants if v.name in arguments.only.split(";")]
        cells = time_variants(variants, arguments.batch, arguments.sequence, arguments.rounds, arguments.calls)
        print(f"batch {arguments.batch}, sequence {arguments.sequence}, {os.cpu_count()} processors, milliseconds\n")
        print("| variant | median | 5 % | 95 % | against the first | MB |\n|---|---|---|---|---|---|")
        first = next(iter(cells.values())).latency.median
        for name, cell in cells.items():
            ms = cell.latency
            size = f"{Artifact.load(paths[name]).bytes / 1e6:.0f}" if name in paths else ""
            print(f"| {name} | {ms.median:.2f} | {cell.p5:.2f} | {ms.p95:.2f} | {first / ms.median:.2f}x | {size} |")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
