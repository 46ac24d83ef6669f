"""Tests of folders with the layouts of other tools, which are read without a copy, and of errors for folders that
cannot be read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.errors import AccelError, ArtifactNotFoundError, ConfigError, ValidationError
from accel.stages.resolution import resolve
from accel.stages.validate import validate

Get = Callable[..., Artifact]
INPUTS = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 1]])}


@pytest.fixture
def nested(tiny_artifact: Get, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that puts an artifact into a subfolder and its config into the parent folder, as
    sentence-transformers saves accel's models. The function returns the parent folder.
    """

    def make(subfolder: str) -> Path:
        root = tmp_path / "saved"
        artifact = tiny_artifact("bert", "feature-extraction")
        shutil.copytree(artifact.path, root / subfolder)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (artifact.path / name).is_file():
                shutil.copyfile(artifact.path / name, root / name)
        return root

    return make


@pytest.mark.parametrize("subfolder", ["onnx", "openvino"])
@pytest.mark.parametrize("words", [{}, {"subfolder": True}, {"file_name": "model.onnx"}])
def test_artifact_in_a_subfolder_loads(
    subfolder: str, words: dict[str, Any], nested: Callable[[str], Path], tiny_artifact: Get
) -> None:
    root = nested(subfolder)
    if "subfolder" in words:
        words = {"subfolder": subfolder}
    with accel.ORTModelForFeatureExtraction.from_pretrained(tiny_artifact("bert", "feature-extraction").path) as opened:
        expected = opened(**INPUTS).last_hidden_state
    with accel.ORTModelForFeatureExtraction.from_pretrained(root, **words) as model:
        assert model.artifact.path == root
        assert torch.equal(model(**INPUTS).last_hidden_state, expected)


def test_artifact_in_a_subfolder_is_saved_with_its_config(nested: Callable[[str], Path], tmp_path: Path) -> None:
    with accel.ORTModelForFeatureExtraction.from_pretrained(nested("onnx")) as model:
        model.save_pretrained(tmp_path / "again")
    assert Artifact.load(tmp_path / "again").component().file == "model.onnx"


def test_changed_artifact_in_a_subfolder_is_refused(nested: Callable[[str], Path]) -> None:
    root = nested("onnx")
    with (root / "onnx" / "model.onnx").open("ab") as file:
        file.write(b"more")
    with pytest.raises(AccelError, match=r"model\.onnx"):
        accel.ORTModelForFeatureExtraction.from_pretrained(root)


@pytest.fixture
def foreign_t5(shared: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a T5 folder from Optimum. Tests may change the copy."""
    import tarfile

    packed = Path(__file__).parents[1] / "fixtures" / "foreign" / "folders.tar.xz"

    def unpack(out: Path) -> None:
        with tarfile.open(packed) as archive:
            archive.extractall(out, filter="data")

    return Path(shutil.copytree(shared("foreign", unpack) / "optimum" / "t5-past", tmp_path / "t5"))


@pytest.mark.parametrize(
    "names",
    [
        {"encoder_model": "encoder", "decoder_model_merged": "decoder_merged"},
        {"encoder_model": "encoder", "decoder_model_merged": "decoder"},
        {"encoder_model": "encoder", "decoder_model": "decoder", "decoder_with_past_model": "decoder_with_past"},
        {"encoder_model": "encoder_q8", "decoder_model_merged": "decoder_q8"},
    ],
)
def test_file_names_of_encoder_and_decoder(names: dict[str, str], foreign_t5: Path) -> None:
    inputs = {**INPUTS, "max_new_tokens": 4, "do_sample": False}
    with accel.ORTModelForSeq2SeqLM.from_pretrained(foreign_t5) as model:
        expected = model.generate(**inputs)
    for path in list(foreign_t5.glob("*.onnx")):
        path.rename(path.with_stem(names[path.stem])) if path.stem in names else path.unlink()
    with accel.ORTModelForSeq2SeqLM.from_pretrained(foreign_t5) as model:
        assert torch.equal(model.generate(**inputs), expected)


def test_missing_config_gives_one_error_message(foreign_t5: Path, tmp_path: Path) -> None:
    (foreign_t5 / "config.json").unlink()
    messages = set()
    for act in (
        accel.ORTModel.from_pretrained,
        resolve,
        lambda folder: accel.optimize(folder, tmp_path / "out"),
        lambda folder: accel.export(folder, tmp_path / "out"),
    ):
        with pytest.raises(ArtifactNotFoundError) as error:
            act(foreign_t5)
        messages.add((error.value.message, error.value.fix))
    assert len(messages) == 1
    assert "contains no config.json" in messages.pop()[0]


def test_weights_without_config_raise(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copyfile(tiny_folder("bert") / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(ArtifactNotFoundError, match=r"contains no config\.json"):
        accel.ORTModel.from_pretrained(tmp_path)


def test_missing_output_is_named(tiny_artifact: Get, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    import onnx

    shutil.copytree(tiny_artifact("bert", "question-answering").path, tmp_path / "folder")
    (tmp_path / "folder" / "accel.json").unlink()
    graph = onnx.load(tmp_path / "folder" / "model.onnx", load_external_data=False)
    del graph.metadata_props[:]
    del graph.graph.output[1:]
    onnx.save(graph, tmp_path / "folder" / "model.onnx")
    with pytest.raises(ValidationError, match="no output 'end_logits'. Its outputs are 'start_logits'"):
        validate(tmp_path / "folder", against=tiny_folder("bert", "question-answering"))


def test_output_with_wrong_shape_is_named(tiny_artifact: Get, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tiny_folder("bert"), num_labels=7, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValidationError,
        match=r"'logits' of the graph has the shape \(\d, \d\), but the output of the original model has the shape \(\d, 7\)",
    ):
        validate(tiny_artifact("bert"), against=tmp_path / "other")


def test_benchmark_of_generating_model_requires_new_tokens(generator: Get) -> None:
    with pytest.raises(ConfigError, match="needs new_tokens") as error:
        accel.benchmark(generator("t5"))
    assert "new_tokens" in str(error.value.fix)
