"""Handle standard output that cannot be written: it is closed, the disk is full, or the pipe has no reader."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, TextIO, cast

from .exit_codes import FAILED, PIPE_CLOSED

_OUTPUT, _ERRORS = 1, 2


class CheckedStdout:
    """Standard output that stores the error of a failed write. If Python runs without an output buffer (`PYTHONUNBUFFERED`), no
    later write or flush reports the error again.

    Args:
        stream: Standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self.failed: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text to standard output, and store an `OSError` before it is raised."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        """Flush standard output, and store an `OSError` before it is raised."""
        try:
            self._stream.flush()
        except OSError as error:
            self.failed = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def watch_output() -> CheckedStdout:
    """Wrap standard output so that failed writes are stored. If standard output or standard error is closed, open the
    null device for it.

    Without the null device, the next opened file would get the same file descriptor, and libraries would print into
    that file. Writing to a closed output is an error at the flush, which is not reported if standard error is closed.
    """
    for number, name, mode in ((_OUTPUT, "stdout", os.O_RDONLY), (_ERRORS, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _redirect(number, mode)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    watched = CheckedStdout(sys.stdout)
    sys.stdout = cast(TextIO, watched)
    return watched


def lost_output(stream: Any = None) -> int | None:
    """Flush standard output. If the flush or an earlier write failed, report the error once and discard the remaining
    output.

    Args:
        stream: The result of `watch_output`; `sys.stdout` when `None`.

    Returns:
        The exit code if output was lost, or `None`.
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
        # Redirect to the null device, because Python would flush again at exit and print an error.
        _redirect(stream.fileno(), os.O_WRONLY)
        stream.flush()
    stream.failed = None
    if failed.errno == errno.EPIPE:
        return PIPE_CLOSED
    with contextlib.suppress(OSError):
        sys.stderr.write(
            f"Error: The output cannot be written: {failed.strerror or failed}.\n"
            "Fix: redirect the output to a writable file on a disk with free space.\n"
        )
    return FAILED


def _redirect(number: int, mode: int) -> None:
    """Point a file descriptor to the null device."""
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)
