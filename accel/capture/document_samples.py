"""Sample inputs for models that read texts with the position of each word on a page (LayoutLM) or in a table (TAPAS)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family import Sample
from ..interfaces.tracing_wrapper import Tensors, unwrapped
from .samples import BOXES, SAMPLE_BATCH, SAMPLE_SEQUENCE, parameters_of, resize, text_inputs

_SIDES = 4


def document_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make sample texts with a bounding box for each token: `input_ids: (batch, sequence)` and `bbox: (batch, sequence, 4)`.

    Raises:
        ExportError: The model requires an image of the page.
    """
    if "image" in parameters_of(module):
        inner = unwrapped(module)
        raise ExportError(
            f"{type(inner).__name__} cannot be exported. It reads images with a detectron2 network, and no accel backend supports the "
            "operators of detectron2.",
            fix="run the model with transformers, or use a LayoutLMv3 model, which does not need detectron2.",
        )
    return _places(module, folder, BOXES, _SIDES)


def table_sample(module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make sample questions with tables: `input_ids: (batch, sequence)` and `token_type_ids: (batch, sequence, 7)`."""
    kinds = len(getattr(module.config, "type_vocab_sizes", ()))
    return _places(module, folder, "token_type_ids", kinds)


def _places(module: torch.nn.Module, folder: Path | None, name: str, count: int) -> Sample:
    """Make sample texts, and an input with the given name that has `count` integers for each token."""
    config: Any = module.config
    names, unused = text_inputs(module, config, folder)
    shape = (SAMPLE_BATCH, SAMPLE_SEQUENCE)
    example: Tensors = {input_name: torch.ones(shape, dtype=torch.int64) for input_name in names}
    example[name] = torch.ones((*shape, count), dtype=torch.int64)
    axes = {input_name: {0: "batch", 1: "sequence"} for input_name in example}
    sizes = {"batch": SAMPLE_BATCH, "sequence": SAMPLE_SEQUENCE}
    return (
        resize(example, axes, sizes, config, seed=0),
        axes,
        tuple(input_name for input_name in unused if input_name != name),
    )
