"""Input sizes for which code is compiled, padding of calls to these sizes, and removal of the padding from outputs."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

# Batch sizes and lengths to which calls are padded. Each size is at most 1.5 times the previous size, so that a padded
# call is at most 1.5 times as large in each axis.
BATCHES = tuple(sorted({*(2**i for i in range(12)), *(3 * 2**i for i in range(11))}))
LENGTHS = tuple(step for step in BATCHES if step >= 16)

# Inputs that have one value per token: `(batch, sequence, ...)`.
BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "bbox")
MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Input sizes of a call.

    Attributes:
        batch: Number of rows of the batch, or `None` if the inputs have different numbers of rows.
        length: Number of tokens per row, or `None` if the inputs are not text or cannot be padded.
    """

    batch: int | None
    length: int | None

    def __str__(self) -> str:
        parts = [f"{self.batch} row{'s' * (self.batch != 1)}"] if self.batch is not None else []
        return " of ".join([*parts, *([f"{self.length} tokens"] if self.length is not None else [])]) or "its shapes"


def sizes_of(call: Mapping[str, Any], *, maskable: bool) -> CallSizes:
    """Return the batch size and the number of tokens per row of a call.

    Args:
        call: The inputs by name.
        maskable: Whether the model has an attention mask input.
    """
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    first = next((tensors[name] for name in (MASK, *BY_TOKEN) if name in tensors), None)
    if first is None or first.ndim < 2:
        rows = {int(tensor.shape[0]) if tensor.ndim else 0 for tensor in tensors.values()}
        batch_size = rows.pop() if len(rows) == 1 else 0
        return CallSizes(batch_size or None, None)
    batch, length = int(first.shape[0]), int(first.shape[1])
    texts = [tensor for name, tensor in tensors.items() if name in BY_TOKEN]
    agree = all(tensor.shape[:2] == (batch, length) for tensor in texts) and first.ndim == 2
    same_batch = all(tensor.ndim and tensor.shape[0] == batch for tensor in tensors.values())
    nested = any(isinstance(value, (tuple, list, dict)) for value in call.values())
    can_pad = maskable and agree and same_batch and not nested
    return CallSizes(batch if same_batch and not nested else None, length if can_pad else None)


def step_up(size: int, steps: tuple[int, ...]) -> int:
    """Return the smallest number in `steps` that is at least `size`, or `size` itself if all numbers are smaller."""
    index = bisect.bisect_left(steps, size)
    return steps[index] if index < len(steps) else size


def padded(call: Mapping[str, Any], have: CallSizes, want: CallSizes, pad_id: int) -> dict[str, Any]:
    """Pad the inputs of a call: append masked tokens to each row, and copies of the last row to the batch.

    Args:
        call: The inputs by name.
        have: Sizes of the inputs.
        want: Sizes to pad to.
        pad_id: Id of the padding token.
    """
    inputs = dict(call)
    if have.length is not None and want.length is not None:
        if inputs.get(MASK) is None:
            first = next(inputs[name] for name in BY_TOKEN if isinstance(inputs.get(name), torch.Tensor))
            inputs[MASK] = torch.ones(first.shape[:2], dtype=torch.int64, device=first.device)
        more = want.length - have.length
        if more:
            for name in BY_TOKEN:
                tensor = inputs.get(name)
                if isinstance(tensor, torch.Tensor):
                    fill = pad_id if name == "input_ids" else 0
                    inputs[name] = pad(tensor, [0, 0] * (tensor.ndim - 2) + [0, more], value=fill)
    if have.batch is not None and want.batch is not None and (rows := want.batch - have.batch):
        for name, tensor in inputs.items():
            if isinstance(tensor, torch.Tensor):
                inputs[name] = torch.cat([tensor, tensor[-1:].expand(rows, *tensor.shape[1:])])
    return inputs


def axes_to_cut(
    actual: torch.Tensor, expected: torch.Tensor, have: CallSizes, want: CallSizes
) -> dict[int, str] | None:
    """Return the padded axes of an output, with "batch" or "length" for each axis.

    Return `None` if an axis differs between the two outputs for another reason than padding.

    Args:
        actual: Output of the compiled code for the padded call.
        expected: Output of the original model for the call without padding.
        have: Sizes of the call without padding.
        want: Sizes to which the call was padded.
    """
    if actual.ndim != expected.ndim:
        return None
    axes: dict[int, str] = {}
    for axis, (long, short) in enumerate(zip(actual.shape, expected.shape, strict=True)):
        if long == short:
            continue
        names = [n for n in ("batch", "length") if getattr(have, n) == short and getattr(want, n) == long]
        if not names:
            return None
        axes[axis] = "batch" if axis == 0 and "batch" in names else names[-1]
    return axes


def cut(tensor: torch.Tensor, axes: Mapping[int, str], have: CallSizes) -> torch.Tensor:
    """Remove the padding from the given axes of an output."""
    for axis, name in axes.items():
        size = getattr(have, name)
        if tensor.shape[axis] != size:
            tensor = tensor.narrow(axis, 0, size)
    return tensor


def longest(model: Any) -> int | None:
    """Return the maximum number of tokens per row from the model config, or `None` if there is no limit."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    # In RoBERTa models, position ids start after `padding_idx`, so fewer tokens fit.
    table = next((m for p, m in model.named_modules() if p.endswith("position_embeddings")), None)
    start = getattr(table, "padding_idx", None)
    return limit - start - 1 if isinstance(start, int) else limit
