"""Tests of the `generate` methods that model classes of transformers override. accel runs graphs with its own classes,
so each override must be implemented or listed as unnecessary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin

import accel
from accel.artifact import Artifact
from accel.errors import InputError
from accel.families import MODULES
from accel.interfaces.family_registry import family_of
from accel.interfaces.task_registry import all_tasks
from accel.testing.generative_models import save_generator, tiny_generator
from accel.upstream.generate_hooks import GenerateHooks
from tests.sweep.cases import pairs

PREPARE = "prepare_inputs_for_generation"
# Each entry gives the reason why a model's override has no effect in accel, or the place where accel implements the
# override.
HONOURED: dict[str, dict[str, str]] = {
    PREPARE: {
        "BambaForCausalLM": "num_logits_to_keep of the config: how many logits are computed, of which the last one is read",
        "CTRLLMHeadModel": "drops token_type_ids, which the graph does not take",
        "FalconH1ForCausalLM": "as Bamba",
        "FalconMambaForCausalLM": "no mask after the prompt: the mask of one new token is 1",
        "Gemma3ForConditionalGeneration": "token types tell images from text; exported for text alone",
        "Gemma4ForConditionalGeneration": "as Gemma 3",
        "Gemma4UnifiedForConditionalGeneration": "as Gemma 3",
        "Mamba2ForCausalLM": "as FalconMamba",
        "MambaForCausalLM": "as FalconMamba",
        "NemotronHForCausalLM": "as Bamba",
        "OpenAIGPTLMHeadModel": "has no cache: all tokens are passed at each step, as GenerationMixin does without a cache",
        "Phi3ForCausalLM": "`Generator.prepare_inputs_for_generation`; tests/integration/test_positions_by_model.py",
        "Phi4MultimodalForCausalLM": "as Phi-3",
        "PhimoeForCausalLM": "as Phi-3",
        "RoCBertForCausalLM": "cuts ids of shapes and pronunciations, which the graph does not take",
        "WhisperForConditionalGeneration": "`ORTModelForSpeechSeq2Seq.prepare_inputs_for_generation`",
        "Zamba2ForCausalLM": "as Bamba",
    },
    "_prepare_cache_for_generation": {
        "T5Gemma2ForConditionalGeneration": "PyTorch's cache of the encoder's keys; the graphs have their own, without windows",
        "T5GemmaForConditionalGeneration": "as T5Gemma 2",
    },
    "generate": {
        "SeamlessM4TForTextToText": "tgt_lang, in `ORTModelForSeq2SeqLM.generate`",
        "SeamlessM4Tv2ForTextToText": "as SeamlessM4T",
        "WhisperForConditionalGeneration": "`ORTModelForSpeechSeq2Seq` inherits from WhisperGenerationMixin",
    },
}
# These classes have overrides but cannot be exported (docs/models.md gives the reasons). If a class becomes exportable,
# check its overrides.
NOT_EXPORTED = frozenset(
    """
Apertus1p5ForConditionalGeneration Blip2ForConditionalGeneration BlipForConditionalGeneration CanaryForConditionalGeneration
CohereAsrForConditionalGeneration CohereCompassForConditionalGeneration Cosmos3EdgeForConditionalGeneration
Cosmos3OmniForConditionalGeneration CpmAntForCausalLM DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration
DiaForConditionalGeneration DiffusionGemmaForBlockDiffusion Dots3NoteForConditionalGeneration Emu3ForConditionalGeneration
Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration Florence2ForConditionalGeneration
Glm46VForConditionalGeneration Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration
GlmOcrForConditionalGeneration Granite4VisionForConditionalGeneration GraniteSpeechForConditionalGeneration
GraniteSpeechPlusForConditionalGeneration HYV4VLForConditionalGeneration HunYuanVLForConditionalGeneration
HyperCLOVAXVisionV2ForConditionalGeneration IdeficsForVisionText2Text InklingForConditionalGeneration
InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration JanusForConditionalGeneration Kosmos2ForConditionalGeneration
Kosmos2_5ForConditionalGeneration KyutaiSpeechToTextForConditionalGeneration MiniCPMOcrForConditionalGeneration
MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MllamaForConditionalGeneration
Molmo2ForConditionalGeneration MusicgenForCausalLM MusicgenMelodyForCausalLM NemotronH_Omni_Reasoning_V3
PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration Pop2PianoForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration Qwen2_5_VLForConditionalGeneration
Qwen3OmniMoeThinkerForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration ReformerModelWithLMHead
RwkvForCausalLM SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText UnlimitedOcrForConditionalGeneration
VibeVoiceAsrForConditionalGeneration VibeVoiceForConditionalGeneration VoxtralRealtimeForConditionalGeneration
XLMWithLMHeadModel XLNetLMHeadModel ZambaForCausalLM
""".split()
)


def overrides_of(cls: type) -> set[str]:
    """Return the names of the `GenerationMixin` methods that a model class or its base classes override."""
    overrides = set()
    for name in vars(GenerationMixin):
        owner = next((base for base in cls.__mro__ if name in vars(base)), GenerationMixin)
        if not name.startswith("__") and owner.__module__.startswith("transformers.models."):
            overrides.add(name)
    return overrides


def test_every_override_of_generate_is_listed() -> None:
    tasks = [spec.name for spec in all_tasks() if spec.generates]
    listed = {name: set(classes) for name, classes in HONOURED.items()}
    unknown = [
        f"{pair.model}.{name}"
        for pair in pairs(tasks)
        if pair.model not in NOT_EXPORTED
        for name in sorted(overrides_of(getattr(transformers, pair.model)))
        if pair.model not in listed.get(name, ())
    ]
    assert not unknown, "say in HONOURED how these are honoured, or why they change nothing"


CALLED = {
    "_prefill": ["self", "input_ids", "generation_config", "model_kwargs"],
    "_update_model_kwargs_for_generation": ["self", "outputs", "model_kwargs", "is_encoder_decoder"],
    "_prepare_generation_config": ["self", "generation_config", "kwargs"],
    "_prepare_special_tokens": ["self", "generation_config", "device"],
    "_get_logits_processor":
        ["self", "generation_config", "input_ids_seq_length", "encoder_input_ids", "logits_processor", "device"],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_private_generate_functions_accept_accels_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(GenerationMixin, name)).parameters
    assert set(CALLED[name]) <= set(parameters)
    required = {
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    assert required <= set(CALLED[name])


@pytest.mark.parametrize("name", ["_sample", "_prepare_cache_for_generation"])
def test_generate_hooks_have_transformers_parameters(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (GenerateHooks, GenerationMixin))
    assert ours == theirs


def test_overrides_in_the_table_exist() -> None:
    for name, classes in HONOURED.items():
        for cls in classes:
            # Older versions of transformers may not have the model class.
            assert not hasattr(transformers, cls) or name in overrides_of(getattr(transformers, cls)), (name, cls)


def test_models_with_changing_angles_are_listed() -> None:
    classes = {name for name, how in HONOURED[PREPARE].items() if "Phi-3" in how or name == "Phi3ForCausalLM"}
    kinds = {getattr(transformers, name).config_class.model_type for name in classes}
    assert kinds == {kind for kind in MODULES if family_of({"model_type": kind}).recomputes_long_texts}


def padded_in_front() -> dict[str, torch.Tensor]:
    """Return three audio inputs, and decoder prompts of different lengths that are padded on the left."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 90, (3, 6), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[2, :1] = 0, 0
    sounds = torch.randn((3, 80, 40), generator=draw)
    return {"input_features": sounds, "decoder_input_ids": ids * mask, "decoder_attention_mask": mask}


@pytest.fixture
def whisper(generator: Callable[..., Artifact]) -> Any:
    return accel.ORTModelForSpeechSeq2Seq.from_pretrained(generator("whisper").path)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"use_cache": False}],
    ids=["greedy", "beams", "sampled", "without a cache"],
)
@pytest.mark.filterwarnings("ignore:.*max_length.*")
def test_left_padded_decoder_prompts_of_whisper(whisper: Any, settings: dict[str, Any]) -> None:
    rows, tokens = padded_in_front(), []
    for model in (tiny_generator("whisper"), whisper):
        torch.manual_seed(0)
        tokens.append(model.generate(**rows, max_new_tokens=8, **settings))
    assert torch.equal(*tokens)


def test_whisper_rows_alone_equal_rows_in_a_padded_batch(whisper: Any) -> None:
    rows = padded_in_front()
    together = whisper.generate(**rows, max_new_tokens=8)
    for i, length in enumerate(rows["decoder_attention_mask"].sum(dim=1).tolist()):
        alone = whisper.generate(
            rows["input_features"][i : i + 1], decoder_input_ids=rows["decoder_input_ids"][i : i + 1, -length:],
            max_new_tokens=8,
        )  # fmt: skip
        assert torch.equal(alone[0, -8:], together[i, -8:])


@pytest.fixture
def translator(shared: Callable[..., Path]) -> Any:
    folder = shared("generator-t5", lambda folder: save_generator(folder, "t5"))
    model = accel.ORTModelForSeq2SeqLM.from_pretrained(folder, backend="pytorch")
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.text_decoder_lang_to_code_id = {"deu": 7, "fra": 8}
    return model


@pytest.mark.parametrize("language", ["fra", "__fra__"])
def test_target_language_is_the_first_decoder_token(translator: Any, language: str) -> None:
    ids = torch.tensor([[5, 6, 9], [9, 8, 7]])
    tokens = translator.generate(ids, tgt_lang=language, max_new_tokens=4)
    expected = translator.generate(ids, decoder_input_ids=torch.tensor([[8], [8]]), max_new_tokens=4)
    assert torch.equal(tokens, expected)


def test_unknown_target_language_is_refused(translator: Any) -> None:
    with pytest.raises(InputError, match="deu, fra"):
        translator.generate(torch.tensor([[5, 6]]), tgt_lang="eng")
    del translator.generation_config.text_decoder_lang_to_code_id
    with pytest.raises(InputError, match="no languages"):
        translator.generate(torch.tensor([[5, 6]]), tgt_lang="eng")
