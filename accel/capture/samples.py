"""Inputs that a trace cannot misread: two rows or more, unequal sizes, padding in the mask."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..artifact.companions import open_companion
from ..artifact.reading import read_json
from ..errors import ExportError, InputError
from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.wrapper import Tensors, unwrapped
from ..upstream.library_output import quiet
from .patch_samples import PATCH_AXIS, PATCHES, USUAL_PATCHES, drawn_patches

SAMPLE_BATCH = 2
SAMPLE_SEQUENCE = 5
SAMPLE_CHOICES = 3
SAMPLE_PATCHES = 11
# Fields of a config that say how many tokens a model takes at a time; of two such blocks and a part of one, their number is
# seen to vary: LongT5's global tokens, CANINE's characters, LED's windows.
_BLOCKS = ("global_block_size", "downsampling_rate", "attention_window")

# Axes that a graph keeps where the model computes at any size and the trace follows it; otherwise their sizes are fixed.
IMAGE_AXES = ("height", "width")
# Which pixels are an image's own and not padding: `(batch, height, width)`.
PIXEL_MASK = "pixel_mask"
# Where the words of tokens stand on a page: `(batch, sequence, 4)`.
BOXES = "bbox"
# Padding masks: of the text, of what an encoder answered, and of what was seen next to a text.
_MASKS = ("attention_mask", "encoder_attention_mask", "visual_attention_mask")
_SPECIAL = ("eos_token_id", "sep_token_id", "cls_token_id", "bos_token_id", "mask_token_id", "pad_token_id")
_IMAGE_STEP = 32  # pixels; architectures halve images up to five times


def parameters_of(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a transformers model's `forward` takes, by name."""
    inner = unwrapped(module)
    return inspect.signature(inner.forward).parameters


def default_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Inputs for a transformers model, from what its forward takes and its config says."""
    config = getattr(module, "config", None)
    inner = unwrapped(module)
    main = getattr(inner, "main_input_name", None)
    if main == "inputs":
        # Perceiver's one word for all modalities; its heads take the usual names, too.
        main = next((name for name in ("input_ids", "pixel_values") if name in parameters_of(module)), main)
    mel_bins: Any = getattr(config, "num_mel_bins", None)
    mel_frames: Any = getattr(config, "max_source_positions", None)
    whisper = main == "input_features" and mel_bins is not None and mel_frames is not None
    if config is None or not (main in ("input_ids", "pixel_values", PATCHES) or whisper):
        raise _no_inputs(inner, main)
    if main == "pixel_values":
        # Processors make a mask for models that take any other argument, too, and read nothing of it (YOLOS).
        parameters = parameters_of(module)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        return *image_sample(module, folder), ((PIXEL_MASK,) if takes_any and PIXEL_MASK not in parameters else ())
    if main == PATCHES:
        return *_patch_sample(int(config.vision_config.patch_embed_hidden_size)), ()
    if main == "input_features":
        # Whisper's log-mel frames: a fixed window, twice the encoder's positions.
        features = torch.randn(SAMPLE_BATCH, int(mel_bins), 2 * int(mel_frames))
        return {"input_features": features}, {"input_features": {0: "batch"}}, ("attention_mask",)
    names, unused = text_inputs(module, config, folder)
    choices = type(inner).__name__.endswith("ForMultipleChoice")
    blocks = [_largest(getattr(config, name, None)) for name in _BLOCKS]
    length = SAMPLE_SEQUENCE + 2 * max(*blocks, family_of(config).tokens_at_once(config))
    shape = (SAMPLE_BATCH, SAMPLE_CHOICES, length) if choices else (SAMPLE_BATCH, length)
    axis_names = ("batch", "choices", "sequence") if choices else ("batch", "sequence")
    example = {name: torch.ones(shape, dtype=torch.int64) for name in names}
    if BOXES in parameters_of(module) and getattr(config, "max_2d_position_embeddings", None):
        # LayoutLM's and LiLT's heads read places as their answerer of questions does.
        example[BOXES] = torch.ones((*shape, 4), dtype=torch.int64)
    axes = {name: dict(enumerate(axis_names)) for name in example}
    sizes = dict(zip(axis_names, shape, strict=True))
    return resize(example, axes, sizes, config, seed=0), axes, unused


def _patch_sample(width: int) -> tuple[Tensors, Axes]:
    """Images as patches of so many values, of which the second has fewer."""
    example = {PATCHES: torch.zeros((1, 1, 2 + width)), "attention_mask": torch.ones((1, 1), dtype=torch.int64)}
    axes = {name: {0: "batch", 1: PATCH_AXIS} for name in example}
    return resize(example, axes, {"batch": SAMPLE_BATCH, PATCH_AXIS: SAMPLE_PATCHES}, None, seed=0), axes


def _no_inputs(module: torch.nn.Module, main: str | None) -> ExportError:
    name = type(module).__name__
    if _generates(module):
        return ExportError(
            f"No inputs can be made for a {name}: it generates from {main!r}, and generating models are exported that read "
            "'input_ids', 'pixel_values', 'flattened_patches', or sounds as Whisper, Moonshine and Speech2Text do.",
            fix="run it with transformers.",
        )
    reads = f": it reads {main!r}, whose shape its config does not say" if main else ""
    return ExportError(
        f"No inputs can be made for a {name}{reads}.",
        fix="pass sample={name: tensor} and, for names other than a transformers model's, axes={name: {0: 'batch'}}.",
    )


def text_inputs(module: torch.nn.Module, config: Any, folder: Path | None) -> tuple[list[str], tuple[str, ...]]:
    """What a text model is given, and which inputs it takes but ignores."""
    parameters = parameters_of(module)
    names = ["input_ids"]
    if "attention_mask" in parameters:
        names.append("attention_mask")
    # `generate` passes none, even to models that would take them (GPT-2).
    if "token_type_ids" in parameters and not _generates(module):
        types = getattr(config, "type_vocab_size", None)
        if types is None:
            # Left out, they add nothing, where zeros would add something (GPT-2 adds the embedding of token 0): such a
            # graph takes them only where the tokenizer always gives them (XLNet's).
            if "token_type_ids" in tokenizer_names(folder):
                names.append("token_type_ids")
        elif types > 1:
            names.append("token_type_ids")
        else:
            # A table of one row (RoBERTa) or none (DeBERTa-v2) adds the same to every token.
            return names, ("token_type_ids",)
    return names, ()


def tokenizer_names(folder: Path | None) -> Sequence[str]:
    """What the tokenizer in a folder returns; nothing without one."""
    if folder is None or not any(folder.glob("*token*")):
        return ()
    try:
        names: Sequence[str] = open_companion("AutoTokenizer", folder).model_input_names
    # Tokenizers of the model's own code and broken ones: the export goes on without.
    except Exception:  # noqa: BLE001
        return ()
    return names


def _largest(size: Any) -> int:
    """A number of tokens that a config states, for all layers or for each."""
    sizes = size if isinstance(size, list | tuple) else [size]
    return max((n for n in sizes if isinstance(n, int)), default=0)


def _generates(module: Any) -> bool:
    return hasattr(module, "can_generate") and bool(module.can_generate())


@contextmanager
def same_draws() -> Iterator[None]:
    """The same random numbers at every export; the caller's generator is as it was afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


def image_sample(module: torch.nn.Module, folder: Path | None, others: Tensors | None = None) -> tuple[Tensors, Axes]:
    """Images for a model of images, with the mask of their padding where the model takes one.

    Args:
        module: The model.
        folder: Where its config and processor files are.
        others: What else it is given.
    """
    config = getattr(module, "config", None)
    inner = unwrapped(module)
    height, width = image_size(config, folder, type(inner).__name__)
    channels = getattr(_image_config(config), "num_channels", 3)
    named = {0: "batch"}
    masked = PIXEL_MASK in parameters_of(module)
    shape = (SAMPLE_BATCH, channels, height, width)
    if (
        not _generates(inner)
        and family_of(config).any_image_size
        and _computes_at_any_size(module, shape, masked=masked, others=others or {})
    ):
        named |= dict(enumerate(IMAGE_AXES, start=2))
        # Axes of one size would become one axis.
        width += _IMAGE_STEP if height == width else 0
    sample = {"pixel_values": torch.randn(SAMPLE_BATCH, channels, height, width)}
    axes = {"pixel_values": named}
    if masked:
        sample[PIXEL_MASK] = _padded_pixels((SAMPLE_BATCH, height, width), torch.int64)
        axes[PIXEL_MASK] = {max(place - 1, 0): axis for place, axis in named.items()}
    return sample, axes


def _computes_at_any_size(
    module: torch.nn.Module, shape: tuple[int, int, int, int], *, masked: bool, others: Tensors
) -> bool:
    """Whether a model of images `(batch, channels, height, width)` computes at two sizes beside its own."""
    dtype, device = next(((p.dtype, p.device) for p in module.parameters() if p.is_floating_point()), (None, None))
    batch, channels, height, width = shape
    try:
        with torch.inference_mode(), quiet():
            for higher, wider in ((_IMAGE_STEP, 2 * _IMAGE_STEP), (2 * _IMAGE_STEP, _IMAGE_STEP)):
                pixels = torch.zeros((batch, channels, height + higher, width + wider), dtype=dtype, device=device)
                mask = {PIXEL_MASK: torch.ones_like(pixels[:, 0], dtype=torch.int64)} if masked else {}
                module(pixel_values=pixels, **mask, **others)
    # Foreign model code, which may raise anything: positions for one size alone are the usual reason.
    except Exception:  # noqa: BLE001
        return False
    return True


def image_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Other heights and widths in pixels for the case `index`; nothing for a graph without such axes."""
    if not set(IMAGE_AXES) <= set(sizes):
        return {}
    height, width = (sizes[axis] for axis in IMAGE_AXES)
    # Square images, as processors make them, are among them, and the last fills no whole patches.
    plans = (
        (0, 0), (_IMAGE_STEP, 0), (0, -_IMAGE_STEP), (_IMAGE_STEP, -_IMAGE_STEP), (2 * _IMAGE_STEP, _IMAGE_STEP),
        (_IMAGE_STEP + 5, _IMAGE_STEP - 3),
    )  # fmt: skip
    higher, wider = plans[index % len(plans)]
    return {"height": height + higher, "width": max(width + wider, _IMAGE_STEP)}


def point_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Other numbers of points in an image for the case `index`; nothing for a graph without such axes."""
    if not {"points", "each"} <= set(sizes):
        return {}
    # The pipeline's among them: one point a mask.
    plans = ((0, 0), (3, -3), (-3, 1), (1, -3), (2, 2))
    more, longer = plans[index % len(plans)]
    return {"points": sizes["points"] + more, "each": sizes["each"] + longer}


def usual_sizes(axes: Collection[str], config: Any, folder: Path | None) -> dict[str, int]:
    """The sizes of axes that are not free choices for a caller who names none: an image's height and width in pixels, or its patches,
    as many as its processor makes.
    """
    if PATCH_AXIS in axes:
        made = _processor_settings(folder) if folder is not None else {}
        return {PATCH_AXIS: int(made.get("max_patches", USUAL_PATCHES))}
    if not set(IMAGE_AXES) <= set(axes):
        return {}
    return dict(zip(IMAGE_AXES, image_size(config, folder), strict=True))


def _image_config(config: Any) -> Any:
    """The part of a config that describes images."""
    inner = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    # As a file has it, or as a class does.
    return SimpleNamespace(**inner) if isinstance(inner, Mapping) else inner


def image_size(config: Any, folder: Path | None, architecture: str = "") -> tuple[int, int]:
    """Height and width in pixels: the model's own, else its processor's, else 224.

    Args:
        config: Of the model.
        folder: Where its processor's files are.
        architecture: Its class; what the config names when empty.
    """
    family = family_of(config)
    size = family.image_size(_image_config(config), architecture)
    if size is None and folder is not None:
        settings = _processor_settings(folder)
        size = next((settings[name] for name in family.processor_sizes if settings.get(name)), None)
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge", 224)
        return int(size.get("height", edge)), int(size.get("width", edge))
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if size else (224, 224)


def _processor_settings(folder: Path) -> Mapping[str, Any]:
    """What the folder's image processor is told; nothing where it has none."""
    if (folder / "preprocessor_config.json").is_file():
        return read_json(folder / "preprocessor_config.json")
    whole = read_json(folder / "processor_config.json") if (folder / "processor_config.json").is_file() else {}
    found: Mapping[str, Any] = whole.get("image_processor") or {}
    return found


def known_axes(sample: Mapping[str, torch.Tensor]) -> Axes:
    """Axes of inputs whose names are a transformers model's: `(batch, sequence)`, `(batch, choices, sequence)`, or images.

    Raises:
        InputError: An input of another name or rank.
    """
    text = {2: ("batch", "sequence"), 3: ("batch", "choices", "sequence")}
    axes: dict[str, dict[int, str]] = {}
    for name, tensor in sample.items():
        if name in ("input_ids", "attention_mask", "token_type_ids", "position_ids") and tensor.ndim in text:
            axes[name] = dict(enumerate(text[tensor.ndim]))
        elif name == "pixel_values":
            axes[name] = {0: "batch"}
        else:
            raise InputError(
                f"Which axes of the sample's {name!r} {tuple(tensor.shape)} vary is not known.",
                fix=f"pass axes={{{name!r}: {{0: 'batch'}}, ...}}; leave an axis out to fix its size.",
            )
    return axes


def check_sample(sample: Mapping[str, torch.Tensor], axes: Axes | None) -> None:
    """Check inputs to trace with, and the names of their axes, as a caller gave them.

    Raises:
        InputError: Something else than tensors by name, or than names of axes by number.
    """
    for name, tensor in sample.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InputError(f"The sample has {type(tensor).__name__} as {name!r}.", fix="pass tensors by input name.")
    for name, named in (axes or {}).items():
        if name not in sample:
            raise InputError(f"axes names {name!r}, which the sample has not.", fix=f"use {', '.join(sample)}.")
        if not isinstance(named, Mapping) or not all(
            isinstance(axis, int) and isinstance(word, str) and 0 <= axis < sample[name].ndim
            for axis, word in named.items()
        ):
            raise InputError(
                f"The axes of {name!r} are {named!r}; its shape is {tuple(sample[name].shape)}.",
                fix="name axes by their numbers: {0: 'batch', 1: 'sequence'}.",
            )


def safe_sizes(sample: Mapping[str, torch.Tensor], axes: Axes) -> dict[str, int]:
    """Sizes that a trace can tell apart: at least 2, a sequence of at least 3, all different.

    Args:
        sample: Inputs of any shape, by name.
        axes: Names of the axes that vary, by input and position.

    Raises:
        InputError: An input that the sample lacks, or an axis with two sizes.
    """
    sizes: dict[str, int] = {}
    for name, named in axes.items():
        if name not in sample:
            raise InputError(
                f"axes names {name!r}, which the sample {sorted(sample)} does not hold.",
                fix="name inputs that the sample holds.",
            )
        for position, axis in named.items():
            size = int(sample[name].shape[position])
            if sizes.setdefault(axis, size) != size:
                raise InputError(
                    f"The axis {axis!r} has sizes {sizes[axis]} and {size} in one sample.",
                    fix="give axes that differ names that differ, or pass a sample in which they agree.",
                )
    taken: set[int] = set()
    for axis, size in sizes.items():
        size = max(size, 3 if axis == "sequence" else 2)
        while size in taken:
            size += 1
        taken.add(size)
        sizes[axis] = size
    return sizes


_CORNERS = 4


def resize(
    example: Mapping[str, torch.Tensor], axes: Axes, sizes: Mapping[str, int], config: Any, seed: int
) -> Tensors:
    """Inputs with the example's names, types and ranks: the shape is the example's where an axis is fixed, and `sizes` where it
    has a name.

    Token ids are drawn anew; other tensors are repeated up to size with a little noise on floating-point ones. Masks
    get padding at the end of every second row, and padded tokens the padding id, as a tokenizer does.
    """
    family, whole = family_of(config), config
    config = text_config(config)
    generator = torch.Generator().manual_seed(seed)
    resized: Tensors = {}
    for name, tensor in example.items():
        named = axes.get(name, {})
        shape = [sizes.get(named[i], n) if i in named else n for i, n in enumerate(tensor.shape)]
        if name == "input_ids":
            resized[name] = _token_ids(shape, config, generator)
        elif name in _MASKS:
            resized[name] = _padded_mask(shape, tensor.dtype)
        elif name == PIXEL_MASK:
            resized[name] = _padded_pixels(shape, tensor.dtype)
        elif name == BOXES and not tensor.is_floating_point() and shape[-1] == _CORNERS:
            resized[name] = _boxes(shape, config, generator).to(tensor.dtype)
        elif name == PATCHES:
            resized[name] = drawn_patches(shape, generator).to(tensor.dtype)
        elif name == "token_type_ids":
            types = min(2, int(getattr(config, "type_vocab_size", 2) or 1))
            resized[name] = torch.randint(0, types, shape, generator=generator, dtype=tensor.dtype)
        else:
            value = tensor
            for i, size in enumerate(shape):
                if size != value.shape[i]:
                    repeats = [1] * value.ndim
                    repeats[i] = -(-size // max(value.shape[i], 1))
                    value = value.repeat(repeats).narrow(i, 0, size)
            if value.is_floating_point():
                value = value + 0.1 * torch.randn(value.shape, generator=generator).to(value.dtype)
            resized[name] = value.contiguous()
    if "attention_mask" in resized and PATCHES in resized:
        resized[PATCHES][resized["attention_mask"] == 0] = 0
    if "attention_mask" in resized and "input_ids" in resized:
        ids, mask = resized["input_ids"], resized["attention_mask"]
        if ids.shape == mask.shape:
            ids[mask == 0] = pad_id(config)
            end = _end_id(config)
            if end is not None:
                ids.scatter_(-1, mask.sum(-1, keepdim=True).to(torch.int64) - 1, end)
    family.fill(resized, whole)
    return resized


def with_special_tokens(feeds: Mapping[str, torch.Tensor], config: Any) -> Tensors:
    """The same inputs with `i` special tokens in row `i`, at places of plain tokens: `input_ids: (batch, sequence)`.

    The first and the last kept token of a row stay. Inputs without token ids are returned as they are.
    """
    ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
    if ids is None or ids.ndim != 2 or config is None:
        return dict(feeds)
    config = text_config(config)
    known = {
        token
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index"))
        for token in _ids_in(value)
    }
    special = [token for name in _SPECIAL for token in _ids_in(getattr(config, name, None)) if token in known]
    special = [token for token in dict.fromkeys(special) if 0 <= token < _vocabulary(config)]
    edited = ids.clone()
    for i, row in enumerate(edited):
        kept = mask[i] != 0 if mask is not None and mask.shape == ids.shape else torch.ones_like(row, dtype=torch.bool)
        plain = [place for place in kept.nonzero()[1:-1, 0].tolist() if int(row[place]) not in known]
        for k, place in enumerate(plain[1::3][:i] if special else ()):
            row[place] = special[(i + k) % len(special)]
    return {**feeds, "input_ids": edited}


def _ids_in(value: object) -> list[int]:
    """The ids in a config's field: one, several (Llama 3 ends a text with any of three tokens), or none."""
    return [token for token in (value if isinstance(value, list | tuple) else [value]) if isinstance(token, int)]


def text_config(config: Any) -> Any:
    """The part of a config that describes texts, where it says nothing of them itself (CLIP's)."""
    inner = getattr(config, "text_config", None)
    return inner if inner is not None and not isinstance(inner, dict) and not hasattr(config, "vocab_size") else config


def pad_id(config: Any) -> int:
    """The padding token's id, or that of the texts' config (SmolVLM's own is none of its tokens), or 0."""
    text = text_config(config)
    known = getattr(text, "vocab_size", None) or sys.maxsize
    for one in (config, text):
        value = getattr(one, "pad_token_id", None)
        if isinstance(value, int) and 0 <= value < known:
            return value
    return 0


def _end_id(config: Any) -> int | None:
    """The end token's id for models whose heads may read that token (BART's classifier), else `None`."""
    value = getattr(config, "eos_token_id", None)
    return value if isinstance(value, int) and getattr(config, "is_encoder_decoder", False) else None


def _vocabulary(config: Any) -> int:
    """How many tokens a model knows: its config says it, or those of its encoder and decoder do, or it is taken for 100."""
    parts = (config, getattr(config, "encoder", None), getattr(config, "decoder", None))
    return min((int(size) for size in (getattr(one, "vocab_size", None) for one in parts) if size), default=100)


def _token_ids(shape: Sequence[int], config: Any, generator: torch.Generator) -> torch.Tensor:
    vocabulary = _vocabulary(config)
    ids = torch.randint(0, vocabulary, tuple(shape), generator=generator)
    # A padding id in the middle would move the positions of RoBERTa-like models, an end token would end BART's text.
    reserved = (pad_id(config), _end_id(config))
    around = (i % vocabulary for i in range(reserved[0] + 1, reserved[0] + 4))
    plain = next((i for i in around if i not in reserved), 0)
    for special in reserved:
        if special is not None:
            ids = torch.where(ids == special, plain, ids)
    return ids


def _boxes(shape: Sequence[int], config: Any, generator: torch.Generator) -> torch.Tensor:
    """Boxes `(batch, sequence, 4)`, which end behind where they begin: models look their widths and heights up, too."""
    half = int(getattr(config, "max_2d_position_embeddings", None) or 1024) // 2
    corners, sizes = (torch.randint(0, half, (*shape[:-1], 2), generator=generator) for _ in range(2))
    return torch.cat([corners, corners + sizes], dim=-1)


def _padded_mask(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(tuple(shape), dtype=dtype)
    rows = mask.view(-1, shape[-1])
    rows[1::2, (shape[-1] + 1) // 2 :] = 0
    return mask


def _padded_pixels(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A mask `(batch, height, width)` in which every second image is padded below and on the right, as processors do."""
    mask = torch.ones(tuple(shape), dtype=dtype)
    mask[1::2, -(shape[1] // 4) :] = 0
    mask[1::2, :, -(shape[2] // 4) :] = 0
    return mask
