"""Tests of PEFT adapters: an exported adapter computes the same outputs as PEFT with the base model. The export follows
later changes of the base model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel import ORTModelForCausalLM
from accel.artifact.hub import HubOptions, Location
from accel.capture import load_source
from accel.config import ExportConfig
from accel.errors import ExportError
from accel.testing.generative_models import tiny_generator
from accel.testing.models import rescale, tiny_tokenizer

peft = pytest.importorskip("peft", reason="adapters are PEFT's")

# PEFT warns about tied embeddings, and transformers warns about an argument name that it will remove.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has `tie", "ignore:`is_gradient", "ignore:Setting `save", "ignore:Could not find"
)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def save_base(folder: Path, seed: int = 0, *, tied: bool = False) -> Path:
    config = tiny_generator("llama").config
    config.tie_word_embeddings = tied
    rescale(transformers.LlamaForCausalLM(config).eval(), seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: str, targets: list[str], **settings: Any) -> Any:
    """Save an adapter with large weights to `folder`, without the base model. Return the adapted model."""
    hub = {name: settings.pop(name) for name in ("cache_dir",) if name in settings}
    model = transformers.LlamaForCausalLM.from_pretrained(base, revision=settings.get("revision"), **hub)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, **settings)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.3)
    adapted.eval().save_pretrained(folder)
    return adapted


def logits(model: Callable[..., Any]) -> torch.Tensor:
    with torch.inference_mode():
        values: torch.Tensor = model(input_ids=IDS).logits
    return values


def loaded(folder: Path, hub: HubOptions | None = None) -> torch.nn.Module:
    where = Location(str(folder), folder)
    return load_source(where, task="text-generation", config=ExportConfig(), hub=hub or HubOptions()).model


@pytest.mark.parametrize(
    "targets", [["q_proj", "embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="-".join
)
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_tied_embeddings(tied: bool, targets: list[str], tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "adapter", str(save_base(tmp_path / "base", tied=tied)), targets)
    torch.testing.assert_close(logits(loaded(tmp_path / "adapter")), logits(adapted), atol=1e-4, rtol=1e-4)


def test_base_revision_named_by_the_adapter_is_used(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--me--base"
    (repository / "refs").mkdir(parents=True)
    for name, commit, seed in (("main", "a" * 40, 0), ("v1", "b" * 40, 5)):
        save_base(repository / "snapshots" / commit, seed)
        (repository / "refs" / name).write_text(commit)
    hub = tmp_path / "hub"
    adapted = save_adapter(tmp_path / "adapter", "me/base", ["q_proj"], revision="v1", cache_dir=hub)
    opened = loaded(tmp_path / "adapter", HubOptions(cache_dir=str(hub)))
    torch.testing.assert_close(logits(opened), logits(adapted), atol=1e-4, rtol=1e-4)


ADDED = ["newtoken", "othertoken"]


def save_with_tokens(folder: Path, base: Path, *, tokens: int = 2, save: Any = "auto", **settings: Any) -> Any:
    """Save an adapter and a tokenizer with added tokens, for a base model whose embeddings were resized. Return the
    adapted model.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(ADDED)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    before = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(before + tokens, mean_resizing=False)
    if settings.pop("indices", False):
        settings["trainable_token_indices"] = [3, before, before + 1]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": ["q_proj"], **settings})
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
        adapted.get_input_embeddings()
    adapted.eval().save_pretrained(folder, save_embedding_layers=save)
    tokenizer.save_pretrained(folder)
    return adapted


def logits_of_added(model: Any, vocabulary: int) -> torch.Tensor:
    ids = torch.tensor([[5, vocabulary - 1, 7, vocabulary - 2]])
    with torch.inference_mode():
        values: torch.Tensor = model(input_ids=ids).logits
    return values


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"indices": True},
        {"use_dora": True},
    ],
    ids=["saved-embeddings", "modules-to-save", "adapted-embeddings", "trained-tokens", "dora"],
)
def test_adapter_with_added_tokens(settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied=tied)
    adapted = save_with_tokens(tmp_path / "adapter", base, **settings)
    opened = loaded(tmp_path / "adapter")
    size = adapted.config.vocab_size
    if not tied and (settings.get("indices") or "embed_tokens" in settings.get("target_modules", ())):
        # If only the input embeddings are adapted, PEFT does not save the output embeddings of the two added tokens, so
        # these logits are not compared.
        size -= 2
    assert opened.config.vocab_size == adapted.config.vocab_size
    expected = logits_of_added(adapted, adapted.config.vocab_size)[..., :size]
    torch.testing.assert_close(
        logits_of_added(opened, opened.config.vocab_size)[..., :size], expected, atol=1e-4, rtol=1e-4
    )


def test_added_tokens_without_saved_embeddings_are_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The padding token exists only in the tokenizer, because the model's embeddings were not resized. The export
    warns, and the outputs are correct.
    """
    base = save_base(tmp_path / "base")
    rows = transformers.AutoConfig.from_pretrained(base).vocab_size
    adapted = save_adapter(tmp_path / "adapter", str(base), ["q_proj"])
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"added{i}" for i in range(rows)])
    tokenizer.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded(tmp_path / "adapter")), logits(adapted), atol=1e-4, rtol=1e-4)
    assert "the PEFT adapter and its base model have embeddings for only" in caplog.text


def test_unsaved_embeddings_raise(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_with_tokens(tmp_path / "adapter", base, save=False, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ExportError, match="contains no embeddings for the other") as error:
        loaded(tmp_path / "adapter")
    assert "save_embedding_layers=True" in error.value.fix


def test_adapter_of_another_base_model_raises(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_adapter(tmp_path / "adapter", str(base), ["q_proj"])
    other = transformers.LlamaConfig(**{**transformers.AutoConfig.from_pretrained(base).to_dict(), "hidden_size": 128})
    transformers.LlamaForCausalLM(other).save_pretrained(base)
    with pytest.raises(ExportError, match="does not fit its base model") as error:
        loaded(tmp_path / "adapter")
    assert "base_model_name_or_path" in error.value.fix


@pytest.mark.parametrize(
    "settings",
    [
        peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
        peft.LoKrConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
        peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
        peft.OFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], oft_block_size=4),
        peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[5, 6], target_modules=["embed_tokens"]),
    ],
    ids=lambda settings: settings.peft_type.value,
)
def test_other_mergeable_adapter_types(settings: Any, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(save_base(tmp_path / "base"))
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.eval().save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded(tmp_path / "adapter")), logits(adapted), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING"),
        (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "P_TUNING"),
        (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]),
            "PEFT cannot merge",
        ),
    ],
    ids=["prefix", "p-tuning", "alora"],
)
def test_adapter_types_that_cannot_be_merged_raise(settings: Any, kind: str, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(save_base(tmp_path / "base"))
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match=kind):
        loaded(tmp_path / "adapter")


def test_prompt_tuning_is_refused(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(save_base(tmp_path / "base"))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(model, prompts).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match="has the type PROMPT_TUNING") as error:
        accel.export(tmp_path / "adapter", tmp_path / "out")
    assert "LoRA" in str(error.value.fix)


@pytest.mark.thorough
def test_adapter_is_opened_with_the_current_base_model(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    adapted = save_adapter(tmp_path / "adapter", str(tmp_path / "base"), ["q_proj"])
    model = ORTModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits(adapted), atol=1e-4, rtol=1e-4)
    assert accel.pipeline("text-generation", model=model.path)("hello world", max_new_tokens=2)
    again = ORTModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert again.path == model.path

    save_base(tmp_path / "base", seed=9)
    with_another = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    newest = ORTModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(newest), logits(with_another), atol=1e-4, rtol=1e-4)
    assert (logits(with_another) - logits(adapted)).abs().max() > 0.1, (
        "the base changes nothing: the test shows nothing"
    )
