"""What a command's exit code says: 0 that it did what it promised."""

from __future__ import annotations

from ..errors import AccelError, ConfigError, UnknownBackendError

FAILED = 1
"""It did not do what it promised."""
USAGE = 2
"""An option or a value that cannot work."""
PIPE_CLOSED = 141
"""Whoever read the output wants no more of it; what a shell says of tools that the signal SIGPIPE ends."""
INTERRUPTED = 130
"""Ctrl-C."""


def exit_code(error: AccelError) -> int:
    """The code for an error."""
    return USAGE if isinstance(error, ConfigError | UnknownBackendError) else FAILED
