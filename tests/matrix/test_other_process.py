"""Saved artifacts give the same outputs in another process, and `accel.tune` tries every backend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Case
from chain import Chains

import accel
from accel.backends import registry
from accel.models.base import model_class

PLAIN = {
    "task": "text-classification",
    "exporter": "cpu",
    "format": "onnx",
    "dtype": "float32",
    "runner": "cpu",
    "device": "cpu",
}
IR = {"exporter": "openvino", "format": "openvino_ir", "runner": "openvino"}
CPU_BACKENDS = ("cpu", "openvino", "pytorch")

SAVED: dict[str, dict[str, str]] = {
    "exported": {},
    "optimized": {"optimizer": "cpu", "level": "O2"},
    "quantized": {"optimizer": "cpu", "level": "O2", "quantizer": "cpu", "scheme": "static-int8"},
    "weights": {"exporter": "pytorch", "format": "torch", "runner": "pytorch"},
    "ir": IR,
    "ir-quantized": {**IR, "quantizer": "openvino", "scheme": "static-int8"},
    "decoder": {"task": "text-generation"},
    "encoder-decoder": {"task": "text2text-generation"},
}

CHILD = """
import sys
from pathlib import Path
import torch
from accel.artifact import Artifact
from accel.models.base import model_class

for folder in map(Path, sys.argv[1:]):
    call = torch.load(folder / "call.pt")
    cls = model_class(Artifact.load(folder / "model").task)
    model = cls.from_pretrained(folder / "model", backend=call["backend"])
    outputs = model(**call["feeds"])
    torch.save({name: outputs[name] for name in call["names"]}, folder / "outputs.pt")
"""


@pytest.mark.thorough
def test_outputs_are_equal_in_another_process(chains: Chains, tmp_path: Path) -> None:
    expected = {}
    for name, changes in SAVED.items():
        case = Case(**(PLAIN | changes))
        folder = tmp_path / name
        folder.mkdir()
        model = model_class(case.task)(chains.artifact(case), backend=case.runner)
        model.save_pretrained(folder / "model")
        feeds = chains.inputs(case)
        outputs = model(**feeds)
        expected[name] = {key: value for key, value in outputs.items() if isinstance(value, torch.Tensor)}
        torch.save({"feeds": feeds, "backend": case.runner, "names": list(expected[name])}, folder / "call.pt")
    folders = [str(tmp_path / name) for name in SAVED]
    done = subprocess.run([sys.executable, "-c", CHILD, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, expected_outputs in expected.items():
        outputs = torch.load(tmp_path / name / "outputs.pt")
        for output, value in expected_outputs.items():
            assert torch.allclose(outputs[output], value, atol=1e-5), (name, output)


@pytest.mark.thorough  # the search times all candidates of three backends, which takes minutes
def test_tune_tries_every_cpu_backend(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder()
    classify = accel.pipeline("text-classification", model=folder, backend="pytorch")
    words = "the a my card is not here where when lost new old money bank pay".split()
    texts = [" ".join(words[i % 7 : i % 7 + 2 + i % 6]) for i in range(20)]
    # The labels are PyTorch's predictions, so the accuracy in the search is the agreement with PyTorch.
    rows = [{"text": text, "label": classify(text)[0]["label"]} for text in texts]
    tuning = accel.tune(
        folder, tmp_path / "tuned", data=rows, calibration=rows, max_drop=50.0, sequence=(8,),
        backends=CPU_BACKENDS, threads=1, time_limit_s=300,
    )  # fmt: skip
    # Candidates that the search skipped without a trial have an empty backend name.
    assert {trial.backend for trial in tuning.trials} - {""} == set(CPU_BACKENDS)
    assert tuning.rows == 20
    assert registry.describe(tuning.winner.backend).capability("run", tuning.artifact.format) is not None
    assert tuning.winner.drop <= 50.0


@pytest.mark.thorough
def test_tune_a_generating_model(chains: Chains, tmp_path: Path) -> None:
    rows = [{"text": " ".join(["where is my card"] * (1 + i % 3))} for i in range(20)]
    tuning = accel.tune(
        chains.source("text-generation"), tmp_path / "tuned", data=rows, max_drop=1000.0, sequence=(8,),
        backends=("cpu", "pytorch"), threads=1, time_limit_s=300,
    )  # fmt: skip
    assert tuning.artifact.task == "text-generation"
    assert sum(trial.winner for trial in tuning.trials) == 1
