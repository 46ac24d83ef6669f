"""Tests that model configurations equal the golden files. There is one golden file for each task and one for each
backend.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.artifact import Artifact
from accel.errors import AccelError, ConfigError, OutputFolderError, TaskError

from .small_artifacts import LABELS, make_artifact

pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from accel.deploying.triton import check, deploy, repository
from accel.deploying.triton.model_config import CONFIG, read
from accel.deploying.triton.repository import SERVED

GOLDEN = Path(__file__).parent / "golden"
TASKS = [*LABELS, "zero-shot-classification"]
# For each backend and device, the table has the arguments of the artifact and the deployment settings.
BACKENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "onnxruntime-cpu": ({}, {"threads": 4}),
    "onnxruntime-cuda": ({"dtype": "float16"}, {"device": "cuda", "instances": 2}),
    "onnxruntime-tensorrt": (
        {"quantized": True},
        {"device": "cuda:1", "accelerator": "tensorrt", "profile": "sequence=1:16:48", "max_batch_size": 16},
    ),
    "onnxruntime-openvino": ({}, {"accelerator": "openvino"}),
    "openvino": ({"format": "openvino_ir"}, {"threads": 4}),
    "tensorrt": (
        {"format": "tensorrt", "profile": {"batch": "1:8:16", "sequence": "1:16:48"}},
        {"device": "cuda", "max_batch_size": 16},
    ),
    "python": ({}, {"backend": "python"}),
}


def artifact_for(folder: Path, task: str, **changes: Any) -> Path:
    model_task = "text-classification" if task == "zero-shot-classification" else task
    return make_artifact(folder, model_task, **changes).path


@pytest.mark.parametrize(
    ("backend", "task"),
    [
        *(("onnxruntime-cpu", task) for task in TASKS),
        *((name, TASKS[0]) for name in BACKENDS if name != "onnxruntime-cpu"),
    ],
)
def test_configurations_equal_the_golden_files(tmp_path: Path, backend: str, task: str) -> None:
    """Compare the configuration files of two Triton models with stored files: of the front model of each task, which accepts
    texts, and of the graph model of each backend.
    `ACCEL_GOLDEN=write` updates the golden files.
    """
    changes, settings = BACKENDS[backend]
    repository = deploy(artifact_for(tmp_path / "artifact", task, **changes), tmp_path / "out", task=task, **settings)
    configs = {name: (repository.path / name / CONFIG).read_text(encoding="utf-8") for name in repository.models}
    for name in repository.models:
        assert read(repository.path / name / CONFIG).name == name
    golden = GOLDEN / f"{backend}.{task}.json"
    if os.environ.get("ACCEL_GOLDEN") == "write":
        golden.write_text(
            json.dumps({n: t.splitlines() for n, t in configs.items()}, indent=1) + "\n", encoding="utf-8"
        )
    assert {n: t.splitlines() for n, t in configs.items()} == json.loads(golden.read_text(encoding="utf-8"))


@pytest.mark.parametrize("layout", ["text", "ensemble", "graph"])
def test_written_repositories_have_no_findings(tmp_path: Path, layout: str) -> None:
    artifact = make_artifact(tmp_path / "artifact").path
    repository = deploy(artifact, tmp_path / "out", layout=layout, buckets=(16, 32) if layout != "graph" else ())
    assert check(repository.path) == ()
    assert repository.name in repository.models


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[AccelError]]] = {
    "a bucket beyond the positions": ("text-classification", {}, {"buckets": (16, 512)}, ConfigError),
    "more tokens than positions": ("text-classification", {}, {"max_length": 512}, ConfigError),
    "an ensemble of several rows a text": ("question-answering", {}, {"layout": "ensemble"}, TaskError),
    "a task that the model does not do": ("question-answering", {}, {"task": "text-ranking"}, TaskError),
    "ONNX for the backend of engines": ("text-classification", {}, {"backend": "tensorrt"}, ConfigError),
    "OpenVINO on a GPU": ("text-classification", {"format": "openvino_ir"}, {"device": "cuda"}, ConfigError),
    "TensorRT on a processor": ("text-classification", {}, {"accelerator": "tensorrt"}, ConfigError),
    "a profile that leaves requests out": (
        "text-classification", {}, {"accelerator": "tensorrt", "device": "cuda", "profile": "batch=1:2:4"}, ConfigError,
    ),
    "a profile of an axis that is not there": (
        "text-classification", {}, {"accelerator": "tensorrt", "device": "cuda", "profile": "width=1:2:4"}, ConfigError,
    ),
    "more rows than the engine has": (
        "text-classification", {"format": "tensorrt", "profile": {"batch": "1:8:16"}}, {"device": "cuda"}, ConfigError,
    ),
    "a preferred size above the largest": (
        "text-classification", {}, {"preferred_batch_sizes": (64,)}, ConfigError,
    ),
    "a name that no address can hold": ("text-classification", {}, {"name": "a/b"}, ConfigError),
    "a parameter of nothing": ("text-classification", {}, {"layuot": "text"}, ConfigError),
    "an ensemble whose graph has a fixed batch": (
        "text-classification", {"format": "openvino_ir"}, {"layout": "ensemble"}, ConfigError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_deployments_are_refused(tmp_path: Path, case: str) -> None:
    task, changes, settings, error = REFUSED[case]
    with pytest.raises(error) as caught:
        deploy(make_artifact(tmp_path / "artifact", task, **changes).path, tmp_path / "out", **settings)
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"id2label": {"0": "a", "1": "b\nc", "2": "d"}, "label2id": {}}, "one line"),
        ("config.json", {"id2label": {"0": "a", "1": "", "2": "d"}, "label2id": {}}, "one line"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens"),
    ],
)
def test_settings_that_triton_would_read_differently_are_refused(
    tmp_path: Path, file: str, change: dict[str, Any], words: str
) -> None:
    folder = make_artifact(tmp_path / "artifact").path
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    Artifact.accept_files(folder)
    with pytest.raises(AccelError, match=words) as caught:
        deploy(folder, tmp_path / "out")
    assert caught.value.fix


def test_nonempty_folder_is_refused(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "artifact").path
    with pytest.raises(OutputFolderError):
        deploy(artifact, artifact)


def test_queue_policy_is_optional_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(repository.logger, "warning", warned.append)
    artifact = make_artifact(tmp_path / "artifact").path
    plain = deploy(artifact, tmp_path / "plain")
    assert "queue_policy" not in (plain.path / plain.name / CONFIG).read_text(encoding="utf-8")
    assert not warned
    with_timeout = deploy(artifact, tmp_path / "asked", queue_timeout_us=1000)
    assert read(
        with_timeout.path / with_timeout.name / CONFIG
    ).dynamic_batching.default_queue_policy.default_timeout_microseconds
    assert ["8870" in text for text in warned] == [True]


@pytest.mark.parametrize("path", sorted(SERVED.glob("*.py")), ids=lambda path: path.name)
def test_copied_modules_have_few_imports(path: Path) -> None:
    """The modules that run inside Triton support Python 3.10, and import only libraries that the container in the guide
    contains.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    absolute = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
    }
    allowed = {"numpy", "tokenizers", "onnxruntime", "triton_python_backend_utils"}
    assert absolute - set(sys.stdlib_module_names) <= allowed
    assert all(node.level <= 1 for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
