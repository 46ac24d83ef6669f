"""Sample inputs for traces, with at least two rows, different sizes for different axes, and padding in the mask.

With other inputs, a trace could be correct only for these inputs. For example, it could make an axis of size 1 a constant.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..artifact.json_reading import read_json
from ..artifact.processor_loading import open_companion
from ..errors import ExportError, InputError
from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.tracing_wrapper import Tensors, unwrapped
from ..upstream.output_silencing import quiet
from .patch_samples import PATCH_AXIS, PATCHES, USUAL_PATCHES, drawn_patches

SAMPLE_BATCH = 2
SAMPLE_SEQUENCE = 5
SAMPLE_CHOICES = 3
SAMPLE_PATCHES = 11
# Config fields with the block size in tokens, of models that process texts in blocks (LongT5, CANINE, LED). The sample is longer than two
# blocks, so that the number of blocks stays variable in the trace.
_BLOCKS = ("global_block_size", "downsampling_rate", "attention_window")

# Names of the image axes of models that accept images of any size. Other models have a fixed image size.
IMAGE_AXES = ("height", "width")
# Name of the input with 1 for pixels that are not padding, `(batch, height, width)`.
PIXEL_MASK = "pixel_mask"
# Name of the input with the bounding box of each token's word on a page, `(batch, sequence, 4)`.
BOXES, _CORNERS = "bbox", 4
# Names of padding masks: of the text, of the encoder's output, and of image features in models of images and texts.
_MASKS = ("attention_mask", "encoder_attention_mask", "visual_attention_mask")
_SPECIAL = ("eos_token_id", "sep_token_id", "cls_token_id", "bos_token_id", "mask_token_id", "pad_token_id")
_IMAGE_STEP = 32  # Pixels. Most architectures halve the size of an image up to five times, and 32 is 2**5.


def parameters_of(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a transformers model's `forward`."""
    inner = unwrapped(module)
    return inspect.signature(inner.forward).parameters


def default_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make inputs for a transformers model from the signature of its `forward` and its config."""
    config = getattr(module, "config", None)
    inner = unwrapped(module)
    main = getattr(inner, "main_input_name", None)
    if main == "inputs":
        # Perceiver's main input is named `inputs` for all modalities, but its classes also accept `input_ids` or `pixel_values`.
        main = next((name for name in ("input_ids", "pixel_values") if name in parameters_of(module)), main)
    if config is None or main not in ("input_ids", "pixel_values", PATCHES):
        raise _no_inputs(inner, main)
    if main == "pixel_values":
        # Some image processors return a pixel mask that the model accepts as **kwargs and ignores (YOLOS).
        parameters = parameters_of(module)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        return *image_sample(module, folder), ((PIXEL_MASK,) if takes_any and PIXEL_MASK not in parameters else ())
    if main == PATCHES:
        return *_patch_sample(int(config.vision_config.patch_embed_hidden_size)), ()
    names, unused = text_inputs(module, config, folder)
    choices = type(inner).__name__.endswith("ForMultipleChoice")
    blocks = [_largest(getattr(config, name, None)) for name in _BLOCKS]
    length = SAMPLE_SEQUENCE + 2 * max(*blocks, family_of(config).tokens_at_once(config))
    shape = (SAMPLE_BATCH, SAMPLE_CHOICES, length) if choices else (SAMPLE_BATCH, length)
    axis_names = ("batch", "choices", "sequence") if choices else ("batch", "sequence")
    example = {name: torch.ones(shape, dtype=torch.int64) for name in names}
    largest = family_of(config).largest_box(config)
    if BOXES in parameters_of(module) and largest is not None:
        # All models of LayoutLM and LiLT read bounding boxes.
        example[BOXES] = torch.ones((*shape, _CORNERS), dtype=torch.tensor(largest).dtype)
    axes = {name: dict(enumerate(axis_names)) for name in example}
    sizes = dict(zip(axis_names, shape, strict=True))
    return resize(example, axes, sizes, config, seed=0), axes, unused


def _patch_sample(width: int) -> tuple[Tensors, Axes]:
    """Make sample images as patches with `width` pixel values each. The second image has fewer patches."""
    example = {PATCHES: torch.zeros((1, 1, 2 + width)), "attention_mask": torch.ones((1, 1), dtype=torch.int64)}
    axes = {name: {0: "batch", 1: PATCH_AXIS} for name in example}
    return resize(example, axes, {"batch": SAMPLE_BATCH, PATCH_AXIS: SAMPLE_PATCHES}, None, seed=0), axes


def _no_inputs(module: torch.nn.Module, main: str | None) -> ExportError:
    name = type(module).__name__
    if _generates(module):
        return ExportError(
            f"A {name} cannot be exported for generation, because its main input is {main!r}. accel exports generating models with the "
            "main input 'input_ids', 'pixel_values' or 'flattened_patches', and the audio models Whisper, Moonshine and Speech2Text.",
            fix="run the model with transformers.",
        )
    reads = f", because its config does not contain the shape of its main input {main!r}" if main else ""
    return ExportError(
        f"accel cannot make sample inputs for a {name}{reads}.",
        fix="pass sample={input name: tensor}. If an input name is not a usual one of transformers, also pass "
        "axes={input name: {0: 'batch'}}.",
    )


def text_inputs(module: torch.nn.Module, config: Any, folder: Path | None) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a text model's inputs, and the names of inputs that the model accepts but ignores."""
    parameters = parameters_of(module)
    names = ["input_ids"]
    if "attention_mask" in parameters:
        names.append("attention_mask")
    # `generate` passes no token types, even to models that accept them (GPT-2).
    if "token_type_ids" in parameters and not _generates(module):
        types = getattr(config, "type_vocab_size", None)
        if types is None:
            # In models such as GPT-2, missing token types and token types of zeros give different results. So the graph has this input only
            # if the tokenizer always returns token types (XLNet).
            if "token_type_ids" in tokenizer_names(folder):
                names.append("token_type_ids")
        elif types > 1:
            names.append("token_type_ids")
        else:
            # A token type table with one row (RoBERTa) or without rows (DeBERTa-v2) adds the same values to every token.
            return names, ("token_type_ids",)
    return names, ()


def tokenizer_names(folder: Path | None) -> Sequence[str]:
    """Return the names of the tensors that the tokenizer in a folder returns. Empty if the folder has no tokenizer."""
    if folder is None or not any(folder.glob("*token*")):
        return ()
    try:
        names: Sequence[str] = open_companion("AutoTokenizer", folder).model_input_names
    # An export must not fail because of a tokenizer with custom code or an invalid tokenizer.
    except Exception:  # noqa: BLE001
        return ()
    return names


def _largest(size: Any) -> int:
    """Return the largest number in a config field. The field contains one number, or a list with one number for each layer."""
    sizes = size if isinstance(size, list | tuple) else [size]
    return max((n for n in sizes if isinstance(n, int)), default=0)


def _generates(module: Any) -> bool:
    return hasattr(module, "can_generate") and bool(module.can_generate())


@contextmanager
def same_draws() -> Iterator[None]:
    """Set a fixed random seed while the context is open, so that every export uses the same sample inputs.

    At the end, the caller's random state is restored.
    """
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


def image_sample(module: torch.nn.Module, folder: Path | None, others: Tensors | None = None) -> tuple[Tensors, Axes]:
    """Make sample images, and their padding mask if the model has an input for it.

    Args:
        module: The model.
        folder: Folder with the model's config and processor files.
        others: Further inputs without which the model cannot run, such as texts.
    """
    config = getattr(module, "config", None)
    inner = unwrapped(module)
    height, width = image_size(config, folder, type(inner).__name__)
    channels = getattr(_image_config(config), "num_channels", 3)
    named = {0: "batch"}
    masked = PIXEL_MASK in parameters_of(module)
    shape = (SAMPLE_BATCH, channels, height, width)
    if not _generates(inner) and _computes_at_any_size(module, shape, masked=masked, others=others or {}):
        named |= dict(enumerate(IMAGE_AXES, start=2))
        # Height and width must differ, because the trace would merge two axes of the same size.
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
    """Return whether a model accepts images `(batch, channels, height, width)` of two other sizes."""
    dtype, device = next(((p.dtype, p.device) for p in module.parameters() if p.is_floating_point()), (None, None))
    batch, channels, height, width = shape
    try:
        with torch.inference_mode(), quiet():
            for higher, wider in ((_IMAGE_STEP, 2 * _IMAGE_STEP), (2 * _IMAGE_STEP, _IMAGE_STEP)):
                pixels = torch.zeros((batch, channels, height + higher, width + wider), dtype=dtype, device=device)
                mask = {PIXEL_MASK: torch.ones_like(pixels[:, 0], dtype=torch.int64)} if masked else {}
                module(pixel_values=pixels, **mask, **others)
    # The model's own code may raise any exception. The usual reason is that position embeddings have a fixed size.
    except Exception:  # noqa: BLE001
        return False
    return True


def image_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Return the height and width of images in pixels for the reference case `index`.

    Return an empty dict if the graph accepts only one image size.
    """
    if not set(IMAGE_AXES) <= set(sizes):
        return {}
    height, width = (sizes[axis] for axis in IMAGE_AXES)
    # Some sizes are squares, as most processors produce them. The last size is not a multiple of the patch size.
    plans = (
        (0, 0), (_IMAGE_STEP, 0), (0, -_IMAGE_STEP), (_IMAGE_STEP, -_IMAGE_STEP), (2 * _IMAGE_STEP, _IMAGE_STEP),
        (_IMAGE_STEP + 5, _IMAGE_STEP - 3),
    )  # fmt: skip
    higher, wider = plans[index % len(plans)]
    return {"height": height + higher, "width": max(width + wider, _IMAGE_STEP)}


def point_sizes(sizes: Mapping[str, int], index: int) -> dict[str, int]:
    """Return the sizes of the point axes for the reference case `index`, or an empty dict for a graph without point axes."""
    if not {"points", "each"} <= set(sizes):
        return {}
    # One of the cases has one point for each mask, as in transformers' pipeline.
    plans = ((0, 0), (3, -3), (-3, 1), (1, -3), (2, 2))
    more, longer = plans[index % len(plans)]
    return {"points": sizes["points"] + more, "each": sizes["each"] + longer}


def usual_sizes(axes: Collection[str], config: Any, folder: Path | None) -> dict[str, int]:
    """Return the usual sizes of the image axes of a graph, or an empty dict for a graph without image axes.

    The sizes are the height and width in pixels, or the number of patches of the image processor.
    """
    if PATCH_AXIS in axes:
        settings = processor_settings(folder, "image_processor")
        return {PATCH_AXIS: int(settings.get("max_patches", USUAL_PATCHES))}
    if not set(IMAGE_AXES) <= set(axes):
        return {}
    return dict(zip(IMAGE_AXES, image_size(config, folder), strict=True))


def _image_config(config: Any) -> Any:
    """Return the part of a config that describes images."""
    inner = getattr(config, "encoder", None) or getattr(config, "vision_config", None) or config
    # A nested config is a mapping if the config was read from a file, and an object in a config class of transformers.
    return SimpleNamespace(**inner) if isinstance(inner, Mapping) else inner


def image_size(config: Any, folder: Path | None, architecture: str = "") -> tuple[int, int]:
    """Return the height and width of images in pixels.

    The size is read from the model's config, else from the settings of the image processor. If both have no size, it is 224.

    Args:
        config: Config of the model.
        folder: Folder with the files of the image processor.
        architecture: Class name of the model. Empty means the class name in the config.
    """
    family = family_of(config)
    size = family.image_size(_image_config(config), architecture)
    if size is None:
        settings = processor_settings(folder, "image_processor")
        size = next((settings[name] for name in family.processor_sizes if settings.get(name)), None)
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge", 224)
        return int(size.get("height", edge)), int(size.get("width", edge))
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if size else (224, 224)


def processor_settings(folder: Path | None, part: str) -> Mapping[str, Any]:
    """Return the settings of the `image_processor` or `feature_extractor` in a folder. Empty if the folder has none."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if folder is not None and (folder / name).is_file():
            settings = read_json(folder / name)
            return settings.get(part) or (settings if name.startswith("pre") else {})
    return {}


def known_axes(sample: Mapping[str, torch.Tensor]) -> Axes:
    """Return the axis names of inputs with the usual names of transformers, such as `input_ids` and `pixel_values`.

    The axes of texts are `(batch, sequence)` or `(batch, choices, sequence)`. Images have only a named batch axis.

    Raises:
        InputError: An input has another name, or another number of axes.
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
                f"accel cannot tell which axes of the sample input {name!r} of shape {tuple(tensor.shape)} may vary.",
                fix=f"pass axes={{{name!r}: {{0: 'batch'}}, ...}} with all axes that may vary. An axis without a name keeps its size.",
            )
    return axes


def check_sample(sample: Mapping[str, torch.Tensor], axes: Axes | None) -> None:
    """Check the sample inputs and axis names that a caller passed for the trace.

    Raises:
        InputError: The sample is not a mapping of tensors, or the axes are not names by axis number.
    """
    for name, tensor in sample.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"The sample input {name!r} is a {type(tensor).__name__}, not a tensor.",
                fix="pass sample={input name: torch tensor}.",
            )
    for name, named in (axes or {}).items():
        if name not in sample:
            raise InputError(
                f"axes contains the input name {name!r}, but sample has only {', '.join(map(repr, sample))}.",
                fix="use the input names of sample in axes.",
            )
        if not isinstance(named, Mapping) or not all(
            isinstance(axis, int) and isinstance(word, str) and 0 <= axis < sample[name].ndim
            for axis, word in named.items()
        ):
            raise InputError(
                f"axes[{name!r}] is {named!r}, which does not map axis numbers to names for a tensor of shape "
                f"{tuple(sample[name].shape)}.",
                fix="pass a mapping of axis numbers to names, such as {0: 'batch', 1: 'sequence'}.",
            )


def safe_sizes(sample: Mapping[str, torch.Tensor], axes: Axes) -> dict[str, int]:
    """Return axis sizes for a trace. All sizes are different, at least 2, and at least 3 for the axis `sequence`.

    Args:
        sample: Inputs of any shape, by name.
        axes: Names of the axes that may vary, by input name and axis number.

    Raises:
        InputError: Two inputs have different sizes for the same axis name.
    """
    sizes: dict[str, int] = {}
    for name, named in axes.items():
        for position, axis in named.items():
            size = int(sample[name].shape[position])
            if sizes.setdefault(axis, size) != size:
                raise InputError(
                    f"The axis name {axis!r} is used for axes of different sizes in the sample: {sizes[axis]} and {size}.",
                    fix="use different names for axes of different sizes, or pass a sample in which all axes of one name have one size.",
                )
    used_sizes: set[int] = set()
    for axis, size in sizes.items():
        size = max(size, 3 if axis == "sequence" else 2)
        while size in used_sizes:
            size += 1
        used_sizes.add(size)
        sizes[axis] = size
    return sizes


def resize(
    example: Mapping[str, torch.Tensor], axes: Axes, sizes: Mapping[str, int], config: Any, seed: int
) -> Tensors:
    """Make inputs with the names, dtypes and ranks of example inputs, but with other axis sizes.

    Axes without a name keep the size of the example. Token ids are drawn at random. Other tensors are repeated up to the new size, and
    floating-point values get a little noise. Every second row of a mask ends with padding, and the token ids in the padding are the
    padding token.
    """
    family, full_config = family_of(config), config
    config = text_config(config)
    largest = family.largest_box(config)
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
        elif name == BOXES and shape[-1] == _CORNERS and tensor.is_floating_point() == isinstance(largest, float):
            resized[name] = _boxes(shape, largest or 1023, generator).to(tensor.dtype)
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
    family.fill(resized, full_config)
    return resized


def with_special_tokens(feeds: Mapping[str, torch.Tensor], config: Any) -> Tensors:
    """Replace some normal tokens of `input_ids: (batch, sequence)` by special tokens. Row `i` gets up to `i` special tokens.

    The first and the last token of a row that are not padding are kept. Inputs without token ids are returned unchanged.
    """
    ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
    if ids is None or ids.ndim != 2 or config is None:
        return dict(feeds)
    config = text_config(config)
    special_ids = {
        token
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index"))
        for token in _ids_in(value)
    }
    special = [token for name in _SPECIAL for token in _ids_in(getattr(config, name, None)) if token in special_ids]
    special = [token for token in dict.fromkeys(special) if 0 <= token < _vocabulary(config)]
    edited = ids.clone()
    for i, row in enumerate(edited):
        not_padding = (
            mask[i] != 0 if mask is not None and mask.shape == ids.shape else torch.ones_like(row, dtype=torch.bool)
        )
        plain = [place for place in not_padding.nonzero()[1:-1, 0].tolist() if int(row[place]) not in special_ids]
        for k, place in enumerate(plain[1::3][:i] if special else ()):
            row[place] = special[(i + k) % len(special)]
    return {**feeds, "input_ids": edited}


def _ids_in(value: object) -> list[int]:
    """Return the token ids in a config field, which contains one id, a list of ids (Llama 3 has three end tokens) or `None`."""
    return [token for token in (value if isinstance(value, list | tuple) else [value]) if isinstance(token, int)]


def text_config(config: Any) -> Any:
    """Return the nested text config if the config has no vocabulary size (CLIP), else the config."""
    inner = getattr(config, "text_config", None)
    return inner if inner is not None and not isinstance(inner, dict) and not hasattr(config, "vocab_size") else config


def pad_id(config: Any) -> int:
    """Return the id of the padding token from the config or from the nested text config. Return 0 if both have no padding token.

    An id outside the vocabulary is ignored, because SmolVLM's config contains such an id.
    """
    text = text_config(config)
    vocabulary = getattr(text, "vocab_size", None) or sys.maxsize
    for part in (config, text):
        value = getattr(part, "pad_token_id", None)
        if isinstance(value, int) and 0 <= value < vocabulary:
            return value
    return 0


def _end_id(config: Any) -> int | None:
    """Return the id of the end token for encoder-decoder models, whose head may read the end token (BART), else `None`."""
    value = getattr(config, "eos_token_id", None)
    return value if isinstance(value, int) and getattr(config, "is_encoder_decoder", False) else None


def _vocabulary(config: Any) -> int:
    """Return the smallest vocabulary size in a config and its nested configs, or 100 if there is none."""
    parts = (config, *getattr(config, "__dict__", {}).values())
    sizes = [
        part.get("vocab_size") if isinstance(part, Mapping) else getattr(part, "vocab_size", None) for part in parts
    ]
    return min((size for size in sizes if isinstance(size, int) and size), default=100)


def _token_ids(shape: Sequence[int], config: Any, generator: torch.Generator) -> torch.Tensor:
    vocabulary = _vocabulary(config)
    ids = torch.randint(0, vocabulary, tuple(shape), generator=generator)
    # The random ids must not contain the padding token, which would shift the position ids of RoBERTa, or the end token, which BART's
    # classifier searches.
    reserved = (pad_id(config), _end_id(config))
    around = (i % vocabulary for i in range(reserved[0] + 1, reserved[0] + 4))
    plain = next((i for i in around if i not in reserved), 0)
    for special in reserved:
        if special is not None:
            ids = torch.where(ids == special, plain, ids)
    return ids


def _boxes(shape: Sequence[int], largest: float, generator: torch.Generator) -> torch.Tensor:
    """Return random bounding boxes `(batch, sequence, 4)`.

    The right and bottom coordinates are larger than the left and top coordinates, because some models embed the width and height.
    """
    corners, sizes = (torch.rand((*shape[:-1], 2), generator=generator) * largest / 2 for _ in range(2))
    return torch.cat([corners, corners + sizes], dim=-1)


def _padded_mask(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(tuple(shape), dtype=dtype)
    rows = mask.view(-1, shape[-1])
    rows[1::2, (shape[-1] + 1) // 2 :] = 0
    return mask


def _padded_pixels(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a pixel mask `(batch, height, width)`. Every second image has padding at the bottom and on the right."""
    mask = torch.ones(tuple(shape), dtype=dtype)
    mask[1::2, -(shape[1] // 4) :] = 0
    mask[1::2, :, -(shape[2] // 4) :] = 0
    return mask
