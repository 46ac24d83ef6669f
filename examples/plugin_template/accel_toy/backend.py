"""Implementation of the toy backend: a backend class, an exporter, a session and a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from accel.artifact import Artifact, Component, Manifest, Step, TensorSpec, record_files, tool_versions
from accel.capture import Source, capture_program, reference
from accel.config import ExportConfig
from accel.errors import ConfigError, InputError, SessionError
from accel.interfaces.protocols import Exporter, Feeds, Names, OpenRequest, Optimizer, Quantizer
from accel.interfaces.session import BaseSession
from accel.interfaces.specs import DeviceSpec, Probe
from accel.interfaces.state import State

GRAPH = "model.pt2"


class ToyBackend:
    """Backend that runs `torch.export` programs on the CPU. It works on every machine with PyTorch."""

    def probe(self) -> Probe:
        """Import the runtime, and return its devices and versions. This method reports errors in its result and never raises."""
        return Probe(devices=(DeviceSpec("cpu", name="the host"),), versions={"torch": torch.__version__})

    def exporter(self) -> Exporter:
        """Return the exporter. A backend with a new format needs an exporter."""
        return ToyExporter()

    def optimizer(self) -> Optimizer | None:
        """Return None, because the toy backend cannot optimize graphs."""
        return None

    def quantizer(self) -> Quantizer | None:
        """Return None, because the toy backend cannot quantize graphs."""
        return None

    def open(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, ToySession]:
        """Return a session for each component of the artifact.

        The session only checks the fixed shapes of the request, because PyTorch is not faster with fixed shapes.
        """
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
    """Exporter that writes a model as a `torch.export` program."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace the model with the sample inputs of `accel`, write the program, and then write the manifest."""
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
    """State that stores all tokens of the previous calls. A real backend stores keys and values instead of tokens."""

    # Position ids count the columns of the batch, so a row that joins a batch later would get wrong position ids.
    joinable = False
    readable = False

    def growing_axis(self, name: str) -> int | None:
        """Return 1, because the second axis of each tensor counts tokens."""
        return 1

    def extended(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tokens, with the new tokens at the end. This method does not change the state."""
        if any(tensor.shape[0] != self.batch for tensor in feeds.values()):
            raise InputError(f"The state is for {self.batch} rows.")
        earlier = self.tensors()
        # The mask of a call already covers the old and the new tokens, so it is not concatenated.
        return {
            name: torch.cat([earlier[name], tensor], dim=1) if name in earlier and name != "attention_mask" else tensor
            for name, tensor in feeds.items()
        }


class ToySession(BaseSession[torch.nn.Module]):
    """Session that runs a loaded program.

    The base class checks the inputs of a call. `accel.interfaces.protocols.Session` describes the methods of a session.
    """

    # With these two attributes, a caller may pass a sequence in several calls with a state, or in one call without a state.
    stateful = True
    state_is_optional = True

    def __init__(
        self, path: Path, component: Component, dtype: str, device: DeviceSpec, shapes: Mapping[str, int]
    ) -> None:
        try:
            module = torch.export.load(path).module()
        except (OSError, RuntimeError, ValueError) as error:
            raise SessionError(f"{path} cannot be loaded: {error}", fix="export the model again.") from error
        super().__init__(module, component, device, dtype, shapes=shapes)

    def _read(self, feeds: Feeds, state: State | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs of a call, with the tokens of the state before the new tokens."""
        return super()._read(state.extended(feeds) if isinstance(state, History) else feeds)

    @torch.inference_mode()
    def _compute(
        self, tensors: dict[str, torch.Tensor], names: Names, out: Feeds, state: State | None
    ) -> dict[str, torch.Tensor]:
        """Run the program and return its outputs. The base class copies them into the caller's buffers."""
        outputs = self.runtime(**tensors)
        if state is not None:
            state.store(tensors)
            state.advance(tensors["attention_mask"].shape[1] - state.length)
        return {name: outputs[name] for name in names}

    def new_state(self, batch: int) -> History:
        """Return a state without tokens."""
        return History(self, self._component, batch)
