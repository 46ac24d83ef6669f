"""What is captured: a PyTorch model, the inputs it is traced with, and the names of the axes that may vary."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from ..artifact import Origin
from .samples import Axes, resize
from .wrappers import Tensors, Wrapper

logger = logging.getLogger(__name__)

_CHATTY = ("transformers", "torch", "onnxscript", "onnx_ir", "onnx")


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

    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    onnx_loggers = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    levels |= {name: logging.getLogger(name).level for name in onnx_loggers}
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(_OtherThreads(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A PyTorch model about to be exported.

    Attributes:
        model: In evaluation mode, in the dtype to export.
        task: Its task.
        folder: Where its config and processor files are; `None` for a model made in memory.
        origin: Where it came from, for the manifest.
        example: Inputs it is traced with.
        axes: Names of the axes that may vary, by input and position.
        max_sizes: Largest size of an axis, where the model has a limit.
        unused_inputs: Inputs that its result does not depend on.
        dtype: Element type of its weights.
        name: Of the graph it becomes; the parts of a generating model are sources of their own.
        stateful: Whether its graph reads and writes a cache (inputs `past_…`, outputs `present_…`).
    """

    model: torch.nn.Module
    task: str
    folder: Path | None
    origin: Origin
    example: Tensors
    axes: Axes
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    unused_inputs: tuple[str, ...] = ()
    dtype: str = "float32"
    name: str = "model"
    stateful: bool = False

    @property
    def config(self) -> Any:
        """The transformers config, or `None` for a plain module."""
        return getattr(self.model, "config", None)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        inner = self.model.model if isinstance(self.model, Wrapper) else self.model
        return type(inner).__name__

    def sample(self, sizes: Mapping[str, int], *, seed: int = 0) -> Tensors:
        """Inputs like the example with other axis sizes: random values, and padding where there is a mask."""
        return resize(self.example, self.axes, sizes, self.config, seed)
