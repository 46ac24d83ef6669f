"""Tests of the attributes and calls of generating models that scripts written for Optimum use."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from PIL import Image

from accel.artifact import Artifact
from accel.capture import CACHE_NAME
from accel.compat import optimum
from accel.compat.optimum.graph_parts import file_name_of
from accel.errors import ConfigError, InputError

IDS = torch.tensor([[5, 6, 7, 3]])
START = torch.tensor([[0, 8]])
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture
def bart(generator: Callable[..., Artifact]) -> Callable[..., Any]:
    def load(**settings: Any) -> Any:
        return optimum.ORTModelForSeq2SeqLM.from_pretrained(generator("bart").path, **settings)

    return load


def test_encoder_decoder_model_exposes_each_graph(bart: Callable[..., Any]) -> None:
    model = bart()
    assert isinstance(model.encoder, optimum.ORTEncoder)
    assert isinstance(model.decoder, optimum.ORTDecoderForSeq2Seq)
    for part in model.parts:
        assert isinstance(part.session, onnxruntime.InferenceSession)
        assert part.path.is_file()
        assert part.providers == [part.session.get_providers()[0]] == [model.provider]
    assert "input_ids" in model.encoder.input_names
    assert "logits" in model.decoder.output_names


@pytest.mark.parametrize("use_merged", [None, False, True])
def test_decoder_keeps_the_requested_use_merged(use_merged: bool | None, generator: Callable[..., Artifact]) -> None:
    model = optimum.ORTModelForCausalLM.from_pretrained(generator("gpt2").path, use_merged=use_merged)
    assert model.use_merged is (use_merged is True)


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["image-to-text", "image-text-to-text"])
def test_image_pipeline_opens_an_encoder_decoder(task: str, generator: Callable[..., Artifact]) -> None:
    path = generator("vit-gpt2").path
    read = optimum.pipeline(task, model=str(path), model_kwargs={"use_cache": True, "use_merged": True})
    assert isinstance(read.model, optimum.ORTModelForVision2Seq)
    assert read.model.use_merged
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 36, 3), dtype=np.uint8))
    (result,), (other,) = read([picture, picture], generate_kwargs={"max_new_tokens": 5})
    assert set(result) == {"generated_text"}
    assert result == other


@pytest.mark.thorough
def test_speech_pipeline_opens_the_class_of_the_model(tiny_artifact: Callable[..., Artifact]) -> None:
    """The speech recognition pipeline supports encoder-decoder models and CTC models, so it selects the class that fits
    the model.
    """
    path = tiny_artifact("wav2vec2", "ctc").path
    hear = optimum.pipeline("automatic-speech-recognition", model=str(path))
    assert isinstance(hear.model, optimum.ORTModelForCTC)


def test_pipeline_ignores_unknown_arguments_with_a_warning(
    tiny_artifact: Callable[..., Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    """Like transformers' pipelines, this pipeline accepts any argument. An unused `sampling_rate` is logged and does
    not change the output for a text.
    """
    model = optimum.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    with caplog.at_level("WARNING", logger="accel"):
        classify = optimum.pipeline("text-classification", model=model, sampling_rate=220)
    assert "sampling_rate=220" in caplog.text
    assert classify("my card") == optimum.pipeline("text-classification", model=model)("my card")


def test_encoder_then_decoder_equals_the_model(bart: Callable[..., Any]) -> None:
    model = bart()
    hidden = model.encoder(input_ids=IDS).last_hidden_state
    outputs = model.decoder(START, hidden, torch.ones_like(IDS))
    torch.testing.assert_close(outputs.logits, model(input_ids=IDS, decoder_input_ids=START).logits, **CLOSE)


@pytest.mark.parametrize(
    ("use_cache", "use_merged", "second", "can"),
    [(True, None, True, True), (True, True, False, True), (False, False, False, False), (False, True, False, True)],
)
def test_decoder_attributes_follow_the_arguments(
    bart: Callable[..., Any], use_cache: bool, use_merged: bool | None, second: bool, can: bool
) -> None:
    model = bart(use_cache=use_cache, use_merged=use_merged)
    assert (model.decoder_with_past is not None) is second
    assert model.decoder.is_merged is model.use_merged is (use_merged is True)
    assert model.can_use_cache is can
    assert model.config.use_cache is use_cache


def test_encoder_keys_and_values_are_readable(bart: Callable[..., Any], generator: Callable[..., Artifact]) -> None:
    source = generator("bart").manifest.source.id  # type: ignore[union-attr]
    original = transformers.AutoModelForSeq2SeqLM.from_pretrained(source)
    with torch.inference_mode():
        reference = original(input_ids=IDS, decoder_input_ids=START)[CACHE_NAME]
    cache = bart()(input_ids=IDS, decoder_input_ids=START).past_key_values
    for name in ("self_attention_cache", "cross_attention_cache"):
        pairs = zip(getattr(cache, name).layers, getattr(reference, name).layers, strict=True)
        for ours, theirs in pairs:
            # The tolerance is relative to the largest value, because the order of additions depends on the CPU.
            atol = 2e-5 * float(theirs.keys.abs().max())
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=0.0, atol=atol)
            torch.testing.assert_close(ours.values, theirs.values, rtol=0.0, atol=atol)


def test_generation_settings_are_ignored_in_a_forward_call(bart: Callable[..., Any]) -> None:
    model = bart()
    plain = model(input_ids=IDS, decoder_input_ids=START).logits
    assert torch.equal(model(input_ids=IDS, decoder_input_ids=START, num_beams=1, do_sample=True).logits, plain)
    with pytest.raises(InputError, match="output_attentions"):
        model(input_ids=IDS, decoder_input_ids=START, output_attentions=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"encoder_file_name": "encoder_model.onnx"}, None),
        ({"decoder_file_name": "decoder_model_merged.onnx"}, "decoder_model_merged.onnx"),
        (
            {"encoder_file_name": "encoder_model_q4.onnx", "decoder_file_name": "decoder_model_q4.onnx"},
            "decoder_model_q4.onnx",
        ),
    ],
)
def test_graph_file_names_of_all_parts_are_accepted(settings: dict[str, str], expected: str | None) -> None:
    assert file_name_of(settings) == expected


def test_graphs_of_different_variants_are_refused() -> None:
    with pytest.raises(ConfigError, match="different variants"):
        file_name_of({"encoder_file_name": "encoder_model_quantized.onnx"})


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that contains the model folders of Optimum, unpacked from tests/fixtures/foreign."""
    out = tmp_path_factory.mktemp("foreign")
    with tarfile.open(Path(__file__).parents[1] / "fixtures" / "foreign" / "folders.tar.xz") as packed:
        members = [member for member in packed if member.name.startswith(("optimum/gpt2-pair", "optimum/t5-"))]
        packed.extractall(out, members, filter="data")
    return out / "optimum"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "decoder_model_merged.onnx"),
        ({"file_name": "decoder_with_past_model.onnx"}, "decoder_with_past_model.onnx"),
        ({"file_name": "decoder_model.onnx"}, "decoder_model.onnx"),
    ],
)
def test_path_of_a_foreign_decoder(foreign: Path, settings: dict[str, str], name: str) -> None:
    model = optimum.ORTModelForCausalLM.from_pretrained(foreign / "gpt2-pair", **settings)
    assert model.path == foreign / "gpt2-pair" / name
    assert model.model_save_dir == foreign / "gpt2-pair"


@pytest.mark.parametrize("merged", [True, False])
def test_foreign_merged_decoder_is_reported_as_merged(foreign: Path, tmp_path: Path, merged: bool) -> None:
    left_out = ("decoder_model.onnx", "decoder_with_past_model.onnx") if merged else ("decoder_model_merged.onnx",)
    shutil.copytree(foreign / "t5-past", tmp_path / "t5", ignore=shutil.ignore_patterns(*left_out))
    model = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    assert model.use_merged is model.decoder.is_merged is merged
    assert (model.decoder_with_past is None) is merged
    assert model.can_use_cache
    without = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "t5", use_cache=False)
    assert without.can_use_cache is merged


@pytest.mark.parametrize("subfolder", ["onnx", "another"])
def test_paths_of_foreign_parts(foreign: Path, tmp_path: Path, subfolder: str) -> None:
    names = {
        "encoder_file_name": "encoder_model_quantized.onnx",
        "decoder_file_name": "decoder_model_quantized.onnx",
        "decoder_with_past_file_name": "decoder_with_past_model_quantized.onnx",
    }
    shutil.copytree(foreign / "t5-web", tmp_path / "t5")
    (tmp_path / "t5" / "onnx" / "decoder_model_merged_quantized.onnx").unlink()
    (tmp_path / "t5" / "onnx").rename(tmp_path / "t5" / subfolder)
    model = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "t5", subfolder=subfolder, **names)
    assert {part.path.name for part in model.parts} == set(names.values())
    assert model.path == tmp_path / "t5" / subfolder / "encoder_model_quantized.onnx"
    assert model.model_save_dir == tmp_path / "t5" / subfolder
    unnamed = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "t5", subfolder=subfolder)
    assert {part.path.parent for part in unnamed.parts} == {tmp_path / "t5" / subfolder}

    # A saved copy must not depend on the original files.
    model.save_pretrained(tmp_path / "saved")
    again = optimum.ORTModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert {part.path.parent for part in again.parts} == {tmp_path / "saved"}
    assert all(part.path.is_file() for part in again.parts)
