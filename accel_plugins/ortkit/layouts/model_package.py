"""Writer of ONNX Runtime's model packages: a component for each graph, variants by execution provider, and shared assets.

Specification: `model_package/README.md` and `onnxruntime/core/session/model_package/README.md` of ONNX Runtime, schema 1.0. The functions
that open a package are experimental in ONNX Runtime 1.28 to 1.31, and its Python package does not contain them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.artifact.atomic_folder_writing import copy_companions
from accel.artifact.checksums import stamp_files
from accel.artifact.json_writing import json_text
from accel.artifact.probe_file import PROBES
from accel.interfaces.folder_writer import LayoutVariant

from ..graph.editing import read_graph
from .graph_files import write_graph_file

_MODEL = "model.onnx"
_ASSETS = "shared_assets"


class ModelPackageWriter:
    """A `FolderWriter` for model packages. The tokenizer, config and processor files are one shared asset."""

    variants: Mapping[str, LayoutVariant] = {
        "cpu": LayoutVariant(provider="CPUExecutionProvider"),
        "cuda": LayoutVariant(level="O4", tolerance=2e-2, provider="CUDAExecutionProvider", device="gpu"),
    }

    def check(self, artifact: Artifact) -> None:
        """Accept every artifact: each graph becomes a component under its name in the artifact."""

    def write(self, artifact: Artifact, name: str, out: Path) -> list[str]:
        """Write the graphs of one variant to `COMPONENT/VARIANT/model.onnx`."""
        files: list[Path] = []
        for component in artifact.components:
            model = read_graph(artifact.path / component.file)
            files += write_graph_file(model, out / component.name / name / _MODEL)
        return [path.relative_to(out).as_posix() for path in files]

    def finish(self, artifact: Artifact, files: Mapping[str, list[str]], out: Path) -> None:
        """Write the manifest, a description of each component, and the shared asset."""
        uri = _add_shared_asset(artifact, out)
        for component in artifact.components:
            variants = {name: _variant(self.variants[name]) for name in files}
            values = {"component_name": component.name, "variants": variants}
            (out / component.name / "component.json").write_text(json_text(values) + "\n", encoding="utf-8")
        manifest = {
            "schema_version": "1.0",
            "package_name": artifact.path.name
            if artifact.manifest.source is None
            else Path(artifact.manifest.source.id).name,
            "layout": "portable",
            "components": {component.name: component.name for component in artifact.components},
            "additional_metadata": {"task": artifact.manifest.task, "processor": uri},
        }
        (out / "manifest.json").write_text(json_text(manifest) + "\n", encoding="utf-8")

    def read(self, artifact: Artifact, name: str, files: list[str], out: Path) -> Artifact:
        """Return the artifact of the variant, with the graph files of the package."""
        components = tuple(
            replace(
                component,
                file=f"{component.name}/{name}/{_MODEL}",
                files=stamp_files(out, [file for file in files if file.startswith(f"{component.name}/{name}/")]),
            )
            for component in artifact.components
        )
        return Artifact(out, replace(artifact.manifest, components=components, files=()))


def _variant(variant: LayoutVariant) -> dict[str, Any]:
    return {"ep": variant.provider, "device": variant.device, "executor_info": {"ort": {"model_file": _MODEL}}}


def _add_shared_asset(artifact: Artifact, out: Path) -> str:
    """Write the config, tokenizer and processor files as a shared asset, and return its URI.

    The URI is the checksum of lines `CHECKSUM  NAME`, sorted by name, one for each file.
    """
    folder = out / _ASSETS / "new"
    folder.mkdir(parents=True)
    copy_companions(artifact.path, folder)
    (folder / PROBES).unlink(missing_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    folder.rename(out / _ASSETS / f"sha256-{digest}")
    return f"sha256:{digest}"
