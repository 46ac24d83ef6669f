"""Make folders without a manifest of accel, or with a modified manifest and a valid checksum."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..artifact.manifest import MANIFEST, MARK, sealed
from ..artifact.probe_file import PROBES

_IR_MARK = re.compile(rf"<{MARK.split('.')[0]}>.*?</{MARK.split('.')[0]}>", re.DOTALL)


def as_foreign(artifact: Path, out: Path, *, leave_out: Sequence[str] = ()) -> Path:
    """Copy an artifact's folder without manifest and metadata, like the export of another tool.

    Args:
        artifact: The folder of the artifact.
        out: The folder of the copy.
        leave_out: Name patterns of further files that are not copied.
    """
    ignored = shutil.ignore_patterns(MANIFEST, PROBES, "export.json", *leave_out)
    shutil.copytree(artifact, out, ignore=ignored, dirs_exist_ok=True)
    for path in out.rglob("*.onnx"):
        unmark(path)
    for path in out.rglob("*.xml"):
        path.write_text(_IR_MARK.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    return out


def unmark(graph: Path) -> None:
    """Remove the metadata key of accel from an ONNX file. Its weight files are unchanged."""
    import onnx_ir

    model = onnx_ir.load(graph)
    model.metadata_props.pop(MARK, None)
    onnx_ir.save(model, graph)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the values of a manifest and update its checksum."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    values.pop("sha256", None)
    change(values)
    (folder / MANIFEST).write_text(sealed(values), encoding="utf-8")
    return folder
