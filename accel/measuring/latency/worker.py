"""A process that holds one variant, asked by its parent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...config import available_processors
from ...errors import SessionError
from ..processes import ANSWER_TIMEOUT_S, WorkerLostError, exit_reason, start_process
from .calls import serve
from .variants import Block, Loaded, Traffic, Variant, Workload


class Worker:
    """A process that holds one variant.

    Args:
        variant: What to hold.
        threads: That work on one call; what the process may use when `None`.
        until: When, on the clock of `time.perf_counter`, it must have answered everything; `None`: never.

    Raises:
        SessionError: From every method: the variant failed, its process died, or it did not answer.
    """

    def __init__(self, variant: Variant, threads: int | None = None, until: float | None = None) -> None:
        self.variant = variant
        self._until = until
        self._process, self._pipe = start_process(serve, variant, threads or available_processors())

    def load(self) -> Loaded:
        """Load the variant."""
        self._answer()  # the imports are done
        loaded: Loaded = self._ask("load")
        return loaded

    def sample(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
        """Inputs of these sizes for the variant, without padding, as arrays."""
        made: dict[str, Any] = self._ask("sample", dict(sizes), seed)
        return made

    def prepare(self, workload: Workload) -> None:
        """Send a workload; the calls below name it."""
        self._ask("prepare", workload)

    def outputs(self, workload: str, case: int = 0) -> dict[str, Any]:
        """What the variant answers to a case, as arrays."""
        found: dict[str, Any] = self._ask("outputs", workload, case)
        return found

    def time(
        self,
        workload: str,
        calls: int,
        first: int = 0,
        traffic: Traffic | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Block:
        """Time calls, from the case `first` on."""
        block: Block = self._ask("time", workload, calls, first, traffic or Traffic(), patience=timeout_s)
        return block

    def peak_memory(self) -> int:
        """Largest resident memory of the process so far, in bytes; the interpreter and PyTorch take part of it."""
        peak: int = self._ask("memory")
        return peak

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(model, *args)` in the process, for a function of a module."""
        return self._ask("call", function, args)

    def hang_up(self) -> None:
        """Let the process end by itself; `close` waits for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process."""
        self.hang_up()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)

    def _ask(self, verb: str, *args: Any, patience: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            self._pipe.send((verb, args))
        except (OSError, ValueError) as error:
            raise self._died() from error
        return self._answer(patience)

    def _answer(self, patience: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            if self._until is not None:
                patience = min(patience, max(self._until - time.perf_counter(), 0.1))
            if not self._pipe.poll(patience):
                self._process.kill()
                raise WorkerLostError(
                    f"{self.variant.name} did not answer for {patience:.0f} s.",
                    fix="measure it alone, or with smaller batches and shorter sequences.",
                    late=True,
                )
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if not good:
            raise SessionError(f"{self.variant.name} failed: {value}")
        return value

    def _died(self) -> WorkerLostError:
        self._process.join(timeout=5)
        return WorkerLostError(
            f"The process of {self.variant.name} died ({exit_reason(self._process.exitcode)}).",
            fix="run it alone to see why.",
        )
