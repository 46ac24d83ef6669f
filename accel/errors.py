"""Every error that `accel` raises on purpose.

    AccelError
    ├── ConfigError (ValueError)                 an option with a value that cannot work
    ├── TaskError (ValueError)                   an unknown task, or one that does not fit the model
    ├── InputError (ValueError)                  a call with inputs that the graph does not take
    ├── ArtifactError
    │   ├── ArtifactNotFoundError (FileNotFoundError)  no graph, or not the file asked for
    │   ├── OutputFolderError (FileExistsError)  a folder that must not be written to
    │   ├── IntegrityError                       a file is missing, truncated or changed
    │   ├── SchemaError                          a manifest that this version does not understand
    │   └── TargetMismatchError                  compiled for other hardware or software
    ├── BackendError
    │   ├── UnknownBackendError (LookupError, ValueError)  no plugin has that name
    │   ├── BackendUnavailableError (ImportError)  installed or named, but it cannot run here
    │   ├── PluginError                          a plugin that breaks the contract
    │   └── SessionError (RuntimeError)          a runtime failed to open or to run a graph
    │       ├── SessionClosedError               `run` after `close`
    │       └── NotFiniteError                   a model computed NaN or infinity
    ├── ServingError
    │   ├── QueueFullError                       more is waiting than may wait
    │   ├── RequestTimeoutError (TimeoutError)   no answer within the time given
    │   └── EngineClosedError (RuntimeError)     a call before the engine was started, or after it was closed
    └── StageError
        ├── PrepareError                         a PyTorch model that could not be accelerated or made ready to train
        ├── ExportError                          a model that could not be captured
        ├── OptimizeError
        ├── QuantizeError
        │   └── BudgetError                      nothing stays inside the accuracy budget
        └── ValidationError                      the result differs from what it was made from

An error says what happened, the values seen and expected, and in a last line `Fix:` what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AccelError(Exception):
    """Base of all errors raised by `accel`.

    Args:
        message: What happened, with the values seen and the values expected.
        fix: A command or a setting that helps; printed as the last line, after `Fix: `.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # With the notes and what was added, such as the time after which to ask again.
        return _rebuild, (type(self), self.message, self.fix), vars(self)


def _rebuild(cls: type[AccelError], message: str, fix: str | None) -> AccelError:
    return cls(message, fix=fix)


class ConfigError(AccelError, ValueError):
    """An option that does not exist or has a value that cannot work."""


class TaskError(AccelError, ValueError):
    """A task that is unknown or does not fit the model."""


class InputError(AccelError, ValueError):
    """Inputs that the graph does not take, or a missing one."""


class ArtifactError(AccelError):
    """Base of the errors about folders and files."""


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """The folder, or the graph asked for in it, does not exist."""


class OutputFolderError(ArtifactError, FileExistsError):
    """The output folder is the input folder, or it is not empty."""


class IntegrityError(ArtifactError):
    """A file of an artifact is missing, truncated or changed since it was written."""


class SchemaError(ArtifactError):
    """A manifest that is malformed, or newer than this version of `accel`."""


class TargetMismatchError(ArtifactError):
    """An artifact compiled for other hardware or another runtime version."""


class BackendError(AccelError):
    """Base of the errors about backends and their runtimes."""


class UnknownBackendError(BackendError, LookupError, ValueError):
    """No installed plugin has the name asked for."""


class BackendUnavailableError(BackendError, ImportError):
    """A known backend that cannot run here; the message holds every reason."""


class PluginError(BackendError):
    """A plugin that breaks the plugin contract; addressed to its author."""


class SessionError(BackendError, RuntimeError):
    """A runtime failed to open a graph or to run it."""


class SessionClosedError(SessionError):
    """`run` was called after `close`."""


class NotFiniteError(SessionError):
    """A model computed NaN or infinity, of which no answer can be made."""


class ServingError(AccelError):
    """Base of the errors about serving."""


class QueueFullError(ServingError):
    """More is waiting for the model than may wait.

    Attributes:
        retry_after_s: After how many seconds there is room, as it looks now.
    """

    retry_after_s: float = 1.0


class RequestTimeoutError(ServingError, TimeoutError):
    """No answer came within the time given; the request was dropped."""


class EngineClosedError(ServingError, RuntimeError):
    """A call of an engine that was not started, or was closed."""


class StageError(AccelError):
    """Base of the errors of the stages prepare, export, optimize, quantize and validate. Nothing was written."""


class PrepareError(StageError):
    """A PyTorch model that could not be prepared; it is as it was."""


class ExportError(StageError):
    """A model that could not be captured as a graph."""


class OptimizeError(StageError):
    """A graph that could not be optimized."""


class QuantizeError(StageError):
    """A graph that could not be quantized."""


class BudgetError(QuantizeError):
    """No recipe stays inside the accuracy budget; the message lists everything tried."""


class ValidationError(StageError):
    """The result differs from what it was made from by more than the tolerance."""


_LONGEST_NAME = 200
"""Looking for the like of a longer one takes seconds, and nobody mistypes it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'cpu'?"` for a mistyped name, or an empty string."""
    if len(name) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(name.lower(), {k.lower(): k for k in known}, n=1, cutoff=0.55)
    original = {k.lower(): k for k in known}
    return f" Did you mean {original[close[0]]!r}?" if close else ""
