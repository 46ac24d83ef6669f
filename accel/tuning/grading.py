"""Accuracy of a search: PyTorch float32 first, then the survivors of the screens, all on the same rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ..errors import AccelError
from .building import Builder
from .jobs import Store, accuracy, data_digest
from .state import Subject, Tried

logger = logging.getLogger(__name__)


class Grader:
    """Measures candidates on labelled rows, unless an earlier search did.

    Args:
        subject: What is tuned.
        data: Arguments of `EvaluationSet`.
        store: What earlier searches measured.
        builder: Its processes do the work.

    Attributes:
        seconds: The longest that one candidate took so far.
    """

    def __init__(self, subject: Subject, data: dict[str, Any], store: Store, builder: Builder) -> None:
        self._subject, self._data, self._store, self._builder = subject, data, store, builder
        self._data_key = {**data, "data": data_digest(data["data"])}
        self._pending: Future[dict[str, Any]] | None = None
        self._reference: dict[str, Any] | None = None
        self.seconds = 0.0

    def begin(self) -> None:
        """Start on PyTorch float32, beside whatever comes next."""
        self._reference = self._store.get("accuracy", self._reference_key())
        if self._reference is None:
            subject = self._subject
            model = {
                "pytorch": str(subject.folder),
                "task": subject.task,
                "trust_remote_code": subject.hub.trust_remote_code,
            }
            self._pending = self._builder.start(accuracy, model, self._data, None)

    def reference(self) -> Mapping[str, Any]:
        """PyTorch float32 on the data.

        Raises:
            InputError: Data without rows or labels.
        """
        if self._reference is None:
            assert self._pending is not None, "begin() comes first"
            self._reference = self._pending.result()
            self._store.put("accuracy", self._reference_key(), self._reference)
            found = self._reference
            logger.info("PyTorch float32: %s %.4f on %d rows", found["metric"], found["value"], found["rows"])
        return self._reference

    def grade(self, tried: Tried) -> None:
        """Measure a candidate; it gets `found`, or a reason why not."""
        c, subject = tried.candidate, self._subject
        key = {
            "what": tried.identity,
            "data": self._data_key,
            "source": subject.digest,
            "machine": subject.machine,
            "versions": subject.versions,
        }
        known = self._store.get("accuracy", key)
        if known is None:
            model = {
                "path": str(tried.made.path), "backend": c.backend, "device": c.device, "options": c.options.to_dict(),
                "task": subject.task, "trust_remote_code": subject.hub.trust_remote_code,
            }  # fmt: skip
            try:
                self._builder.files(tried.made)
                known = self._builder.call(accuracy, model, self._data, list(self.reference()["predictions"]))
            except AccelError as error:
                tried.reason = f"measuring its accuracy failed: {error.message.splitlines()[0]}"
                logger.info("%s: %s", c, tried.reason)
                return
            self._store.put("accuracy", key, known)
            self.seconds = max(self.seconds, float(known["seconds"]))
        tried.found = known
        logger.info("%s: loses %.2f points on %d rows", c, known["drop"], known["rows"])

    def _reference_key(self) -> dict[str, Any]:
        subject = self._subject
        return {"model": subject.digest, "task": subject.task, "data": self._data_key, "versions": subject.versions}
