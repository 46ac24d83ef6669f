"""What the libraries below us print, warn and log while they work, held back unless somebody wants to read it."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_AT_IMPORT = ("torchao", "torch.utils._pytree")
_CHATTY = ("transformers", "torch", "torchao", "onnxscript", "onnx_ir", "onnx")


# What is held back belongs to the process: the first thread that asks for quiet takes it away, the last one puts it back.
_lock = threading.Lock()
_threads: Counter[int] = Counter()
_taken_away = ExitStack()


class _OtherThreads:
    """A stream without what threads in `quiet` write: `torch.export` prints whole graphs, a progress bar has a thread.

    Args:
        stream: Standard output or error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in _threads else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence upstream prints, warnings and log lines, unless `accel`'s own logger is at DEBUG (`--verbose`).

    Prints are held back of the threads in it alone, warnings and log lines of the libraries below us in all threads.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    me = threading.get_ident()
    with _lock:
        if not _threads:
            _take_away(_taken_away)
        _threads[me] += 1
    try:
        yield
    finally:
        with _lock:
            _threads[me] -= 1
            if not _threads[me]:
                del _threads[me]
            if not _threads:
                _taken_away.close()


def _take_away(stack: ExitStack) -> None:
    """Silence the process; closing the stack puts everything back."""
    from transformers.utils import logging as transformers_logging

    # Of the loggers below them only those with a level of their own, as the others take their parent's: each change of a
    # level empties the caches of all loggers, and PyTorch has hundreds.
    known = list(logging.root.manager.loggerDict.items())
    children = [
        one for name, one in known if name.startswith("torch.") and isinstance(one, logging.Logger) and one.level
    ]
    levels = {one: one.level for one in (*map(logging.getLogger, _CHATTY), *children)}
    bars = transformers_logging.is_progress_bar_enabled()
    if bars:
        transformers_logging.disable_progress_bar()
        stack.callback(transformers_logging.enable_progress_bar)
    for one, level in levels.items():
        one.setLevel(logging.ERROR)
        stack.callback(one.setLevel, level)
    stack.enter_context(warnings.catch_warnings())
    stack.enter_context(redirect_stdout(_OtherThreads(sys.stdout)))
    stack.enter_context(redirect_stderr(_OtherThreads(sys.stderr)))
    warnings.simplefilter("ignore")


def hush_imports() -> None:
    """Hold back what loggers warn of when transformers imports torchao: nobody who runs a command can change it."""
    for name in _AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
