"""A PyTorch module behind `accel.interfaces.protocols.Session`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from accel.artifact import Component
from accel.capture import graph_name, named_tensors
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .cuda_graphs import Turns, captured, on_device

Module = Callable[..., Any]
RUN_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError, AssertionError)
"""What PyTorch and models' code raise of inputs that they cannot compute."""


class ModuleSession(BaseSession[Module]):
    """Runs a module with named tensors in and out. Calls may come from several threads.

    Args:
        module: The model, where it runs and in the type that it computes in.
        component: What goes in and out.
        device: Where the module is.
        dtype: What it computes in.
        shapes: Sizes that named axes are held to.
    """

    runtime_name = "PyTorch"
    run_errors = RUN_ERRORS
    advice = "check the inputs against what the model takes; with too little memory, use smaller batches."

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
            found = {graph_name(name): tensor for name, tensor in named_tensors(self.runtime(**tensors)).items()}
        return {name: self._declared(name, found[name]) for name in names}

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the module is, floating-point numbers in the type that it computes in."""
        # What a GPU is given from pageable memory is read before the call returns: nobody waits for what the GPU computes.
        soon = tensor.is_cpu and self._where.type == "cuda" and not tensor.is_pinned()
        dtype = self._computes if tensor.is_floating_point() else None
        return tensor.to(self._where, dtype, non_blocking=soon)

    def _declared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An answer of the declared type, which the caller may write to: PyTorch forbids that of what inference mode made."""
        made = tensor.to(self._output_dtypes[name])
        return made.clone() if made.is_inference() and not torch.is_inference_mode_enabled() else made

    def _reason(self, error: Exception) -> str:
        return f"{type(error).__name__}: {super()._reason(error)}"


class Captured(NamedTuple):
    """A call's graph.

    Attributes:
        graph: What is replayed.
        inputs: What it reads, by name.
        leaves: What each replay writes, in the order of `spec`, and what is no tensor.
        spec: How an answer is made of them.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    leaves: list[Any]
    spec: Any


class CapturedModule:
    """A module on a GPU, replayed from a CUDA graph: eager kernels without the host's part in launching them.

    Each shape is captured at its first call. Inputs are copied into the graph's buffers, and outputs are copied out of
    them, so callers take turns.

    Args:
        module: The model on a GPU.
        device: That GPU.
    """

    def __init__(self, module: Module, device: torch.device) -> None:
        self._module = module
        self._graphs: dict[Any, Captured] = {}
        self._turn = threading.Lock()
        self._device = device
        self._on_device = Turns(device)

    def __call__(self, **feeds: Any) -> Any:
        """Replay the graph of these shapes."""
        tensors = {name: value for name, value in feeds.items() if isinstance(value, torch.Tensor)}
        with self._turn:
            known = self.graph_of(feeds)
            if known is None:
                self._on_device.take()
                settings = {name: value for name, value in feeds.items() if name not in tensors}
                known = self._graphs[_shapes(feeds)] = self._capture(tensors, settings)
            return self._replayed(known, tensors, None)

    def graph_of(self, feeds: Mapping[str, Any]) -> Captured | None:
        """The graph of a call, if there is one."""
        return self._graphs.get(_shapes(feeds))

    def replay(self, known: Captured, feeds: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
        """The answer to a call whose graph is known.

        Args:
            known: From `graph_of`.
            feeds: Inputs of the same names and shapes, and others.
            dtype: Of the answer's floating-point numbers.
        """
        with self._turn:
            return self._replayed(known, feeds, dtype)

    def _replayed(self, known: Captured, feeds: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
        self._on_device.take()
        torch._foreach_copy_(list(known.inputs.values()), [feeds[name] for name in known.inputs])
        known.graph.replay()
        copies = [
            leaf.to(dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype, copy=True)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in known.leaves
        ]
        return tree_unflatten(copies, known.spec)

    def _capture(self, feeds: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Captured:
        inputs = {name: tensor.clone() for name, tensor in feeds.items()}
        graph, result = captured(lambda: self._module(**inputs, **settings), self._device)
        return Captured(graph, inputs, *tree_flatten(result))


def _shapes(feeds: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a graph depends on."""
    return tuple(
        (name, tuple(value.shape)) if isinstance(value, torch.Tensor) else (name, repr(value))
        for name, value in feeds.items()
    )
