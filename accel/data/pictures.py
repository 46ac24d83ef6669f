"""Rows of images as inputs, with texts beside them or not, and what columns of boxes and of maps hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..upstream.auto_models import model_type_of
from ..upstream.library_output import quiet
from .batches import Encoded, images_of
from .columns import inner
from .labels import texts, translation
from .rows import Rows

if TYPE_CHECKING:
    import torch

_BOX = ("bbox", "bboxes", "boxes", "box")
_CATEGORY = ("category", "categories", "category_id", "label", "labels", "class", "class_label")
_CROWD = ("iscrowd", "is_crowd")
_UNLIMITED = 1 << 30  # tokenizers without a limit say 1e30


def encode_pictures(rows: Rows, processor: Any, max_length: int | None) -> Encoded:  # noqa: ARG001
    """Images, which are read when their batch is made: each alone where the processor leaves them of several sizes."""
    return Encoded(images=(images_of(rows), processor), alone=not _makes_one_size(processor))


def _makes_one_size(processor: Any) -> bool:
    """Whether a processor makes a batch of images that are high and wide."""
    from PIL import Image

    try:
        with quiet():
            processor([Image.new("RGB", (48, 160)), Image.new("RGB", (160, 64))], return_tensors="pt")
    except (ValueError, RuntimeError):
        return False
    return True


def encode_images_with_texts(rows: Rows, processor: Any, max_length: int | None) -> Encoded:
    """Images with texts beside them: a column of texts, else the names of the data's classes.

    Raises:
        InputError: The data has neither.
    """
    if rows.has("text"):
        found = texts(rows, "text")
    else:
        named = (getattr(feature, "names", None) for feature in rows.dataset.features.values())
        found = next((list(names) for names in named if names), [])
    if not found:
        raise _no_texts(rows)
    return beside(rows, processor, list(dict.fromkeys(found)), max_length)


def _no_texts(rows: Rows) -> InputError:
    return InputError(
        f"{rows.sample.source} holds no texts that images could be compared with, and no classes with names.",
        fix="say which column holds texts: columns={'text': '<column>'}, or --column text=<column>.",
    )


def beside(rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
    """Images, with the same texts beside every batch of them."""
    tokens = tokenized(processor, candidates, max_length)

    def both(pictures: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        return {**processor.image_processor(pictures, return_tensors=return_tensors), **tokens}

    return Encoded(images=(images_of(rows), both), alone=not _makes_one_size(processor.image_processor))


def encode_images_with_each_text(rows: Rows, processor: Any, max_length: int | None) -> Encoded:
    """Images, each with every text of a column or every class that the data's objects have.

    Raises:
        InputError: The data has neither.
    """
    found = texts(rows, "text") if rows.has("text") else _names_in(rows.dataset.features)
    if not found:
        raise _no_texts(rows)
    return with_each(rows, processor, list(dict.fromkeys(found)), max_length)


def _names_in(features: Any) -> list[str]:
    """The names of the first classes among features, or inside of one."""
    for feature in features.values():
        for one in (feature, inner(feature)):
            names = getattr(one, "names", None) or (_names_in(one) if isinstance(one, Mapping) else None)
            if names:
                return list(names)
    return []


def with_each(rows: Rows, processor: Any, candidates: Sequence[str], max_length: int | None) -> Encoded:
    """Images alone, each as often as there are texts, which stand beside it: an image and a text at a time, as transformers'
    pipeline for zero-shot detection asks.
    """
    tokens = tokenized(processor, candidates, max_length)

    def each(pictures: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        made = processor.image_processor(pictures, return_tensors=return_tensors)
        return {name: value.repeat_interleave(len(candidates), 0) for name, value in made.items()} | tokens

    return Encoded(images=(images_of(rows), each), alone=True)


def tokenized(processor: Any, candidates: Sequence[str], max_length: int | None) -> dict[str, torch.Tensor]:
    """Texts as transformers' pipeline for such models tokenizes them: `(texts, sequence) int64`."""
    tokenizer = processor.tokenizer
    length = family_of({"model_type": model_type_of(processor)}).fixed_text_length
    if length is not None:
        options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
    else:
        limit = max_length or (tokenizer.model_max_length if tokenizer.model_max_length < _UNLIMITED else None)
        options = {"padding": True, "max_length": limit, "truncation": limit is not None}
    return dict(tokenizer(list(candidates), return_tensors="pt", **options))


# Boxes


@dataclass(frozen=True, slots=True)
class Box:
    """An object that is in an image.

    Attributes:
        label: The model's number of its class.
        corners: `(left, top, right, bottom)` in pixels.
        crowd: Whether it is a group that is not to be taken apart, as COCO marks them.
    """

    label: int
    corners: tuple[float, float, float, float]
    crowd: bool = False


def boxes(rows: Rows, config: Any) -> list[list[Box]]:
    """The objects of each row, as COCO writes them: `{"bbox": [[x, y, width, height], ...], "category": [...]}` in pixels, or a
    list with such a dictionary an object.

    Args:
        rows: The data, its columns mapped.
        config: The model's, for labels.

    Raises:
        InputError: Objects in another form, or of classes that the model does not know.
    """
    assert rows.sample.columns is not None
    name = rows.sample.columns["objects"]
    feature = rows.dataset.features[name]
    fields = feature if isinstance(feature, Mapping) else inner(feature)
    box = _field(fields, _BOX, name)
    category = _field(fields, _CATEGORY, name)
    crowd = next((key for key in _CROWD if key in fields), None)
    kind = fields[category]
    found = [_objects(value) for value in rows.column("objects")]
    flat = [one[category] for row in found for one in row]
    number = translation(flat, inner(kind) or kind, config, rows)
    return [
        [
            Box(number(one[category]), _corners(one[box], i), bool(one[crowd]) if crowd is not None else False)
            for one in row
        ]
        for i, row in enumerate(found)
    ]


def categories(rows: Rows) -> list[str]:
    """The names of the objects' classes: those that the data declares, else all that occur, sorted.

    Raises:
        InputError: Numbers without names.
    """
    assert rows.sample.columns is not None
    name = rows.sample.columns["objects"]
    feature = rows.dataset.features[name]
    fields = feature if isinstance(feature, Mapping) else inner(feature)
    category = _field(fields, _CATEGORY, name)
    declared = getattr(inner(fields[category]) or fields[category], "names", None)
    if declared:
        return list(declared)
    found = {one[category] for value in rows.column("objects") for one in _objects(value)}
    if not found or not all(isinstance(one, str) for one in found):
        raise InputError(
            f"The classes in the column {name!r} are numbers without names, which are what a model for zero-shot detection looks for.",
            fix="give the names of the classes.",
        )
    return sorted(found)


def _field(fields: Any, known: Sequence[str], column: str) -> str:
    """The first of these names that objects have.

    Raises:
        InputError: They have none.
    """
    found = next((key for key in known if key in fields), None)
    if found is None:
        raise InputError(
            f"The objects in the column {column!r} have {sorted(fields)}, and none of {', '.join(known)}.",
            fix="give objects as COCO does: {'bbox': [[x, y, width, height], ...], 'category': [...]}.",
        )
    return found


def _objects(value: Any) -> list[dict[str, Any]]:
    """A row's objects, a dictionary each; `datasets` also keeps a dictionary of lists."""
    if isinstance(value, Mapping):
        return [dict(zip(value, one, strict=True)) for one in zip(*value.values(), strict=True)]
    return [dict(one) for one in value or []]


def _corners(box: Sequence[float], row: int) -> tuple[float, float, float, float]:
    if len(box) != 4 or min(box[2:]) < 0:
        raise InputError(
            f"A box of row {row} is {list(box)}.", fix="give boxes as COCO does: [x, y, width, height] in pixels."
        )
    left, top, width, height = (float(value) for value in box)
    return left, top, left + width, top + height


def check_boxes(found: Sequence[Sequence[Box]], sizes: Sequence[tuple[int, int]], source: str) -> None:
    """Refuse boxes that cannot be what COCO writes: those that end outside their images, and those in shares of them.

    Args:
        found: A list a row.
        sizes: Width and height of each row's image, in pixels.
        source: Name of the data.

    Raises:
        InputError: More than a tenth of them ends outside by more than two pixels and 2 %, or none is longer than a pixel.
    """
    pairs = [(box.corners, size) for row, size in zip(found, sizes, strict=True) for box in row]
    outside = [(corners, size) for corners, size in pairs if any(corners[2 + i] > 1.02 * size[i] + 2 for i in range(2))]
    tiny = pairs and all(max(corners) <= 1 for corners, _ in pairs)
    if not tiny and len(outside) <= len(pairs) / 10:
        return
    (left, top, right, bottom), size = (outside or pairs)[0]
    raise InputError(
        f"{len(outside)} of {len(pairs)} boxes of {source} end outside their images, such as "
        f"{[left, top, right - left, bottom - top]} in one of {size[0]} x {size[1]} pixels."
        if outside
        else f"All boxes of {source} are shorter than a pixel.",
        fix="give boxes as COCO does, [x, y, width, height] in pixels; these may be corners, or shares of the image.",
    )


# Maps: a value for each pixel


def pixels(value: Any) -> npt.NDArray[Any]:
    """A picture or a nested list as an array `(height, width)` or `(height, width, channels)`."""
    if getattr(value, "mode", None) == "1":
        value = value.convert("L")
    return np.asarray(value)


def one_channel(value: Any, row: int, what: str) -> npt.NDArray[Any]:
    """The same, of pictures with one value a pixel; three channels that agree are one.

    Raises:
        InputError: Colours.
    """
    found = pixels(value)
    if found.ndim == 3 and (found[..., :1] == found[..., :3]).all():
        found = found[..., 0]
    if found.ndim != 2:
        raise InputError(
            f"The {what} of row {row} has shape {found.shape}: colours, and no value for each pixel.",
            fix=f"give pictures of one channel, whose values are the {what}.",
        )
    return found
