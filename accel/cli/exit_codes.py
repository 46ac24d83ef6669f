"""Exit codes of the `accel` command; 0 is success."""

from __future__ import annotations

from ..errors import AccelError, ConfigError, UnknownBackendError

FAILED = 1
"""The command failed."""
USAGE = 2
"""An option or a value is invalid."""
PIPE_CLOSED = 141
"""The reader of the output closed the pipe. Shells report the same code for programs that are ended by SIGPIPE."""
INTERRUPTED = 130
"""The user pressed Ctrl-C."""


def exit_code(error: AccelError) -> int:
    """Return the exit code for an error."""
    return USAGE if isinstance(error, ConfigError | UnknownBackendError) else FAILED
