"""Weight-only quantization to 4 or 8 bits. Layers of `accel` store the integers, scales and zero points that Neural
Compressor computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import util
from typing import Any

import torch

from accel.capture import BlockLinear, pack
from accel.config import QuantizeConfig
from accel.errors import ConfigError, QuantizeError, did_you_mean

from . import ALGORITHMS, AUTO_ROUND
from .block_call_checks import called_plainly, check_chain
from .upstream import blocks_of, has_norms_to_scale, library, mapped, packed_layers

NEEDS_DATA = ("gptq", "awq", "teq", "autoround")
_FIX = "use algorithm='rtn', or another backend; `accel doctor` lists the backends."


def check_algorithm(config: QuantizeConfig, *, calibrated: bool) -> None:
    """Raise if an algorithm cannot be used.

    Raises:
        ConfigError: The algorithm is not offered.
        QuantizeError: The package or the calibration data of the algorithm is missing.
    """
    name = config.algorithm
    if name not in ALGORITHMS:
        raise ConfigError(
            f"The algorithm {name!r} is not available with Neural Compressor.{did_you_mean(name, ALGORITHMS)}",
            fix=f"use one of {', '.join(ALGORITHMS)}, or backend='cpu' for hqq; `accel doctor` shows the reasons.",
        )
    if name == "autoround" and util.find_spec("auto_round") is None:
        raise QuantizeError(
            "The algorithm autoround needs the package auto-round, which is not installed.", fix=AUTO_ROUND
        )
    if name in NEEDS_DATA and not calibrated:
        raise QuantizeError(
            f"The algorithm {name} needs calibration data, but none was passed.",
            fix="pass calibration=... (--calibration), or use algorithm='rtn'.",
        )


def check_blocks(model: torch.nn.Module, config: QuantizeConfig, exclude: Sequence[str]) -> None:
    """Raise if the number of inputs of a layer is not a multiple of the block size.

    AWQ does not support this. Other algorithms pad the last block.

    Raises:
        ConfigError: The block size does not divide the inputs of a layer.
    """
    layers = {n: layer for n, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and n not in exclude}
    odd = next((name for name, layer in layers.items() if layer.in_features % config.block_size), None)
    if odd is not None:
        raise ConfigError(
            f"The algorithm awq needs whole blocks, but block_size {config.block_size} does not divide the "
            f"{layers[odd].in_features} inputs of the layer {odd}.",
            fix="use a smaller block_size, exclude the layer, or use algorithm='rtn' or 'gptq'.",
        )


def weight_config(config: QuantizeConfig, exclude: Sequence[str], folder: str) -> Any:
    """Translate the quantization config into Neural Compressor's settings.

    Args:
        config: The quantization config of `accel`.
        exclude: Names of layers that stay in floating point.
        folder: Folder of the model's weights. GPTQ requires it even if it does not read it.
    """
    inc, bits = library(), 4 if config.scheme == "weight-int4" else 8
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        # Disable the layer-wise mode, because it reads weights by their names in the file, which may differ from the
        # names in the model.
        "rtn": ("RTNConfig", {"use_layer_wise": False}),
        "gptq": ("GPTQConfig", {"model_path": folder}),
        "awq": ("AWQConfig", {}),
        "teq": ("TEQConfig", {}),
        "autoround": ("AutoRoundConfig", {}),
    }
    name, more = kinds[config.algorithm]
    kind = getattr(inc, name)
    settings = kind(bits=bits, group_size=config.block_size, use_sym=bool(config.symmetric), **more)
    for layer in exclude:
        settings.set_local(layer, kind(dtype="fp32", **more))
    return settings


def quantize_weights(
    model: torch.nn.Module, config: QuantizeConfig, settings: Any, rows: Sequence[Mapping[str, torch.Tensor]]
) -> Any:
    """Quantize a model in place and return it with Neural Compressor's packed layers.

    Args:
        model: The model to quantize.
        config: The quantization config; it names the algorithm.
        settings: Settings from `weight_config`.
        rows: Calibration data: model inputs by name.
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
            # AWQ and TEQ trace the model with these inputs.
            if "input_ids" not in rows[0]:
                raise QuantizeError(
                    f"The algorithm {config.algorithm} traces the model with token ids, but this model has the inputs "
                    f"{', '.join(rows[0])}.",
                    fix=_FIX,
                )
            traced = {"example_inputs": rows[0]["input_ids"]}
        with called_plainly(model, masks=config.algorithm == "gptq"):
            if config.algorithm in ("gptq", "awq"):
                check_chain(model, blocks_of(model, config.algorithm), _extremes(rows), config.algorithm)
            if config.algorithm == "teq" and not has_norms_to_scale(model, traced["example_inputs"]):
                raise QuantizeError(
                    "The algorithm teq scales normalization layers together with the linear layers after them, but found none in "
                    "the model.",
                    fix=_FIX,
                )
            return calibrated(**traced)


def _extremes(rows: Sequence[Mapping[str, torch.Tensor]]) -> list[Mapping[str, torch.Tensor]]:
    """Return the shortest and the longest calibration row."""
    by_size = sorted(rows, key=lambda row: sum(tensor.numel() for tensor in row.values()))
    return [by_size[0], by_size[-1]]


def with_block_layers(model: torch.nn.Module, before: Mapping[str, torch.nn.Module]) -> list[str]:
    """Replace the quantized layers of Neural Compressor by layers of `accel`. Return the names of the layers.

    Args:
        model: The model from `quantize_weights`; it is changed in place.
        before: The floating-point layers by name. Their biases are used, because packed layers store biases in 16 bits.

    Raises:
        QuantizeError: The model has no packed layer, or a packed layer cannot be stored exactly.
    """
    packed = packed_layers(model)
    if not packed:
        raise QuantizeError(
            "Neural Compressor quantized no layer of the model.",
            fix="check if exclude=... excludes all linear layers, or use another backend.",
        )
    for name, (module, factor) in packed.items():
        model.set_submodule(name, _block_layer(name, module, factor, before.get(name)))
    return list(packed)


def _block_layer(name: str, module: Any, factor: torch.Tensor | None, before: torch.nn.Module | None) -> BlockLinear:
    if module.g_idx is not None:
        raise QuantizeError(
            f"Neural Compressor reordered the input groups of the layer {name}, which no runtime supports.", fix=_FIX
        )
    unpacked = module.unpack()
    values, scales, zeros = unpacked["int_weight"].to(torch.int16), unpacked["scales"].float(), unpacked["zp"]
    middle = 2 ** (module.bits - 1)
    if zeros is None:
        values, zeros = values + middle, torch.full_like(scales, middle)
    outer, inner = values.shape
    size = module.group_size
    blocks = -(-inner // size)
    bias = _bias(module.bias, getattr(before, "bias", None))
    packed_layer = BlockLinear(
        inner, outer, bits=module.bits, block_size=size, bias=bias is not None, factor=factor is not None
    )
    padded = torch.full((outer, blocks * size), middle, dtype=torch.uint8)
    padded[:, :inner] = values.to(torch.uint8)
    packed_layer.packed = pack(padded.reshape(outer, blocks, size), module.bits)
    packed_layer.scales = scales.reshape(outer, blocks).contiguous()
    packed_layer.zeros = pack(zeros.reshape(outer, blocks).to(torch.uint8), module.bits)
    packed_layer.bias = bias
    if factor is not None:
        packed_layer.factor = factor.detach().float().reshape(-1).clone()
    return packed_layer


def _bias(packed: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias of a quantized layer in floating point.

    Packed layers store the bias in 16 bits. The original bias is returned if the packed bias is its rounded value. If
    the algorithm changed the bias, the packed bias is returned.
    """
    if packed is None:
        return None
    bias = packed.detach().float().reshape(-1)
    if before is not None and torch.equal(before.detach().half().float(), bias.half().float()):
        return before.detach().float().clone()
    return None if before is None and not bias.any() else bias.clone()


def with_weights_of_their_own(model: torch.nn.Module) -> torch.nn.Module:
    """Give each linear layer with a shared weight its own copy, and return the model.

    Weights are usually shared with the token embeddings, and Neural Compressor overwrites the weights that it reads.
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and owners[id(layer.weight)] > 1:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    return model


def share_again(model: torch.nn.Module, before: torch.nn.Module) -> None:
    """Share parameters again that are shared in the floating-point model, if their values are still equal.

    If the algorithm changed one of the shared parameters, `tie_word_embeddings` is turned off.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in before.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in groups.values():
        shared = [name for name in names if name in parameters]
        for name in shared[1:]:
            if torch.equal(parameters[name], parameters[shared[0]]):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, parameters[shared[0]])
            elif getattr(getattr(model, "config", None), "tie_word_embeddings", False):
                model.config.tie_word_embeddings = False  # type: ignore[union-attr]
