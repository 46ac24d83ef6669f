"""Tasks of models that read videos."""

from __future__ import annotations

from .spec import Column, TaskSpec
from .text import LABEL

SPECS = (
    TaskSpec(
        name="video-classification",
        model="accel.models.videos:ORTModelForVideoClassification",
        auto_model="AutoModelForVideoClassification",
        output="ImageClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        suffixes=("ForVideoClassification",),
        modalities=("video",),
        columns=(
            LABEL,
            Column(use="video", known=("video", "frames", "clip", "images", "pixel_values"), holds="video"),
        ),
        encode="accel.data.videos:encode_videos",
        predictor="accel.measuring.accuracy.predictors:Classes",
        sample="accel.capture.videos:video_sample",
        loss="ForVideoClassification",
    ),
)
"""The tasks; see `TaskSpec`."""
