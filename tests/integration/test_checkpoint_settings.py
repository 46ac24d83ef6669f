"""Tests of the fields in a checkpoint's generation_config.json: each field is applied, has no effect, or is rejected.
Empty inputs are also rejected.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import GenerationConfig

import accel
from accel.artifact.processor_loading import open_generation_config
from accel.errors import InputError, IntegrityError
from accel.testing.generative_models import save_generator, tiny_generator
from accel.testing.models import tiny_tokenizer

IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6], [0, 0, 9, 8, 7, 9, 8]])
ROWS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
NEW = 6
BEAMS, DRAWN = {"num_beams": 3}, {"do_sample": True}
TUPLE = {"return_dict_in_generate": True}

# Each entry has a field, its value, and other fields that it requires. The expected output is transformers' output with
# the same generation config.
HONOURED: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 10},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 12, "eos_token_id": 20},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": 20},
    "early_stopping": {"early_stopping": True, **BEAMS},
    "max_time": {"max_time": 1000.0},
    "do_sample": DRAWN,
    "num_beams": BEAMS,
    "num_return_sequences": {"num_return_sequences": 2, **BEAMS},
    "temperature": {"temperature": 0.5, **DRAWN},
    "top_k": {"top_k": 3, **DRAWN},
    "top_p": {"top_p": 0.5, **DRAWN},
    "top_h": {"top_h": 0.5, **DRAWN},
    "min_p": {"min_p": 0.2, **DRAWN},
    "typical_p": {"typical_p": 0.5, **DRAWN},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, **DRAWN},
    "eta_cutoff": {"eta_cutoff": 0.01, **DRAWN},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "length_penalty": {"length_penalty": 2.0, "eos_token_id": 20, **BEAMS},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[9]]},
    "renormalize_logits": {"renormalize_logits": True, **BEAMS},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 20},
    "suppress_tokens": {"suppress_tokens": [9, 10]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [9, 10]},
    "sequence_bias": {"sequence_bias": {(9,): 50.0}},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "output_scores": {"output_scores": True, **TUPLE},
    "output_logits": {"output_logits": True, **TUPLE},
    "return_dict_in_generate": TUPLE,
    "pad_token_id": {"pad_token_id": 3, "eos_token_id": 20},
    "bos_token_id": {"bos_token_id": 9},
    "eos_token_id": {"eos_token_id": [20, 21]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "decoder_start_token_id": {"decoder_start_token_id": 9},
    "prefill_chunk_size": {"prefill_chunk_size": 3},
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 2},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2, "prompt_lookup_num_tokens": 2},
}
# These fields are about caching or compilation in PyTorch, and do not change any token.
HARMLESS: dict[str, Any] = {
    "cache_implementation": "static",
    "max_cache_len": 32,
    "compile_config": None,
    "disable_compile": True,
    "continuous_batching_config": None,
    "low_memory": True,
    "transformers_version": "4.40.0",
    "is_assistant": False,
}
# These fields are about the drafts of an assistant model. transformers reads them only from the assistant's own config.
OF_ASSISTANTS = frozenset(
    ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
     "target_lookbehind", "assistant_ensemble_weight", "speculation_type")
)  # fmt: skip
# accel or transformers rejects these fields.
REFUSED: dict[str, dict[str, Any]] = {
    "output_attentions": {"output_attentions": True, **TUPLE},
    "output_hidden_states": {"output_hidden_states": True, **TUPLE},
    "dola_layers": {"dola_layers": "low"},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "num_beam_groups": {"num_beam_groups": 3, "diversity_penalty": 1.0, "num_beams": 3},
    "diversity_penalty": {"num_beam_groups": 3, "diversity_penalty": 1.0, "num_beams": 3},
    "constraints": {"constraints": [1], **BEAMS},
    "force_words_ids": {"force_words_ids": [[9]], **BEAMS},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
}
OTHER = {
    "cache_config": "belongs to a quantized cache, see the test of it",
    "stop_strings": "compared by transformers with what the caller's tokenizer makes of the tokens",
    "token_healing": "transformers changes the prompt with the caller's tokenizer, before the model is called",
}


def test_every_generation_field_is_in_the_tables() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    documented = {*HONOURED, *HARMLESS, *OF_ASSISTANTS, *REFUSED, *OTHER}
    assert not fields - documented, "say what becomes of these"


@pytest.fixture(scope="module")
def opened(shared: Callable[..., Path]) -> Any:
    folder = shared("generator-gpt2", lambda folder: save_generator(folder, "gpt2"))
    return accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_generator("gpt2")


def answers(model: Any, checkpoint: dict[str, Any]) -> Any:
    """Return the tokens and the other outputs of `generate` for a checkpoint whose generation config has the given
    fields.
    """
    usual = model.generation_config
    model.generation_config = GenerationConfig.from_dict(
        {"pad_token_id": 0, "max_new_tokens": NEW, **copy.deepcopy(checkpoint)}
    )
    if "max_length" in checkpoint:
        model.generation_config.max_new_tokens = None
    rows = ROWS
    if "prompt_lookup_num_tokens" in checkpoint:
        rows = {name: value[:1] for name, value in ROWS.items()}
    try:
        torch.manual_seed(0)
        return model.generate(**rows)
    finally:
        model.generation_config = usual


@pytest.mark.parametrize("field", HONOURED)
@pytest.mark.filterwarnings("ignore")
def test_supported_fields_are_applied(field: str, opened: Any, original: Any) -> None:
    expected, outputs = (answers(model, HONOURED[field]) for model in (original, opened))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(outputs, expected)
        return
    assert torch.equal(outputs.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert (getattr(outputs, name) is None) == (getattr(expected, name) is None)


@pytest.mark.parametrize("field", HARMLESS)
@pytest.mark.filterwarnings("ignore")
def test_fields_without_effect_do_not_change_tokens(field: str, opened: Any) -> None:
    assert torch.equal(answers(opened, {field: HARMLESS[field]}), answers(opened, {}))


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_fields_are_refused(field: str, opened: Any) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011  # transformers' own types
        answers(opened, REFUSED[field])
    assert not isinstance(error.value, AttributeError | KeyError | TypeError | IndexError), error.value


# The tests below check cache implementations and old config files.


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "sliding_window", "hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_cache_implementation_of_a_checkpoint_does_not_change_tokens(kind: str, opened: Any) -> None:
    assert torch.equal(answers(opened, {"cache_implementation": kind}), answers(opened, {}))


def test_quantized_cache_of_a_checkpoint_is_warned(
    shared: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def save(folder: Path) -> None:
        save_generator(folder, "gpt2")
        GenerationConfig(cache_implementation="quantized", pad_token_id=0).save_pretrained(folder)

    with caplog.at_level(logging.WARNING, logger="accel"):
        model = accel.ORTModelForCausalLM.from_pretrained(shared("gpt2-quantized-cache", save), backend="pytorch")
    assert "quantized cache" in caplog.text
    assert "float32" in caplog.text
    assert model.generate(**ROWS, max_new_tokens=3).shape == (2, 10)


def _settings_in_config(folder: Path, **settings: Any) -> Path:
    """Remove generation_config.json and put the settings of `generate` into config.json, as transformers before 4.26
    did. Return the folder.
    """
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bart", {"forced_bos_token_id": 17, "num_beams": 3, "max_length": 9}),
        ("llama", {"bad_words_ids": [[9]], "max_length": 12, "repetition_penalty": 2.0}),
    ],
)
def test_generation_settings_in_config_json_are_read(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5 removes generation settings from a config that it loads, so accel reads them from the file
    config.json.
    """
    folder = _settings_in_config(save_generator(tmp_path / "model", family), **settings)
    auto = transformers.AutoModelForSeq2SeqLM if family == "bart" else transformers.AutoModelForCausalLM
    ours: Any = accel.ORTModelForSeq2SeqLM if family == "bart" else accel.ORTModelForCausalLM
    expected = auto.from_pretrained(folder).generate(**ROWS)
    artifact = accel.export(folder, tmp_path / "out")
    model = ours.from_pretrained(artifact.path)
    assert torch.equal(model.generate(**ROWS), expected)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(ours.from_pretrained(tmp_path / "saved").generate(**ROWS), expected)


def test_generation_settings_in_the_decoder_config_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2", "num_beams": 3}})
    )
    assert open_generation_config(tmp_path, None).num_beams == 3


def test_generation_setting_of_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart", "no_repeat_ngram_size": "three"}))
    with pytest.raises(IntegrityError, match=r"no_repeat_ngram_size is 'three' in .*config\.json"):
        open_generation_config(tmp_path, None)


@pytest.mark.parametrize("start", [None, torch.tensor([[2, 5, 6], [2, 7, 8]])], ids=["one token", "three tokens"])
def test_prefill_chunk_size_is_ignored_by_encoder_decoders(
    start: torch.Tensor | None, shared: Callable[..., Path]
) -> None:
    folder = shared("generator-t5", lambda folder: save_generator(folder, "t5"))
    model = accel.ORTModelForSeq2SeqLM.from_pretrained(folder, backend="pytorch")
    rows = {**ROWS, "decoder_input_ids": start, "max_new_tokens": 4}
    assert torch.equal(model.generate(**rows, prefill_chunk_size=2), model.generate(**rows))


# The tests below check empty inputs.


@pytest.mark.parametrize("task", ["automatic-speech-recognition", "audio-classification"])
@pytest.mark.parametrize("form", ["array", "dictionary", "list"])
def test_audio_without_samples_is_refused(task: str, form: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("wav2vec2", "ctc" if task == "automatic-speech-recognition" else task)
    empty = np.zeros(0, np.float32)
    forms = {"array": empty, "dictionary": {"raw": empty, "sampling_rate": 8000}, "list": [empty]}
    hear = accel.pipeline(task, folder, backend="pytorch")
    with pytest.raises(InputError, match="no samples"):
        hear(forms[form])
    with pytest.raises(InputError, match="0 samples"):
        hear.model(torch.zeros((1, 0)))


def test_empty_audio_is_not_padded_to_silence(shared: Callable[..., Path]) -> None:
    """An empty audio input is refused. Whisper's feature extractor would pad it to 30 seconds of silence."""
    folder = shared("generator-whisper", lambda folder: save_generator(folder, "whisper"))
    hear = accel.pipeline(
        "automatic-speech-recognition", folder, backend="pytorch", tokenizer=tiny_tokenizer(),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=80),
    )  # fmt: skip
    with pytest.raises(InputError, match="no samples"):
        hear(np.zeros(0, np.float32))


@pytest.mark.parametrize("size", [(0, 5), (0, 0)])
def test_image_without_pixels_is_refused(size: tuple[int, int], tiny_folder: Callable[..., Path]) -> None:
    look = accel.pipeline("image-classification", tiny_folder("vit", "image-classification"), backend="pytorch")
    with pytest.raises(InputError, match="pixels"):
        look(Image.new("RGB", size))
