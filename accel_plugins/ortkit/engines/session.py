"""Session that runs an engine without ONNX Runtime, with the Python package of `tensorrt` (10 and 11) or `tensorrt_rtx`.

All calls were checked against the signatures of the `tensorrt` 11.4 and `tensorrt_rtx` 1.7 bindings, but no engine was ever run on
a GPU; see docs/backends/tensorrt.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Component, TensorSpec
from accel.errors import InputError, SessionError
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.session_contract import check_buffer_shape
from accel.interfaces.shape_profiles import Shape
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

from .libraries import TENSORRT, EngineLibrary

# The torch data type for each name in TensorRT's `DataType`.
_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
}
# Names of low-precision types in the engine inspector's output. TensorRT 11 writes the name as the type of a tensor,
# TensorRT 10 writes it as a part of the tensor's format.
_INSPECTED = {
    "float16": ("half", "fp16"),
    "bfloat16": ("bf16", "bfloat16"),
    "int8": ("int8",),
    "float8_e4m3fn": ("fp8",),
}


def computed_types(information: str) -> Counter[str]:
    """Count the tensors between an engine's layers by data type, in lower case, from the engine inspector's JSON.

    TensorRT 10 writes the type as `Format/Datatype` ("Row major linear FP16 format"), TensorRT 11 as `DataType`
    ("Half").
    """
    types: Counter[str] = Counter()
    for layer in json.loads(information).get("Layers", ()):
        for tensor in (*layer.get("Inputs", ()), *layer.get("Outputs", ())) if isinstance(layer, dict) else ():
            word = next((str(tensor[key]) for key in ("DataType", "Format/Datatype") if key in tensor), "")
            types[word.lower()] += 1
    return types


def check_precisions(information: str, precisions: Sequence[str]) -> None:
    """Check that an engine has tensors in every low-precision data type of its graph.

    Raises:
        SessionError: No tensor of the engine has one of the precisions.
    """
    types = computed_types(information)
    for precision in precisions:
        words = _INSPECTED[precision]
        if not any(word in name for name in types for word in words):
            have = ", ".join(f"{name} ({n})" for name, n in types.most_common()) or "nothing"
            raise SessionError(
                f"The graph uses {precision}, but the engine that TensorRT built has no tensor of this data type, only {have}.",
                fix="check that this GPU has kernels for the data type, or use a graph with another data type.",
            )


def torch_device(device: DeviceSpec) -> torch.device:
    """Return a device spec as a torch device."""
    return torch.device(device.type, device.index)


class EngineSession(BaseSession[Any]):
    """Session that runs an engine on one GPU with one execution context. Not thread-safe.

    Args:
        plan: The data of `build_plan`, or the content of a `.plan` file.
        device: The GPU.
        library: The library that built the engine.
        compute_dtype: The data type of the computation.
        inputs, outputs: The specs that an artifact declares; read from the engine if `None`.
        limits: The largest sizes of named axes that the model has positions for.
    """

    def __init__(
        self,
        plan: bytes,
        device: DeviceSpec | None = None,
        *,
        library: EngineLibrary = TENSORRT,
        compute_dtype: str = "float32",
        inputs: Sequence[TensorSpec] | None = None,
        outputs: Sequence[TensorSpec] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        trt = library.load()
        device = device or DeviceSpec("cuda")
        where = torch_device(device)
        self._trt, self._title = trt, library.title
        with torch.cuda.device(where):
            # Keep a reference, because the engine needs the runtime.
            self._library = trt.Runtime(trt.Logger(trt.Logger.ERROR))
            self._engine = self._library.deserialize_cuda_engine(plan)
            if self._engine is None:
                raise SessionError(
                    f"{library.title} cannot load this engine, because it was built by another version of {library.title} or for "
                    "another GPU.",
                    fix=f"build the engine again: accel export MODEL OUT --backend {library.backend}.",
                )
            context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        input_names = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        returned = [name for name in names if name not in input_names]
        component = Component(
            name="engine",
            file="",
            files=(),
            inputs=tuple(inputs if inputs is not None else map(self._spec, input_names)),
            outputs=tuple(outputs if outputs is not None else map(self._spec, returned)),
            max_sizes=limits or {},
        )
        super().__init__(context, component, device, compute_dtype)
        self._where = where
        # Use the engine's data types, which may be narrower than those that the artifact declares.
        self._dtypes = {spec.name: self._type(spec.name) for spec in component.inputs}
        self._output_dtypes = {spec.name: self._type(spec.name) for spec in component.outputs}
        self._profile = {name: self._engine.get_tensor_profile_shape(name, 0) for name in input_names}

    @classmethod
    def load(cls, path: Path, device: DeviceSpec | None = None, *, library: EngineLibrary = TENSORRT) -> EngineSession:
        """Load an engine from a `.plan` file."""
        return cls(path.read_bytes(), device, library=library)

    def _type(self, name: str) -> torch.dtype:
        word = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2].upper()
        if word not in _TYPES:
            raise SessionError(
                f"The engine's tensor {name!r} has the data type {word}, which torch tensors do not support.",
                fix="export the model again with inputs and outputs of another data type.",
            )
        return _TYPES[word]

    def _spec(self, name: str) -> TensorSpec:
        shape = self._engine.get_tensor_shape(name)
        dims = tuple(int(d) if int(d) >= 0 else f"{name}_{i}" for i, d in enumerate(shape))
        return TensorSpec(name, str(self._type(name)).removeprefix("torch."), dims)

    def information(self) -> str:
        """Return the engine inspector's JSON about the layers."""
        trt = self._trt
        inspector = self._engine.create_engine_inspector()
        return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        tensors = super()._read(feeds, state)
        # Check ids before the run, because kernels have undefined behavior for ids out of bounds.
        self._check_values.waiting(tensors)
        return tensors

    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        """Enqueue a run on torch's current stream and return the outputs; returns before the GPU is done."""
        context = self.runtime
        results: dict[str, torch.Tensor] = {}
        with torch.cuda.device(self._where):
            for name, tensor in tensors.items():
                if not context.set_input_shape(name, tuple(tensor.shape)):
                    raise self._outside(name, tensor)
                context.set_tensor_address(name, tensor.data_ptr())
            for name in self._output_names:
                shape = tuple(int(d) for d in context.get_tensor_shape(name))
                results[name] = self._buffer(name, shape, out.get(name))
                context.set_tensor_address(name, results[name].data_ptr())
            stream = torch.cuda.current_stream(self._where)
            if not context.execute_async_v3(stream.cuda_stream):
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                raise SessionError(
                    f"{self._title} failed to run the engine on inputs of the shapes {shapes}.",
                    fix="use smaller batches.",
                )
        return {name: results[name] for name in names}

    def _buffer(self, name: str, shape: Shape, buffer: torch.Tensor | None) -> torch.Tensor:
        dtype = self._output_dtypes[name]
        if buffer is None:
            return torch.empty(shape, dtype=dtype, device=self._where)
        check_buffer_shape(name, buffer, shape)
        return buffer

    def _outside(self, name: str, tensor: torch.Tensor) -> InputError:
        least, _, most = (tuple(int(d) for d in shape) for shape in self._profile[name])
        return InputError(
            f"Input {name!r} has the shape {tuple(tensor.shape)}, but the engine was built for {least} to {most}.",
            fix="pass inputs within these shapes, or build the engine again with a larger profile.",
        )

    def close(self) -> None:
        """Wait for the GPU and release TensorRT's memory."""
        if self._runtime is not None:
            torch.cuda.synchronize(self._where)
        super().close()
        self._engine = self._library = None
