"""Tests of `check`, which examines a model repository: each fault is found and reported with a fix, and nothing else is
reported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.artifact import Artifact
from accel.artifact.checksums import sha256
from accel.errors import ArtifactNotFoundError

from .small_artifacts import make_artifact

pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from typer.testing import CliRunner

from accel.cli import app
from accel.deploying.triton import check, deploy
from accel.deploying.triton.model_config import CONFIG, read, write

FRONT, GRAPH, DECODER = "text_classification", "text_classification_graph", "decoder"
Change = Callable[[Path], Any]


@pytest.fixture(scope="session")
def repositories(shared: Callable[..., Path], generator: Callable[..., Artifact]) -> Callable[..., Path]:
    """Return a function that copies an undamaged repository with a given layout."""

    def make(folder: Path) -> None:
        artifact = make_artifact(folder / "artifact")
        deploy(artifact, folder / "text")
        deploy(artifact, folder / "ensemble", layout="ensemble")
        engine = make_artifact(folder / "engine", format="tensorrt", profile={"batch": "1:8:32", "sequence": "1:8:48"})
        deploy(engine, folder / "engines", layout="graph", name=GRAPH, device="cuda")
        deploy(artifact, folder / "python", backend="python")
        deploy(generator("llama"), folder / "generator", name=DECODER)

    root = shared("triton-repositories", make)
    return lambda name, target: Path(shutil.copytree(root / name, target))


def config(name: str, change: Callable[[Any], Any]) -> Change:
    """Return a function that edits the configuration of one model in a repository."""

    def edit(root: Path) -> None:
        config = read(root / name / CONFIG)
        change(config)
        write(config, root / name)

    return edit


def text(name: str, before: str, after: str) -> Change:
    """Return a function that replaces text in the configuration of one model, or in another file of a repository."""

    def edit(root: Path) -> None:
        path = root / name / CONFIG if (root / name).is_dir() else root / name
        content = path.read_text(encoding="utf-8")
        assert before in content
        path.write_text(content.replace(before, after, 1), encoding="utf-8")

    return edit


def changed_settings(name: str, **changes: Any) -> Change:
    """Return a function that sets values in the `settings.json` of one model."""

    def edit(root: Path) -> None:
        path = root / name / "1" / "settings.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def without(name: str, key: str) -> Change:
    """Return a function that removes one value from the `settings.json` of one model."""

    def edit(root: Path) -> None:
        path = root / name / "1" / "settings.json"
        settings = json.loads(path.read_text())
        del settings[key]
        path.write_text(json.dumps(settings))

    return edit


def fixed_batch(root: Path) -> None:
    """Change the recorded tensors of a graph so that its batch size is fixed."""
    path = root / GRAPH / "1" / "settings.json"
    path.write_text(path.read_text().replace("-1", "1", 1))


ANSWERS = f"{FRONT}_answers"
# For each case, the table has the layout, the function that damages the repository, the model that is reported, the
# code of the finding, and a text in its message.
BROKEN: dict[str, tuple[str, Change, str, str, str]] = {
    "no configuration": ("text", lambda r: (r / GRAPH / CONFIG).unlink(), GRAPH, "config-missing", CONFIG),
    "an unknown field": ("text", text(GRAPH, "max_batch_size", "max_batch"), GRAPH, "config-unreadable", "max_batch"),
    "an unknown value": ("text", text(GRAPH, "KIND_CPU", "KIND_TPU"), GRAPH, "config-unreadable", "KIND_TPU"),
    "another name": ("text", text(GRAPH, f'"{GRAPH}"', '"other"'), GRAPH, "name", "other"),
    "no version": ("text", lambda r: shutil.rmtree(r / GRAPH / "1"), GRAPH, "version-missing", "version"),
    "no graph": ("text", lambda r: (r / GRAPH / "1" / "model.onnx").unlink(), GRAPH, "file-missing", "model.onnx"),
    "another graph": (
        "text", lambda r: (r / GRAPH / "1" / "model.onnx").write_bytes(b"no graph"), GRAPH, "changed", "model.onnx",
    ),
    "half an engine": (
        "engines", lambda r: (r / GRAPH / "1" / "model.plan").write_bytes(b"half"), GRAPH, "changed", "model.plan",
    ),
    "no code": ("text", lambda r: (r / FRONT / "1" / "text_batches.py").unlink(), FRONT, "file-missing", "text_batches.py"),
    "no tokenizer": (
        "text", lambda r: (r / FRONT / "1" / "tokenizer.json").unlink(), FRONT, "file-missing", "tokenizer.json",
    ),
    "wrong sizes": ("text", config(GRAPH, lambda c: c.output[0].dims.__setitem__(0, 7)), GRAPH, "dims", "[7]"),
    "a wrong rank": ("text", config(GRAPH, lambda c: c.input[0].dims.append(-1)), GRAPH, "dims", "input_ids"),
    "a wrong type": ("text", text(GRAPH, "TYPE_FP32", "TYPE_FP16"), GRAPH, "dtype", "TYPE_FP32"),
    "an input that is not named": ("text", config(GRAPH, lambda c: c.input.pop()), GRAPH, "input-missing", "token_type_ids"),
    "an input that is not there": (
        "text", config(GRAPH, lambda c: setattr(c.input[0], "name", "ids")), GRAPH, "input-unknown", "'ids'",
    ),
    "a fixed batch": ("text", fixed_batch, GRAPH, "batch", "batch of 1"),
    "no labels": ("text", lambda r: (r / FRONT / "labels.txt").unlink(), FRONT, "labels-missing", "labels.txt"),
    "the graph's model is gone": ("text", lambda r: shutil.rmtree(r / GRAPH), FRONT, "member-missing", GRAPH),
    "more rows than the graph takes": ("text", changed_settings(FRONT, max_rows=64), FRONT, "batch", "64"),
    "another output": ("text", changed_settings(FRONT, outputs=["scores"]), FRONT, "settings", "scores"),
    "an unknown backend": ("text", text(GRAPH, '"onnxruntime"', '"onnx"'), GRAPH, "backend", "'onnx'"),
    "a step is gone": ("ensemble", lambda r: shutil.rmtree(r / ANSWERS), FRONT, "member-missing", ANSWERS),
    "a step takes fewer rows": ("ensemble", text(ANSWERS, "max_batch_size: 32", "max_batch_size: 8"), FRONT, "batch", "8"),
    "a key that is missing": ("text", without(FRONT, "graph"), FRONT, "settings-unreadable", "graph"),
    "no settings": (
        "text", lambda r: (r / FRONT / "1" / "settings.json").unlink(), FRONT, "settings-unreadable", "settings.json",
    ),
    "settings that are a list": (
        "text", lambda r: (r / FRONT / "1" / "settings.json").write_text("[]"), FRONT, "settings-unreadable", "list",
    ),
    "another tokenizer": (
        "text", text(f"{FRONT}/1/tokenizer.json", '"[CLS]"', '"[SEP]"'), FRONT, "changed", "tokenizer.json",
    ),
    "a changed letter of code": (
        "text", text(f"{FRONT}/1/text_batches.py", "max_rows", "max_row"), FRONT, "changed", "text_batches.py",
    ),
    "a graph beside code by another name": (
        "python", text(f"{GRAPH}/1/settings.json", '"model.onnx"', '"model.onx"'), GRAPH, "file-missing", "model.onx",
    ),
    "a decoder without a tokenizer": (
        "generator", lambda r: (r / DECODER / "1" / "tokenizer.json").unlink(), DECODER, "file-missing", "tokenizer.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_each_damage_is_found(repositories: Callable[..., Path], tmp_path: Path, case: str) -> None:
    layout, change, model, code, words = BROKEN[case]
    root = repositories(layout, tmp_path / "out")
    assert check(root) == ()
    change(root)
    findings = check(root)
    fitting = [
        finding for finding in findings if (finding.model, finding.code) == (model, code) and words in finding.message
    ]
    assert fitting, findings
    assert all(finding.fix for finding in findings)


def test_all_findings_are_reported_at_once(repositories: Callable[..., Path], tmp_path: Path) -> None:
    root = repositories("text", tmp_path / "out")
    kinds = ["another name", "wrong sizes", "no labels", "no tokenizer"]
    for kind in kinds:
        BROKEN[kind][1](root)
    assert {BROKEN[kind][3] for kind in kinds} <= {finding.code for finding in check(root)}


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError):
        check(tmp_path / "nowhere")
    assert [finding.code for finding in check(tmp_path)] == ["empty"]


def test_commands_write_and_check_repositories(tmp_path: Path) -> None:
    artifact, out = make_artifact(tmp_path / "artifact").path, tmp_path / "out"
    runner = CliRunner()
    done = runner.invoke(
        app, ["deploy", "triton", str(artifact), str(out), "--json", "--bucket", "16", "--threads", "2"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["models"] == {FRONT: "python", GRAPH: "onnxruntime"}
    assert runner.invoke(app, ["deploy", "check", str(out)]).exit_code == 0
    (out / FRONT / "labels.txt").unlink()
    done = runner.invoke(app, ["deploy", "check", str(out), "--json"])
    assert done.exit_code == 1
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["labels-missing"]
    assert (
        runner.invoke(app, ["deploy", "triton", str(artifact), str(tmp_path / "b"), "--device", "tpu!"]).exit_code == 2
    )


def test_checksums_of_the_manifest_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make_artifact(tmp_path / "artifact")
    read_names: list[str] = []

    def recorded(path: Path) -> str:
        read_names.append(path.name)
        return sha256(path)

    monkeypatch.setattr("accel.deploying.triton.repository.sha256", recorded)
    deploy(artifact, tmp_path / "out", layout="graph", name=GRAPH)
    settings = json.loads((tmp_path / "out" / GRAPH / "1" / "settings.json").read_text(encoding="utf-8"))
    graph_files = {Path(record.name).name: record.sha256 for record in artifact.components[0].files}
    assert graph_files.items() <= settings["files"].items()
    assert graph_files.keys().isdisjoint(read_names)
