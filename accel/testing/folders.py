"""Folders as others leave them: without our manifest, or with another one that its checksum fits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..artifact.manifest import MANIFEST, MARK, sealed

_IR_MARK = re.compile(rf"<{MARK.split('.')[0]}>.*?</{MARK.split('.')[0]}>", re.DOTALL)


def as_foreign(artifact: Path, out: Path, *, leave_out: Sequence[str] = ()) -> Path:
    """A copy of an artifact's folder as another tool would have written it.

    Args:
        artifact: The folder.
        out: Where the copy goes.
        leave_out: Patterns of further files that it does not get.
    """
    ignored = shutil.ignore_patterns(MANIFEST, "export.json", *leave_out)
    shutil.copytree(artifact, out, ignore=ignored, dirs_exist_ok=True)
    for path in out.rglob("*.onnx"):
        unmark(path)
    for path in out.rglob("*.xml"):
        path.write_text(_IR_MARK.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
    return out


def unmark(graph: Path) -> None:
    """Take the mark that it had a manifest out of an ONNX file; weights beside it are not touched."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    kept = [entry for entry in model.metadata_props if entry.key != MARK]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, str(graph))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the values of a manifest in place, and its own checksum with them."""
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    values.pop("sha256", None)
    change(values)
    (folder / MANIFEST).write_text(sealed(values), encoding="utf-8")
    return folder
