"""Keeps transformers from logging, for a page, that our classes are not its own."""

from __future__ import annotations

import logging
import re

from ..interfaces.task_registry import load_task, specs_for


class NotSupportedFilter(logging.Filter):
    """Drops the page-long "not supported" error that stock pipelines log for any class outside transformers, where the
    class does serve the pipeline's task.
    """

    _MESSAGE = re.compile(r"The model '(?:ORT|OV)(ModelFor\w+)' is not supported for ([\w-]+)\.")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        match = self._MESSAGE.match(str(record.msg))
        if match is None:
            return True
        # Such a line comes from transformers' pipelines, which are imported then.
        from transformers.pipelines import PIPELINE_REGISTRY

        task = PIPELINE_REGISTRY.task_aliases.get(match[2], match[2])
        return not any(
            getattr(load_task(spec.name).model, "__name__", "") == f"ORT{match[1]}" for spec in specs_for(task)
        )


FILTER = NotSupportedFilter()
