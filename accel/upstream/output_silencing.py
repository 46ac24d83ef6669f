"""Hide printed output, warnings and log records of other libraries, unless the level of accel's logger is DEBUG."""

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


# Standard output is global: the first thread inside `quiet` redirects it, and the last one restores it.
_lock = threading.Lock()
_threads: Counter[int] = Counter()
_taken_away = ExitStack()


class _ThreadFilteredStream:
    """Stream that discards the output of threads inside `quiet`, because `torch.export` prints whole graphs. The output of other
    threads, such as progress bars, is written.

    Args:
        stream: Standard output or standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in _threads else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide printed output, warnings and log records of other libraries, unless accel's logger is at DEBUG (`--verbose`).

    Printed output is hidden only for threads inside `quiet`. Warnings and log records are hidden in all threads.
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
    """Hide the output of the whole process. Closing the stack restores everything."""
    from transformers.utils import logging as transformers_logging

    # Change only child loggers that have their own level; the other child loggers inherit the level. Each change of a level
    # clears the caches of all loggers, and PyTorch has hundreds of loggers.
    loggers = list(logging.root.manager.loggerDict.items())
    children = [
        logger
        for name, logger in loggers
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and logger.level
    ]
    levels = {logger: logger.level for logger in (*map(logging.getLogger, _CHATTY), *children)}
    bars = transformers_logging.is_progress_bar_enabled()
    if bars:
        transformers_logging.disable_progress_bar()
        stack.callback(transformers_logging.enable_progress_bar)
    for logger, level in levels.items():
        logger.setLevel(logging.ERROR)
        stack.callback(logger.setLevel, level)
    stack.enter_context(warnings.catch_warnings())
    stack.enter_context(redirect_stdout(_ThreadFilteredStream(sys.stdout)))
    stack.enter_context(redirect_stderr(_ThreadFilteredStream(sys.stderr)))
    warnings.simplefilter("ignore")


def hush_imports() -> None:
    """Hide the warnings that appear when transformers imports torchao, because users of a command can do nothing about them."""
    for name in _AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
