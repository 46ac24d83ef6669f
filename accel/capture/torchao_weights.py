"""Replace linear layers whose weights torchao quantized, by `BlockLinear` layers with the same integers."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from ..errors import ExportError
from .packed_layers import ORIGINAL, block_linear, unsigned
from .quantized_linears import BlockLinear, pack, with_checkpoint_record

logger = logging.getLogger(__name__)


def without_torchao(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in which layers whose weights torchao quantized are `BlockLinear` layers with the same integers.

    Weights of other formats of torchao, for example float8, are dequantized. A model without weights of torchao is returned unchanged.
    """
    quantized = {name: p for name, p in model.named_parameters(remove_duplicate=False) if _is_torchao(p)}
    if not quantized:
        return model
    tensors = (*model.parameters(), *model.buffers())
    converted = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    blocks: dict[int, torch.nn.Module] = {}
    others = []
    for name, weight in quantized.items():
        owner, _, last = name.rpartition(".")
        module = converted.get_submodule(owner)
        layer = blocks.get(id(module)) or _torchao_blocks(module, weight)
        if layer is not None:
            blocks[id(module)] = layer
            converted.set_submodule(owner, layer)
        else:
            others.append(name)
            setattr(module, last, torch.nn.Parameter(_dequantized(name, weight), requires_grad=False))
    if others:
        logger.warning(
            "%d weights that torchao quantized are exported in float32, because their format (%s) has no integers in blocks: %s",
            len(others), type(quantized[others[0]]).__name__, ", ".join(others[:3]),
        )  # fmt: skip
    return with_checkpoint_record(converted, "torchao") if blocks else converted


def _dequantized(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight of torchao in float32.

    Raises:
        ExportError: torchao cannot dequantize this format.
    """
    try:
        values: torch.Tensor = weight.dequantize().float()
    except NotImplementedError as error:
        raise ExportError(
            f"The weight {name} has a format of torchao ({type(weight.data).__name__}) that torchao cannot dequantize.",
            fix=ORIGINAL,
        ) from error
    return values


def _is_torchao(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__module__.startswith("torchao.")


def _torchao_blocks(module: torch.nn.Module, weight: torch.Tensor) -> BlockLinear | None:
    """Return a layer with the integers of a weight of torchao, or `None` if it has other values than integers in blocks."""
    tensor: Any = weight.data
    integers, sizes = getattr(tensor, "qdata", None), list(getattr(tensor, "block_size", ()))
    if not isinstance(module, torch.nn.Linear) or integers is None or integers.dtype is not torch.int8:
        return None
    # The other sizes are those of weights whose blocks have several rows.
    if integers.shape != weight.shape or sizes[:-1] != [1]:
        return None
    if getattr(tensor, "act_pre_scale", None) is not None:
        return None
    bits = 4 if str(getattr(tensor, "target_dtype", "")).removeprefix("torch.int") in ("1", "2", "3", "4") else 8
    scales = tensor.scale.float().view(len(integers), -1)
    zeros = getattr(tensor, "zero_point", None)
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else zeros.view(scales.shape)
    if zeros.is_floating_point():
        return None
    return block_linear(
        pack(unsigned(integers, bits), bits), scales, unsigned(zeros, bits), bits=bits, inner=integers.shape[1],
        group=int(sizes[-1]), bias=None if module.bias is None else module.bias.detach(),
    )  # fmt: skip
