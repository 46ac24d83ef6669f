"""Graphs of generating models, with a KV cache.

A decoder-only model becomes one graph. An encoder-decoder becomes three graphs: the encoder, the keys and values of the
cross-attention (run once for each prompt), and the decoder. A model that reads images and text also becomes three graphs: the vision
tower with its projector, the embedding table, and a decoder that reads embeddings. The decoder graph accepts any number of new tokens
and any number of cached tokens. So the same graph, with one copy of the weights, runs the prefill, each decode step, and the next turn
of a chat.

The trace runs the model's own code with the cache and the attention function of `cached_attention.py`. If the backend has no fused
attention operator, or the operator does not support a call, the graph concatenates the cached and the new keys and values.
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
from ..interfaces.tracing_wrapper import Tensors, Wrapper
from ..upstream.cache_names import CACHE_NAME, cache_argument
from ..upstream.model_internals import masks_not_shortened
from ..upstream.output_silencing import quiet
from .cached_attention import CacheLayer, FusedAttention, tracing
from .cached_layers import TOKENS, Layer, croppable, described, make_cache_layers, presents, without_tokens
from .export_source import Source
from .output_selection import OutputSelection
from .patch_samples import PATCH_AXIS, PATCHES
from .position_limits import has_position_table
from .recurrence import recurrent
from .samples import same_draws
from .sound_samples import SOUND_AXES
from .speech_samples import shortened_mask
from .tracer import first_lines

_BATCH, _NEW, _TOTAL, _CAPACITY = 2, 3, 7, 13  # Axis sizes of the sample inputs of the trace, all different.
ENCODER_MASK = "encoder_attention_mask"
# Input names of models that read audio or images.
_SENSED = {"audio": ("input_features", "input_values"), "image": ("pixel_values", PATCHES)}


def split(source: Source, fusion: FusedAttention | None = None) -> tuple[Source, ...]:
    """Split a model into one source for each graph. A model that becomes one graph is returned as the only source.

    Args:
        source: Source from `load_source`.
        fusion: The backend's fused attention operators. With `None`, the graphs contain unfused attention operators.

    Raises:
        ExportError: The cache of the model cannot be part of a graph, or the model does not have the parts that the task expects.
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
    """Return one source for each graph that the model's family defines, for a model that does not generate text.

    Raises:
        ExportError: The model's family defines no parts.
    """
    parts = family_of(source.config).parts(source.model, source.example, source.axes)
    if not parts:
        raise ExportError(
            f"accel cannot export a {source.architecture} for the task {source.task!r}. This task needs the model split into several "
            "graphs, and accel has no code that splits this architecture.",
            fix="run the model with transformers.",
        )
    sources = []
    for part in parts:
        varied = {axis for named in part.axes.values() for axis in named.values()}
        limits = {axis: most for axis, most in source.max_sizes.items() if axis in varied}
        graph: dict[str, Any] = {"name": part.name, "model": part.model, "example": part.example, "axes": part.axes}
        sources.append(replace(source, **graph, max_sizes=limits))
    return tuple(sources)


def _check_parts(source: Source, spec: TaskSpec) -> None:
    """Raise if the task's graphs would not contain all parts of the model, such as its audio or image input.

    transformers lists some classes for several tasks. For example, it lists Voxtral, a text decoder with audio in the prompt, for
    speech recognition.
    """
    has_encoder = bool(getattr(source.config, "is_encoder_decoder", False))
    sense = next((modality for modality in _SENSED if modality in spec.modalities), "")
    unread = sense and (spec.encoder_decoder or sense == "audio") and not set(_SENSED[sense]) & set(source.example)
    if spec.encoder_decoder not in (None, has_encoder) or unread:
        expected = "an encoder and a decoder" if spec.encoder_decoder else "a decoder without an encoder"
        actual = "an encoder and a decoder" if has_encoder else "a decoder without an encoder"
        reads = f" Its inputs are {sorted(source.example)}." if unread else ""
        senses = "audio as input" if sense == "audio" else "images as input" if unread else ""
        raise ExportError(
            f"{source.architecture} cannot be exported for the task {spec.name!r}. The task requires {expected}"
            f"{f', and {senses}' if senses else ''}. The model has {actual}.{reads}",
            fix="run the model with transformers, or pass another task, such as task='text-generation', to export only the text decoder.",
        )


# Parts


class _Part(Wrapper):
    """Base class of the parts of a generating model. Each part becomes one graph, and has named input and output tensors."""

    def __init__(self, model: Any, fusion: FusedAttention | None, layers: list[Layer] | None = None) -> None:
        super().__init__(model)
        self.fusion = fusion
        self.kept = layers or []

    def layers(self, feeds: Mapping[str, torch.Tensor], total: Any, new: Any) -> list[Any]:
        """Create the cache layers from the `past_…` inputs."""
        return make_cache_layers(self.kept, dict(feeds), total, new, roomy=self.fusion is not None)


class _Decoder(_Part):
    """Decoder-only model.

    The inputs are `input_ids`, `attention_mask`, `position_ids`, `logits_to_keep` and `past_…`. The outputs are `logits` and
    `present_…`.
    """

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Run the decoder-only model."""
        from transformers.cache_utils import Cache

        tokens = feeds["input_ids"] if "input_ids" in feeds else feeds["inputs_embeds"]
        new, total = tokens.shape[1], feeds["attention_mask"].shape[1]
        layers = self.layers(feeds, total, new)
        inputs = {name: tensor for name, tensor in feeds.items() if not name.startswith("past_")}
        if without_tokens(self.kept):
            # A model without attention layers expects a mask of only the new tokens.
            inputs["attention_mask"] = feeds["attention_mask"][:, total - new :]
        inputs[cache_argument(self.model)] = Cache(layers=layers)
        with tracing(self.model, self.fusion, layers, tokens.shape[0], total):
            output = self.model(**inputs, use_cache=True)
        return {"logits": output.logits, **presents(layers)}


class _Vision(_Part):
    """Vision tower. It reads `pixel_values: (1, channels, height, width)` and returns `image_features: (tokens, hidden)`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Return the embeddings of one image. The graph accepts one image per call: transformers returns a list for several images."""
        return {"image_features": family_of(self.config).image_features(self.model, feeds["pixel_values"])}


class _Embedding(_Part):
    """Table of token embeddings. It reads `input_ids` and returns `inputs_embeds: (batch, sequence, hidden)`."""

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Return the embeddings of the tokens."""
        return {"inputs_embeds": family_of(self.config).embeddings(self.model, feeds["input_ids"])}


class Encoder(_Part):
    """Encoder of an encoder-decoder. It reads the encoder's inputs and returns `last_hidden_state`.

    If the encoder shortens audio, `last_hidden_state` has fewer positions than the input. The graph then also returns the mask of these
    positions as `encoder_attention_mask`.
    """

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Run the encoder."""
        model: Any = self.model
        encoder = model.get_encoder()
        masked_audio = model.main_input_name in ("input_features", "input_values") and "attention_mask" in feeds
        output = encoder(**feeds, return_dict=True)
        mask = shortened_mask(encoder, output, feeds["attention_mask"]) if masked_audio else None
        outputs = {"last_hidden_state": output.last_hidden_state}
        return outputs if mask is None else {**outputs, ENCODER_MASK: mask}


def encoder_output(hidden: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    """Return an encoder output object of transformers for the hidden states `(batch, sequence, hidden)` of an encoder.

    The object also has the fields that only the encoders of NLLB-MoE (`router_logits`) and Moonshine (`attention_mask`) return.
    """
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=hidden)
    output.router_logits = None
    output.attention_mask = mask
    return output


class CrossAttentionKeyValueProjection(_Part):
    """Key and value projections of the decoder's cross-attention.

    The module reads `encoder_hidden_states` and returns the keys and values of all layers. It runs one complete decoder step, but the
    graph contains only the projections, because the exporter removes all nodes that the outputs do not need.
    """

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Run one decoder step."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        hidden = feeds["encoder_hidden_states"]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.model(
            decoder_input_ids=torch.zeros((hidden.shape[0], 1), dtype=torch.int64, device=hidden.device),
            encoder_outputs=encoder_output(hidden),
            use_cache=True,
            **{CACHE_NAME: cache},
        )
        outputs = {}
        for i, layer in enumerate(cache.cross_attention_cache.layers):
            outputs[f"cross_{i}_key"], outputs[f"cross_{i}_value"] = layer.keys, layer.values
        return outputs


class CrossDecoder(_Part):
    """Decoder of an encoder-decoder.

    The inputs are `input_ids`, `attention_mask`, `encoder_attention_mask`, `cross_…` and `past_…`. The outputs are `logits` and
    `present_…`.
    """

    def __init__(
        self, model: Any, fusion: FusedAttention | None, layers: list[Layer], encoder_size: int, cross: int
    ) -> None:
        super().__init__(model, fusion, layers)
        self.cross = cross
        self.encoder_size = encoder_size

    def forward(self, **feeds: torch.Tensor) -> Tensors:
        """Run the decoder."""
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
        # The cross-attention keys and values are cached, so the decoder reads only the shape of the encoder's hidden states.
        hidden = key.new_zeros(1).expand(batch, key.shape[2], self.encoder_size)
        optional = {}
        if ENCODER_MASK in feeds:
            optional["attention_mask"] = feeds[ENCODER_MASK]
        if "position_ids" in feeds:
            optional["decoder_position_ids"] = feeds["position_ids"]
        with tracing(self.model, self.fusion, layers, batch, total), masks_not_shortened(self.model):
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
    layers = _cached_layers(model)
    if layers is None:
        return _recomputed(source)
    example, axes = _tokens()
    if "position_ids" in parameters:
        _add_positions(example, axes)
    if "logits_to_keep" in parameters:
        example["logits_to_keep"] = torch.tensor([0, 1, 2, 2])
        axes["logits_to_keep"] = {0: "kept"}
    _add_cache(example, axes, layers, source.dtype, _CAPACITY if fusion is not None else _TOTAL - _NEW)
    module = _Decoder(model, fusion, layers).eval()
    return replace(
        source,
        name="model",
        model=module,
        example=example,
        axes=axes,
        max_sizes=_positions(model),
        stateful=True,
        croppable=croppable(layers),
        # Some tokenizers return token_type_ids although the model has no input token_type_ids.
        unused_inputs=() if "token_type_ids" in parameters else ("token_type_ids",),
    )


def _recomputed(source: Source) -> Source:
    """Return the source of a graph without a KV cache, for a model without a KV cache (GPT-1). Each step runs all tokens again."""
    model: Any = source.model
    example, axes = dict(source.example), {name: dict(named) for name, named in source.axes.items()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        example["position_ids"] = torch.arange(example["input_ids"].shape[1]).repeat(example["input_ids"].shape[0], 1)
        axes["position_ids"] = dict(axes["input_ids"])
    _check_prompt(model, example)
    limits = {"sequence": _positions(model)["total"]} if _positions(model) else source.max_sizes
    module = OutputSelection(model, ("logits",)).eval()
    return replace(source, name="model", model=module, example=example, axes=axes, max_sizes=limits, continues="none")


def _check_prompt(model: Any, example: Tensors) -> None:
    """Raise if the model's `generate` code changes the prompt. For example, XLM appends a mask token to the prompt."""
    ids = example["input_ids"]
    mask = {name: tensor for name, tensor in example.items() if name == "attention_mask"}
    with quiet():
        prepared = model.prepare_inputs_for_generation(ids, **mask)
    read = prepared.get("input_ids")
    added = sorted(n for n, value in prepared.items() if isinstance(value, torch.Tensor) and n not in example)
    if added or read is None or not torch.equal(read, ids):
        raise ExportError(
            f"{type(model).__name__} cannot be exported for text generation. Its `generate` code adds "
            f"{', '.join(added) or 'tokens'} to the inputs at each step, and accel passes only the prompt and the generated tokens.",
            fix="run the model with transformers.",
        )


def vision_language(source: Source, fusion: FusedAttention | None) -> tuple[Source, ...]:
    """Return the sources of the vision tower, the embedding table and the decoder of a model with images in the prompt."""
    model: Any = source.model
    vision = getattr(source.config, "vision_config", None)
    size = getattr(vision, "image_size", None)
    # In InternVL's config, `image_size` is a pair of height and width.
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if getattr(source.config, "image_token_id", None) is None or not (
        isinstance(height, int) and isinstance(width, int)
    ):
        raise ExportError(
            f"{source.architecture} cannot be exported for the task {source.task!r}. accel supports only models whose config has an "
            "image_token_id and one fixed vision_config.image_size.",
            fix="run the model with transformers.",
        )
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"{source.architecture} cannot be exported for the task {source.task!r}. It computes bidirectional attention between the "
            "image tokens of a prompt (input token_type_ids), and accel's decoder graphs compute causal attention only.",
            fix="run the model with transformers.",
        )
    pixels = torch.randn(
        (1, getattr(vision, "num_channels", 3), height, width), generator=torch.Generator().manual_seed(3)
    )
    tokens = {"input_ids": torch.ones((_BATCH, _NEW), dtype=torch.int64)}
    images = {"pixel_values": pixels.to(getattr(torch, source.dtype))}
    vision_model, embedding = _Vision(model, None).eval(), _Embedding(model, None).eval()
    decoder = _decoder_only(source, fusion)
    with torch.inference_mode():
        embedded = embedding(**tokens)["inputs_embeds"].clone()
    token_axes = decoder.axes["input_ids"]
    example = {"inputs_embeds": embedded} | {n: t for n, t in decoder.example.items() if n != "input_ids"}
    axes = {"inputs_embeds": token_axes} | {n: a for n, a in decoder.axes.items() if n != "input_ids"}
    return (
        replace(source, name="vision", model=vision_model, example=images, axes={"pixel_values": {}}, max_sizes={}),
        replace(
            source, name="embedding", model=embedding, example=tokens, axes={"input_ids": token_axes}, max_sizes={}
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
    cross_module = CrossAttentionKeyValueProjection(model, None).eval()
    with torch.inference_mode(), quiet():
        cross = {name: value.clone() for name, value in cross_module(encoder_hidden_states=hidden).items()}
        layers = _self_attention_layers(model, hidden)
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
    _add_cache(example, axes, layers, source.dtype, _CAPACITY if fusion is not None else _TOTAL - _NEW)
    decoder = CrossDecoder(model, fusion, layers, size, len(cross) // 2).eval()
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
    """Return sample inputs and axis names for two rows with four cached tokens and three new tokens. The second row has padding."""
    example: Tensors = {
        "input_ids": torch.ones((_BATCH, _NEW), dtype=torch.int64),
        "attention_mask": torch.ones((_BATCH, _TOTAL), dtype=torch.int64),
    }
    example["attention_mask"][1, :2] = 0
    return example, {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}


def _add_positions(example: Tensors, axes: dict[str, dict[int, str]]) -> None:
    example["position_ids"] = torch.arange(_TOTAL - _NEW, _TOTAL).repeat(_BATCH, 1)
    axes["position_ids"] = {0: "batch", 1: "sequence"}


def _add_cache(
    example: Tensors, axes: dict[str, dict[int, str]], layers: list[Layer], dtype: str, capacity: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    for i, layer in enumerate(layers):
        for kind, tensor in layer.items():
            shape = (_BATCH, *(capacity if size == TOKENS else int(size) for size in tensor.shape))
            values = torch.randn(shape, generator=generator)
            name = f"past_{i}_{kind}"
            example[name] = values.to(tensor.dtype or getattr(torch, dtype))
            axes[name] = {0: "batch"} | {at: TOKENS for at, size in enumerate(tensor.shape, start=1) if size == TOKENS}


@torch.inference_mode()
def _cached_layers(model: Any) -> list[Layer] | None:
    """Describe the KV cache of a model after a call with three tokens. Return `None` for a model without a KV cache."""
    parameters = inspect.signature(model.forward).parameters
    argument = cache_argument(model)
    if argument not in parameters:
        unknown = sorted({"state", "mems", "past_buckets_states"} & set(parameters))
        if unknown:
            raise ExportError(
                f"{type(model).__name__} cannot be exported for text generation. It keeps its state between tokens in the argument "
                f"{unknown[0]!r}, and accel supports only transformers' Cache classes.",
                fix="export the model for a task that does not generate text, such as 'feature-extraction', or run it with transformers.",
            )
        return None
    with quiet(), recurrent(model):
        output = _answer(model, input_ids=torch.ones((1, 3), dtype=torch.int64), use_cache=True)
    cache = getattr(output, argument, None)
    if cache is None:
        decodes = getattr(model.config, "is_decoder", True)
        raise ExportError(
            f"{type(model).__name__} has an argument {argument!r}, but it returned no KV cache for use_cache=True."
            f"{'' if decodes else ' The config has is_decoder=False, so each token also attends to later tokens.'}",
            fix="run the model with transformers."
            if decodes
            else "set config.is_decoder=True and export the model again.",
        )
    return described(cache, type(model).__name__)


def _answer(model: Any, **inputs: Any) -> Any:
    try:
        return model(**inputs)
    # The code of a model may raise any exception.
    except Exception as error:
        raise ExportError(
            f"The PyTorch model {type(model).__name__} failed in a call with a KV cache: {type(error).__name__}: {first_lines(error)}",
            fix="check that model.generate(...) works in transformers, then export the model again.",
        ) from error


def _self_attention_layers(model: Any, hidden: torch.Tensor) -> list[Layer]:
    output = _answer(
        model,
        decoder_input_ids=torch.zeros((hidden.shape[0], 1), dtype=torch.int64),
        encoder_outputs=encoder_output(hidden),
        use_cache=True,
    )
    return described(getattr(output, CACHE_NAME).self_attention_cache, type(model).__name__)


def _positions(model: Any) -> dict[str, int]:
    """Return the largest number of tokens of prompt and output together, as `{"total": limit}`.

    Return an empty dict if the positions are not limited, because the model computes rotary angles for any position.
    """
    config = model.config.get_text_config(decoder=True)
    # In an encoder-decoder with audio input, only the decoder reads tokens.
    reads = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else model
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # These rotary angles change for texts longer than the limit. A graph contains only the angles for the length of the sample.
    changing = "dynamic" in str(rope) or "longrope" in str(rope)
    if not isinstance(limit, int) or not (changing or has_position_table(reads, limit)):
        return {}
    return {"total": int(limit)}
