"""All errors that `accel` raises intentionally.

    AccelError
    ├── ConfigError (ValueError)                 an option with an invalid value
    ├── TaskError (ValueError)                   an unknown task, or a task that does not fit the model
    ├── InputError (ValueError)                  an unexpected, missing or invalid input of a call
    ├── ArtifactError
    │   ├── ArtifactNotFoundError (FileNotFoundError)  the folder or the requested graph does not exist
    │   ├── OutputFolderError (FileExistsError)  a folder that must not be written to
    │   ├── IntegrityError                       a file is missing, truncated or changed
    │   │   └── ProbeError                       the outputs on this machine differ from those of PyTorch
    │   ├── SchemaError                          a manifest that this version cannot read
    │   └── TargetMismatchError                  compiled for other hardware or software
    ├── BackendError
    │   ├── UnknownBackendError (LookupError, ValueError)  no plugin has that name
    │   ├── BackendUnavailableError (ImportError)  a known backend that cannot run on this machine
    │   ├── PluginError                          a plugin that violates the contract
    │   └── SessionError (RuntimeError)          a runtime failed to open or to run a graph
    │       ├── SessionClosedError               `run` on a closed session
    │       └── NotFiniteError                   a model computed NaN or infinity
    ├── ServingError
    │   ├── QueueFullError                       the queue of the model is full
    │   ├── RequestTimeoutError (TimeoutError)   no result within the time limit
    │   └── EngineClosedError (RuntimeError)     a call before the engine was started, or after it was closed
    └── StageError
        ├── PrepareError                         a PyTorch model that cannot be accelerated or prepared for training
        ├── ExportError                          a model that cannot be exported to a graph
        ├── OptimizeError
        ├── QuantizeError
        │   └── BudgetError                      no recipe stays within the accuracy budget
        └── ValidationError                      the result differs from its source

An error message has the cause, the actual and expected values, and a last line `Fix:` with the solution.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AccelError(Exception):
    """Base class of all errors raised by `accel`.

    Args:
        message: The cause of the error, with actual and expected values.
        fix: A command or setting that solves the problem. It is printed as the last line, after `Fix: `.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Include notes and added attributes in the pickle, such as `retry_after_s`.
        return _rebuild, (type(self), self.message, self.fix), vars(self)


def _rebuild(cls: type[AccelError], message: str, fix: str | None) -> AccelError:
    return cls(message, fix=fix)


class ConfigError(AccelError, ValueError):
    """An option does not exist or has an invalid value."""


class TaskError(AccelError, ValueError):
    """A task is unknown or does not fit the model."""


class InputError(AccelError, ValueError):
    """A call has an unexpected, missing or invalid input."""


class ArtifactError(AccelError):
    """Base class of errors about folders and files."""


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """The folder, or the requested graph in it, does not exist."""


class OutputFolderError(ArtifactError, FileExistsError):
    """The output folder is the input folder, is not empty, or cannot be written."""


class IntegrityError(ArtifactError):
    """A file of an artifact is missing, truncated or changed since it was written."""


class ProbeError(IntegrityError):
    """An artifact computes other outputs on this machine than PyTorch, for the inputs of its probes."""


class SchemaError(ArtifactError):
    """A manifest is malformed, or newer than this version of `accel`."""


class TargetMismatchError(ArtifactError):
    """An artifact was compiled for other hardware or another runtime version."""


class BackendError(AccelError):
    """Base class of errors about backends and their runtimes."""


class UnknownBackendError(BackendError, LookupError, ValueError):
    """No installed plugin has the requested name."""


class BackendUnavailableError(BackendError, ImportError):
    """A known backend cannot run on this machine. The message contains all reasons."""


class PluginError(BackendError):
    """A plugin violates the plugin contract. The message is for its author."""


class SessionError(BackendError, RuntimeError):
    """A runtime failed to open or to run a graph."""


class SessionClosedError(SessionError):
    """`run` was called on a closed session."""


class NotFiniteError(SessionError):
    """A model computed NaN or infinity, so there is no valid result."""


class ServingError(AccelError):
    """Base class of errors about serving."""


class QueueFullError(ServingError):
    """The queue of the model is full.

    Attributes:
        retry_after_s: Estimated number of seconds until the queue has room.
    """

    retry_after_s: float = 1.0


class RequestTimeoutError(ServingError, TimeoutError):
    """The request did not finish within its time limit and was dropped."""


class EngineClosedError(ServingError, RuntimeError):
    """An engine was called before it was started, or after it was closed."""


class StageError(AccelError):
    """Base class of errors of the stages prepare, export, optimize, quantize and validate. Nothing was written."""


class PrepareError(StageError):
    """A PyTorch model cannot be prepared; the model is unchanged."""


class ExportError(StageError):
    """A model cannot be exported to a graph."""


class OptimizeError(StageError):
    """A graph cannot be optimized."""


class QuantizeError(StageError):
    """A graph cannot be quantized."""


class BudgetError(QuantizeError):
    """No quantization recipe stays within the accuracy budget. The message lists all attempts."""


class ValidationError(StageError):
    """The result differs from its source by more than the tolerance."""


_LONGEST_NAME = 200
"""Longest name that gets a suggestion. The search for longer names takes seconds, and they are rarely mistyped."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean 'cpu'?"` for a mistyped name, or an empty string."""
    if len(name) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name.lower(), {k.lower(): k for k in candidates}, n=1, cutoff=0.55)
    original = {k.lower(): k for k in candidates}
    return f" Did you mean {original[close[0]]!r}?" if close else ""
