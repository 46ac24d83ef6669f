"""Session that runs a PyTorch module, and replays of CUDA graphs of a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from accel.artifact import Component
from accel.capture import graph_name, named_tensors
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .cuda_graphs import StreamOrder, captured, on_device
from .upstream import copy_all, tree_flatten, tree_unflatten

Module = Callable[..., Any]
RUN_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError, AssertionError)
"""Exceptions that PyTorch and the model code raise for invalid inputs."""


class ModuleSession(BaseSession[Module]):
    """Session that runs a PyTorch module with named input and output tensors. Several threads may call it at once.

    Args:
        module: The model, on its device and in the data type used for computation.
        component: The component, which describes the inputs and outputs.
        device: The device of the module.
        dtype: Data type used for computation.
        shapes: Fixed sizes of named axes.
    """

    runtime_name = "PyTorch"
    run_errors = RUN_ERRORS
    advice = "check the names, shapes and values of the inputs. If the memory is full, use smaller batches."

    def __init__(
        self, module: Module, component: Component, device: DeviceSpec, dtype: str, shapes: Mapping[str, int]
    ) -> None:
        super().__init__(module, component, device, dtype, shapes=shapes)
        self._where = torch.device(str(device))
        self._computes: torch.dtype = getattr(torch, dtype)

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        with on_device(self._where), torch.inference_mode():
            outputs = {graph_name(name): tensor for name, tensor in named_tensors(self.runtime(**tensors)).items()}
        return {name: self._declared(name, outputs[name]) for name in names}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the module's device. Floating-point tensors are converted to the module's data type."""
        # An asynchronous copy from pageable memory is safe: CUDA reads the tensor before `to` returns, so the caller
        # may change the tensor afterwards.
        asynchronous = tensor.is_cpu and self._where.type == "cuda" and not tensor.is_pinned()
        dtype = self._computes if tensor.is_floating_point() else None
        return tensor.to(self._where, dtype, non_blocking=asynchronous)

    def _declared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output in the data type that the component declares, as a tensor that the caller may change.

        PyTorch forbids changes to tensors that were created in inference mode, so this method clones these tensors.
        """
        output = tensor.to(self._output_dtypes[name])
        return output.clone() if output.is_inference() and not torch.is_inference_mode_enabled() else output

    def _reason(self, error: Exception) -> str:
        return f"{type(error).__name__}: {super()._reason(error)}"


class CapturedCall(NamedTuple):
    """A CUDA graph of one call, with its input and output tensors.

    Attributes:
        graph: The graph that is replayed.
        inputs: The tensors that the graph reads, by name.
        leaves: The outputs as a flat list: tensors that each replay overwrites, and other values, in the order of
            `spec`.
        spec: The nested structure of the outputs (a pytree spec).
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    leaves: list[Any]
    spec: Any


class CapturedModule:
    """Module on a GPU that runs by replaying a CUDA graph, which launches all kernels at once.

    The first call with a new input shape captures a graph. Each call copies its inputs into the memory of the graph and
    its outputs out of this memory. Only one thread at a time runs a graph.

    Args:
        module: The model on a GPU.
        device: The GPU of the model.
    """

    def __init__(self, module: Module, device: torch.device) -> None:
        self._module = module
        self._graphs: dict[Any, CapturedCall] = {}
        self._turn = threading.Lock()
        self._device = device
        self._on_device = StreamOrder(device)

    def __call__(self, **feeds: Any) -> Any:
        """Run the module on the inputs: replay the CUDA graph for the input shapes. If no graph was captured for these
        shapes, capture one first.
        """
        tensors = {name: value for name, value in feeds.items() if isinstance(value, torch.Tensor)}
        with self._turn:
            captured_call = self.graph_of(feeds)
            if captured_call is None:
                self._on_device.take()
                settings = {name: value for name, value in feeds.items() if name not in tensors}
                captured_call = self._graphs[_shapes(feeds)] = self._capture(tensors, settings)
            return self._replayed(captured_call, tensors, None)

    def graph_of(self, feeds: Mapping[str, Any]) -> CapturedCall | None:
        """Return the graph captured for these input names, shapes and settings, or `None`."""
        return self._graphs.get(_shapes(feeds))

    def replay(self, captured_call: CapturedCall, feeds: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
        """Replay a captured graph on new inputs and return copies of its outputs.

        Args:
            captured_call: The graph, from `graph_of`.
            feeds: Inputs with the names and shapes of the captured call. Additional inputs are ignored.
            dtype: Data type of the floating-point outputs; by default the data type that the graph computes.
        """
        with self._turn:
            return self._replayed(captured_call, feeds, dtype)

    def _replayed(self, captured_call: CapturedCall, feeds: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
        self._on_device.take()
        copy_all(list(captured_call.inputs.values()), [feeds[name] for name in captured_call.inputs])
        captured_call.graph.replay()
        copies = [
            leaf.to(dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype, copy=True)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in captured_call.leaves
        ]
        return tree_unflatten(copies, captured_call.spec)

    def _capture(self, feeds: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> CapturedCall:
        inputs = {name: tensor.clone() for name, tensor in feeds.items()}
        graph, result = captured(lambda: self._module(**inputs, **settings), self._device)
        return CapturedCall(graph, inputs, *tree_flatten(result))


def _shapes(feeds: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a captured graph: names and shapes of tensors, and names and values of other arguments."""
    return tuple(
        (name, tuple(value.shape)) if isinstance(value, torch.Tensor) else (name, repr(value))
        for name, value in feeds.items()
    )
