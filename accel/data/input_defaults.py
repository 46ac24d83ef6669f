"""Add the default values of transformers for model inputs that the caller omits, such as an attention mask of ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FILL = {"attention_mask": 1, "token_type_ids": 0}
# The attention mask has the length of one of these inputs: tokens, waveform samples or spectrogram frames.
_LONG_AS = ("input_ids", "input_values", "input_features")


def with_defaults(
    feeds: Mapping[str, torch.Tensor], names: Iterable[str], own_defaults: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the inputs with defaults for omitted inputs. The defaults have the shape of the tokens, sounds or images. Inputs
    without a default stay missing.

    Args:
        feeds: Inputs by name.
        names: Names of the graph's inputs.
        own_defaults: Inputs whose default only the PyTorch model can compute (`Component.own_defaults`); they are not added.
    """
    import torch

    complete = dict(feeds)
    first = next((feeds[name] for name in _LONG_AS if name in feeds), None)
    for name in names:
        if name in complete:
            continue
        if name in _FILL and name not in own_defaults and first is not None and first.ndim >= 2:
            shape = first.shape if "input_ids" in feeds else first.shape[:2]
            complete[name] = torch.full(shape, _FILL[name], dtype=torch.int64, device=first.device)
        elif name == "bbox" and name not in own_defaults and "input_ids" in feeds:
            # Without boxes, LayoutLM, LayoutLMv3 and LiLT in transformers use the box (0, 0, 0, 0) for every token.
            ids = feeds["input_ids"]
            complete[name] = torch.zeros((*ids.shape, 4), dtype=torch.int64, device=ids.device)
        elif name == "pixel_mask" and "pixel_values" in feeds:
            # A mask of ones means that no pixel is padding.
            complete[name] = torch.ones_like(feeds["pixel_values"][:, 0], dtype=torch.int64)
    return complete
