"""Store of search results: JSON files, named by a digest of everything that the result depends on."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ..artifact.atomic_folder_writing import locked_file
from ..artifact.cache import alone_with_searches, using_searches
from ..artifact.checksums import folder_digest, sha256
from ..artifact.home_folder import SEARCHES, accel_home, keeping
from ..upstream.pipeline_internals import fingerprint_of


class ResultStore:
    """Results of earlier searches, by a digest of everything that they depend on.

    Args:
        root: Folder of the store; `None` for `ACCEL_HOME/tune`.
        fresh: Ignore results of earlier searches.
    """

    def __init__(self, root: Path | None = None, *, fresh: bool = False) -> None:
        self._root = root or accel_home() / SEARCHES
        self._fresh = fresh
        self._running: Path | None = None
        self._written: set[Path] = set()
        self.hits = 0

    def get(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the stored result of a key, or `None`."""
        file = self._file(kind, key)
        if self._fresh and file not in self._written:
            return None
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # Do not count builds as hits, because they are looked up many times; measurements are looked up once.
        self.hits += kind != "builds"
        return result if isinstance(result, dict) else None

    def put(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Write a result immediately, so that it is kept if the search is interrupted."""
        file = self._file(kind, key)
        with keeping("The result of a search"):
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
        """Mark the store as used while a search runs, so that no other process removes its files."""
        with using_searches() as self._running:
            yield

    def alone(self) -> AbstractContextManager[bool]:
        """Lock the store; yield whether this is the only search that uses it, so that artifacts may be removed."""
        return alone_with_searches(self._running)

    def building(self, key: Mapping[str, Any], timeout_s: float) -> AbstractContextManager[bool]:
        """Lock the artifact of a key, which another search may be building; yield whether the lock was acquired before the timeout."""
        return locked_file(self.artifact(key).with_suffix(".lock"), timeout_s, keep=True)

    def artifact(self, key: Mapping[str, Any]) -> Path:
        """Return the folder for the artifact of a key."""
        return self._root / "artifacts" / digest(key)

    def _file(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self._root / kind / f"{digest(key)}.json"


def digest(key: Any) -> str:
    """Return a short digest of JSON values."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def data_digest(data: Any) -> str:
    """Return a digest that identifies data.

    It is computed from the contents of a file or folder, or from the rows of a list. For a `datasets.Dataset` it is the fingerprint,
    and for a data set on the Hub it is the name.

    Files whose paths are in the rows, such as images and sounds, are not read.
    """
    if data is None:
        return ""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if path.is_dir():
            return folder_digest(path)
        return sha256(path) if path.is_file() else os.fspath(data)
    if fingerprint := fingerprint_of(data):
        return fingerprint
    from datasets.fingerprint import Hasher

    hasher = Hasher()
    for row in data:
        try:
            hasher.update(row)
        # Decoders of audio or video cannot be pickled. Return a random digest, so that such data is always measured again.
        except (TypeError, pickle.PicklingError):
            return secrets.token_hex(12)
    return str(hasher.hexdigest())
