"""Accuracy of a search: the baseline first, then candidates, all on the same rows.

Candidates are measured as they will be run: with the workload's rows a call, and with their own run options. Dynamic
quantization finds its ranges call by call, so its accuracy depends on both.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

from ..errors import AccelError
from ..measuring.accuracy.comparison import Comparison
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.latency.workloads import Load
from .builder import Builder
from .jobs import Accuracy, accuracy
from .store import Store, data_digest
from .subject import Subject, Tried

logger = logging.getLogger(__name__)


class Grader:
    """Measures candidates on labelled rows, unless an earlier search did.

    Args:
        subject: What is tuned.
        data: The rows; or a set made of them, with which nothing is remembered from one search to the next.
        store: What earlier searches measured.
        builder: Its processes do the work.
        load: The calls that are timed: accuracy is measured with as many rows a call, and as many threads.

    Attributes:
        seconds: The longest that one candidate took so far.
        batch_sizes: Rows a call that each candidate is measured with.
    """

    def __init__(
        self, subject: Subject, data: EvaluationData | EvaluationSet, store: Store, builder: Builder, load: Load
    ) -> None:
        self._subject, self._store, self._builder = subject, store, builder
        self.batch_sizes = tuple(sorted(set(load.batch)))
        self._threads = load.threads
        self._data_key: dict[str, Any] = {}
        if isinstance(data, EvaluationData):
            # PyTorch float32 answers a row the same in any company: its largest calls are the quickest.
            data = replace(data, batch_size=max(load.batch))
            settings = {field.name: getattr(data, field.name) for field in fields(data) if field.name != "token"}
            # With what is remembered of a comparison: what an older version remembered may lack a part.
            known = [field.name for field in fields(Comparison)]
            rows = data_digest(data.data)
            self._data_key = {**settings, "data": rows, "comparison": known, "batch_sizes": self.batch_sizes}
        self._data = data
        self._pending: Future[Accuracy] | None = None
        self._reference: Accuracy | None = None
        self.seconds = 0.0

    def begin(self) -> None:
        """Start to measure the baseline in another process."""
        known = self._store.get("accuracy", self._reference_key())
        if known is not None:
            self._reference = Accuracy.from_dict(known)
        else:
            self._pending = self._builder.start(accuracy, self._subject.baseline, self._data, None)

    def reference(self) -> Accuracy:
        """Return the accuracy of the baseline.

        Raises:
            InputError: Data without rows or labels.
        """
        if self._reference is None:
            assert self._pending is not None, "begin() comes first"
            self._reference = found = self._pending.result()
            self._store.put("accuracy", self._reference_key(), found.to_dict())
            logger.info("%s: %s %.4f on %d rows", self._subject.reference, found.metric, found.scored.value, found.rows)
        return self._reference

    def grade(self, tried: Tried) -> None:
        """Measure a candidate; it gets `found`, or a reason why not."""
        candidate, subject = tried.candidate, self._subject
        key = {
            "what": tried.identity,
            "data": self._data_key,
            "source": subject.digest,
            "machine": subject.machine,
            "versions": subject.versions,
        }
        known = self._store.get("accuracy", key)
        if known is not None:
            tried.found = Accuracy.from_dict(known)
        else:
            try:
                self._builder.files(tried.made)
                variant = subject.variant(candidate, tried.made.path)
                options = replace(candidate.options, threads=candidate.options.threads or self._threads)
                variant = replace(variant, options=options)
                reference = (subject.reference, self.reference().scored)
                tried.found = self._builder.call(accuracy, variant, self._data, reference, self.batch_sizes)
            except AccelError as error:
                self._builder.errors[str(candidate.recipe)] = error
                tried.reason = f"measuring its accuracy failed: {error.message.splitlines()[0]}"
                logger.info("%s: %s", candidate, tried.reason)
                return
            self._store.put("accuracy", key, tried.found.to_dict())
            self.seconds = max(self.seconds, tried.found.scored.seconds)
        assert tried.found.comparison is not None
        logger.info("%s: loses %.2f points on %d rows", candidate, tried.found.comparison.drop, tried.found.rows)

    def _reference_key(self) -> dict[str, Any]:
        subject = self._subject
        return {"model": subject.digest, "task": subject.task, "data": self._data_key, "versions": subject.versions}
