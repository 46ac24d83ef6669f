"""TensorRT engines without ONNX Runtime: build, save, load and run them with TensorRT's Python package (versions 10 and
11).

All calls were checked against the signatures of the `tensorrt` 11.4 bindings, but no call was ever run on a GPU; see
docs/backends/tensorrt.md.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Component, TensorSpec
from accel.errors import BackendUnavailableError, InputError, SessionError
from accel.interfaces.protocols import Feeds, Names
from accel.interfaces.session import BaseSession
from accel.interfaces.session_contract import check_buffer_shape
from accel.interfaces.shape_profiles import Shape
from accel.interfaces.specs import DeviceSpec
from accel.interfaces.state import State

INSTALL = 'pip install "accel-transformers[tensorrt]"'
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


def load_tensorrt() -> Any:
    """Import and return the `tensorrt` package.

    Raises:
        BackendUnavailableError: The package is not installed, or its libraries are missing.
    """
    try:
        return importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(f"TensorRT cannot be imported: {error}.", fix=INSTALL) from error


def build_plan(
    graph: Path,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]],
    *,
    times: Path | None = None,
) -> bytes:
    """Build an engine for the current GPU and return it in serialized form. Takes minutes.

    Args:
        graph: An ONNX file. Its data types determine the precision of each operator (a strongly typed network).
        shapes: The smallest, usual and largest shape of each input.
        times: A file of kernel times, which is read if it exists, and updated.

    Raises:
        BackendUnavailableError: TensorRT is not installed.
        SessionError: TensorRT cannot parse the graph, or has no kernels for it.
    """
    trt = load_tensorrt()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # TensorRT 10 needs the flag for strongly typed networks. TensorRT 11 ignores the flag, because all of its networks
    # are strongly typed.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise SessionError(
            f"TensorRT cannot read the ONNX graph {graph.name}: {errors[:600]}",
            fix="use a graph without com.microsoft operators: accel optimize --backend tensorrt.",
        )
    config = builder.create_builder_config()
    # The engine inspector reports data types only for engines built with detailed profiling verbosity.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    # Disable TF32, because it rounds the inputs of float32 products to 10 bits of mantissa.
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, (least, usual, most) in shapes.items():
        profile.set_shape(name, least, usual, most)
    config.add_optimization_profile(profile)
    cache = config.create_timing_cache(times.read_bytes() if times is not None and times.exists() else b"")
    config.set_timing_cache(cache, False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SessionError(
            f"TensorRT found no kernels for the graph {graph.name}.",
            fix="use a profile with smaller sizes, or a GPU with more free memory.",
        )
    if times is not None:
        partial = times.with_suffix(".partial")
        partial.write_bytes(bytes(config.get_timing_cache().serialize()))
        partial.replace(times)
    return bytes(plan)


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
        plan: The result of `build_plan`, or the content of a `.plan` file.
        device: The GPU.
        compute_dtype: The data type of the computation.
        inputs, outputs: The specs that an artifact declares; read from the engine if `None`.
        limits: The largest sizes of named axes that the model has positions for.
    """

    def __init__(
        self,
        plan: bytes,
        device: DeviceSpec | None = None,
        *,
        compute_dtype: str = "float32",
        inputs: Sequence[TensorSpec] | None = None,
        outputs: Sequence[TensorSpec] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        trt = load_tensorrt()
        device = device or DeviceSpec("cuda")
        where = torch_device(device)
        with torch.cuda.device(where):
            # Keep a reference, because the engine needs the runtime.
            self._library = trt.Runtime(trt.Logger(trt.Logger.ERROR))
            self._engine = self._library.deserialize_cuda_engine(plan)
            if self._engine is None:
                raise SessionError(
                    "TensorRT cannot load this engine, because it was built by another version of TensorRT or for another GPU.",
                    fix="build the engine again on this machine.",
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
    def load(cls, path: Path, device: DeviceSpec | None = None) -> EngineSession:
        """Load an engine from a `.plan` file."""
        return cls(path.read_bytes(), device)

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
        trt = load_tensorrt()
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
                    f"TensorRT failed to run the engine on inputs of the shapes {shapes}.", fix="use smaller batches."
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
