"""A model as a package of compiled code: `torch.export`'s program through the compiler, for all sizes at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.artifact import Artifact, Component, Manifest, Step, record_files, tool_versions
from accel.capture import Source, capture_program, first_lines, split
from accel.config import ExportConfig
from accel.errors import BackendUnavailableError, ConfigError, ExportError

from ..exporter import components_of
from ..inductor.compilation import REMEDIES, compiling, cpu_compiler
from .packages import FORMAT, remember, target_of


class PackageExporter:
    """Writes `model.pt2`: native code for the processors that are here, and weights."""

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace, compile and write; see `accel.interfaces.protocols.Exporter`. Compiling takes 10 s to minutes.

        Raises:
            BackendUnavailableError: There is no compiler.
            ConfigError: An opset.
            ExportError: The model cannot be traced, or its program not be compiled.
        """
        if config.opset is not None:
            raise ConfigError("Compiled code has no opset to choose.", fix="leave opset out.")
        if cpu_compiler() is None:
            raise BackendUnavailableError("Nothing here compiles code.", fix=f"{REMEDIES['cpu']}.")
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
            # Frozen weights would be in the code once more for each use of them.
            with compiling(freezing=False):
                torch._inductor.aoti_compile_and_package(program, package_path=str(out / file))
        except Exception as error:  # the compiler raises anything
            raise ExportError(
                f"PyTorch's compiler cannot make code of {part.architecture}: {first_lines(error)}",
                fix="run it with backend='pytorch', or export it to another format.",
            ) from error
        return replace(component, file=file, files=record_files(out, (file,)))
