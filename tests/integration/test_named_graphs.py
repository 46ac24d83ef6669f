"""Tests of a folder with several graphs: every function that accepts a model accepts the path of one graph file."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel.artifact import Artifact
from accel.artifact.hub import HubOptions, Location
from accel.cli import app
from accel.compat import optimum
from accel.errors import ArtifactNotFoundError, ConfigError
from accel.measuring.latency.benchmark import Baselines, variants_of
from accel.measuring.latency.variants import planned_variant
from accel.stages import resolution
from accel.stages.resolution import resolve
from accel.testing.copies_without_manifest import unmark

IDS = torch.tensor([[2, 9, 10, 3]])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "token_type_ids": torch.zeros_like(IDS)}


@pytest.fixture(scope="module")
def repository(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a Hub repository: the configs are in the folder, and a graph and its quantized version are
    in the subfolder `onnx`.
    """
    artifact = tiny_artifact()
    base = tmp_path_factory.mktemp("named")
    quantized = accel.quantize(artifact, base / "quantized", scheme="dynamic-int8")
    folder = base / "repository"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(artifact.path / name, folder)
    for source, name in ((artifact, "model.onnx"), (quantized, "model_quantized.onnx")):
        # Store the weights inside the graph files, because the external weight files of both graphs would have the same
        # name.
        onnx.save(onnx.load(source.path / "model.onnx"), folder / "onnx" / name)
        unmark(folder / "onnx" / name)
    return folder


@pytest.fixture(scope="module")
def answers(repository: Path) -> dict[str, torch.Tensor]:
    logits = {}
    for variant in (None, "quantized"):
        with accel.ORTModelForSequenceClassification.from_pretrained(repository, variant=variant) as model:
            logits[f"model{'_quantized' if variant else ''}.onnx"] = model(**INPUTS).logits
    assert not torch.equal(*logits.values())
    return logits


@pytest.mark.parametrize("file", ["model.onnx", "model_quantized.onnx"])
@pytest.mark.parametrize("load", [accel.ORTModel, accel.ORTModelForSequenceClassification, optimum.ORTModel])
def test_graph_file_uses_the_config_of_the_parent_folder(
    load: Any, file: str, repository: Path, answers: dict[str, torch.Tensor]
) -> None:
    with load.from_pretrained(repository / "onnx" / file) as model:
        assert torch.equal(model(**INPUTS).logits, answers[file])
        again = pickle.loads(pickle.dumps(model))
    with again:
        assert torch.equal(again(**INPUTS).logits, answers[file])


def test_pipeline_accepts_a_graph_file(repository: Path) -> None:
    file = repository / "onnx" / "model_quantized.onnx"
    pipe = accel.pipeline("text-classification", model=str(file), tokenizer=str(repository))
    assert pipe.model.path == file
    assert pipe("where is my card")[0]["score"] > 0


def test_another_process_opens_the_same_graph_files(repository: Path) -> None:
    files = [repository / "onnx" / name for name in ("model.onnx", "model_quantized.onnx")]
    variants = variants_of(
        files, backends=None, baselines=Baselines(), task=None, device=None, options=None, hub=HubOptions()
    )
    assert [planned_variant(variant).artifact.components[0].file for variant in variants] == [  # type: ignore[union-attr]
        str(file.relative_to(repository)) for file in files
    ]
    assert len({variant.name for variant in variants}) == 2


def test_command_accepts_a_graph_file(repository: Path, tiny_folder: Callable[..., Path]) -> None:
    words = ["--against", str(tiny_folder()), "--json"]
    differences = {}
    for name in ("model.onnx", "model_quantized.onnx"):
        done = CliRunner().invoke(app, ["validate", str(repository / "onnx" / name), *words, "--atol", "1"])
        assert done.exit_code == 0, done.output
        differences[name] = json.loads(done.stdout)["max_abs_difference"]
    assert differences["model.onnx"] < 1e-5 < differences["model_quantized.onnx"]


def test_pickled_graph_file_next_to_an_artifact(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    optimum.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path).save_pretrained(folder)
    quantizer = optimum.ORTQuantizer.from_pretrained(folder)
    quantizer.quantize(optimum.AutoQuantizationConfig.avx512_vnni(is_static=False), save_dir=folder)
    with optimum.ORTModel.from_pretrained(folder, file_name="model_quantized.onnx") as model:
        expected = model(**INPUTS).logits
        again = pickle.loads(pickle.dumps(model))
    with again:
        assert again.path.name == "model_quantized.onnx"
        assert torch.equal(again(**INPUTS).logits, expected)


def test_graph_file_of_a_hub_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = []

    def locate(name: str, options: HubOptions, **_: Any) -> Location:
        downloads.append((name, options.subfolder))
        return Location(name, repository / options.subfolder, "abc", repository)

    monkeypatch.setattr(resolution, "locate", locate)
    resolved = resolve("org/name/onnx/model_quantized.onnx")
    assert downloads == [("org/name", "onnx")]
    assert resolved.artifact is not None
    assert resolved.artifact.components[0].file == "onnx/model_quantized.onnx"
    assert resolved.id == "org/name/onnx/model_quantized.onnx"


def test_graph_file_with_variant_is_refused(repository: Path) -> None:
    with pytest.raises(ConfigError, match="is the path of a graph"):
        accel.ORTModel.from_pretrained(repository / "onnx" / "model.onnx", variant="quantized")


def test_file_that_is_not_a_graph_is_refused(repository: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="a model folder is required"):
        resolve(repository / "config.json")
