"""Load checkpoints whose linear layers were quantized by GPTQ, AWQ, auto-round or compressed-tensors.

The layers become `BlockLinear` layers with the integers, scales and zero points of the checkpoint. No packages of these tools are needed.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from .packed_layers import ORIGINAL, PackedLinear, PackedSettings, Shapes, is_packed
from .quantized_linears import with_checkpoint_record
from .streamed_weights import safetensors_files, safetensors_header

logger = logging.getLogger(__name__)

_METHOD = "accel-packed"
"""Name under which the loader is registered in transformers."""
_DTYPES = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_OUTPUT_LAYERS = ("lm_head", "embed_out", "cls.predictions.decoder")


def packed_settings(config: Any) -> PackedSettings | None:
    """Return the settings of a model whose packed weights accel reads; `None` for other models.

    Args:
        config: The config of a transformers model.

    Raises:
        ExportError: The quantization config is not valid, or describes a layout or a number of bits that accel does not read.
    """
    values: Any = getattr(config, "quantization_config", None)
    values = values.to_dict() if hasattr(values, "to_dict") else values
    if values is None:
        return None
    try:
        method = str(values.get("quant_method", "")).replace("_", "-")
        if method == "compressed-tensors":
            return _compressed_settings(values)
        return _gptq_settings(method, values) if method in ("gptq", "awq", "auto-round") else None
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(
            f"The entry quantization_config in config.json cannot be read: {error}",
            fix="correct config.json, or download it again.",
        ) from error


def _gptq_settings(method: str, values: Mapping[str, Any]) -> PackedSettings:
    """Return the settings of GPTQ, AWQ and auto-round."""
    if method == "gptq":
        layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    elif method == "awq":
        layout = values.get("version") or values.get("format") or "gemm"
    else:
        layout = str(values.get("packing_format") or "auto_round:auto_gptq").rpartition(":")[2]
    layout, bits = str(layout).lower(), int(values.get("bits") or 4)
    awq = layout in ("gemm", "auto_awq")
    if (layout not in ("gptq", "gptq_v2", "auto_gptq") and not awq) or bits not in ((4,) if awq else (4, 8)):
        raise ExportError(
            f"The checkpoint was quantized by {method} to {bits} bits, in the layout {layout!r}. accel reads 4 and 8 bits in the "
            "layouts of AutoGPTQ, and 4 bits in AutoAWQ's version 'gemm'.",
            fix=ORIGINAL,
        )
    # Single layers may have other settings. The shapes of their tensors show the number of bits.
    varies = bool(values.get("dynamic") or values.get("extra_config"))
    size = values.get("group_size")
    return PackedSettings(
        method=method,
        layout="awq" if awq else "gptq",
        # Other versions contain each zero point minus 1.
        zero_offset=0 if awq or layout == "gptq_v2" else 1,
        group=None if varies or size is None else int(size),
        ordered=bool(values.get("desc_act")) and not varies and not awq,
    )


def _compressed_settings(values: Mapping[str, Any]) -> PackedSettings | None:
    """Return the settings of compressed-tensors; `None` if transformers loads the format, or for formats without integers."""
    groups = list((values.get("config_groups") or {}).values())
    formats = {str(group.get("format") or values.get("format")) for group in groups} or {str(values.get("format"))}
    if not formats <= {"pack-quantized", "int-quantized"}:
        return None
    weights = [group.get("weights") or {} for group in groups]
    strategies = {str(each.get("strategy") or "tensor") for each in weights}
    if values.get("transform_config") or not strategies <= {"channel", "group", "tensor"}:
        raise ExportError(
            "The checkpoint was quantized by compressed-tensors with "
            f"{'rotations (transform_config)' if values.get('transform_config') else f'the strategy {sorted(strategies)}'}, which accel "
            "does not read.",
            fix=ORIGINAL,
        )
    sizes = {int(each.get("group_size") or -1) for each in weights}
    return PackedSettings(
        method="compressed-tensors",
        layout="compressed-tensors",
        group=sizes.pop() if len(sizes) == 1 else None,
        symmetric=len(weights) != 1 or bool(weights[0].get("symmetric", True)),
        rounds_activations=any(group.get("input_activations") for group in groups),
    )


def load_packed(
    load: Callable[..., torch.nn.Module], folder: Path, model_config: Any, settings: PackedSettings
) -> torch.nn.Module:
    """Load a model whose linear layers are quantized.

    Args:
        load: A function that loads the model with `from_pretrained` and passes its keyword arguments on.
        folder: The folder with the checkpoint, in safetensors files.
        model_config: The config of the model.
        settings: The result of `packed_settings`.

    Returns:
        The model, with a record of its quantization.

    Raises:
        ExportError: Weight files or tensors are missing, quantized layers are not linear layers of the model, or their tensors do not have
            the layout of the settings.
        SafetensorError: A weight file is damaged.
        FileNotFoundError: The index of the weights lists a file that is missing.
    """
    from safetensors import safe_open

    files = safetensors_files(folder)
    if not files and (folder / "model.safetensors.index.json").is_file():
        raise FileNotFoundError("weight files are missing")
    if not files:
        raise ExportError(
            "accel reads quantized checkpoints from model.safetensors or from the files that model.safetensors.index.json lists, and "
            f"{folder} has neither.",
            fix="rename the file with the weights to model.safetensors, or save the model again with safetensors files.",
        )
    layers: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for path in files:
        with safe_open(path, framework="pt"):
            header = safetensors_header(path)
        for name, (kind, shape, _) in header.items():
            owner, _, last = name.rpartition(".")
            layers.setdefault(owner, {})[last] = _DTYPES.get(kind, torch.uint8), shape
    packed = {name: tensors for name, tensors in layers.items() if is_packed(tensors)}
    if not packed:
        raise ExportError(
            f"config.json says that {settings.method} quantized the checkpoint, but its weights in {folder} are not quantized.",
            fix="use the weights that belong to config.json, or remove quantization_config from config.json.",
        )
    inside = [
        name for name in layers if any(name.startswith(f"{layer}.") for layer in _prefixes(name) if layer in packed)
    ]
    if inside:
        raise ExportError(
            f"Quantized layers of the checkpoint have tensors that accel does not read: {', '.join(inside[:3])}.",
            fix=ORIGINAL,
        )
    if settings.rounds_activations:
        logger.warning(
            "The checkpoint in %s was made to run with rounded activations. accel uses its integer weights and does not round activations.",
            folder,
        )
    plain = copy.deepcopy(model_config)
    _register_loader()
    plain.quantization_config = {"quant_method": _METHOD, "packed": packed, "settings": settings}
    if any(name in packed for name in _OUTPUT_LAYERS):
        # The quantized output layer is not the table of the embeddings.
        plain.get_text_config().tie_word_embeddings = plain.tie_word_embeddings = False
    model = load(config=plain)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "quantization_config"):
            del module.config.quantization_config  # type: ignore[union-attr]
    return with_checkpoint_record(model, settings.method)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a module."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@functools.cache
def _register_loader() -> None:
    """Register a loader of packed weights in transformers.

    transformers creates the model without weights, lets the loader replace layers, and reads the weights.
    """
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, quant_method: str, packed: Mapping[str, Shapes], settings: PackedSettings) -> None:
            self.quant_method = quant_method
            self.packed, self.settings = packed, settings

    @register_quantizer(_METHOD)
    class PackedLoader(HfQuantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            config = self.quantization_config
            matched = dict(_matched(model, config.packed))
            _check_matched(model, config.packed, {path for path, _ in matched.values()})
            for name, (path, tensors) in matched.items():
                layer = model.get_submodule(name)
                model.set_submodule(name, PackedLinear(path, layer, tensors, config.settings))

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            for name, layer in list(model.named_modules()):
                if isinstance(layer, PackedLinear):
                    model.set_submodule(name, layer.blocks())
            del model.hf_quantizer, model.is_quantized, model.quantization_method
            return model

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False


def _matched(model: Any, packed: Mapping[str, Shapes]) -> Iterator[tuple[str, tuple[str, Shapes]]]:
    """Yield the names of the linear layers of a model that are packed in the checkpoint, with their names in the checkpoint and the shapes
    of their tensors.

    A checkpoint of a model with a head has a prefix before the names of the model without the head, and the reverse.
    """
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            names = (name, prefix + name, name.removeprefix(prefix))
            path = next((each for each in names if each in packed), None)
            if path is not None:
                yield name, (path, packed[path])


def _check_matched(model: Any, packed: Mapping[str, Shapes], matched: Set[str]) -> None:
    """Raise if quantized layers of the checkpoint are not linear layers of the model. A head that the model does not have is ignored.

    Raises:
        ExportError: The model has no quantized layer, or quantized embeddings or experts (transformers merges the experts of a layer).
    """
    prefix = f"{model.base_model_prefix}."
    modules = {name for name, _ in model.named_modules()}
    modules |= {prefix + name for name in modules} | {name.removeprefix(prefix) for name in modules}
    others = [name for name in packed.keys() - matched if not matched or name in modules or ".experts." in name]
    if others:
        raise ExportError(
            f"{len(others)} of {len(packed)} quantized layers of the checkpoint are not linear layers of a {type(model).__name__} in "
            f"transformers: {', '.join(sorted(others)[:3])}{', ...' if len(others) > 3 else ''}.",
            fix=ORIGINAL,
        )
