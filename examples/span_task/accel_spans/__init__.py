"""Spec of the task span extraction: find the spans of a text that match the labels of the call."""

from __future__ import annotations

from accel.interfaces.task_spec import Column, TaskSpec

SPEC = TaskSpec(
    name="span-extraction",
    impl="accel_spans.task:SpanExtraction",
    suffixes=("SpanExtractor",),
    outputs={"start_logits": ("batch", "labels", "sequence"), "end_logits": ("batch", "labels", "sequence")},
    own_pipelines=("span-extraction",),
    columns=(
        Column(use="spans", known=("spans", "entities"), holds="answers", needed="measuring", answer=True),
        Column(use="text", known=("text", "sentence"), holds="text"),
        Column(use="labels", known=("labels", "candidate_labels"), holds="words"),
    ),
)
