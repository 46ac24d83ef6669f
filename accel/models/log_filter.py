"""Logging filter for transformers' long message that `ORTModelFor...` classes are not supported."""

from __future__ import annotations

import logging
import re

from ..interfaces.task_registry import load_task, specs_for


class NotSupportedFilter(logging.Filter):
    """Drop the error "The model ... is not supported" that transformers' pipelines log for accel's model classes.

    Transformers logs this error for every model class that is not part of transformers. The filter drops the record only if accel's class
    supports the pipeline's task.
    """

    _MESSAGE = re.compile(r"The model '(?:ORT|OV)(ModelFor\w+)' is not supported for ([\w-]+)\.")

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        match = self._MESSAGE.match(str(record.msg))
        if match is None:
            return True
        # Only transformers' pipelines log this message, so they are imported already.
        from transformers.pipelines import PIPELINE_REGISTRY

        task = PIPELINE_REGISTRY.task_aliases.get(match[2], match[2])
        return not any(
            getattr(load_task(spec.name).model, "__name__", "") == f"ORT{match[1]}" for spec in specs_for(task)
        )


FILTER = NotSupportedFilter()
