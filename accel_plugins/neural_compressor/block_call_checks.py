"""Checks that GPTQ and AWQ can call the blocks of a model one by one.

GPTQ and AWQ of Neural Compressor call the blocks of a model one after another. Each block gets the output of the
previous block and the other arguments of the first block. If a model calls its blocks differently, the algorithms would
silently optimize the weights for activations that never occur in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Conv1D

from accel.errors import QuantizeError

_FIX = "use algorithm='rtn', or export the model and quantize the graph with backend='openvino'."
# Arguments that GPTQ keeps although they are not tensors.
_PAIRS = ("alibi", "position_embeddings")
# The outputs may differ slightly, because attention kernels for short and for long rows add numbers in a different
# order.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Call:
    """Recorded call of a model block during a normal run of the model: arguments and output."""

    args: tuple[Any, ...]
    kept: dict[str, Any]
    answer: torch.Tensor


def check_chain(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], rows: Sequence[Mapping[str, Any]], algorithm: str
) -> None:
    """Raise if the blocks of a model compute different outputs when an algorithm calls them one by one.

    Args:
        model: The model in floating point.
        blocks: The blocks that Neural Compressor found.
        rows: The shortest and the longest row of the calibration data. Each row costs about two runs of the model.
        algorithm: `gptq` or `awq`.

    Raises:
        QuantizeError: A block differs or cannot be called; the message names the first one.
    """
    if not blocks:
        raise QuantizeError(
            f"The algorithm {algorithm} needs a list of blocks in the model, but Neural Compressor found none.",
            fix=_FIX,
        )
    gptq = algorithm == "gptq"
    if gptq and (odd := next((n for n, module in blocks[0].named_modules() if isinstance(module, Conv1D)), "")):
        raise QuantizeError(
            f"The algorithm gptq quantizes only linear layers, but the layer {odd} in the model's blocks is a Conv1D layer.",
            fix=_FIX,
        )
    names: set[str] | None = None
    for row in rows:
        calls = _calls(model, blocks, row, tensors=gptq)
        if gptq and names is not None and names != set(calls[0].kept):
            odd = ", ".join(sorted(names ^ set(calls[0].kept)))
            raise QuantizeError(
                "The algorithm gptq needs the same arguments of the model's blocks for all calibration rows, but only some rows "
                f"have {odd}.",
                fix=_FIX,
            )
        names = set(calls[0].kept)
        hidden: Any = calls[0].args[0] if calls[0].args else calls[0].kept.get("hidden_states")
        for number, block in enumerate(blocks):
            args, kwargs = calls[0].args[1:], dict(calls[0].kept)
            if calls[0].args:
                args = (hidden, *args)
            else:
                kwargs["hidden_states"] = hidden
            try:
                with torch.no_grad():
                    hidden = _first(block(*args, **kwargs))
            # The block is model code and may raise any exception, for example because an argument is missing.
            except Exception as error:
                raise QuantizeError(
                    f"The algorithm {algorithm} calls every block of the model with the arguments of the first block. Block {number} of "
                    f"{len(blocks)} fails with these arguments: {type(error).__name__}: {error}",
                    fix=_FIX,
                ) from error
            expected = calls[number].answer
            if hidden.shape != expected.shape or not _close(hidden, expected):
                raise QuantizeError(
                    f"The algorithm {algorithm} calls every block of the model with the arguments of the first block, but the model "
                    f"calls block {number} of {len(blocks)} with other arguments, such as other masks or positions.",
                    fix=_FIX,
                )


def _close(computed: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((computed - other).abs().max() <= _TOLERANCE * other.abs().max())


def _calls(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], row: Mapping[str, Any], *, tensors: bool
) -> list[_Call]:
    calls: dict[int, _Call] = {}

    def watch(number: int) -> Any:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
            stored_kwargs = {
                n: value for n, value in kwargs.items() if not tensors or isinstance(value, torch.Tensor) or n in _PAIRS
            }
            calls[number] = _Call(args, stored_kwargs, _first(answer))

        return hook

    hooks = [block.register_forward_hook(watch(number), with_kwargs=True) for number, block in enumerate(blocks)]
    try:
        with torch.no_grad():
            model(**row)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [number for number in range(len(blocks)) if number not in calls]
    if missing:
        raise QuantizeError(
            f"Neural Compressor found {len(blocks)} blocks in the model, starting with a {type(blocks[0]).__name__}, but the model "
            f"does not call block {missing[0]}.",
            fix=_FIX,
        )
    return [calls[number] for number in range(len(blocks))]


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, tuple | list) else answer


@contextmanager
def called_plainly(model: Any, *, masks: bool) -> Iterator[None]:
    """Context manager in which a model runs without a KV cache. With a cache, blocks that run repeatedly would read
    their earlier results.

    Args:
        model: The model.
        masks: Whether attention always gets a mask. If this is false, rows without padding get no mask. GPTQ keeps the
            masks of all rows in one list, so it would then use the mask of another row.
    """
    configs = [model.config, model.config.get_text_config()] if hasattr(model, "config") else []
    caching = [settings for settings in configs if getattr(settings, "use_cache", False)]
    attention = getattr(configs[0], "_attn_implementation", None) if configs else None
    changes = masks and attention not in (None, "eager") and hasattr(model, "set_attn_implementation")
    for settings in caching:
        settings.use_cache = False
    if changes:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for settings in caching:
            settings.use_cache = True
        if changes:
            model.set_attn_implementation(attention)


class _InFloat(torch.nn.Module):
    """Linear layer with another class than `torch.nn.Linear`, so that Neural Compressor does not find and quantize it."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@contextmanager
def hidden(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context manager that hides linear layers from Neural Compressor, so that they stay in floating point.

    GPTQ would quantize a layer without settings with the settings of another layer.
    """
    layers = {name: model.get_submodule(name) for name in names}

    def put(name: str, layer: torch.nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)

    for name, layer in layers.items():
        assert isinstance(layer, torch.nn.Linear)
        put(name, _InFloat(layer))
    try:
        yield
    finally:
        for name, layer in layers.items():
            put(name, layer)
