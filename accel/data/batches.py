"""Batches of model inputs made from rows of data, for calibration and evaluation.

Each text is tokenized once, and its token ids are stored. A batch contains rows of similar length, so that it has little padding.
The batches can be iterated several times, and only one batch at a time is in memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.manifest import Artifact
from ..artifact.processor_loading import open_companion
from ..artifact.tensor_specs import TensorSpec
from ..config import QuantizeConfig
from ..errors import ArtifactNotFoundError, BackendUnavailableError, ConfigError, InputError, QuantizeError
from ..interfaces.protocols import Feeds
from ..interfaces.task_registry import load_task, task_spec
from ..interfaces.task_spec import Modality
from ..upstream.output_silencing import quiet
from .columns import map_columns
from .encoded_rows import EncodedRows, encode_texts
from .image_rows import encode_images
from .input_defaults import with_defaults
from .rows import DatasetRows, is_rows, load_rows, take
from .sound_rows import encode_sounds

if TYPE_CHECKING:
    import torch

BATCH_SIZE = 32
_CALIBRATION_TOKENS = 256
_UNLIMITED = 1 << 30  # tokenizers without a limit have a model_max_length of 1e30

_PROCESSORS: Mapping[tuple[Modality, ...], tuple[str, str]] = {
    ("text",): ("AutoTokenizer", "tokenizer"),
    ("image",): ("AutoImageProcessor", "image processor"),
    ("audio",): ("AutoFeatureExtractor", "feature extractor"),
    ("video",): ("AutoImageProcessor", "image processor"),
}


def load_processor(folder: Path, task: str, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a task's model: a tokenizer, an image processor, a feature extractor or a combined processor.

    Raises:
        InputError: The folder has no processor.
        IntegrityError: The processor is damaged.
    """
    spec = task_spec(task)
    loader, kind = _PROCESSORS.get(spec.modalities, ("AutoProcessor", "processor"))
    loader = spec.processor or loader
    try:
        with quiet():
            return open_companion(loader, folder, trust_remote_code=trust_remote_code)
    except (ArtifactNotFoundError, BackendUnavailableError) as error:
        raise InputError(
            f"The {kind} in {folder} cannot be loaded: {error.message}",
            fix=f"copy the {kind} files of the original model into the folder, or pass processor=...",
        ) from error


def longest(limit: int | None, processor: Any, max_length: int | None) -> int | None:
    """Return the number of tokens to which each row is truncated, or `None` for processors without a tokenizer.

    This is `max_length`, or the smaller of the model's position limit (`limit`) and the tokenizer's limit when `max_length` is `None`.

    Raises:
        ConfigError: `max_length` is below 3 or above the number of positions of the model.
    """
    if not hasattr(processor, "model_max_length"):
        return None
    if max_length is not None and (max_length < 3 or (limit is not None and max_length > limit)):
        raise ConfigError(
            f"max_length is {max_length}, but it must be at least 3"
            f"{f' and at most {limit}, the number of positions of the model' if limit is not None else ''}.",
            fix=f"use a max_length from 3 to {limit}." if limit is not None else "use a max_length of at least 3.",
        )
    own_limit = processor.model_max_length if processor.model_max_length < _UNLIMITED else None
    return max_length or min((n for n in (limit, own_limit) if n), default=None)


def encode(rows: DatasetRows, task: str, processor: Any, max_length: int | None) -> EncodedRows:
    """Encode rows for the models of a task.

    Texts are tokenized immediately. Images and sounds are loaded later, when their batch is made.

    Raises:
        InputError: A row has no text.
    """
    task_object = load_task(task)
    with quiet():
        encoded: EncodedRows | None = task_object.encode(rows, processor, max_length)
        return (
            _ENCODERS.get(task_object.spec.modalities, encode_texts)(rows, processor, max_length)
            if encoded is None
            else encoded
        )


_ENCODERS: Mapping[tuple[Modality, ...], Callable[[DatasetRows, Any, int | None], EncodedRows]] = {
    ("image",): encode_images,
    ("audio",): encode_sounds,
}
"""Default encoder of rows, by the input modalities of the task."""


class Batches:
    """Batches that contain exactly the inputs of a graph. They can be iterated several times.

    Args:
        make: Function that returns a new iterable of batches. Inputs that the graph does not have are removed from the batches.
        inputs: Inputs of the graph.
        record: Description of the rows (source, sample size, seed), written to the manifest.
        prompts: Whether the graph is a decoder, which may also need position ids and `logits_to_keep`.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Feeds]],
        inputs: Sequence[TensorSpec],
        record: Mapping[str, Any],
        *,
        prompts: bool,
    ) -> None:
        self.record = dict(record)
        self._make, self._inputs, self._prompts = make, tuple(inputs), prompts

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for feeds in self._make():
            yield for_graph(_as_prompts(feeds, self._inputs) if self._prompts else feeds, self._inputs)


def _bounded(encoded: EncodedRows, rows: Sequence[int]) -> list[Sequence[int]]:
    """Split a batch into parts of at most 256 tokens including padding, to limit the memory of calibration with long rows."""
    if not encoded.tokens:
        return [rows]
    width = max(len(encoded.tokens["input_ids"][row]) for row in rows)
    size = max(1, _CALIBRATION_TOKENS // max(width, 1))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _as_prompts(feeds: Feeds, inputs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Add the decoder inputs that a tokenizer does not return: position ids that skip padding, and `logits_to_keep`."""
    import torch

    decoder_inputs = dict(feeds)
    names = {spec.name for spec in inputs}
    ids = decoder_inputs.get("input_ids")
    if ids is not None and ids.ndim == 2:
        mask = decoder_inputs.get("attention_mask", torch.ones_like(ids))
        if "position_ids" in names:
            decoder_inputs.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    if ids is not None and ids.ndim == 2 and "logits_to_keep" in names:
        decoder_inputs.setdefault("logits_to_keep", torch.arange(ids.shape[1]))
    return decoder_inputs


def for_graph(
    feeds: Feeds, inputs: Sequence[TensorSpec], own_defaults: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the inputs of a graph in the graph's order, with defaults for inputs that a tokenizer may omit.

    Raises:
        InputError: The processor does not produce an input of the graph.
    """
    complete = with_defaults(feeds, [spec.name for spec in inputs], own_defaults)
    for spec in inputs:
        if spec.name not in complete:
            raise InputError(
                f"The graph requires the input {spec.name!r}, but the tokenizer or processor makes only {sorted(feeds)}.",
                fix="pass batches with all inputs of the graph: an iterable of dictionaries of tensors.",
            )
    return {spec.name: complete[spec.name] for spec in inputs}


def _tensors(batch: Any, position: int) -> Feeds:
    """Convert the values of a batch from the caller to tensors, and check that all numbers are finite."""
    import torch

    if not isinstance(batch, Mapping):
        raise InputError(
            f"Batch {position} of the calibration data is of type {type(batch).__name__}, but it must be a dictionary of tensors.",
            fix="pass dictionaries of tensors, rows such as {'text': ...}, a data set or a file.",
        )
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(
                f"The input {name!r} in batch {position} of the calibration data contains NaN or infinite values, which would make "
                "the activation ranges useless.",
                fix="remove the rows with such values.",
            )
    return tensors


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
) -> Batches:
    """Convert calibration data of any form into batches for the graph of an artifact.

    Args:
        artifact: The artifact to calibrate; its folder holds the tokenizer or image processor.
        data: Anything that `accel.data.rows.load_rows` reads, or batches: an iterable of dictionaries of tensors
            or arrays.
        config: Quantization settings; its `samples` and `seed` decide which rows are drawn.
        columns: Column name by use, for columns that cannot be inferred from the task. Labels are not needed.
        split, revision, token: Split, revision and access token of a Hub data set.
        max_length: Number of tokens to which longer rows are truncated.
        batch_size: Rows per batch.
        processor: Processor to use instead of the artifact's own.
        inputs: The inputs in each batch; when `None`, the inputs of the artifact's first graph without its KV cache.

    Raises:
        InputError: The data has no rows, the columns cannot be mapped, or values are not finite.
        QuantizeError: The data has no batches.
    """
    config = config or QuantizeConfig()
    if inputs is None:
        # Leave out the inputs of the KV cache, because the session fills them.
        inputs = [spec for spec in artifact.components[0].inputs if spec.pair is None]
    prompts = artifact.components[0].name == "model" and task_spec(artifact.task).generates
    if isinstance(data, Batches):
        return data
    if not is_rows(data, {spec.name for spec in inputs}):
        # Store the batches of a generator in a list, because the quantizer may read them several times.
        batches = list(itertools.islice(data, config.samples)) if isinstance(data, Iterator) else data
        if isinstance(batches, Sequence) and not batches:
            raise QuantizeError("The calibration data has no batches.", fix="pass at least one batch.")
        return Batches(
            lambda: map(_tensors, batches, itertools.count()), inputs, {"source": "batches"}, prompts=prompts
        )
    rows = take(load_rows(data, split=split, revision=revision, token=token), config.samples, config.seed)
    rows = map_columns(rows, artifact.task, columns, answers=False)
    processor = processor or load_processor(artifact.path, artifact.task)
    limit = artifact.components[0].max_sizes.get("sequence")
    encoded = encode(rows, artifact.task, processor, longest(limit, processor, max_length))
    plan = [part for group in encoded.plan(batch_size) for part in _bounded(encoded, group)]
    return Batches(lambda: map(encoded.batch, plan), inputs, rows.sample.to_dict(), prompts=prompts)


def data_name(data: Any) -> str:
    """Return the name of the data for messages: its path, or its type."""
    return os.fspath(data) if isinstance(data, str | os.PathLike) else f"a {type(data).__name__}"
