"""Interface of writers of model folders for other libraries, such as transformers.js."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..artifact.manifest import Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutVariant:
    """A precision in which a layout contains the model.

    Attributes:
        level: Optimization level of the graph; `None` for the graph that `accel export` writes.
        enable: Names of fusions and conversions to add to those of the level.
        scheme: Quantization scheme; `None` for floating point.
        operators: Operator types to quantize; `None` for all that the scheme quantizes.
        tolerance: Largest accepted difference from PyTorch, relative to the largest value of an output; 0 for the tolerance of float32.
        provider: ONNX Runtime's execution provider that the variant is made for, if the layout selects variants by provider.
        device: Device type of the provider: `cpu`, `gpu` or `npu`.
    """

    level: str | None = None
    enable: tuple[str, ...] = ()
    scheme: str | None = None
    operators: tuple[str, ...] | None = None
    tolerance: float = 0.0
    provider: str = ""
    device: str = "cpu"


@runtime_checkable
class FolderWriter(Protocol):
    """Writer of model folders for another library.

    `BackendSpec.written_layouts` contains the name of the layout and the path of the class. The class is created without arguments.

    Attributes:
        variants: Variants by the name that the library uses.
    """

    variants: Mapping[str, LayoutVariant]

    def check(self, artifact: Artifact) -> None:
        """Check that the library can run a model of this kind, before anything is written.

        Raises:
            TaskError: The layout has no file names for the graphs of this model.
        """

    def write(self, artifact: Artifact, name: str, out: Path) -> list[str]:
        """Write the graphs of one variant and return the names of the written files, relative to `out`.

        Args:
            artifact: The artifact of the variant.
            name: Name of the variant.
            out: The folder. It may already contain other variants.
        """

    def finish(self, artifact: Artifact, files: Mapping[str, list[str]], out: Path) -> None:
        """Write configs, tokenizer and processor files, after all variants.

        Args:
            artifact: The exported artifact.
            files: The files of each variant that was written.
            out: The folder.
        """

    def read(self, artifact: Artifact, name: str, files: list[str], out: Path) -> Artifact:
        """Return an artifact that opens the graph files of one variant, so that their outputs can be compared.

        Args:
            artifact: The artifact of the variant.
            name: Name of the variant.
            files: The files of the variant.
            out: The folder.
        """
