"""Export of a model as a package of compiled code. `torch.export` traces the model, and PyTorch's compiler compiles the
traced program once for all input sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, Component, Manifest, Step, record_files, tool_versions
from accel.capture import Source, capture_program, first_lines, split
from accel.config import ExportConfig
from accel.errors import BackendUnavailableError, ConfigError, ExportError

from ..exporter import components_of
from ..inductor.compilation import REMEDIES, compiling
from ..upstream import compile_package, cpp_compiler
from .packages import FORMAT, remember, target_of


class PackageExporter:
    """Exporter that writes `.pt2` files: native code for the processor of this machine, with the weights."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace and compile the model, and write the packages; see `accel.interfaces.protocols.Exporter`. The
        compilation takes from 10 seconds to several minutes.

        Raises:
            BackendUnavailableError: No C++ compiler is installed.
            ConfigError: The config has an opset, which compiled code does not use.
            ExportError: The model cannot be traced or compiled.
        """
        if config.opset is not None:
            raise ConfigError(
                f"opset={config.opset} was passed, but the backend 'aotinductor' writes no ONNX graph and uses no opset.",
                fix="leave opset out.",
            )
        if cpp_compiler() is None:
            raise BackendUnavailableError(
                "The backend 'aotinductor' needs a C++ compiler, and none was found on this machine.",
                fix=f"{REMEDIES['cpu']}.",
            )
        described = components_of(source)
        components = tuple(
            self._component(part, component, out) for part, component in zip(split(source), described, strict=True)
        )
        step = Step(
            stage="export",
            backend="aotinductor",
            config=config.to_dict(),
            versions=tool_versions("torch", "transformers"),
        )
        manifest = Manifest(
            format=FORMAT,
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            source=source.origin,
            components=components,
            steps=(step,),
            target=target_of(out / components[0].file),
        )
        for component in components:
            remember(component)
        return Artifact.create(out, manifest)

    def _component(self, part: Source, component: Component, out: Path) -> Component:
        program: Any = capture_program(part)
        file = f"{component.name}.pt2"
        try:
            # Freezing (weights as constants of the code) is off, because it would store a copy of a weight for each
            # use.
            with compiling(freezing=False):
                compile_package(program, out / file)
        except Exception as error:  # PyTorch's compiler may raise any exception.
            raise ExportError(
                f"PyTorch's compiler cannot compile {part.architecture}: {first_lines(error)}",
                fix="run the model with backend='pytorch', or export the model to another format.",
            ) from error
        return replace(component, file=file, files=record_files(out, (file,)))
