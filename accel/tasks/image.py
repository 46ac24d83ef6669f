"""Tasks of models that read images alone."""

from __future__ import annotations

from .spec import Column, TaskSpec
from .text import LABEL

IMAGE = Column(use="image", known=("image", "img", "pixel_values", "file", "path", "image_path"), holds="image")

SPECS = (
    TaskSpec(
        name="image-classification",
        model="accel.models.encoders:ORTModelForImageClassification",
        auto_model="AutoModelForImageClassification",
        output="ImageClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        suffixes=("ForImageClassification",),
        modalities=("image",),
        columns=(LABEL, IMAGE),
        loss="ForImageClassification",
        encode="accel.data.batches:encode_images",
        predictor="accel.measuring.accuracy.predictors:Classes",
    ),
)
