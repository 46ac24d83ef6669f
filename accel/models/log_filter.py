"""Keeps transformers from logging, for a page, that our classes are not its own."""

from __future__ import annotations

import logging
import re

from ..interfaces.task_registry import all_tasks


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
        return not any(spec.model_name == f"ORT{match[1]}" and task in spec.serves for spec in all_tasks())


FILTER = NotSupportedFilter()
