"""Table of the two TensorRT libraries, and of everything that differs between their Python packages.

The other modules of this package read all differences from the table, so their code is the same for both libraries.

| | `tensorrt` 10 and 11 | `tensorrt_rtx` 1.7 |
| --- | --- | --- |
| builder needs a GPU | yes, it measures kernels | no, kernels are compiled when an engine is loaded |
| an engine runs on | the GPU model that built it | every compute capability for which it was built (`set_compute_capability`) |
| timing cache | yes | deprecated: its calls do nothing |
| strongly typed networks | with a flag in 10, always in 11 | with a flag |
| engine inspector | yes | only on a GPU, because it reads a loaded engine |
| weight stripping and refit | yes | only on a GPU: without a driver, the builder fails with a CUDA error |
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from accel.errors import BackendUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLibrary:
    """One of the TensorRT libraries.

    Attributes:
        title: The name of the library in error messages.
        module: The Python module.
        backend: The name of the backend that uses the library.
        install: The command that installs the module.
        builds_for: Compute capabilities that the builder compiles for on any machine, with the names in the library's
            `ComputeCapability`. Empty if the builder compiles only for the GPU of this machine.
        without_float8: Compute capabilities of GPUs without float8 arithmetic. The builder refuses graphs with float8 for them.
        times_kernels: Whether the builder measures kernels, and stores the times in a timing cache.
        distributions: The packages whose versions an artifact records.
    """

    title: str
    module: str
    backend: str
    install: str
    builds_for: tuple[tuple[str, str], ...] = ()
    without_float8: tuple[str, ...] = ()
    times_kernels: bool = True
    distributions: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import and return the Python module.

        Raises:
            BackendUnavailableError: The package is not installed, or its libraries are missing.
        """
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise BackendUnavailableError(f"{self.title} cannot be imported: {error}.", fix=self.install) from error


TENSORRT = EngineLibrary(
    title="TensorRT",
    module="tensorrt",
    backend="tensorrt",
    install='pip install "accel-transformers[tensorrt]"',
    distributions=("tensorrt",),
)
TENSORRT_RTX = EngineLibrary(
    title="TensorRT for RTX",
    module="tensorrt_rtx_bindings",
    backend="tensorrt-rtx",
    install='pip install "accel-transformers[tensorrt-rtx]"',
    builds_for=(("8.0", "SM80"), ("8.6", "SM86"), ("8.9", "SM89"), ("12.0", "SM120"), ("12.1", "SM121")),
    without_float8=("8.0", "8.6"),
    times_kernels=False,
    distributions=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
)
