"""Run a transformers pipeline in steps, as a `Work` of the engine. The results are equal to the pipeline's results."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.pipelines.base import ChunkPipeline, Pipeline, pad_collate_fn
from transformers.pipelines.pt_utils import PipelineIterator

from ..errors import InputError, did_you_mean
from ..models.pipelines.pipeline_arguments import known_options
from .batch_formation import can_pad
from .job import Options, PreparedRequest, Row, UnknownOptionError


class _PipelineStopped(Exception):  # noqa: N818  # used for control flow, not an error
    """Raised to stop a pipeline's call: contains the items to compute and the parameters of the pipeline's three steps."""


class _PipelineLoopMixin:
    """Mixin that replaces a pipeline's loop over its items. If `answers` is not set, the mixin stops the pipeline with
    `_PipelineStopped`, which contains the items. If `answers` is set, the mixin returns `answers`.

    The pipeline's `__call__` still converts its inputs and its results.
    """

    answers: Iterator[Any] | None = None

    def run_single(self, inputs: Any, *parameters: Mapping[str, Any]) -> Any:
        """Replace the pipeline's method that processes one input."""
        return next(self.get_iterator([inputs], 0, 1, *parameters))

    def get_iterator(self, inputs: Any, workers: int, batch_size: int, *parameters: Mapping[str, Any]) -> Iterator[Any]:
        """Replace the pipeline's method that processes several inputs."""
        if self.answers is None:
            raise _PipelineStopped(list(inputs), parameters)
        return self.answers


class PipelineHandler:
    """Run the steps of a pipeline, with rows of several callers in one model call."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._loop = _PipelineLoopMixin()
        pipe.run_single, pipe.get_iterator = self._loop.run_single, self._loop.get_iterator
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

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Convert the inputs of a request to rows with the pipeline's `preprocess`."""
        if isinstance(inputs, types.GeneratorType):
            raise InputError("The inputs of a request cannot be a generator.", fix="pass a list.")
        self._check(options)
        try:
            # If the pipeline returns here, the input is an empty list and there is nothing to compute.
            self._loop.answers = None
            return PreparedRequest([], self._pipe(inputs, **options))
        except _PipelineStopped as recorded:
            items, (before, forward, after) = recorded.args
        except TypeError as error:
            raise InputError(
                f"The pipeline for {self._pipe.task} does not accept the arguments: {error}",
                fix="see the arguments of this pipeline in the documentation of transformers.",
            ) from error
        rows = []
        for item in items:
            inputs_of_item = self._pipe.preprocess(item, **before)
            rows.append(
                [self._row(chunk, forward) for chunk in (inputs_of_item if self._chunks else (inputs_of_item,))]
            )
        return PreparedRequest(rows, after)

    def _check(self, options: Options) -> None:
        """Raise if a request has options that the pipeline would ignore.

        Raises:
            UnknownOptionError: The pipeline has no option of that name.
        """
        unknown = sorted(set(options) - self._known) if self._known is not None else []
        if unknown:
            raise UnknownOptionError(
                f"The pipeline for {self._pipe.task} has no option {unknown[0]!r}."
                f"{did_you_mean(unknown[0], self._known or ())}",
                fix="see the options of this pipeline in the documentation of transformers.",
            )

    def _row(self, inputs: Mapping[str, Any], forward: Mapping[str, Any]) -> Row:
        ids = inputs.get("input_ids")
        length = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else None
        # Rows of a batch must have equal sizes in all dimensions that are not padded.
        shapes = tuple(
            (name, tuple(value.shape[1:]))
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and (length is None or value.shape[1:2] != (length,))
        )
        if self._limit and length is not None and length > self._limit:
            raise InputError(
                f"The text has {length} tokens, but the model accepts at most {self._limit}.",
                fix="shorten the text, or pass truncation=True if the pipeline has this option.",
            )
        alone = () if self._pads else (length,)
        options = tuple(sorted((name, repr(value)) for name, value in forward.items()))
        return Row(inputs=(inputs, forward), length=length or 1, group=(self._pipe.task, alone, shapes, options))

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Run the rows in one call of the pipeline's `forward` and return one output for each row."""
        forward = rows[0].inputs[1]
        if len(rows) == 1:
            return [self._pipe.forward(dict(rows[0].inputs[0]), **forward)]
        items = [row.inputs[0] for row in rows]
        batch = self._collate(items) if self._collate is not None else _stacked(items)
        split = PipelineIterator([batch], self._pipe.forward, forward, loader_batch_size=len(rows))
        width = max(row.length for row in rows)
        return [self._unpadded(row, output, width) for row, output in zip(rows, split, strict=True)]

    def _unpadded(self, row: Row, output: Any, width: int) -> Any:
        """Return the output of a row without the padding positions."""
        if row.length == width:
            return output
        start = width - row.length if self._left else 0
        inputs = row.inputs[0]
        for name, value in output.items():
            if isinstance(value, torch.Tensor):
                if isinstance(inputs.get(name), torch.Tensor):
                    output[name] = inputs[name]
                elif name in self._sequences and value.shape[self._sequences[name]] == width:
                    output[name] = value.narrow(self._sequences[name], start, row.length)
        return output

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Make the result of a request from the outputs with the pipeline's `postprocess`."""
        if not outputs:
            return memo
        answers = [self._pipe.postprocess(output if self._chunks else output[0], **memo) for output in outputs]
        self._loop.answers = iter(answers)
        return self._pipe(inputs, **options)


def _stacked(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the tensors of items with equal lengths along the batch dimension; collect other values in lists."""
    return {
        name: torch.cat([item[name] for item in items])
        if isinstance(items[0][name], torch.Tensor)
        else [item[name] for item in items]
        for name in items[0]
    }
