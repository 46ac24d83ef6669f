"""Private methods and attributes of transformers' models, and attributes that other libraries set on a model.

| name | seen in | public alternative |
|---|---|---|
| `model._shift_right` (T5-like models) | transformers 5.23, 5.24 | only generating models: `prepare_decoder_input_ids_from_labels` |
| `encoder._get_feature_vector_attention_mask` | transformers 5.23, 5.24 | none |
| `model._get_feat_extract_output_lengths`, `model._get_tdnn_output_lengths` | transformers 5.23, 5.24 | none |
| `model._original_forward`, which Accelerate sets | accelerate 1.15 | `extract_model_from_parallel`, which changes its argument |
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .replaced_attributes import replaced_attributes

_SHORTEN = "_get_feature_vector_attention_mask"
_FORWARDS = ("forward", "_original_forward")


def shifted_right(model: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the decoder's inputs for labels `(batch, sequence)`, or `None` if the model's decoder creates them itself."""
    shift = getattr(model, "_shift_right", None)
    return None if shift is None else shift(ids)


def shortened_by(encoder: Any, length: Any, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the padding mask `(batch, length)` of an encoder's output, or `None` if the encoder does not shorten masks.

    Args:
        encoder: Encoder of an audio model.
        length: Number of positions of its output.
        mask: Mask of its input, `(batch, samples)` or `(batch, frames)`.
    """
    shorten = getattr(encoder, _SHORTEN, None)
    return None if shorten is None else shorten(length, mask)


@contextmanager
def masks_not_shortened(model: Any) -> Iterator[None]:
    """Within the block, let the model use an attention mask that already has the length of the encoder's output. transformers
    would shorten it again like a mask of audio samples.
    """
    inner = getattr(model, "model", None)
    with replaced_attributes([(inner, _SHORTEN, lambda _, mask: mask)] if hasattr(inner, _SHORTEN) else []):
        yield


def lengths_of_tdnn(model: Any, lengths: torch.Tensor) -> torch.Tensor:
    """Return the numbers of output positions of an x-vector model's layers for `lengths` audio samples: `(batch,)`."""
    positions: torch.Tensor = model._get_tdnn_output_lengths(model._get_feat_extract_output_lengths(lengths))
    return positions


def without_mixed_precision(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module without the automatic mixed precision that `Trainer(bf16=True)` adds around its `forward`.

    The original module is not modified.
    """
    original = vars(module).get("_original_forward")
    if original is None or getattr(original, "__func__", None) is not type(module).forward:
        return module
    plain = copy.copy(module)
    for name in _FORWARDS:
        vars(plain).pop(name, None)
    return plain
