"""What the libraries below us print, warn and log while they work, held back unless somebody wants to read it."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_AT_IMPORT = ("torchao", "torch.utils._pytree")
_CHATTY = ("transformers", "torch", "torchao", "onnxscript", "onnx_ir", "onnx")


class _OtherThreads:
    """Standard error without what this thread writes: `torch.export` prints whole graphs there, a progress bar has a thread.

    Args:
        stream: Standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence upstream prints, warnings and log lines, unless `accel`'s own logger is at DEBUG (`--verbose`)."""
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    from transformers.utils import logging as transformers_logging

    # Of the loggers below them only those with a level of their own, as the others take their parent's: each change of a
    # level empties the caches of all loggers, and PyTorch has hundreds.
    known = list(logging.root.manager.loggerDict.items())
    children = [
        one for name, one in known if name.startswith("torch.") and isinstance(one, logging.Logger) and one.level
    ]
    levels = {one: one.level for one in (*map(logging.getLogger, _CHATTY), *children)}
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    for one in levels:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(_OtherThreads(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in levels.items():
            one.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def hush_imports() -> None:
    """Hold back what loggers warn of when transformers imports torchao: nobody who runs a command can change it."""
    for name in _AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
