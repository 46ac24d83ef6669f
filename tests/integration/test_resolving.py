"""Tests of model arguments: each is resolved once, and the Hub options (revision, token, trust_remote_code) are passed
to every function that loads a file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact, HubOptions, Location, Step
from accel.config import ExportConfig
from accel.errors import AccelError, ArtifactNotFoundError, ConfigError, TaskError
from accel.stages import resolution
from accel.stages.resolution import original, recorded_export, resolve
from accel.testing.copies_without_manifest import edit_manifest, unmark
from accel.testing.models import save_tiny, tiny_model

HUB = {"revision": "abc123", "token": "hf_secret", "trust_remote_code": True}
ROWS = [{"text": text, "label": 0} for text in ("where is my card", "i lost it", "please help")]
FEW = {"processes": 1, "rounds": 1, "calls": 1, "warmup": 0, "threads": 1}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Path], list[HubOptions]]:
    """Replace the Hub by local folders, and record the Hub options of each request."""
    folders: dict[str, Path] = {}
    requests: list[HubOptions] = []

    def locate(name: Any, options: HubOptions, **_: Any) -> Location:
        requests.append(options)
        folder = folders.get(str(name), Path(str(name)))
        return Location(str(name), folder, options.revision if str(name) in folders else None)

    monkeypatch.setattr(resolution, "locate", locate)
    return folders, requests


class TestKinds:
    def test_artifact(self, tiny_artifact: Callable[..., Artifact]) -> None:
        for named in (tiny_artifact(), tiny_artifact().path, str(tiny_artifact().path)):
            resolved = resolve(named)
            assert (resolved.kind, resolved.task) == ("artifact", "text-classification")
            assert resolved.artifact == tiny_artifact()
        model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
        assert resolve(model).artifact == tiny_artifact()

    def test_weights(self, tiny_folder: Callable[..., Path]) -> None:
        resolved = resolve(tiny_folder())
        assert (resolved.kind, resolved.task) == ("weights", "text-classification")
        assert resolved.has_weights
        assert resolve(resolved) is resolved

    def test_graph_is_preferred_to_weights(
        self, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
    ) -> None:
        both = tmp_path / "both"
        shutil.copytree(tiny_folder(), both)
        for name in ("model.onnx", "model.onnx.data"):
            shutil.copy(tiny_artifact().path / name, both / name)
        unmark(both / "model.onnx")
        assert resolve(both).kind == "foreign"
        assert resolve(both, weights=True).kind == "weights"

    def test_module(self) -> None:
        resolved = resolve(tiny_model("bert"))
        assert (resolved.kind, resolved.task) == ("module", "text-classification")
        assert resolve(torch.nn.Linear(2, 2)).task == "custom"

    def test_folder_without_model_raises(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactNotFoundError, match=r"neither config\.json nor adapter_config\.json"):
            resolve(tmp_path)
        with pytest.raises(ConfigError, match="which accel cannot load"):
            resolve(7)

    @pytest.mark.parametrize(
        ("how", "words"),
        [
            ({"trust_remote_code": "False"}, "trust_remote_code is 'False'"),
            ({"trust_remote_code": 1}, "trust_remote_code is 1"),
            ({"subfolder": 3}, "subfolder is 3"),
            ({"revision": 3}, "revision is 3"),
            ({"file_name": 3}, "file_name is 3"),
            ({"task": 3}, "task is 3"),
        ],
    )
    def test_argument_of_wrong_type_is_named(
        self, how: dict[str, Any], words: str, tiny_artifact: Callable[..., Artifact]
    ) -> None:
        with pytest.raises(AccelError, match=words):
            accel.ORTModel.from_pretrained(tiny_artifact().path, **how)

    def test_artifact_of_another_task_is_refused(self, tiny_artifact: Callable[..., Artifact]) -> None:
        folder = tiny_artifact().path
        with pytest.raises(
            TaskError, match="exported for the task 'text-classification', not for 'token-classification'"
        ):
            accel.ORTModel.from_pretrained(folder, task="token-classification")
        for same in ("text-classification", "sentiment-analysis", "zero-shot-classification"):
            accel.ORTModel.from_pretrained(folder, task=same).close()

    def test_too_long_model_name_raises(self) -> None:
        with pytest.raises(ArtifactNotFoundError, match="longer than the file system allows"):
            accel.ORTModel.from_pretrained("a" * 5000)

    def test_original_model_of_an_artifact(
        self, tiny_artifact: Callable[..., Artifact], tiny_folder: Callable[..., Path]
    ) -> None:
        resolved = original(resolve(tiny_artifact()))
        assert (resolved.kind, resolved.folder) == ("weights", tiny_folder())
        with pytest.raises(ArtifactNotFoundError, match="does not record the PyTorch model"):
            original(resolve(tiny_model("bert")))


class TestHubArguments:
    """Every public function passes the Hub options to every request."""

    def test_pipeline(self, hub: Any, tiny_folder: Callable[..., Path]) -> None:
        folders, requests = hub
        folders["org/model"] = tiny_folder()
        accel.pipeline("text-classification", model="org/model", backend="pytorch", **HUB)
        accel.pipeline(model="org/model", backend="pytorch", **HUB)
        assert requests
        assert all((o.revision, o.token, o.trust_remote_code) == tuple(HUB.values()) for o in requests)

    def test_evaluate(self, hub: Any, tiny_folder: Callable[..., Path]) -> None:
        folders, requests = hub
        folders["org/model"] = tiny_folder()
        accel.evaluate("org/model", ROWS, against="org/model", **HUB)
        assert len(requests) == 2
        assert all((o.revision, o.token, o.trust_remote_code) == tuple(HUB.values()) for o in requests)

    @pytest.mark.thorough
    def test_benchmark(self, hub: Any, tiny_folder: Callable[..., Path]) -> None:
        folders, requests = hub
        folders["org/model"] = tiny_folder()
        result = accel.benchmark("org/model", sequence=[5], **FEW, **HUB)
        assert all(variant.error is None for variant in result.variants)
        assert all((o.revision, o.token) == (HUB["revision"], HUB["token"]) for o in requests)

    def test_original_model_is_loaded_at_its_recorded_revision(
        self, hub: Any, tiny_artifact: Callable[..., Artifact], tmp_path: Path
    ) -> None:
        folders, requests = hub
        copied = shutil.copytree(tiny_artifact().path, tmp_path / "made")
        folders["org/original"] = Path(tiny_artifact().manifest.source.id)  # type: ignore[union-attr]
        edit_manifest(copied, lambda values: values["source"].update(id="org/original", revision="f00"))
        accel.evaluate(copied, ROWS, against=True, token="hf_secret")
        assert (requests[-1].revision, requests[-1].token) == ("f00", "hf_secret")


_CONFIG = """
from transformers import BertConfig

class StrangeConfig(BertConfig):
    model_type = "strange"
"""
_MODEL = """
from transformers import BertForSequenceClassification
from .configuration_strange import StrangeConfig

class StrangeForSequenceClassification(BertForSequenceClassification):
    config_class = StrangeConfig
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with custom code."""
    folder = save_tiny(tmp_path_factory.mktemp("strange") / "model", "bert", num_hidden_layers=1)
    (folder / "configuration_strange.py").write_text(_CONFIG)
    (folder / "modeling_strange.py").write_text(_MODEL)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeForSequenceClassification"],
        "auto_map": {
            "AutoConfig": "configuration_strange.StrangeConfig",
            "AutoModelForSequenceClassification": "modeling_strange.StrangeForSequenceClassification",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TestRemoteCode:
    @pytest.fixture(scope="class")
    @classmethod
    def artifact(cls, strange: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
        return accel.export(strange, tmp_path_factory.mktemp("made") / "artifact", trust_remote_code=True)

    def test_custom_code_requires_trust_remote_code(self, strange: Path, tmp_path: Path) -> None:
        with pytest.raises(AccelError):
            accel.export(strange, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_trusted_custom_code_runs_on_pytorch(self, strange: Path) -> None:
        """The model with custom code runs on the `pytorch` backend, which needs no export."""
        trust, words = {"trust_remote_code": True, "backend": "pytorch"}, "my card"
        classifier = accel.ORTModelForSequenceClassification
        assert classifier.from_pretrained(strange, **trust).config.model_type == "strange"
        assert accel.pipeline("text-classification", model=strange, **trust)(words)
        assert accel.evaluate(strange, ROWS, **trust).value is not None

    @pytest.mark.thorough
    def test_every_function_accepts_trust_remote_code(self, strange: Path, artifact: Artifact) -> None:
        trust = {"trust_remote_code": True}
        classifier = accel.ORTModelForSequenceClassification
        assert classifier.from_pretrained(artifact.path, **trust).config.model_type == "strange"
        assert classifier.from_pretrained(strange, backend="pytorch", **trust).backend == "pytorch"
        assert accel.pipeline(model=artifact.path, **trust)("my card")
        report = accel.evaluate(artifact, ROWS, against=True, **trust)
        assert report.comparison is not None
        assert report.comparison.agreement == 1.0
        assert accel.validate(artifact, hub=HubOptions(**trust)).passed
        timed = accel.benchmark(artifact, sequence=[5], **FEW, **trust)
        assert [variant.error for variant in timed.variants] == [None, None]

    @pytest.mark.parametrize("backend", ["pytorch", "cpu"])
    @pytest.mark.thorough
    def test_tune_accepts_trust_remote_code(self, strange: Path, backend: str, tmp_path: Path) -> None:
        tuned = accel.tune(
            strange,
            tmp_path / "tuned",
            data=ROWS,
            backends=[backend],
            sequence=[5],
            max_drop=100,
            trust_remote_code=True,
        )
        assert tuned.winner.drop is not None


def test_foreign_engine_has_no_recorded_export(tiny_artifact: Callable[..., Artifact]) -> None:
    """An engine that another tool built has one step, the build. The settings of the build belong to the vendor
    (TensorRT's shape profile), so they are not export settings.
    """
    artifact = tiny_artifact()
    built = Step(stage="export", backend="made", config={"profile": {}}, parent=artifact.digest)
    engine = Artifact(artifact.path, replace(artifact.manifest, steps=(built,)))
    assert recorded_export(engine) == ExportConfig(atol=None)
