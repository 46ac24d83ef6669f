"""The steps of a stock pipeline as work of the engine: its answers look exactly like the pipeline's."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers.pipelines.base import ChunkPipeline, Pipeline, pad_collate_fn
from transformers.pipelines.pt_utils import PipelineIterator

from ..errors import InputError, did_you_mean
from ..models.pipelines.pipeline_arguments import known_options
from .batching import can_pad
from .job import Options, Prepared, Row, UnknownOptionError


class _Recorded(Exception):  # noqa: N818  # control flow
    """What a pipeline's call was about to compute."""

    def __init__(self, items: Sequence[Any], parameters: Sequence[Mapping[str, Any]]) -> None:
        self.items = items
        self.parameters = parameters


class _Script:
    """Stands in for a pipeline's own loop: the first time it says what is to be computed, the second time it gives the answers.

    What a pipeline's `__call__` does around the loop, to its inputs and to its answers, stays its own.
    """

    def __init__(self) -> None:
        self._answers: Iterator[Any] | None = None

    def play(self, pipe: Pipeline, answers: Sequence[Any] | None, inputs: Any, options: Options) -> Any:
        """Call the pipeline: without answers it raises `_Recorded`."""
        self._answers = None if answers is None else iter(answers)
        return pipe(inputs, **options)

    def run_single(self, inputs: Any, *parameters: Mapping[str, Any]) -> Any:
        """Of one input."""
        return next(self._loop([inputs], *parameters))

    def get_iterator(self, inputs: Any, workers: int, batch_size: int, *parameters: Mapping[str, Any]) -> Iterator[Any]:
        """Of several."""
        return self._loop(list(inputs), *parameters)

    def _loop(self, items: Sequence[Any], *parameters: Mapping[str, Any]) -> Iterator[Any]:
        return self._answers if self._answers is not None else _record(items, parameters)


def _record(items: Sequence[Any], parameters: Sequence[Mapping[str, Any]]) -> NoReturn:
    raise _Recorded(items, parameters)


class PipelineWork:
    """The steps of a stock pipeline, with rows of several callers in one call of the model."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._script = _Script()
        pipe.run_single, pipe.get_iterator = self._script.run_single, self._script.get_iterator
        self._known = known_options(type(pipe))
        self._chunks = isinstance(pipe, ChunkPipeline)
        tokenizer = pipe.tokenizer
        self._collate = None
        if tokenizer is None or tokenizer.pad_token_id is not None:
            self._collate = pad_collate_fn(tokenizer, pipe.feature_extractor or pipe.image_processor)
        self._pads = self._collate is not None and can_pad(pipe.model)
        self._left = tokenizer is not None and tokenizer.padding_side == "left"
        component = pipe.model.artifact.components[0]
        self._limit = component.max_sizes.get("sequence", 0)
        self._sequences = {
            spec.name: spec.shape.index("sequence") for spec in component.outputs if "sequence" in spec.shape
        }

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        if isinstance(inputs, types.GeneratorType):
            raise InputError("A request cannot be a generator.", fix="pass a list.")
        self._check(options)
        try:
            # Nothing to compute: an empty list.
            return Prepared([], self._script.play(self._pipe, None, inputs, options))
        except _Recorded as found:
            items, (before, forward, after) = found.items, found.parameters
        except TypeError as error:
            raise InputError(
                f"{self._pipe.task} does not take this: {error}", fix="see transformers' pipeline."
            ) from error
        rows = []
        for item in items:
            made = self._pipe.preprocess(item, **before)
            rows.append([self._row(chunk, forward) for chunk in (made if self._chunks else (made,))])
        return Prepared(rows, after)

    def _check(self, options: Options) -> None:
        """Refuse options that the pipeline would pass over.

        Raises:
            InputError: There are some.
        """
        unknown = sorted(set(options) - self._known) if self._known is not None else []
        if unknown:
            raise UnknownOptionError(
                f"{self._pipe.task} has no option {unknown[0]!r}.{did_you_mean(unknown[0], self._known or ())}",
                fix="see transformers' pipeline.",
            )

    def _row(self, inputs: Mapping[str, Any], forward: Mapping[str, Any]) -> Row:
        ids = inputs.get("input_ids")
        length = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else None
        # What padding does not make equal has to be.
        shapes = tuple(
            (name, tuple(value.shape[1:]))
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and (length is None or value.shape[1:2] != (length,))
        )
        if self._limit and length is not None and length > self._limit:
            raise InputError(
                f"The text has {length} tokens; the model has {self._limit} positions.",
                fix="shorten it, or have it truncated.",
            )
        alone = () if self._pads else (length,)
        options = tuple(sorted((name, repr(value)) for name, value in forward.items()))
        return Row(inputs=(inputs, forward), length=length or 1, group=(self._pipe.task, alone, shapes, options))

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        forward = rows[0].inputs[1]
        if len(rows) == 1:
            return [self._pipe.forward(dict(rows[0].inputs[0]), **forward)]
        items = [row.inputs[0] for row in rows]
        batch = self._collate(items) if self._collate is not None else _stacked(items)
        split = PipelineIterator([batch], self._pipe.forward, forward, loader_batch_size=len(rows))
        width = max(row.length for row in rows)
        return [self._unpadded(row, found, width) for row, found in zip(rows, split, strict=True)]

    def _unpadded(self, row: Row, found: Any, width: int) -> Any:
        """A row of a batch as it would be alone."""
        if row.length == width:
            return found
        start = width - row.length if self._left else 0
        inputs = row.inputs[0]
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                if isinstance(inputs.get(name), torch.Tensor):
                    found[name] = inputs[name]
                elif name in self._sequences and value.shape[self._sequences[name]] == width:
                    found[name] = value.narrow(self._sequences[name], start, row.length)
        return found

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        if not outputs:
            return memo
        answers = [self._pipe.postprocess(found if self._chunks else found[0], **memo) for found in outputs]
        return self._script.play(self._pipe, answers, inputs, options)


def _stacked(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Items of one length, without padding."""
    return {
        name: torch.cat([item[name] for item in items])
        if isinstance(items[0][name], torch.Tensor)
        else [item[name] for item in items]
        for name in items[0]
    }
