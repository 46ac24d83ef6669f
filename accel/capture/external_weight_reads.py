"""Detection of layers whose weights are also read by code outside of the layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..interfaces.tracing_wrapper import Tensors
from .reference_cases import reference


def read_by_other_code(model: Any, feeds: Tensors) -> set[torch.nn.Module]:
    """Return the modules whose weights the model reads without calling the module, such as the linear layers of wav2vec2's x-vectors.

    A quantized layer cannot replace such a module, because its weights have another form. The function runs the model once.

    Args:
        model: A transformers model, or a wrapper of a transformers model.
        feeds: Inputs for this run.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # The decoder needs a start token. The token id does not matter, because only the reads of weights are recorded.
        rows = len(next(iter(feeds.values())))
        feeds = {"decoder_input_ids": torch.zeros((rows, 1), dtype=torch.int64), **feeds}
    with ExitStack() as hooks:
        reading = _ParameterReads(model, hooks)
        with reading:
            reference(model, feeds)
    return reading.found


class _ParameterReads(TorchFunctionMode):
    """Record the modules whose parameters are read by an operation outside of the module's `forward`."""

    def __init__(self, model: torch.nn.Module, hooks: ExitStack) -> None:
        super().__init__()
        self.found: set[torch.nn.Module] = set()
        self._running: set[torch.nn.Module] = set()
        self._owners: dict[int, set[torch.nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(module)
            hooks.enter_context(module.register_forward_pre_hook(self._starts))
            hooks.enter_context(module.register_forward_hook(self._ends))

    def _starts(self, module: torch.nn.Module, *_: Any) -> None:
        self._running.add(module)

    def _ends(self, module: torch.nn.Module, *_: Any) -> None:
        self._running.discard(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # An operation whose result is not a tensor reads only a property such as the dtype, so it is not recorded.
        if next(_tensors(result), None) is not None:
            for tensor in _tensors((args, kwargs)):
                owners = self._owners.get(id(tensor), set())
                if not owners & self._running:
                    self.found |= owners
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
