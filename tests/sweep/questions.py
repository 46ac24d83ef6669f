"""Create model inputs of several shapes and paddings, and compare outputs with PyTorch's at positions that are not
padding.

The module does not use accel's own sample inputs, because the sweep tests them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from accel.interfaces.family_registry import family_of
from accel.interfaces.task_registry import task_spec

from .building import NotBuilt, first_line
from .cases import Pair
from .shrinking import BEGIN, END, FIRST_PLAIN_TOKEN, IMAGE, LAST_PLAIN_TOKEN, PAD

Tensors = dict[str, torch.Tensor]
CHOICES = 3
# Lower limit of the compared values. Models write very negative values for forbidden choices (TAPAS' other columns,
# Grounding DINO's missing tokens), whose exact size is irrelevant.
_NOTHING = -1e3


@dataclass(frozen=True, slots=True)
class Question:
    """Model inputs together with PyTorch's outputs.

    Attributes:
        name: Shape and padding, for messages: `3x12 right`.
        inputs: Inputs by name.
        expected: PyTorch's float32 outputs by name.
        real: `(batch, sequence)` boolean mask of the positions that are not padding; `None` without padding.
    """

    name: str
    inputs: Tensors
    expected: Tensors
    real: torch.Tensor | None = None


# Each entry is (batch size, sequence length, padding). The sizes differ from the sample inputs of the trace, which are
# 2x5, or 2x3 with a cache.
_SHAPES = ((1, 7, "none"), (3, 12, "right"), (2, 33, "right"), (3, 9, "left"))


def questions(pair: Pair, model: Any) -> list[Question]:
    """Return inputs of several shapes for a model, with PyTorch's outputs.

    Raises:
        NotBuilt: The model raises an error, or its outputs are not finite.
    """
    checked = []
    for seed, (batch, sequence, padding) in enumerate(_SHAPES):
        if padding == "left" and not is_decoder(pair):
            continue
        if padding == "right" and pair.task == "text-to-audio":
            # Skip this case, because PyTorch's audio of a padded row ends differently from the audio of the row alone.
            # The stage `rows` compares rows alone.
            continue
        inputs, real = make_inputs(pair, model, batch, sequence, padding, seed)
        try:
            expected = answers(model, inputs)
            # Compare only the outputs that the task keeps, without outputs that are needed only for training.
            kept_outputs = task_spec(pair.task).keeps
            expected = {name: value for name, value in expected.items() if name in kept_outputs} or expected
        # Catch all exceptions, because model code may raise any type of exception.
        except Exception as error:
            raise NotBuilt(f"does not answer on {', '.join(inputs)} in PyTorch: {first_line(error)}") from error
        if not expected:
            raise NotBuilt("answers with no tensor")
        question = Question(f"{batch}x{sequence} {padding}", inputs, expected, real)
        for name, value in expected.items():
            if not bool(counted(question, value).isfinite().all()):
                raise NotBuilt(f"{name} is not finite in PyTorch with these weights")
        checked.append(question)
    return checked


def is_decoder(pair: Pair) -> bool:
    """Return whether prompts of this pair are usually padded on the left."""
    return pair.task == "text-generation" or (
        pair.architecture in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and pair.architecture not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not _reads_both_ways(pair)
    )


def _reads_both_ways(pair: Pair) -> bool:
    return pair.architecture in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


@torch.inference_mode()
def answers(model: Any, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the floating-point outputs of a PyTorch or accel model, by name. Models that draw noise use the same seed
    each time.
    """
    torch.manual_seed(0)
    result = model(**inputs)
    return {
        name: value.detach().float().cpu().clamp(min=_NOTHING)
        for name, value in result.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def counted(question: Question, value: torch.Tensor) -> torch.Tensor:
    """Return the values at positions that are not padding, or all values if the output has no (batch, sequence) axes."""
    real = question.real
    return value[real] if real is not None and value.ndim >= 2 and value.shape[:2] == real.shape else value


def difference(question: Question, actual: Mapping[str, torch.Tensor]) -> float:
    """Return the largest absolute difference divided by the largest absolute expected value, at positions that are not padding.

    Outputs are matched by name. Return infinity if the task's main output is missing.
    """
    shared = [name for name in question.expected if name in actual and not name.startswith("encoder_")]
    main_outputs = next(
        (actual for actual in ([n for n in names if n in question.expected] for names in _MAIN) if actual), []
    )
    main_outputs = main_outputs or list(question.expected)[:1]
    if not set(main_outputs) <= set(shared):
        return float("inf")
    worst = 0.0
    for name in shared:
        a, b = counted(question, actual[name]), counted(question, question.expected[name])
        if a.shape != b.shape:
            return float("inf")
        apart = float((a - b).abs().nan_to_num(nan=float("inf")).max()) if b.numel() else 0.0
        worst = max(worst, apart / max(float(b.abs().max()) if b.numel() else 0.0, 1e-6))
    return worst


# Main outputs of the tasks. Hidden states count only if the model has no other output in this list (Moshi returns
# both).
_MAIN = (
    ("logits_per_image",), ("logits_per_audio",), ("waveform",), ("matching_scores",),
    ("class_queries_logits", "masks_queries_logits"), ("logits", "pred_boxes", "pred_masks"),
    ("predicted_depth",), ("reconstruction",), ("start_logits", "end_logits"), ("last_hidden_state",),
)  # fmt: skip


def prompts(pair: Pair, model: Any, batch: int = 2, sequence: int = 9, *, ragged: bool = False) -> Tensors:
    """Return a batch of prompts of different lengths for `generate`. With `ragged`, no two rows have the same length."""
    padding = "left" if is_decoder(pair) or pair.task == "image-text-to-text" else "right"
    inputs, _ = make_inputs(pair, model, batch, sequence, f"ragged-{padding}" if ragged else padding, seed=5)
    return {name: value for name, value in inputs.items() if not name.startswith(("decoder_", "position_"))}


def make_inputs(
    pair: Pair, model: Any, batch: int, sequence: int, padding: str, seed: int
) -> tuple[Tensors, torch.Tensor | None]:
    """Return inputs of a given shape, and the mask of positions that are not padding (`None` without padding).

    Raises:
        NotBuilt: The model needs inputs that this function cannot create.
    """
    draw = torch.Generator().manual_seed(100 + seed)
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    main = model.main_input_name
    if main == "inputs" and "input_ids" in parameters:
        # Perceiver has a generic input name for all kinds of inputs.
        main = "input_ids"
    spec = task_spec(pair.task)
    real: torch.Tensor | None = None
    if main == "input_ids" and "audio" in spec.modalities and spec.generates:
        raise NotBuilt("reads sounds within a prompt, in a form of its own")
    if "video" in spec.modalities:
        inputs = {main: torch.randn((batch, *_video_shape(config)), generator=draw)}
    elif spec.modalities == ("audio", "text"):
        audio = config.audio_config
        # This is the spectrogram size that CLAP does not resize.
        frames = audio.spec_size * (audio.spec_size // audio.num_mel_bins)
        sounds = torch.randn((batch, 1, frames, audio.num_mel_bins), generator=draw)
        texts, _ = _text(config.get_text_config(), (batch + 1, sequence), padding, draw, parameters)
        inputs = {**texts, "input_features": sounds}
    elif "image" in spec.modalities and not spec.generates:
        pair = (2,) if spec.name == "keypoint-matching" else ()
        inputs = {"pixel_values": torch.randn((batch, *pair, *_image_shape(config)), generator=draw)}
        if "pixel_mask" in parameters and padding.endswith("right"):
            inputs["pixel_mask"] = torch.ones_like(inputs["pixel_values"][:, 0], dtype=torch.int64)
            inputs["pixel_mask"][1::2, -8:] = 0
        if "text" in spec.modalities:
            # Use different numbers of texts and images. Object detection is an exception, because it needs the same
            # number of texts for each image.
            count = batch + 1
            if spec.name == "zero-shot-object-detection":
                count = batch if getattr(config, "max_text_len", None) else 2 * batch
            texts, _ = _text(config.get_text_config(), (count, sequence), padding, draw, parameters)
            inputs |= texts
        if spec.name == "mask-generation":
            inputs["input_points"] = IMAGE * torch.rand((batch, 3, 2, 2), generator=draw)
            inputs["input_labels"] = torch.randint(0, 2, (batch, 3, 2), generator=draw)
    elif main == "input_ids":
        shape = (batch, CHOICES, sequence) if spec.name == "multiple-choice" else (batch, sequence)
        inputs, mask = _text(config, shape, padding, draw, parameters)
        if "bbox" in parameters:
            half = min(400, getattr(config, "max_2d_position_embeddings", 1024) // 2)
            corners, sizes = (torch.randint(0, half, (*shape, 2), generator=draw) for _ in range(2))
            boxes = torch.cat([corners, corners + sizes], dim=-1)
            # If the model has a table of coordinates, bounding boxes are integers. If it has none, bounding boxes are
            # fractions of the page.
            inputs["bbox"] = boxes if hasattr(config, "max_2d_position_embeddings") else boxes / 1000
        if spec.name == "table-question-answering":
            inputs["token_type_ids"] = torch.randint(0, 2, (*shape, len(config.type_vocab_sizes)), generator=draw)
        if spec.generates:
            # transformers' `generate` passes no token type ids to decoders, and rejects them for BERT.
            inputs.pop("token_type_ids", None)
        # Encoders compute position ids themselves, so only decoders get position ids.
        decodes = spec.generates and not config.is_encoder_decoder
        if decodes and "position_ids" in parameters and "attention_mask" in parameters:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if "image" in spec.modalities:
            _put_images(model, inputs, draw)
        # The outputs of encoder-decoders follow the tokens of the decoder, which have no padding.
        padded = inputs.get("attention_mask", mask).bool()
        real = padded if len(shape) == 2 and not (spec.generates and config.is_encoder_decoder) else None
    elif main == "pixel_values":
        inputs = {"pixel_values": torch.randn((batch, *_image_shape(config)), generator=draw)}
    elif main == "flattened_patches":
        inputs = _patches(config, batch, sequence, padding, draw)
    elif main == "input_features":
        inputs = {"input_features": torch.randn((batch, *_feature_shape(config, sequence)), generator=draw)}
    elif main == "input_values":
        inputs = {"input_values": torch.randn((batch, *_sound_shape(config, sequence)), generator=draw)}
    else:
        raise NotBuilt(f"reads {main}, which the sweep makes no inputs of")
    if main in ("input_features", "input_values") and not spec.generates and "attention_mask" in parameters:
        sounds = inputs[main]
        # Spectrograms of a fixed length are never padded.
        if sounds.shape[1] != getattr(config, "max_length", None):
            mask = torch.ones(sounds.shape[:2], dtype=torch.int64)
            mask[1:, mask.shape[1] // 2 if padding != "none" else mask.shape[1] :] = 0
            for row in range(len(mask)) if padding.startswith("ragged") else ():
                mask[row] = 0
                mask[row, : mask.shape[1] * (8 - row % 5) // 8] = 1
            inputs["attention_mask"] = mask
    if spec.generates and config.is_encoder_decoder:
        ids = torch.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, (batch, 4), generator=draw)
        ids[:, 0] = BEGIN
        inputs["decoder_input_ids"] = ids
    return inputs, real


def _text(
    config: Any, shape: tuple[int, ...], padding: str, draw: torch.Generator, parameters: Mapping[str, Any]
) -> tuple[Tensors, torch.Tensor]:
    ids = torch.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, shape, generator=draw)
    mask = torch.ones_like(ids)
    length = shape[-1]
    rows, masks = ids.view(-1, length), mask.view(-1, length)
    pad = config.pad_token_id if isinstance(getattr(config, "pad_token_id", None), int) else PAD
    for row in range(1, len(rows)) if padding != "none" and "attention_mask" in parameters else ():
        hidden = length // 3 if row % 2 else length // 2
        if padding.startswith("ragged"):
            hidden = 2 * row % (length - 4)
        place = slice(length - hidden, length) if padding.endswith("right") else slice(0, hidden)
        rows[row, place], masks[row, place] = pad, 0
    if config.is_encoder_decoder:
        # BART's classifier reads the end token, so every row must contain exactly one end token.
        end_id = getattr(config, "eos_token_id", None)
        end = end_id if isinstance(end_id, int) else END
        rows.scatter_(1, masks.sum(1, keepdim=True) - 1, end)
    if config.model_type == "longformer":
        # Longformer's question answering head needs three separators: after the question, before the context and after
        # the context.
        last = masks.sum(1, keepdim=True) - 1
        for place in (last // 3, last // 3 + 1, last):
            rows.scatter_(1, place, config.sep_token_id)
    inputs = {"input_ids": ids}
    if "attention_mask" in parameters:
        inputs["attention_mask"] = mask
    if (
        "token_type_ids" in parameters
        and (getattr(config, "type_vocab_size", None) or 0) > 1
        and "labels" in parameters
    ):
        inputs["token_type_ids"] = torch.randint(0, 2, shape, generator=draw)
    return inputs, mask


def _image_shape(config: Any) -> tuple[int, int, int]:
    part = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    size = getattr(part, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    return int(getattr(part, "num_channels", 3) or 3), int(height), int(width)


def _patches(config: Any, batch: int, count: int, padding: str, draw: torch.Generator) -> Tensors:
    """Return patches of images with five columns. With padding, all rows of the batch except the first row have fewer
    patches.
    """
    width = config.vision_config.patch_embed_hidden_size
    numbers = torch.arange(count)
    places = torch.stack([1 + numbers // 5, 1 + numbers % 5], dim=-1).expand(batch, -1, -1)
    patches = torch.cat([places, torch.randn((batch, count, width), generator=draw)], dim=-1)
    mask = torch.ones((batch, count))
    for row in range(1, batch) if padding != "none" else ():
        mask[row, count - count // (2 + row % 2) :] = 0
    patches[mask == 0] = 0
    return {"flattened_patches": patches, "attention_mask": mask}


def _video_shape(config: Any) -> tuple[int, ...]:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    channels, height, width = _image_shape(config)
    size = getattr(config, "crop_size", None)
    return (int(frames or 4), channels, *((size, size) if isinstance(size, int) else (height, width)))


def _feature_shape(config: Any, length: int) -> tuple[int, int]:
    """Return the shape of one row's features: (bins, frames) with fixed length for Whisper, and (frames, bins) of any
    length for other models.
    """
    positions = getattr(config, "max_source_positions", None)
    bins = getattr(config, "num_mel_bins", None)
    if bins is not None and positions is not None and not hasattr(config, "input_feat_per_channel"):
        return int(bins), 2 * int(positions)
    part = getattr(config, "encoder_config", None) or config
    for name in ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "input_dim"):
        if isinstance(getattr(part, name, None), int):
            return 8 * length, int(getattr(part, name))
    return 8 * length, 80


def _sound_shape(config: Any, length: int) -> tuple[int, ...]:
    """Return the shape of one row's audio: at least half a second of samples, or a fixed spectrogram for models that
    read spectrograms.
    """
    if isinstance(getattr(config, "num_mel_bins", None), int) and isinstance(getattr(config, "max_length", None), int):
        return int(config.max_length), int(config.num_mel_bins)
    return (8000 + 200 * length,)


def _put_images(model: Any, inputs: Tensors, draw: torch.Generator) -> None:
    """Insert the placeholder tokens of one image into each row's prompt, and add the pixel values."""
    config = model.config
    token = getattr(config, "image_token_id", None)
    if token is None:
        token = getattr(config, "image_token_index", None)
    if not isinstance(token, int):
        raise NotBuilt("says no image token")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    batch = ids.shape[0]
    tiles = (1,) if family_of(config).tiles else ()
    pixels = torch.randn((batch, *tiles, *_image_shape(config)), generator=draw)
    try:
        with torch.inference_mode():
            features = model.get_image_features(pixel_values=pixels[:1])
        features = getattr(features, "pooler_output", features)
        features = features[0] if isinstance(features, list | tuple) else features
        count = features.numel() // features.shape[-1]
    # Catch all exceptions, because many models accept images only in other forms.
    except Exception as error:
        raise NotBuilt(f"takes images in another form than pixel_values alone: {first_line(error)}") from error
    placed = torch.full((batch, count), token)
    inputs["input_ids"] = torch.cat([ids[:, :-2], placed, ids[:, -2:]], dim=1)
    inputs["attention_mask"] = torch.cat([mask[:, :-2], torch.ones_like(placed), mask[:, -2:]], dim=1)
    inputs["pixel_values"] = pixels
    inputs.pop("position_ids", None)
