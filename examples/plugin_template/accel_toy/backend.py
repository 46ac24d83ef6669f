"""The backend behind the spec: an exporter, a session, a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from accel.artifact import Artifact, Component, Manifest, Step, TensorSpec, record_files, tool_versions
from accel.capture import Source, capture_program, reference
from accel.config import ExportConfig
from accel.errors import ConfigError, InputError, SessionError
from accel.interfaces.protocols import Exporter, Feeds, Names, OpenRequest, Optimizer, Quantizer
from accel.interfaces.session_contract import (
    ShapeCheck,
    ValueCheck,
    check_buffer_shape,
    check_buffers,
    read_feeds,
    session_closed,
    tensor_dtypes,
    wanted_outputs,
)
from accel.interfaces.specs import DeviceSpec, Probe
from accel.interfaces.state import State

GRAPH = "model.pt2"


class ToyBackend:
    """Runs on the CPU, wherever PyTorch runs."""

    def probe(self) -> Probe:
        """Import the vendor's library here, look for devices, and say what is missing. Never raise."""
        return Probe(devices=(DeviceSpec("cpu", name="the host"),), versions={"torch": torch.__version__})

    def exporter(self) -> Exporter:
        """A backend with its own format brings its own exporter."""
        return ToyExporter()

    def optimizer(self) -> Optimizer | None:
        """No optimizer."""
        return None

    def quantizer(self) -> Quantizer | None:
        """No quantizer."""
        return None

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, ToySession]:
        """Open every component. PyTorch gains nothing from fixed shapes: they are only checked."""
        if request.options:
            raise ConfigError(f"The toy backend has no options, not {sorted(request.options)}.", fix="leave them out.")
        if request.session.compute_dtype not in (None, artifact.dtype):
            raise ConfigError(f"The toy backend computes in {artifact.dtype}, not in {request.session.compute_dtype}.")
        return {
            component.name: ToySession(
                artifact.path / component.file, component, artifact.dtype, request.device, request.shapes
            )
            for component in artifact.components
        }


class ToyExporter:
    """Saves the traced program."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Capture with the core's sample, write the file, then the manifest."""
        program = capture_program(source)
        torch.export.save(program, out / GRAPH)
        outputs = reference(source.model, source.sample({"batch": 2, "sequence": 5}))
        component = Component(
            name="model",
            file=GRAPH,
            files=record_files(out, [GRAPH]),
            inputs=tuple(_spec(name, tensor, source.axes.get(name, {})) for name, tensor in source.example.items()),
            outputs=tuple(_spec(name, tensor, {0: "batch"}) for name, tensor in outputs.items()),
            max_sizes=source.max_sizes,
            unused_inputs=source.unused_inputs,
        )
        manifest = Manifest(
            format="torch_program",
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            source=source.origin,
            components=(component,),
            steps=(Step(stage="export", backend="toy", config=config.to_dict(), versions=tool_versions("torch")),),
        )
        return Artifact.create(out, manifest)


def _spec(name: str, tensor: torch.Tensor, axes: Mapping[int, str]) -> TensorSpec:
    shape = tuple(axes.get(i, size) for i, size in enumerate(tensor.shape))
    role = "mask" if name == "attention_mask" else "data"
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), shape, role=role)


class History(State):
    """The state: every token seen so far. A real backend keeps keys and values instead."""

    readable = False

    def growing_axis(self, name: str) -> int | None:
        """Tokens are along the second axis of each input."""
        return 1

    def extended(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tokens, these after the others. The state itself stays as it is until the step has run."""
        if any(tensor.shape[0] != self.batch for tensor in feeds.values()):
            raise InputError(f"The state is for {self.batch} rows.")
        held = self.tensors()
        # The mask covers the whole sequence already.
        return {
            name: torch.cat([held[name], tensor], dim=1) if name in held and name != "attention_mask" else tensor
            for name, tensor in feeds.items()
        }


class ToySession:
    """One program, opened."""

    def __init__(
        self, path: Path, component: Component, dtype: str, device: DeviceSpec, shapes: Mapping[str, int]
    ) -> None:
        try:
            self._module: torch.nn.Module | None = torch.export.load(path).module()
        except (OSError, RuntimeError, ValueError) as error:
            raise SessionError(f"{path} cannot be loaded: {error}", fix="export the model again.") from error
        self._component = component
        self._dtype = dtype
        self._device = device
        self._check_shapes = ShapeCheck(component.inputs, shapes)
        self._check_values = ValueCheck(component.inputs)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As the manifest declares them."""
        return self._component.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As the manifest declares them."""
        return self._component.outputs

    @property
    def device(self) -> DeviceSpec:
        """The host."""
        return self._device

    @property
    def compute_dtype(self) -> str:
        """PyTorch computes in the weights' type."""
        return self._dtype

    @torch.inference_mode()
    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: History | None = None
    ) -> dict[str, torch.Tensor]:
        """Check, run, return; the contract is in `accel.interfaces.protocols.Session`."""
        if self._module is None:
            raise session_closed()
        tensors = read_feeds(feeds, tensor_dtypes(self.inputs))
        if state is not None:
            tensors = state.extended(tensors)
        self._check_shapes(tuple(tuple(tensor.shape) for tensor in tensors.values()))
        self._check_values(tensors)
        dtypes = tensor_dtypes(self.outputs)
        names = wanted_outputs(outputs, list(dtypes)) if outputs is not None else list(dtypes)
        if out:
            check_buffers(out, names, dtypes, torch.device("cpu"))
        found = self._module(**tensors)
        result = {name: found[name] for name in names}
        for name, buffer in (out or {}).items():
            check_buffer_shape(name, buffer, result[name].shape)
            result[name] = buffer.copy_(result[name])
        if state is not None:
            state.store(tensors)
            state.advance(tensors["attention_mask"].shape[1] - state.length)
        return result

    def new_state(self, batch: int) -> History:
        """An empty history."""
        return History(self, self._component, batch)

    def close(self) -> None:
        """Free the program."""
        self._module = None
