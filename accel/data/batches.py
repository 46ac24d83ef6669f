"""Rows as batches of model inputs, for calibration and for evaluation.

Texts are tokenized once and kept as token ids; images are read when their batch is made. A batch holds rows of like
length, so that little of it is padding, and batches can be iterated again and again in bounded memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.companions import open_companion
from ..artifact.manifest import Artifact
from ..artifact.tensors import TensorSpec
from ..config import QuantizeConfig
from ..errors import ArtifactNotFoundError, BackendUnavailableError, ConfigError, InputError, QuantizeError
from ..interfaces.protocols import Feeds
from ..interfaces.task_registry import load_task, task_spec
from ..interfaces.task_spec import Modality
from ..upstream.library_output import quiet
from .columns import is_text, map_columns
from .defaults import with_defaults
from .labels import texts
from .rows import Rows, is_rows, load_rows, take

if TYPE_CHECKING:
    import torch

BATCH_SIZE = 32
_CALIBRATION_TOKENS = 256
_UNLIMITED = 1 << 30  # tokenizers without a limit say 1e30

_PROCESSORS: Mapping[tuple[Modality, ...], tuple[str, str]] = {
    ("text",): ("AutoTokenizer", "tokenizer"),
    ("image",): ("AutoImageProcessor", "image processor"),
    ("audio",): ("AutoFeatureExtractor", "feature extractor"),
    ("video",): ("AutoImageProcessor", "image processor"),
}


def load_processor(folder: Path, task: str, *, trust_remote_code: bool = False) -> Any:
    """What makes a model's inputs from rows of its task, of a folder: a tokenizer, an image processor, ...

    Raises:
        InputError: The folder has none.
        IntegrityError: It has one, which is damaged.
    """
    spec = task_spec(task)
    loader, kind = _PROCESSORS.get(spec.modalities, ("AutoProcessor", "processor"))
    loader = spec.processor or loader
    try:
        with quiet():
            return open_companion(loader, folder, trust_remote_code=trust_remote_code)
    except (ArtifactNotFoundError, BackendUnavailableError) as error:
        raise InputError(
            f"{folder} has no {kind} that can be loaded: {error.message}", fix="pass processor=..."
        ) from error


def longest(limit: int | None, processor: Any, asked: int | None) -> int | None:
    """Tokens that a row is cut to: what was asked for, the model's positions or the tokenizer's own limit; `None` for
    processors of something else than text.

    Raises:
        ConfigError: More was asked for than the model has positions.
    """
    if not hasattr(processor, "model_max_length"):
        return None
    if asked is not None and (asked < 3 or (limit is not None and asked > limit)):
        raise ConfigError(f"max_length is {asked}; the model has {limit} positions.", fix=f"use 3 to {limit}.")
    own = processor.model_max_length if processor.model_max_length < _UNLIMITED else None
    return asked or min((n for n in (limit, own) if n), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Rows as inputs of a model.

    Attributes:
        tokens: Token ids, masks and so on by input name, one list a row; of some, several numbers a token.
        padding: Value that fills each of them up to the longest row of a batch; no entry: rows of unequal length do
            not share a batch.
        left: Whether padding goes to the left.
        images: A column of images and what turns them into `pixel_values`, instead of tokens.
        alone: Whether each image is a batch, as they have several sizes.
        words: For each row the word that each token belongs to (`None` for special tokens), where rows are lists of words.
    """

    tokens: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)
    left: bool = False
    images: tuple[Sequence[Any], Any] | None = None
    alone: bool = False
    words: Sequence[Sequence[int | None]] | None = None

    def __len__(self) -> int:
        return len(self.images[0]) if self.images is not None else len(self.tokens["input_ids"])

    def plan(self, batch_size: int, *, by_length: bool = True) -> list[list[int]]:
        """Row numbers batch by batch: like lengths together, shortest first, or in the order of the rows."""
        if self.images is not None:
            order = list(range(len(self)))
            batch_size = 1 if self.alone else batch_size
            return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        lengths = [len(row) for row in self.tokens["input_ids"]]
        order = list(range(len(lengths)))
        if by_length or not self.padding:
            order.sort(key=lengths.__getitem__)
        if self.padding:
            return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        # Without a padding token only rows of equal length go together.
        return [
            same[i : i + batch_size]
            for _, group in itertools.groupby(order, key=lengths.__getitem__)
            for same in [list(group)]
            for i in range(0, len(same), batch_size)
        ]

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """The inputs of some rows: `(rows, longest) int64`, or `pixel_values: (rows, channels, height, width)`."""
        import torch

        if self.images is not None:
            column, processor = self.images
            pictures = [_rgb(column[i]) for i in rows]
            made: dict[str, torch.Tensor] = dict(processor(pictures, return_tensors="pt"))
            return made
        width = max(len(self.tokens["input_ids"][i]) for i in rows)
        feeds = {}
        for name, lists in self.tokens.items():
            made_of = [torch.tensor(lists[i], dtype=torch.int64) for i in rows]
            # Boxes have four numbers a token.
            shape = (len(rows), width, *made_of[0].shape[1:])
            tensor = torch.full(shape, self.padding.get(name, 0), dtype=torch.int64)
            for place, row in enumerate(made_of):
                if self.left:
                    tensor[place, width - len(row) :] = row
                else:
                    tensor[place, : len(row)] = row
            feeds[name] = tensor
        return feeds


def _rgb(image: Any) -> Any:
    return image.convert("RGB") if getattr(image, "mode", "RGB") != "RGB" else image


def encode(rows: Rows, task: str, processor: Any, max_length: int | None) -> Encoded:
    """Rows as a task's models read them: tokenized; of images nothing yet.

    Raises:
        InputError: A row without text.
    """
    with quiet():
        encoded: Encoded | None = load_task(task).encode(rows, processor, max_length)
        return encode_texts(rows, processor, max_length) if encoded is None else encoded


def encode_texts(rows: Rows, processor: Any, max_length: int | None) -> Encoded:
    """One text a row."""
    return from_tokenizer(processor(texts(rows, "text"), **cut(max_length)), processor)


def encode_images(rows: Rows, processor: Any, max_length: int | None) -> Encoded:  # noqa: ARG001
    """Images, which are read when their batch is made."""
    return Encoded(images=(images_of(rows), processor))


def cut(max_length: int | None) -> dict[str, Any]:
    """The arguments of a tokenizer that cuts texts to so many tokens."""
    return {"truncation": max_length is not None, "max_length": max_length}


def from_tokenizer(found: Any, tokenizer: Any) -> Encoded:
    """What a tokenizer returned for a list of rows, as rows to batch."""
    names = [name for name in tokenizer.model_input_names if name in found]
    pad = tokenizer.pad_token_id
    padding = {"input_ids": pad, "token_type_ids": tokenizer.pad_token_type_id} if pad is not None else {}
    return Encoded(tokens={name: found[name] for name in names}, padding=padding, left=tokenizer.padding_side == "left")


def images_of(rows: Rows, use: str = "image") -> Any:
    """A column of images; one of paths is read as images, and one of arrays is taken as it is."""
    import datasets

    assert rows.sample.columns is not None
    name = rows.sample.columns[use]
    dataset = rows.dataset
    if is_text(dataset.features[name]):
        missing = [path for path in dataset[name][:] if not Path(path).is_file()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(dataset)} images are not found, the first is {missing[0]!r}.",
                fix="give paths that are absolute or relative to the working folder.",
            )
        dataset = dataset.cast_column(name, datasets.Image())
    return dataset[name]


class Batches:
    """Batches of exactly the inputs that a graph takes; iterate it as often as needed.

    Attributes:
        record: Which rows these are, for the manifest.
    """

    def __init__(
        self,
        encoded: Encoded,
        inputs: Sequence[TensorSpec],
        record: Mapping[str, Any],
        batch_size: int = BATCH_SIZE,
        *,
        prompts: bool = False,
    ) -> None:
        self.record = dict(record)
        self._encoded = encoded
        self._inputs = tuple(inputs)
        self._prompts = prompts
        self._plan = [part for whole in encoded.plan(batch_size) for part in _bounded(encoded, whole)]

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for rows in self._plan:
            feeds = self._encoded.batch(rows)
            yield for_graph(_as_prompts(feeds, self._inputs) if self._prompts else feeds, self._inputs)


def _bounded(encoded: Encoded, rows: Sequence[int]) -> list[Sequence[int]]:
    """Parts of a batch of at most 256 tokens, padding included: memory then does not depend on the longest row met."""
    if not encoded.tokens:
        return [rows]
    width = max(len(encoded.tokens["input_ids"][row]) for row in rows)
    size = max(1, _CALIBRATION_TOKENS // max(width, 1))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _as_prompts(feeds: Feeds, inputs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Feeds with the other inputs of a decoder's graph: positions, which padding does not count in, and the logits to keep, all of
    them.
    """
    import torch

    made = dict(feeds)
    names = {spec.name for spec in inputs}
    ids = made.get("input_ids")
    if ids is not None and ids.ndim == 2:
        mask = made.get("attention_mask", torch.ones_like(ids))
        if "position_ids" in names:
            made.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    if ids is not None and ids.ndim == 2 and "logits_to_keep" in names:
        made.setdefault("logits_to_keep", torch.arange(ids.shape[1]))
    return made


def for_graph(
    feeds: Feeds, inputs: Sequence[TensorSpec], own_defaults: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The feeds that a graph takes, in its order and of any shape, with those that a tokenizer may leave out.

    Raises:
        InputError: The processor does not make an input of the graph.
    """
    complete = with_defaults(feeds, [spec.name for spec in inputs], own_defaults)
    for spec in inputs:
        if spec.name not in complete:
            raise InputError(
                f"The graph takes {spec.name!r}, which its processor does not make (it makes {sorted(feeds)}).",
                fix="pass batches of inputs: an iterable of dictionaries of tensors.",
            )
    return {spec.name: complete[spec.name] for spec in inputs}


class _GivenBatches:
    """Batches that the caller made, checked as they pass."""

    def __init__(
        self, batches: Sequence[Feeds] | Iterable[Feeds], inputs: Sequence[TensorSpec], *, prompts: bool
    ) -> None:
        self.record: dict[str, Any] = {"source": "batches"}
        self._batches = batches
        self._inputs = inputs
        self._prompts = prompts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        for position, batch in enumerate(self._batches):
            if not isinstance(batch, Mapping):
                raise InputError(
                    f"Batch {position} is a {type(batch).__name__}.",
                    fix="pass dictionaries of tensors, rows such as {'text': ...}, a data set or a file.",
                )
            tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise InputError(
                        f"Batch {position} of the calibration data has values in {name!r} that are not finite.",
                        fix="remove them: they would decide the ranges.",
                    )
            yield for_graph(_as_prompts(tensors, self._inputs) if self._prompts else tensors, self._inputs)


def calibration_batches(
    artifact: Artifact,
    data: Any,
    *,
    config: QuantizeConfig | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    processor: Any = None,
    inputs: Sequence[TensorSpec] | None = None,
) -> Batches | _GivenBatches:
    """Calibration data in any form as batches for an artifact's graph.

    Args:
        artifact: What will be calibrated; its folder holds the tokenizer or image processor.
        data: Whatever `accel.data.rows.load_rows` reads, or batches: an iterable of dictionaries of tensors
            or arrays.
        config: `samples` and `seed` choose the rows.
        columns: Column by use, where it cannot be inferred from the task; labels are not needed.
        split, revision, token: Of a Hub data set.
        max_length: Tokens that longer rows are cut to.
        batch_size: Rows a batch.
        processor: Instead of the artifact's own.
        inputs: What each batch holds; all inputs of the artifact's first graph but those of its cache when `None`.

    Raises:
        InputError: No rows, columns that do not map, values that are not finite.
        QuantizeError: No batches.
    """
    config = config or QuantizeConfig()
    if inputs is None:
        # The cache starts empty; whoever runs the graph fills it.
        inputs = [spec for spec in artifact.components[0].inputs if spec.pair is None]
    prompts = artifact.components[0].name == "model" and task_spec(artifact.task).generates
    if isinstance(data, Batches | _GivenBatches):
        return data
    if not is_rows(data, {spec.name for spec in inputs}):
        # A generator can be read once only; the quantizer may need several passes.
        kept = list(itertools.islice(data, config.samples)) if isinstance(data, Iterator) else data
        if isinstance(kept, Sequence) and not kept:
            raise QuantizeError("The calibration data holds no batches.", fix="pass at least one.")
        return _GivenBatches(kept, inputs, prompts=prompts)
    rows = take(load_rows(data, split=split, revision=revision, token=token), config.samples, config.seed)
    rows = map_columns(rows, artifact.task, columns, answers=False)
    processor = processor or load_processor(artifact.path, artifact.task)
    limit = artifact.components[0].max_sizes.get("sequence")
    encoded = encode(rows, artifact.task, processor, longest(limit, processor, max_length))
    return Batches(encoded, inputs, rows.sample.to_dict(), batch_size, prompts=prompts)


def data_name(data: Any) -> str:
    """How messages call data."""
    return os.fspath(data) if isinstance(data, str | os.PathLike) else f"a {type(data).__name__}"
