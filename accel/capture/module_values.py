"""Inputs and outputs of the layers of a PyTorch model (`accel.interfaces.layer_traces`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..interfaces.layer_traces import LayerValues, TracedLayer
from ..interfaces.tracing_wrapper import Tensors

Run = Callable[[Tensors], Tensors]


class ModuleTrace:
    """The layers of a PyTorch model. A layer is a module without submodules that has a floating-point weight.

    Args:
        model: The model.
        run: Function that runs the model and returns its outputs by name.
        feeds: Inputs of a first call, which finds the order of the layers.
    """

    def __init__(self, model: torch.nn.Module, run: Run, feeds: Tensors) -> None:
        self.model, self._run = model, run
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if not any(module.children()) and isinstance(getattr(module, "weight", None), torch.Tensor)
        }
        self._layers: list[TracedLayer] = []
        values = self.run(feeds)
        for name in values.outputs:
            module: Any = self._modules[name.partition("#")[0]]
            weight = module.weight
            # torch.nn.Linear stores `(outputs, inputs)`, transformers' Conv1D stores `(inputs, outputs)`.
            turned = isinstance(module, torch.nn.Linear)
            kind = "embedding" if isinstance(module, torch.nn.Embedding) else "norm" if weight.ndim == 1 else "linear"
            shape = tuple(weight.shape[::-1] if turned else weight.shape)

            def read(weight: torch.Tensor = weight, turned: bool = turned) -> torch.Tensor:
                return (weight.T if turned else weight).detach().float()

            self._layers.append(TracedLayer(name, kind, shape, getattr(module, "bias", None) is not None, read))

    @property
    def layers(self) -> list[TracedLayer]:
        """The layers in the order of their calls. The second call of a layer has the name `LAYER#1`."""
        return self._layers

    def bias(self, name: str) -> torch.Tensor:
        """Return the bias of a layer."""
        bias: torch.Tensor = self._modules[name.partition("#")[0]].get_parameter("bias")
        return bias.detach().float()

    @torch.inference_mode()
    def run(self, feeds: Mapping[str, torch.Tensor], replaced: LayerValues | None = None) -> LayerValues:
        """Run the model; see `LayerTrace.run`."""
        values, replacements = LayerValues({}, {}), replaced or LayerValues()
        with self._hooks(values, replacements):
            results = self._run(dict(feeds))
        return LayerValues(values.inputs, values.outputs, results)

    @contextmanager
    def _hooks(self, values: LayerValues, replaced: LayerValues) -> Iterator[None]:
        calls: dict[str, int] = {}
        inputs: Any = values.inputs
        outputs: Any = values.outputs

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            count = calls[name] = calls.get(name, -1) + 1
            key = f"{name}#{count}" if count else name
            if not args or not isinstance(args[0], torch.Tensor):
                return None
            inputs[key] = args[0].clone()
            other = replaced.inputs.get(key)
            return None if other is None else (_like(other, args[0]), *args[1:])

        def after(name: str, output: Any) -> Any:
            key = f"{name}#{calls[name]}" if calls[name] else name
            if not isinstance(output, torch.Tensor):
                return None
            outputs[key] = output.clone()
            other = replaced.outputs.get(key)
            return None if other is None else _like(other, output)

        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: before(name, args)))
            handles.append(module.register_forward_hook(lambda _, _args, output, name=name: after(name, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _like(value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return a value of another model in the dtype and shape of the original value.

    Optimized graphs may compute only the first token in their last layer. Then only this token is replaced.
    """
    if value.numel() == original.numel():
        return value.to(original.dtype).reshape(original.shape)
    if original.ndim == 3 and value.numel() == original[:, :1].numel():
        changed = original.clone()
        changed[:, :1] = value.reshape(original[:, :1].shape)
        return changed
    return original
