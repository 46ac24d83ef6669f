"""Generating models as graphs with a cache.

A decoder-only model becomes one graph; an encoder-decoder three: the encoder, the cross-attention's keys and values (run
once a prompt), and the decoder; a model that reads images three, too: the vision tower with its projector, the embedding
table, and a decoder of embeddings. The decoder graph takes any number of new tokens after any past: prefill, one decode step
and the next turn of a chat are the same graph, so its weights exist once.

Capture runs the model's own code with the cache and the attention of `attention.py` in it. What a backend's fused operator
declines, and backends without one, get the cache by concatenation.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family_registry import family_of
from ..interfaces.task_registry import load_task
from ..interfaces.task_spec import TaskSpec
from ..interfaces.wrapper import Tensors, Wrapper
from ..upstream.cache_names import CACHE_NAME, cache_argument
from ..upstream.library_output import quiet
from .cached_attention import CacheLayer, FusedAttention, tracing
from .cached_layers import TOKENS, Layer, croppable, described, made, presents, without_tokens
from .patch_samples import PATCH_AXIS, PATCHES
from .position_limits import has_position_table
from .recurrence import recurrent
from .samples import same_draws
from .sound_samples import SOUND_AXES
from .source import Source
from .speech_samples import short_masks, shortened_mask
from .tracer import first_lines

_BATCH, _NEW, _TOTAL, _CAPACITY = 2, 3, 7, 13  # of the example that is traced
ENCODER_MASK = "encoder_attention_mask"
# By modality, the inputs that bring it.
_SENSED = {"audio": ("input_features", "input_values"), "image": ("pixel_values", PATCHES)}


def split(source: Source, fusion: FusedAttention | None = None) -> tuple[Source, ...]:
    """The graphs of a source: itself, the parts of a generating model, or those that its task has.

    Args:
        source: From `load_source`.
        fusion: The backend's attention operators; concatenated caches and plain attention without them.

    Raises:
        ExportError: The model keeps another kind of state than keys and values, or has other parts than models for its task.
    """
    task = load_task(source.task)
    if task.spec.generates:
        _check_parts(source, task.spec)
    if (parts := task.parts(source, fusion)) is not None:
        return tuple(parts)
    if not task.spec.generates:
        return (source,)
    if getattr(source.config, "is_encoder_decoder", False):
        return _encoder_decoder(source, fusion)
    return (_decoder_only(source, fusion),)


@same_draws()
def family_parts(source: Source) -> tuple[Source, ...]:
    """The graphs that a family makes of a model that does not generate.

    Raises:
        ExportError: The model's family has none.
    """
    parts = family_of(source.config).parts(source.model, source.example, source.axes)
    if not parts:
        raise ExportError(
            f"accel does not know the parts of a {source.architecture}, of which graphs for {source.task} are made.",
            fix="run it with transformers.",
        )
    varied = [{axis for named in part.axes.values() for axis in named.values()} for part in parts]
    return tuple(
        replace(
            source,
            name=part.name,
            model=part.model,
            example=part.example,
            axes=part.axes,
            max_sizes={axis: most for axis, most in source.max_sizes.items() if axis in axes},
        )
        for part, axes in zip(parts, varied, strict=True)
    )


def _check_parts(source: Source, spec: TaskSpec) -> None:
    """Refuse a model that the task's graphs would hold a part of, without what it is about: its sounds or images.

    transformers' auto classes name one class for several tasks: Voxtral's is a decoder of text with sounds in its prompt.
    """
    has_encoder = bool(getattr(source.config, "is_encoder_decoder", False))
    sense = next((one for one in _SENSED if one in spec.modalities), "")
    unread = sense and (spec.encoder_decoder or sense == "audio") and not set(_SENSED[sense]) & set(source.example)
    if spec.encoder_decoder not in (None, has_encoder) or unread:
        wanted = "an encoder and a decoder" if spec.encoder_decoder else "a decoder alone"
        have = "an encoder and a decoder" if has_encoder else "a decoder alone"
        reads = f", which reads {sorted(source.example)}" if unread else ""
        raise ExportError(
            f"{source.architecture} is {have}{reads}; a model for {spec.name} is {wanted}"
            f"{', which reads sounds' if sense == 'audio' else ', which reads images' if unread else ''}.",
            fix="run it with transformers, or pass another task=... for the part that writes text.",
        )


# Parts


class _Part(Wrapper):
    """A part of a generating model as a module with named tensors in and out."""

    def __init__(self, model: Any, fusion: FusedAttention | None, kept: list[Layer] | None = None) -> None:
        super().__init__(model)
        self.fusion = fusion
        self.kept = kept or []

    def layers(self, feeds: Mapping[str, torch.Tensor], total: Any, new: Any) -> list[Any]:
        """The cache layers among the inputs."""
        return made(self.kept, dict(feeds), total, new, roomy=self.fusion is not None)


class _Decoder(_Part):
    """`input_ids, attention_mask, position_ids, logits_to_keep, past_…` to `logits, present_…`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One call of the decoder-only model."""
        from transformers.cache_utils import Cache

        tokens = feeds["input_ids"] if "input_ids" in feeds else feeds["inputs_embeds"]
        new, total = tokens.shape[1], feeds["attention_mask"].shape[1]
        layers = self.layers(feeds, total, new)
        inputs = {name: tensor for name, tensor in feeds.items() if not name.startswith("past_")}
        if without_tokens(self.kept):
            # Nothing looks back at the tokens before: the model's code masks the new ones alone.
            inputs["attention_mask"] = feeds["attention_mask"][:, total - new :]
        inputs[cache_argument(self.model)] = Cache(layers=layers)
        with tracing(self.model, self.fusion, layers, tokens.shape[0], total):
            output = self.model(**inputs, use_cache=True)
        return {"logits": output.logits, **presents(layers)}


class _Recomputed(_Part):
    """All tokens of a model that keeps nothing, at each call: `input_ids, attention_mask, …` to `logits`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One call of the model."""
        return {"logits": self.model(**feeds).logits}


class _Vision(_Part):
    """`pixel_values: (1, channels, height, width)` to `image_features: (tokens, hidden)`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One image: the model's own code makes a list of several."""
        return {"image_features": family_of(self.config).image_features(self.model, feeds["pixel_values"])}


class _Embedding(_Part):
    """`input_ids` to `inputs_embeds: (batch, sequence, hidden)`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Look tokens up."""
        return {"inputs_embeds": family_of(self.config).embeddings(self.model, feeds["input_ids"])}


class Encoder(_Part):
    """The encoder's inputs to `last_hidden_state`, and to `encoder_attention_mask` where it has fewer positions than its sounds have
    samples or frames.
    """

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One call of the encoder."""
        model: Any = self.model
        encoder = model.get_encoder()
        heard = model.main_input_name in ("input_features", "input_values") and "attention_mask" in feeds
        output = encoder(**feeds, return_dict=True)
        mask = shortened_mask(encoder, output, feeds["attention_mask"]) if heard else None
        found = {"last_hidden_state": output.last_hidden_state}
        return found if mask is None else {**found, ENCODER_MASK: mask}


def encoder_output(hidden: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    """What an encoder returned: its hidden states `(batch, sequence, hidden)`, and the fields that NLLB-MoE's and Moonshine's have beside
    them.
    """
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=hidden)
    output.router_logits = None
    output.attention_mask = mask
    return output


class CrossAttention(_Part):
    """`encoder_hidden_states` to the keys and values of the decoder's cross-attention.

    Runs one decoder step of which the trace keeps these projections only.
    """

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One decoder step."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        hidden = feeds["encoder_hidden_states"]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            decoder_input_ids=torch.zeros((hidden.shape[0], 1), dtype=torch.int64, device=hidden.device),
            encoder_outputs=encoder_output(hidden),
            use_cache=True,
            **{CACHE_NAME: cache},
        )
        found = {}
        for i, layer in enumerate(cache.cross_attention_cache.layers):
            found[f"cross_{i}_key"], found[f"cross_{i}_value"] = layer.keys, layer.values
        return found


class CrossDecoder(_Part):
    """`input_ids, attention_mask, encoder_attention_mask, cross_…, past_…` to `logits, present_…`."""

    def __init__(
        self, model: Any, fusion: FusedAttention | None, kept: list[Layer], encoder_size: int, cross: int
    ) -> None:
        super().__init__(model, fusion, kept)
        self.cross = cross
        self.encoder_size = encoder_size

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """One call of the decoder."""
        from transformers.cache_utils import Cache, EncoderDecoderCache

        ids = feeds["input_ids"]
        batch, total = ids.shape[0], feeds["attention_mask"].shape[1]
        layers = self.layers(feeds, total, ids.shape[1])
        key = feeds["cross_0_key"]
        cross = [
            CacheLayer(
                feeds[f"cross_{i}_key"], feeds[f"cross_{i}_value"], key.shape[2], 0, roomy=self.fusion is not None
            )
            for i in range(self.cross)
        ]
        cache = EncoderDecoderCache(Cache(layers=layers), Cache(layers=cross))
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        # Nothing reads the hidden states behind the keys and values, only their shape.
        hidden = key.new_zeros(1).expand(batch, key.shape[2], self.encoder_size)
        optional = {}
        if ENCODER_MASK in feeds:
            optional["attention_mask"] = feeds[ENCODER_MASK]
        if "position_ids" in feeds:
            optional["decoder_position_ids"] = feeds["position_ids"]
        with tracing(self.model, self.fusion, layers, batch, total), short_masks(self.model):
            output = self.model(
                decoder_input_ids=ids,
                decoder_attention_mask=feeds["attention_mask"],
                encoder_outputs=encoder_output(hidden, feeds.get(ENCODER_MASK)),
                use_cache=True,
                **{CACHE_NAME: cache},
                **optional,
            )
        return {"logits": output.logits, **presents(layers)}


def _decoder_only(source: Source, fusion: FusedAttention | None) -> Source:
    model: Any = source.model
    parameters = inspect.signature(model.forward).parameters
    kept = _kept(model)
    if kept is None:
        return _recomputed(source)
    example, axes = _tokens()
    if "position_ids" in parameters:
        _add_positions(example, axes)
    if "logits_to_keep" in parameters:
        example["logits_to_keep"] = torch.tensor([0, 1, 2, 2])
        axes["logits_to_keep"] = {0: "kept"}
    _add_cache(example, axes, kept, source.dtype, _CAPACITY if fusion is not None else _TOTAL - _NEW)
    module = _Decoder(model, fusion, kept).eval()
    return replace(
        source,
        name="model",
        model=module,
        example=example,
        axes=axes,
        max_sizes=_positions(model),
        stateful=True,
        croppable=croppable(kept),
        # Some tokenizers make token types for models that have none.
        unused_inputs=() if "token_type_ids" in parameters else ("token_type_ids",),
    )


def _recomputed(source: Source) -> Source:
    """The whole model, for one that reads all tokens again for each new one (GPT-1), also in transformers."""
    model: Any = source.model
    example, axes = dict(source.example), {name: dict(named) for name, named in source.axes.items()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        example["position_ids"] = torch.arange(example["input_ids"].shape[1]).repeat(example["input_ids"].shape[0], 1)
        axes["position_ids"] = dict(axes["input_ids"])
    _check_prompt(model, example)
    limits = {"sequence": _positions(model)["total"]} if _positions(model) else source.max_sizes
    module = _Recomputed(model, None).eval()
    return replace(source, name="model", model=module, example=example, axes=axes, max_sizes=limits, continues="none")


def _check_prompt(model: Any, example: Tensors) -> None:
    """Refuse a model whose prompts `generate` changes in a way of the model's own: XLM puts a mask behind them."""
    ids = example["input_ids"]
    mask = {name: tensor for name, tensor in example.items() if name == "attention_mask"}
    with quiet():
        prepared = model.prepare_inputs_for_generation(ids, **mask)
    read = prepared.get("input_ids")
    added = sorted(n for n, value in prepared.items() if isinstance(value, torch.Tensor) and n not in example)
    if added or read is None or not torch.equal(read, ids):
        raise ExportError(
            f"{type(model).__name__} generates from something else than its prompt: its code adds "
            f"{', '.join(added) or 'tokens'} at each step.",
            fix="run it with transformers.",
        )


def vision_language(source: Source, fusion: FusedAttention | None) -> tuple[Source, ...]:
    """The vision tower, the embedding table and the decoder of a model that puts images into the prompt."""
    model: Any = source.model
    vision = getattr(source.config, "vision_config", None)
    size = getattr(vision, "image_size", None)
    # InternVL's is a pair.
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if getattr(source.config, "image_token_id", None) is None or not (
        isinstance(height, int) and isinstance(width, int)
    ):
        raise ExportError(
            f"{source.architecture} does not put images of one size into the prompt; only such models can be exported.",
            fix="run it with transformers.",
        )
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"The images in the prompts of {source.architecture} attend in both directions, where its token_type_ids say so; a graph "
            "attends in causal order.",
            fix="run it with transformers.",
        )
    pixels = torch.randn(
        (1, getattr(vision, "num_channels", 3), height, width), generator=torch.Generator().manual_seed(3)
    )
    tokens = {"input_ids": torch.ones((_BATCH, _NEW), dtype=torch.int64)}
    parts: list[tuple[str, _Part, Tensors, dict[str, dict[int, str]]]] = [
        (
            "vision",
            _Vision(model, None),
            {"pixel_values": pixels.to(getattr(torch, source.dtype))},
            {"pixel_values": {}},
        ),
        ("embedding", _Embedding(model, None), tokens, {"input_ids": {0: "batch", 1: "sequence"}}),
    ]
    decoder = _decoder_only(source, fusion)
    with torch.inference_mode():
        embedded = parts[1][1](**tokens)["inputs_embeds"].clone()
    example = {"inputs_embeds": embedded} | {n: t for n, t in decoder.example.items() if n != "input_ids"}
    axes = {"inputs_embeds": decoder.axes["input_ids"]} | {n: a for n, a in decoder.axes.items() if n != "input_ids"}
    return (
        *(
            replace(source, name=name, model=part.eval(), example=example, axes=axes, max_sizes={})
            for name, part, example, axes in parts
        ),
        replace(decoder, example=example, axes=axes),
    )


def _encoder_decoder(source: Source, fusion: FusedAttention | None) -> tuple[Source, ...]:
    model: Any = source.model
    encoder_example = {name: tensor for name, tensor in source.example.items() if name != "decoder_input_ids"}
    encoder_axes = {name: source.axes[name] for name in encoder_example}
    encoder = Encoder(model, None).eval()
    with torch.inference_mode(), quiet():
        hidden = encoder(**encoder_example)["last_hidden_state"].clone()
    batch, length, size = hidden.shape
    varied = {axis for named in encoder_axes.values() for axis in named.values()}
    fixed = not {"sequence", PATCH_AXIS, *SOUND_AXES} & varied
    cross_module = CrossAttention(model, None).eval()
    with torch.inference_mode(), quiet():
        cross = {name: value.clone() for name, value in cross_module(encoder_hidden_states=hidden).items()}
        kept = _self_kept(model, hidden)
    hidden_axes = {0: "batch"} if fixed else {0: "batch", 1: "encoder_sequence"}
    parts = [
        replace(source, name="encoder", model=encoder, example=encoder_example, axes=encoder_axes),
        replace(
            source,
            name="cross_attention",
            model=cross_module,
            example={"encoder_hidden_states": hidden},
            axes={"encoder_hidden_states": hidden_axes},
            max_sizes={},
        ),
    ]
    example, axes = _tokens()
    if "attention_mask" in encoder_example:
        example[ENCODER_MASK] = torch.ones((batch, length), dtype=torch.int64)
        example[ENCODER_MASK][1, 1 + length // 2 :] = 0
        axes[ENCODER_MASK] = {0: "batch", 1: "encoder_sequence"}
    if "decoder_position_ids" in inspect.signature(model.forward).parameters:
        _add_positions(example, axes)
    for name, value in cross.items():
        example[name] = value
        axes[name] = {0: "batch"} if fixed else {0: "batch", 2: "encoder_sequence"}
    _add_cache(example, axes, kept, source.dtype, _CAPACITY if fusion is not None else _TOTAL - _NEW)
    decoder = CrossDecoder(model, fusion, kept, size, len(cross) // 2).eval()
    parts.append(
        replace(
            source,
            name="decoder",
            model=decoder,
            example=example,
            axes=axes,
            max_sizes=_positions(model),
            stateful=True,
        )
    )
    return tuple(parts)


def _tokens() -> tuple[Tensors, dict[str, dict[int, str]]]:
    """Three new tokens behind four cached ones, for two rows of which one is padded, and the names of their axes."""
    example: Tensors = {
        "input_ids": torch.ones((_BATCH, _NEW), dtype=torch.int64),
        "attention_mask": torch.ones((_BATCH, _TOTAL), dtype=torch.int64),
    }
    example["attention_mask"][1, :2] = 0
    return example, {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}


def _add_positions(example: Tensors, axes: dict[str, dict[int, str]]) -> None:
    example["position_ids"] = torch.arange(_TOTAL - _NEW, _TOTAL).repeat(_BATCH, 1)
    axes["position_ids"] = {0: "batch", 1: "sequence"}


def _add_cache(example: Tensors, axes: dict[str, dict[int, str]], kept: list[Layer], dtype: str, capacity: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for i, layer in enumerate(kept):
        for what, tensor in layer.items():
            shape = (_BATCH, *(capacity if size == TOKENS else int(size) for size in tensor.shape))
            values = torch.randn(shape, generator=generator)
            name = f"past_{i}_{what}"
            example[name] = values.to(tensor.dtype or getattr(torch, dtype))
            axes[name] = {0: "batch"} | {at: TOKENS for at, size in enumerate(tensor.shape, start=1) if size == TOKENS}


@torch.inference_mode()
def _kept(model: Any) -> list[Layer] | None:
    """What each layer keeps, from a call with three tokens; `None` where nothing is kept."""
    parameters = inspect.signature(model.forward).parameters
    argument = cache_argument(model)
    if argument not in parameters:
        unknown = sorted({"state", "mems", "past_buckets_states"} & set(parameters))
        if unknown:
            raise ExportError(
                f"{type(model).__name__} keeps {unknown[0]!r} between tokens, which is none of transformers' caches.",
                fix="export it for another task, or run it with transformers.",
            )
        return None
    with quiet(), recurrent(model):
        output = _answer(model, input_ids=torch.ones((1, 3), dtype=torch.int64), use_cache=True)
    found = getattr(output, argument, None)
    if found is None:
        decodes = getattr(model.config, "is_decoder", True)
        raise ExportError(
            f"{type(model).__name__} takes a cache and returns none"
            f"{'' if decodes else ': its config says is_decoder=False, so every token sees those behind it'}.",
            fix="run it with transformers." if decodes else "set config.is_decoder=True, and export again.",
        )
    return described(found, type(model).__name__)


def _answer(model: Any, **inputs: Any) -> Any:
    try:
        return model(**inputs)
    # Foreign model code, which may raise anything.
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} itself fails on a call with a cache: {type(error).__name__}: {first_lines(error)}",
            fix="check in PyTorch that the model generates.",
        ) from error


def _self_kept(model: Any, hidden: torch.Tensor) -> list[Layer]:
    output = _answer(
        model,
        decoder_input_ids=torch.zeros((hidden.shape[0], 1), dtype=torch.int64),
        encoder_outputs=encoder_output(hidden),
        use_cache=True,
    )
    return described(getattr(output, CACHE_NAME).self_attention_cache, type(model).__name__)


def _positions(model: Any) -> dict[str, int]:
    """How many tokens the decoder's positions allow, prompt and answer together; no limit where they are computed."""
    config = model.config.get_text_config(decoder=True)
    # Of a model that hears, the decoder alone reads tokens.
    reads = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else model
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Angles that depend on how long the text is: a trace holds those of its sample.
    changing = "dynamic" in str(rope) or "longrope" in str(rope)
    if not isinstance(limit, int) or not (changing or has_position_table(reads, limit)):
        return {}
    return {"total": int(limit)}
