"""Architectures that are compared with transformers.js, their inputs, and the answers of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from accel.testing.generative_models import save_generator
from accel.testing.image_models import save_tiny_pictures
from accel.testing.models import save_tiny

MILD: Mapping[str, Any] = {"initializer_range": 0.1}
"""Smaller weights than in other tests: 4-bit weights of tiny random models must keep the outputs recognizable."""
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "q8": 0.35, "q4": 0.5, "q4f16": 0.5}
"""Largest accepted difference from PyTorch, relative to the largest value of an output (at least 1).

Kernels of WebAssembly and of other processors add in another order, and 8-bit activations depend on the rows of a batch.
"""


def texts(config: Any) -> dict[str, torch.Tensor]:
    """Return two rows of token ids, the second one padded."""
    draw = torch.Generator().manual_seed(3)
    pad = config.pad_token_id or 0
    ids = torch.randint(5, 100, (2, 9), generator=draw)
    mask = torch.ones_like(ids)
    ids[1, 6:], mask[1, 6:] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture, and how both libraries load it.

    Attributes:
        task: Name of the task.
        loader: Class in transformers and in transformers.js.
        save: Function that writes a tiny model to a folder.
        outputs: Outputs that are compared.
        feeds: Function that makes inputs from a config.
        generates: Whether the tokens of a greedy generation are compared.
        failing: Variants that `accel convert` must leave out, because the tiny model is too small for them.
        graph_optimization: ONNX Runtime's optimization level in Node for float16. The highest level contains an optimizer that crashes the
            process on some float16 decoders (onnxruntime 1.30 and 1.31.1).
    """

    task: str
    loader: str
    save: Callable[[Path], object]
    outputs: tuple[str, ...] = ("logits",)
    feeds: Callable[[Any], dict[str, torch.Tensor]] = texts
    generates: bool = False
    failing: tuple[str, ...] = ()
    graph_optimization: str = "all"


def prompts(config: Any) -> dict[str, torch.Tensor]:
    """Return two prompts for a decoder; the second one is padded on the left."""
    feeds = texts(config)
    return {name: torch.cat([value[:1], value[1:].roll(3, dims=1)]) for name, value in feeds.items()}


def sentence_pairs(config: Any) -> dict[str, torch.Tensor]:
    """Return the tokens of an encoder and the first tokens of a decoder."""
    return {**texts(config), "decoder_input_ids": torch.tensor([[config.decoder_start_token_id, 7, 8]] * 2)}


def sounds(config: Any) -> dict[str, torch.Tensor]:
    """Return the features of a sound and the first tokens of a decoder. transformers.js generates Whisper's tokens for one sound."""
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=draw)
    return {"input_features": features, "decoder_input_ids": torch.tensor([[config.decoder_start_token_id, 7]])}


def pictures(config: Any) -> dict[str, torch.Tensor]:
    """Return the pixels of two images."""
    draw = torch.Generator().manual_seed(3)
    size = getattr(config, "vision_config", config).image_size
    return {"pixel_values": torch.randn(2, 3, size, size, generator=draw)}


def texts_and_pictures(config: Any) -> dict[str, torch.Tensor]:
    """Return two texts and two images."""
    ids = torch.tensor([[2, 8, 9, 10, 3], [2, 11, 12, 3, 3]])
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [1] * 4 + [0]]), **pictures(config)}


def _encoder(family: str, task: str, loader: str, *outputs: str, failing: tuple[str, ...] = ()) -> Architecture:
    return Architecture(
        task=task, loader=loader, save=lambda out: save_tiny(out, family, task), outputs=outputs or ("logits",),
        failing=failing,
    )  # fmt: skip


def _generator(
    family: str, task: str, loader: str, feeds: Callable[[Any], dict[str, torch.Tensor]], **settings: Any
) -> Architecture:
    def save(out: Path) -> Path:
        return save_generator(out, family, **settings)

    level = "extended" if family == "gpt2" else "all"
    return Architecture(task=task, loader=loader, save=save, feeds=feeds, generates=True, graph_optimization=level)


_SEQUENCES, _TAGS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
_MASKS, _HIDDEN = "AutoModelForMaskedLM", "AutoModel"
_CAUSAL, _PAIRS = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
ARCHITECTURES: dict[str, Architecture] = {
    "bert": _encoder("bert", "text-classification", _SEQUENCES),
    "distilbert": _encoder("distilbert", "text-classification", _SEQUENCES),
    "deberta-v2": _encoder("deberta-v2", "text-classification", _SEQUENCES),
    "roberta": _encoder("roberta", "token-classification", _TAGS),
    "electra": _encoder("electra", "token-classification", _TAGS),
    "albert": _encoder("albert", "fill-mask", _MASKS, failing=("q4", "q4f16")),
    "modernbert": _encoder("modernbert", "fill-mask", _MASKS),
    "mpnet": _encoder("mpnet", "feature-extraction", _HIDDEN, "last_hidden_state"),
    "xlm-roberta": _encoder("xlm-roberta", "feature-extraction", _HIDDEN, "last_hidden_state"),
    "gpt2": _generator("gpt2", "text-generation", _CAUSAL, prompts, **MILD),
    "llama": _generator("llama", "text-generation", _CAUSAL, prompts, **MILD),
    "qwen3": _generator("qwen3", "text-generation", _CAUSAL, prompts, **MILD),
    "t5": _generator("t5", "text2text-generation", _PAIRS, sentence_pairs, initializer_factor=1.0),
    "bart": _generator("bart", "text2text-generation", _PAIRS, sentence_pairs, init_std=0.1),
    "marian": _generator("marian", "text2text-generation", _PAIRS, sentence_pairs, init_std=0.1),
    "whisper": _generator(
        "whisper", "automatic-speech-recognition", "AutoModelForSpeechSeq2Seq", sounds, init_std=0.1
    ),
    "vit": Architecture(
        task="image-classification", loader="AutoModelForImageClassification", feeds=pictures,
        save=lambda out: save_tiny(out, "vit", "image-classification"),
    ),
    "clip": Architecture(
        task="zero-shot-image-classification", loader="AutoModel", feeds=texts_and_pictures,
        outputs=("logits_per_image", "text_embeds", "image_embeds"), save=lambda out: save_tiny_pictures(out, "clip"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Inputs and PyTorch's answers: outputs by name, and the tokens of a greedy generation of at most eight tokens."""

    feeds: dict[str, torch.Tensor]
    outputs: dict[str, np.ndarray[Any, Any]]
    tokens: list[list[int]] | None


def reference(architecture: Architecture, folder: Path) -> Reference:
    """Compute the answers of PyTorch."""
    model = getattr(transformers, architecture.loader).from_pretrained(folder).eval()
    feeds = architecture.feeds(model.config)
    with torch.inference_mode():
        positions = {}
        if architecture.feeds is prompts:
            # transformers.js counts the positions of padded prompts by the mask, as `generate` does.
            positions["position_ids"] = (feeds["attention_mask"].cumsum(1) - 1).clamp(min=0)
        result = model(**feeds, **positions)
        outputs = {name: result[name].float().numpy() for name in architecture.outputs}
        tokens = None
        if architecture.generates:
            prompt = {name: value for name, value in feeds.items() if name != "decoder_input_ids"}
            tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False).tolist()
    return Reference(feeds=feeds, outputs=outputs, tokens=tokens)
