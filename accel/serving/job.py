"""A request while it is processed: its inputs, their rows, the duration of each step, and its result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError

if TYPE_CHECKING:
    from .operations import Operation


Options = Mapping[str, Any]


class UnknownOptionError(InputError):
    """Raised if a request has options that its operation does not support, regardless of the inputs."""


@dataclass(slots=True, kw_only=True)
class Timing:
    """Durations of the steps of a request in seconds, and the sizes of its model calls.

    Attributes:
        tokenization_s: Seconds spent to make the model's inputs.
        queue_s: Seconds spent waiting, over all steps.
        inference_s: Seconds spent in the model calls of the request; parallel calls are counted once.
        total_s: Seconds from the arrival of the request to its result; 0 if it has none.
        tokens: Number of tokens in the rows of the request, without padding.
        batch: Number of rows in the largest batch of the request, including rows of other requests.
    """

    tokenization_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    batch: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """One row of a batch, or several rows of one request that must stay together.

    Attributes:
        inputs: The model's inputs, as returned by `RequestHandler.prepare`.
        length: Number of tokens; 1 for inputs without tokens.
        count: Number of batch rows in this object.
        group: Key of rows that can share a model call: only rows with equal keys run together.
        job: The request that the row belongs to.
        place: Index of the row among the rows of its request.
    """

    inputs: Any
    length: int = 1
    count: int = 1
    group: Hashable = None
    job: Job = field(init=False)
    place: int = field(init=False)


@dataclass(slots=True)
class PreparedRequest:
    """The inputs of a request, converted to rows.

    Attributes:
        rows: For each input, the list of its rows.
        memo: Values that `RequestHandler.finish` needs to make the result.
    """

    rows: list[list[Row]]
    memo: Any = None


@dataclass(slots=True, eq=False)
class Job:
    """One request, from its arrival to its result.

    Attributes:
        operation: The operation to run.
        inputs: The inputs of the request.
        options: The options of the request.
        arrived: Time of arrival in seconds, from `time.perf_counter`.
        size: Number of inputs.
        future: Receives the result or the error.
        timing: Durations of the steps, in seconds.
        rows: Rows of all inputs.
        ends: For each input, the index in `rows` after its last row.
        memo: Values that `RequestHandler.finish` needs to make the result.
        outputs: The model's output for each row.
        left: Number of rows that have not run yet.
        last_end: Time at which the last step ended, from `time.perf_counter`.
    """

    operation: Operation
    inputs: Any
    options: Mapping[str, Any]
    arrived: float
    size: int = 1
    future: Future[Any] = field(default_factory=Future)
    timing: Timing = field(default_factory=Timing)
    rows: list[Row] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    memo: Any = None
    outputs: list[Any] = field(default_factory=list)
    left: int = 0
    last_end: float = 0.0

    def take(self, prepared: PreparedRequest) -> None:
        """Add the rows of the request's inputs."""
        for rows in prepared.rows:
            for row in rows:
                row.job, row.place = self, len(self.rows)
                self.rows.append(row)
            self.ends.append(len(self.rows))
        self.memo = prepared.memo
        self.left = len(self.rows)
        self.outputs = [None] * self.left
        self.timing.tokens = sum(row.length * row.count for row in self.rows)

    def outputs_by_input(self) -> list[list[Any]]:
        """Return the model's outputs, grouped by input: one list of row outputs for each input."""
        starts = [0, *self.ends][: len(self.ends)]
        return [self.outputs[start:end] for start, end in zip(starts, self.ends, strict=True)]


class RequestHandler(Protocol):
    """Implementation of one operation for one model. Each thread has its own object, because tokenizers keep state between calls."""

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Convert the inputs of a request to rows."""

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Run the rows in one model call and return one output for each row."""

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Make the result of a request from the outputs of each input's rows."""
