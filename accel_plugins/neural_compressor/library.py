"""Neural Compressor, imported quietly, and its errors as ours."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from accel.capture import quiet
from accel.errors import AccelError, QuantizeError

# Where it computes. It asks once, and keeps the answer in this module's function.
_DEVICE, _DETECTING = "INC_TARGET_DEVICE", "neural_compressor.torch.utils.auto_accelerator"


def library() -> ModuleType:
    """`neural_compressor.torch.quantization`.

    Raises:
        QuantizeError: It cannot be imported.
    """
    try:
        with quiet(), _on_the_host(), warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="accel-") as folder:
            warnings.simplefilter("ignore")
            from neural_compressor.common import options

            # Or its import leaves a folder where the caller stands; what would use it is its work layer by layer.
            options.workspace = folder
            from neural_compressor.torch import quantization
    # It looks for accelerators when it is imported, and may fail in any way.
    except Exception as error:
        raise QuantizeError(
            f"Neural Compressor cannot be imported: {type(error).__name__}: {error}.",
            fix='pip install "accel-transformers[neural-compressor]"',
        ) from error
    module: ModuleType = quantization
    return module


@contextmanager
def mapped(what: str, fix: str) -> Iterator[None]:
    """What Neural Compressor raises, as ours, without its tables and progress bars.

    Raises:
        QuantizeError: With what it said.
    """
    logger = logging.getLogger("neural_compressor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with quiet(), _on_the_host(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AccelError:
        raise
    # Its algorithms run the model's code and their own, and check little.
    except Exception as error:
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise QuantizeError(f"Neural Compressor fails at {what}: {type(error).__name__}: {said}", fix=fix) from error
    finally:
        logger.setLevel(level)


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Neural Compressor (3.10) without accelerators.

    Beside a GPU it moves parts of the model there, while the rows stay on the host.
    """
    before = os.environ.get(_DEVICE)
    os.environ[_DEVICE] = "cpu"
    _forget()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICE]
        else:
            os.environ[_DEVICE] = before
        _forget()


def _forget() -> None:
    """Have it ask again."""
    if _DETECTING in sys.modules:
        sys.modules[_DETECTING].auto_detect_accelerator.cache_clear()
