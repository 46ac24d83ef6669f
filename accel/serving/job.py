"""A request while it is served: its inputs, the rows they became, how long each step took, and its answer."""

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
    """Options that an operation does not have: the fault of whoever asks, whatever the inputs are."""


@dataclass(slots=True, kw_only=True)
class Timing:
    """How long the steps of a request took, in seconds, and how large the calls were that it was part of.

    Attributes:
        tokenization_s: Making the model's inputs.
        queue_s: Waiting, for all steps together.
        inference_s: The calls of the model that it was part of; those that ran side by side count once.
        total_s: From its arrival to its answer.
        tokens: Of its rows, padding not counted.
        batch: Rows in the largest of those calls, other requests' included.
    """

    tokenization_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    batch: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A row of a batch.

    Attributes:
        inputs: What the work made for the model.
        length: Its tokens; 1 where there are none.
        count: How many rows of a batch it takes.
        group: Rows of one group can share a call.
        job: Whose it is.
        place: Which of its rows.
    """

    inputs: Any
    length: int = 1
    count: int = 1
    group: Hashable = None
    job: Job = field(init=False)
    place: int = field(init=False)


@dataclass(slots=True)
class Prepared:
    """A request's inputs as rows.

    Attributes:
        rows: Those of each input.
        memo: Whatever the work needs again to make the answer.
    """

    rows: list[list[Row]]
    memo: Any = None


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        operation: What is done.
        inputs: Of the operation.
        options: Likewise.
        arrived: When, by `time.perf_counter`.
        size: How many inputs it holds.
        future: Gets the answer.
        timing: See `Timing`.
        rows: Of all inputs, one after another.
        ends: Where the rows of each input end.
        memo: What the work needs again for the answer.
        outputs: Of the model, a row each.
        left: Rows that are not computed yet.
        last_end: When the last step ended.
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

    def take(self, made: Prepared) -> None:
        """What became of its inputs."""
        for rows in made.rows:
            for row in rows:
                row.job, row.place = self, len(self.rows)
                self.rows.append(row)
            self.ends.append(len(self.rows))
        self.memo = made.memo
        self.left = len(self.rows)
        self.outputs = [None] * self.left
        self.timing.tokens = sum(row.length * row.count for row in self.rows)

    def outputs_by_input(self) -> list[list[Any]]:
        """The outputs of each input's rows."""
        starts = [0, *self.ends][: len(self.ends)]
        return [self.outputs[start:end] for start, end in zip(starts, self.ends, strict=True)]


class Work(Protocol):
    """One operation of one model, for one thread: tokenizers keep settings between calls."""

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """The rows of a request."""

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Outputs of the model, one a row, in one call."""

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """The answer to a request, of the outputs of each input's rows."""
