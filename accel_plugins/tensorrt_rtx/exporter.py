"""Export of models as engines for RTX GPUs, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from accel.artifact import Artifact
from accel.config import ExportConfig
from accel.errors import ConfigError, TargetMismatchError
from accel.interfaces.shape_profiles import read_profile
from accel.interfaces.specs import DeviceSpec

from ..ortkit.engines.artifacts import build_engines
from ..ortkit.engines.libraries import TENSORRT_RTX
from ..ortkit.export.exporter import OnnxExporter
from ..ortkit.runtime.nvidia import compute_capability
from ..ortkit.runtime.session import is_float8
from . import FORMAT


class EngineExporter(OnnxExporter):
    """Exporter that writes ONNX graphs without operators of ONNX Runtime, and builds engines from ONNX graphs.

    Building needs no GPU.
    """

    def __init__(self) -> None:
        super().__init__("tensorrt-rtx", attention=None)

    def compile(
        self, artifact: Artifact, *, config: ExportConfig, out: Path, report: Callable[[str, int, int | None], None]
    ) -> Artifact:
        """Build an engine for every graph; see `accel.interfaces.protocols.CompilingExporter`.

        The option `capabilities` lists the compute capabilities of the GPUs that run the engines, for example `8.6,8.9`. The
        default is all of them, for graphs with float8 all that have float8. An engine for all is not larger, because kernels are
        compiled when an engine is loaded. The option `profile` sets the sizes of axes, for example
        `batch=1:8:32,sequence=16:128:384`.

        Raises:
            ConfigError: The library does not build for one of the compute capabilities, or its GPUs have no float8 arithmetic.
        """
        capabilities = _capabilities(config.options.get("capabilities", ""), float8=is_float8(artifact))
        return build_engines(
            artifact,
            out,
            library=TENSORRT_RTX,
            format=FORMAT,
            target={"capabilities": list(capabilities), "tensorrt_rtx": rtx_version()},
            profile=read_profile(config.options.get("profile", "")),
            capabilities=capabilities,
            report=report,
        )


def rtx_version() -> str:
    """Return the version of TensorRT for RTX from the metadata of the installed distribution."""
    try:
        return metadata.version("tensorrt-rtx-cu13-libs")
    except metadata.PackageNotFoundError:
        return "unknown"


def check_target(artifact: Artifact, device: DeviceSpec) -> None:
    """Check that an engine was built for this GPU, and by the installed version of the library.

    Raises:
        TargetMismatchError: The engine was built for other compute capabilities or by another version.
    """
    target, version = artifact.manifest.target or {}, rtx_version()
    capability = compute_capability(device)
    problems = []
    if capability and capability not in target.get("capabilities", ()):
        built_for = ", ".join(map(str, target.get("capabilities", ())))
        problems.append(f"the compute capabilities {built_for} ({device} has {capability})")
    if version != target.get("tensorrt_rtx"):
        problems.append(f"TensorRT for RTX {target.get('tensorrt_rtx')} (version {version} is installed)")
    if problems:
        raise TargetMismatchError(
            f"The engine in {artifact.path} was built for {' and '.join(problems)}.",
            fix="build the engine again: accel export MODEL OUT --format tensorrt_rtx.",
        )


def _capabilities(text: str, *, float8: bool) -> tuple[str, ...]:
    """Return the compute capabilities of the option, or all capabilities that can run the graphs."""
    without = TENSORRT_RTX.without_float8 if float8 else ()
    possible = tuple(capability for capability, _ in TENSORRT_RTX.builds_for if capability not in without)
    named = tuple(word.strip() for word in text.split(",") if word.strip())
    refused = [capability for capability in named if capability in without]
    if refused:
        raise ConfigError(
            f"The graph computes in float8, and GPUs with the compute capability {', '.join(refused)} have no float8 arithmetic.",
            fix=f"use capabilities={','.join(possible)}, or quantize the model with the scheme static-int8.",
        )
    return named or possible
