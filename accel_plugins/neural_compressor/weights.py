"""Weights in 4 or 8 bits: Neural Compressor chooses integers, scales and zero points; our layers keep them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util
from typing import Any

import torch

from accel.capture import BlockLinear, pack, replace_layer
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean

from . import ALGORITHMS, AUTO_ROUND
from .blocks import called_plainly, check_chain
from .library import library, mapped

NEEDS_DATA = ("gptq", "awq", "teq", "autoround")
_FIX = "use algorithm='rtn', or another backend (`accel doctor` lists what is missing here)."


def check_algorithm(config: QuantizeConfig, *, calibrated: bool) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: An algorithm that is not offered, or whose packed weights cannot be kept.
        QuantizeError: Its package is missing, or there is no calibration data for one that needs it.
    """
    name = config.algorithm
    if name not in ALGORITHMS:
        raise ConfigError(
            f"{name!r} is not offered with Neural Compressor: see `accel doctor`.{did_you_mean(name, ALGORITHMS)}",
            fix=f"use one of {', '.join(ALGORITHMS)}, or backend='cpu' for hqq.",
        )
    if name == "autoround" and util.find_spec("auto_round") is None:
        raise QuantizeError("autoround needs the package auto-round, which is not installed.", fix=AUTO_ROUND)
    if name in NEEDS_DATA and not calibrated:
        raise QuantizeError(
            f"{name} needs calibration data, and none was given.", fix="pass calibration=..., or use algorithm='rtn'."
        )


def check_blocks(model: torch.nn.Module, config: QuantizeConfig, exclude: Sequence[str]) -> None:
    """AWQ reads whole blocks, where the other algorithms fill up the last one.

    Raises:
        ConfigError: The block size does not divide a layer's inputs.
    """
    layers = {n: one for n, one in model.named_modules() if isinstance(one, torch.nn.Linear) and n not in exclude}
    odd = next((name for name, one in layers.items() if one.in_features % config.block_size), None)
    if odd is not None:
        raise ConfigError(
            f"awq takes whole blocks, and block_size {config.block_size} does not divide the {layers[odd].in_features} inputs "
            f"of {odd}.",
            fix="use a smaller block_size, exclude the layer, or use algorithm='rtn' or 'gptq'.",
        )


def weight_config(config: QuantizeConfig, exclude: Sequence[str], folder: str) -> Any:
    """Neural Compressor's settings for ours.

    Args:
        config: Ours.
        exclude: Names of layers that stay in float.
        folder: Where the model's weights are: GPTQ wants to know, even when it does not read them.
    """
    inc, bits = library(), 4 if config.scheme == "weight-int4" else 8
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        # Layer by layer it reads weights by their names in the file, which are not always those in the model.
        "rtn": ("RTNConfig", {"use_layer_wise": False}),
        "gptq": ("GPTQConfig", {"model_path": folder}),
        "awq": ("AWQConfig", {}),
        "teq": ("TEQConfig", {}),
        "autoround": ("AutoRoundConfig", {}),
    }
    name, more = kinds[config.algorithm]
    kind = getattr(inc, name)
    made = kind(bits=bits, group_size=config.block_size, use_sym=bool(config.symmetric), **more)
    for layer in exclude:
        made.set_local(layer, kind(dtype="fp32", **more))
    return made


def quantize_weights(
    model: torch.nn.Module, config: QuantizeConfig, settings: Any, rows: Sequence[Mapping[str, torch.Tensor]]
) -> Any:
    """The model with Neural Compressor's packed layers in it; changed in place.

    Args:
        model: To quantize.
        config: Which algorithm.
        settings: From `weight_config`.
        rows: Calibration data, as the model is called.
    """
    inc = library()

    def calibrated(**more: Any) -> Any:
        prepared = inc.prepare(model, settings, **more)
        for row in rows:
            prepared(**row)
        return inc.convert(prepared)

    with mapped(config.algorithm, _FIX):
        if config.algorithm == "rtn":
            return inc.convert(inc.prepare(model, settings), use_optimum_format=False)
        traced = {}
        if config.algorithm in ("awq", "teq"):
            # The model is called with them where it is traced.
            if "input_ids" not in rows[0]:
                raise QuantizeError(
                    f"{config.algorithm} traces models with ids of tokens, and this one takes {', '.join(rows[0])}.",
                    fix=_FIX,
                )
            traced = {"example_inputs": rows[0]["input_ids"]}
        with called_plainly(model, masks=config.algorithm == "gptq"):
            if config.algorithm in ("gptq", "awq"):
                check_chain(model, _blocks(model, config.algorithm), _extremes(rows), config.algorithm)
            if config.algorithm == "teq":
                _check_norms(model, traced["example_inputs"])
            return calibrated(**traced)


def _blocks(model: torch.nn.Module, algorithm: str) -> Sequence[torch.nn.Module]:
    """What an algorithm takes for the model's blocks."""
    from neural_compressor.torch.algorithms.weight_only import gptq, utility

    if algorithm == "gptq":
        return list(gptq.trace_gptq_target_blocks(model)["transformers"])
    found: Any = model.get_submodule(utility.get_block_prefix(model)[0])
    return list(found)


def _check_norms(model: torch.nn.Module, example: Any) -> None:
    """Refuse a model whose layers could not be scaled.

    Raises:
        QuantizeError: TEQ finds no norm that could take the scales up.
    """
    from neural_compressor.torch.algorithms.weight_only.utility import GraphTrace

    if not GraphTrace().get_absorb_to_layer(model, example, ["Linear"])[0]:
        raise QuantizeError(
            "teq finds no norm in front of the model's layers that could be scaled with them.", fix=_FIX
        )


def _extremes(rows: Sequence[Mapping[str, torch.Tensor]]) -> list[Mapping[str, torch.Tensor]]:
    """The shortest row and the longest."""
    by_size = sorted(rows, key=lambda row: sum(tensor.numel() for tensor in row.values()))
    return [by_size[0], by_size[-1]]


def with_block_layers(model: torch.nn.Module, before: Mapping[str, torch.nn.Module]) -> list[str]:
    """Put our layers in the place of Neural Compressor's; gives their names.

    Args:
        model: From `quantize_weights`; changed in place.
        before: The layers as they were, for biases, which packed layers keep in half precision.

    Raises:
        QuantizeError: There is no packed layer, or one that cannot be written down exactly.
    """
    from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear, MulLinear

    scaled = {name: one for name, one in model.named_modules() if isinstance(one, MulLinear)}
    packed = {name: one for name, one in model.named_modules() if isinstance(one, INCWeightOnlyLinear)}
    names = []
    for name, module in packed.items():
        outer = name.removesuffix(".linear") if name.removesuffix(".linear") in scaled else name
        factor = scaled[outer].input_scale if outer in scaled else None
        replace_layer(model, outer, _block_layer(outer, module, factor, before.get(outer)))
        names.append(outer)
    if not names:
        raise QuantizeError(
            "Neural Compressor quantized no layer of the model.", fix="check exclude=..., or use another backend."
        )
    for name in scaled:
        if name not in names:
            raise QuantizeError(f"{name} has scaled inputs and no packed weights.", fix=_FIX)
    return names


def _block_layer(name: str, module: Any, factor: torch.Tensor | None, before: torch.nn.Module | None) -> BlockLinear:
    if module.g_idx is not None:
        raise QuantizeError(f"The groups of {name} are not in order, which no runtime reads.", fix=_FIX)
    found = module.unpack()
    values, scales, zeros = found["int_weight"].to(torch.int16), found["scales"].float(), found["zp"]
    middle = 2 ** (module.bits - 1)
    if zeros is None:
        values, zeros = values + middle, torch.full_like(scales, middle)
    outer, inner = values.shape
    size = module.group_size
    blocks = -(-inner // size)
    bias = _bias(module.bias, getattr(before, "bias", None))
    made = BlockLinear(
        inner, outer, bits=module.bits, block_size=size, bias=bias is not None, factor=factor is not None
    )
    padded = torch.full((outer, blocks * size), middle, dtype=torch.uint8)
    padded[:, :inner] = values.to(torch.uint8)
    made.packed = pack(padded.reshape(outer, blocks, size), module.bits)
    made.scales = scales.reshape(outer, blocks).contiguous()
    made.zeros = pack(zeros.reshape(outer, blocks).to(torch.uint8), module.bits)
    made.bias = bias
    if factor is not None:
        made.factor = factor.detach().float().reshape(-1).clone()
    return made


def _bias(packed: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """The float bias where the packed one is its rounding; else the packed one, which an algorithm has changed."""
    if packed is None:
        return None
    kept = packed.detach().float().reshape(-1)
    if before is not None and torch.equal(before.detach().half().float(), kept.half().float()):
        return before.detach().float().clone()
    return None if before is None and not kept.any() else kept.clone()


def with_weights_of_their_own(model: torch.nn.Module) -> torch.nn.Module:
    """The model, where a linear layer that shares its weight, with the table of tokens as a rule, has a copy: Neural Compressor writes
    integers into the weights that it reads.
    """
    owners: dict[int, int] = {}
    for _, one in model.named_parameters(remove_duplicate=False):
        owners[id(one)] = owners.get(id(one), 0) + 1
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and owners[id(layer.weight)] > 1:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    return model


def share_again(model: torch.nn.Module, before: torch.nn.Module) -> None:
    """Make one parameter of those that were one in the float model, where an algorithm left copies; where it changed one of
    them, the config says that they are two.
    """
    groups: dict[int, list[str]] = {}
    for name, one in before.named_parameters(remove_duplicate=False):
        groups.setdefault(id(one), []).append(name)
    found = dict(model.named_parameters(remove_duplicate=False))
    for names in groups.values():
        kept = [name for name in names if name in found]
        for name in kept[1:]:
            if torch.equal(found[name], found[kept[0]]):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, found[kept[0]])
            elif getattr(getattr(model, "config", None), "tie_word_embeddings", False):
                model.config.tie_word_embeddings = False  # type: ignore[union-attr]
