"""Standard output that cannot be written: closed, on a full disk, or a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, TextIO, cast

from .exit_codes import FAILED, PIPE_CLOSED

_OUTPUT, _ERRORS = 1, 2


class Watched:
    """Standard output, and what went wrong when it was written: without a buffer (`PYTHONUNBUFFERED`) no later write tells.

    Args:
        stream: Standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self.failed: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        """As the stream does."""
        try:
            self._stream.flush()
        except OSError as error:
            self.failed = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def watch_output() -> Watched:
    """Watch standard output, and give it and standard error a file each where the caller closed them.

    Else the next file that is opened gets their number, and what a library prints would go into it. What is written to a closed
    output is an error when it is flushed, and is not said where standard error is closed.
    """
    for number, name, mode in ((_OUTPUT, "stdout", os.O_RDONLY), (_ERRORS, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _redirect(number, mode)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    watched = Watched(sys.stdout)
    sys.stdout = cast(TextIO, watched)
    return watched


def lost_output(stream: Any = None) -> int | None:
    """Write what standard output still holds. Where that fails, or failed before, say so once, and drop the rest.

    Args:
        stream: Standard output as `watch_output` returned it; `sys.stdout` when `None`.

    Returns:
        The exit code where output was lost, and `None` where it was not.
    """
    stream = stream or sys.stdout
    failed = None
    try:
        stream.flush()
    except OSError as error:
        failed = error
    failed = getattr(stream, "failed", None) or failed
    if failed is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        # What is left would be tried again, and complained about, when Python ends.
        _redirect(stream.fileno(), os.O_WRONLY)
        stream.flush()
    stream.failed = None
    if failed.errno == errno.EPIPE:
        return PIPE_CLOSED
    with contextlib.suppress(OSError):
        sys.stderr.write(
            f"Error: The output cannot be written: {failed.strerror or failed}.\n"
            "Fix: send it to a file or a terminal that can be written and has room.\n"
        )
    return FAILED


def _redirect(number: int, mode: int) -> None:
    """Let a file number mean the null device."""
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)
