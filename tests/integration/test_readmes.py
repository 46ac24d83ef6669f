"""Tests of the examples in the READMEs of Optimum and optimum-intel, with tiny models. The tests change the import
lines, and replace data sets, prompts and model names that are not on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from scipy.io import wavfile
from transformers import AutoTokenizer, pipeline

from accel.testing.generative_models import save_generator


def test_text_generation_with_graph_in_subfolder(generator: Any, tmp_path: Path) -> None:
    from accel.compat.optimum import ORTModelForCausalLM

    # Create a folder like a Hub repository: configs and tokenizer are in the folder, and the graph is in the subfolder
    # `onnx`.
    folder = generator("llama").path
    ORTModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "repository" / "onnx")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "repository" / name).write_bytes((folder / name).read_bytes())

    model = ORTModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="onnx")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "repository")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results = pipe("where is my card", max_new_tokens=4, do_sample=False)

    original = transformers.AutoModelForCausalLM.from_pretrained(model.artifact.manifest.source.id)
    reference = pipeline("text-generation", model=original, tokenizer=tokenizer)
    assert results == reference("where is my card", max_new_tokens=4, do_sample=False)


def test_text_generation_with_openvino(generator: Any) -> None:
    from accel.compat.optimum import OVModelForCausalLM

    model_id = generator("llama", "openvino").path
    model = OVModelForCausalLM.from_pretrained(model_id)
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results = pipe("where is my card", max_new_tokens=4, do_sample=False)
    original = transformers.AutoModelForCausalLM.from_pretrained(model.artifact.manifest.source.id)
    reference = pipeline("text-generation", model=original, tokenizer=tokenizer)
    assert results == reference("where is my card", max_new_tokens=4, do_sample=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "kind"),
    [([], "ORTModel"), (["--backend", "openvino"], "OVModel")],
)
def test_export_command_of_the_readme(
    tiny_folder: Callable[..., Path], tmp_path: Path, settings: list[str], kind: str
) -> None:
    from typer.testing import CliRunner

    from accel.cli import app
    from accel.compat import optimum

    # The READMEs use `optimum-cli export onnx --model MODEL OUT` and `optimum-cli export openvino --model MODEL OUT`.
    # The command `optimum-cli accel` passes the following arguments.
    done = CliRunner().invoke(app, ["export", str(tiny_folder()), str(tmp_path / "exported"), *settings])
    assert done.exit_code == 0, done.output
    assert getattr(optimum, kind).from_pretrained(tmp_path / "exported").path.is_file()


@pytest.mark.thorough
def test_model_is_quantized_while_loading(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    from accel.compat.optimum import OVModelForSequenceClassification, OVQuantizationConfig

    model_id = tiny_folder()
    q_config = OVQuantizationConfig(dtype="int8", dataset=["where is my card", "lost money"], num_samples=50)
    q_model = OVModelForSequenceClassification.from_pretrained(model_id, quantization_config=q_config)
    save_dir = tmp_path / "nncf_results"
    q_model.save_pretrained(save_dir)
    assert q_model.artifact.manifest.quantization.scheme == "static-int8"
    ids = torch.tensor([[2, 5, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    again = OVModelForSequenceClassification.from_pretrained(save_dir)
    torch.testing.assert_close(again(**inputs).logits, q_model(**inputs).logits)


def _speech(folder: Path) -> None:
    """Write a data set of random noise in wave files, which replaces LibriSpeech."""
    draw = np.random.default_rng(0)
    for number in range(4):
        samples = (0.1 * draw.standard_normal(14_000 + 300 * number)).astype(np.float32)
        wavfile.write(folder / f"{number}.wav", 16_000, samples)


@pytest.mark.thorough
def test_whisper_is_quantized_with_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.compat.optimum import OVModelForSpeechSeq2Seq, OVQuantizationConfig

    _speech(tmp_path)
    downloads = []

    def load_dataset(path: str, **settings: Any) -> Any:
        downloads.append((path, settings["data_dir"], settings["split"]))
        waves = sorted(map(str, tmp_path.glob("*.wav")))
        rows = datasets.Dataset.from_dict({"audio": waves, "text": ["a"] * len(waves)})
        return rows.cast_column("audio", datasets.Audio(16_000)).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    # The feature extractor pads all audio to one second.
    model_id = save_generator(tmp_path / "whisper", "whisper", max_source_positions=50)
    q_config = OVQuantizationConfig(dtype="int8", dataset="librispeech", num_samples=50)
    q_model = OVModelForSpeechSeq2Seq.from_pretrained(model_id, quantization_config=q_config)
    save_dir = tmp_path / "nncf_results"
    q_model.save_pretrained(save_dir)

    assert downloads == [("openslr/librispeech_asr", "clean", "validation")]
    again = OVModelForSpeechSeq2Seq.from_pretrained(save_dir)
    assert {session.compute_dtype for session in again.sessions.values()} == {"int8"}
    extractor = transformers.AutoFeatureExtractor.from_pretrained(model_id)
    _, samples = wavfile.read(tmp_path / "0.wav")
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    inputs = {"input_features": features, "decoder_input_ids": torch.tensor([[2, 5, 9]])}
    expected = transformers.WhisperForConditionalGeneration.from_pretrained(model_id)(**inputs).logits
    # The tolerance is for 8-bit weights and activations, and logits of up to 7.
    difference = (again(**inputs).logits - expected).abs().max()
    assert 1e-3 < difference < 0.1 * expected.abs().max()
