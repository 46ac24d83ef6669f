"""Results that searches remember, as JSON by a digest of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..artifact.cache import alone_with_searches, using_searches
from ..artifact.checksums import folder_digest, sha256
from ..artifact.home import SEARCHES, accel_home, keeping
from ..artifact.writing import held


class Store:
    """What earlier searches measured, by everything that it depends on.

    Args:
        root: Folder; `ACCEL_HOME/tune` when `None`.
        fresh: Forget what was there before.
    """

    def __init__(self, root: Path | None = None, *, fresh: bool = False) -> None:
        self._root = root or accel_home() / SEARCHES
        self._fresh = fresh
        self._running: Path | None = None
        self._written: set[Path] = set()
        self.hits = 0

    def get(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a key, or `None`."""
        file = self._file(kind, key)
        if self._fresh and file not in self._written:
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # What was built is looked up again and again; what was measured, once.
        self.hits += kind != "builds"
        return found if isinstance(found, dict) else None

    def put(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Write a result at once: an interrupted search keeps its results."""
        file = self._file(kind, key)
        with keeping("What a search found"):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
            try:
                temporary.write_text(json.dumps(value), encoding="utf-8")
                temporary.replace(file)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        self._written.add(file)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the store as used while a search runs, so that nobody removes its files."""
        with using_searches() as self._running:
            yield

    def alone(self) -> AbstractContextManager[bool]:
        """Lock the store: whether no other search uses it during the block, so that artifacts may be removed."""
        return alone_with_searches(self._running)

    def building(self, key: Mapping[str, Any], timeout_s: float) -> AbstractContextManager[bool]:
        """Lock the artifact of a key, which another search may be building; whether the lock came in time."""
        return held(self.artifact(key).with_suffix(".lock"), timeout_s, keep=True)

    def artifact(self, key: Mapping[str, Any]) -> Path:
        """The folder of the artifact that a key stands for."""
        return self._root / "artifacts" / digest(key)

    def _file(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self._root / kind / f"{digest(key)}.json"


def digest(key: Any) -> str:
    """A short name for JSON values."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def data_digest(data: Any) -> str:
    """Identify data by the content of a file or a folder, the rows of a list, the fingerprint of a data set, the name of another.

    Files that a file's rows name (images, sounds) are not read.
    """
    if data is None:
        return ""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if path.is_dir():
            return folder_digest(path)
        return sha256(path) if path.is_file() else os.fspath(data)
    if fingerprint := getattr(data, "_fingerprint", None):
        return str(fingerprint)
    found = hashlib.sha256()
    for row in data:
        _add(found, row)
    return found.hexdigest()[:24]


def _add(digest: Any, value: Any) -> None:
    """Add a value of a row to a digest: all of an array or an image, which are cut short as texts."""
    size = len(value) if isinstance(value, Mapping | list | tuple | str | bytes) else ""
    digest.update(f"<{type(value).__name__} {size}>".encode())
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    elif isinstance(value, bytes):
        digest.update(value)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        # NumPy knows neither the GPU nor bfloat16.
        tensor = value.detach().cpu() if hasattr(value, "detach") else value
        array = np.ascontiguousarray(tensor.float() if str(value.dtype) == "torch.bfloat16" else tensor)
        digest.update(f"{value.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):
        # A palette says what the numbers of a picture mean.
        digest.update(f"{value.mode}{value.size}{value.getpalette()}".encode())
        digest.update(value.tobytes())
    else:
        digest.update(str(value).encode())
