"""Cache of compiled models on disk, with checksums.

OpenVINO's own model cache has no checksums. If bytes of the weights are damaged, the model loads and computes wrong
results. If a file is truncated, OpenVINO compiles the model again without a message. The cache of this module therefore
stores a compiled model (`.blob`) and its checksum for each combination of model, device, OpenVINO version and
properties.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openvino as ov

from accel.artifact import Artifact, Component
from accel.errors import ConfigError
from accel.interfaces.fork_safety import kept_in_children

from .runtime import core

logger = logging.getLogger(__name__)


def cached(
    folder: Path,
    artifact: Artifact,
    component: Component,
    *,
    device: str,
    settings: Mapping[str, Any],
    shapes: Mapping[str, int],
    compile_: Callable[[], ov.CompiledModel],
) -> ov.CompiledModel:
    """Return the compiled model from the cache folder. If it is missing, compile it and store it in the folder. A
    damaged entry is replaced, and a warning is logged.

    Raises:
        ConfigError: The folder cannot be written.
    """
    key = {
        "artifact": artifact.digest,
        "component": component.name,
        "device": [device, str(core().get_property(device.partition(":")[0], "FULL_DEVICE_NAME"))],
        "openvino": ov.__version__,
        "settings": {name: str(value) for name, value in sorted(settings.items())},
        "shapes": dict(sorted(shapes.items())),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    blob, checksum = folder / f"{name}.blob", folder / f"{name}.crc32"
    try:
        if blob.exists() or checksum.exists():
            return _load(blob, checksum, device, settings)
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning("The compiled model %s in the cache is damaged (%s). It is compiled again.", blob, error)
    # Check the folder before the compilation, which takes long.
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("you have no permission to write to this folder")
    compiled = compile_()
    content = compiled.export_model().getvalue()
    with _writing(folder):
        _write(blob, content)
        _write(checksum, f"{zlib.crc32(content):08x}\n".encode())
    return compiled


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The cache_dir {folder} cannot be written: {error}.", fix="choose another folder for cache_dir."
        ) from error


def _load(blob: Path, checksum: Path, device: str, settings: Mapping[str, Any]) -> ov.CompiledModel:
    content = blob.read_bytes()
    expected, checksum_of_blob = checksum.read_text(encoding="ascii").strip(), f"{zlib.crc32(content):08x}"
    if expected != checksum_of_blob:
        raise ValueError(
            f"its checksum is {checksum_of_blob}, but {f'{expected} is stored' if expected else 'no checksum is stored'}"
        )
    return kept_in_children(core().import_model(io.BytesIO(content), device, dict(settings)))


def _write(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it, so that other processes never read an incomplete file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
