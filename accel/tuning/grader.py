"""Measure the accuracy of the baseline and of candidates, all on the same rows.

Candidates are measured with the batch sizes of the workload and with their run options. Dynamic quantization computes its ranges
separately for each call, so its accuracy depends on both.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from typing import Any

from ..artifact.json_reading import build
from ..errors import AccelError
from ..measuring.accuracy.comparison import Comparison
from ..measuring.accuracy.evaluation import EvaluationData, EvaluationSet
from ..measuring.latency.workloads import WorkloadSettings
from .builder import ArtifactBuilder
from .jobs import Accuracy, accuracy
from .search_data import SearchSubject, TriedCandidate
from .store import ResultStore, data_digest

logger = logging.getLogger(__name__)


class AccuracyGrader:
    """Measures the accuracy of candidates on labelled rows, and reuses results of earlier searches.

    Args:
        subject: The model to search for.
        data: The rows; or a prepared set of rows, with which results are not reused by later searches.
        store: Store with the results of earlier searches.
        builder: Builder whose processes run the measurements.
        load: The timed calls; accuracy is measured with the same batch sizes and threads.

    Attributes:
        seconds: Longest time that the measurement of one candidate took so far, in seconds.
        batch_sizes: Batch sizes with which each candidate is measured.
    """

    def __init__(
        self,
        subject: SearchSubject,
        data: EvaluationData | EvaluationSet | None,
        store: ResultStore,
        builder: ArtifactBuilder,
        load: WorkloadSettings,
    ) -> None:
        self._subject, self._store, self._builder = subject, store, builder
        self.batch_sizes = tuple(sorted(set(load.batch)))
        self._threads = load.threads
        self._data_key: dict[str, Any] = {}
        if isinstance(data, EvaluationData):
            # The baseline's predictions do not depend on the batch size, so use the largest, which is the fastest.
            data = replace(data, batch_size=max(load.batch))
            settings = {field.name: getattr(data, field.name) for field in fields(data) if field.name != "token"}
            # The names of the fields are part of the key, because records written by an older version may lack some fields.
            comparison_fields = [field.name for field in fields(Comparison)]
            rows = data_digest(data.data)
            self._data_key = {
                **settings,
                "data": rows,
                "comparison": comparison_fields,
                "batch_sizes": self.batch_sizes,
            }
        self._data = data
        self._pending: Future[Accuracy] | None = None
        self._reference: Accuracy | None = None
        self.seconds = 0.0

    def begin(self) -> None:
        """Start to measure the baseline in another process."""
        stored = self._store.get("accuracy", self._reference_key())
        if stored is not None:
            self._reference = build(Accuracy, stored, "A saved accuracy result")
        else:
            self._pending = self._builder.start(accuracy, self._subject.baseline, self._data, None)

    def reference(self) -> Accuracy:
        """Return the accuracy of the baseline.

        Raises:
            InputError: The data has no rows or no labels.
        """
        if self._reference is None:
            assert self._pending is not None, "begin() comes first"
            self._reference = result = self._pending.result()
            self._store.put("accuracy", self._reference_key(), asdict(result))
            logger.info(
                "%s: %s %.4f on %d rows", self._subject.reference, result.metric, result.scored.value, result.rows
            )
        return self._reference

    def grade(self, tried: TriedCandidate) -> None:
        """Measure the accuracy of a candidate, and set its `accuracy`; if this fails, set its `reason`."""
        candidate, subject = tried.candidate, self._subject
        key = {
            "what": tried.identity,
            "data": self._data_key,
            "source": subject.digest,
            "machine": subject.machine,
            "versions": subject.versions,
        }
        stored = self._store.get("accuracy", key)
        if stored is not None:
            tried.accuracy = build(Accuracy, stored, "A saved accuracy result")
        else:
            try:
                self._builder.files(tried.artifact)
                variant = subject.variant(candidate, tried.artifact.path)
                options = replace(candidate.options, threads=candidate.options.threads or self._threads)
                variant = replace(variant, options=options)
                reference = (subject.reference, self.reference().scored)
                tried.accuracy = self._builder.call(accuracy, variant, self._data, reference, self.batch_sizes)
            except AccelError as error:
                self._builder.errors[str(candidate.recipe)] = error
                tried.reason = f"measuring its accuracy failed: {error.message.splitlines()[0]}"
                logger.info("%s: %s", candidate, tried.reason)
                return
            self._store.put("accuracy", key, asdict(tried.accuracy))
            self.seconds = max(self.seconds, tried.accuracy.scored.seconds)
        logger.info("%s: loses %.2f points on %d rows", candidate, tried.compared.drop, tried.compared.rows)

    def _reference_key(self) -> dict[str, Any]:
        subject = self._subject
        return {"model": subject.digest, "task": subject.task, "data": self._data_key, "versions": subject.versions}
