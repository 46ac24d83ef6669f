"""Store of the sweep's results in `benchmarks/sweep.json`, with one line for each result and the digest of the code
that produced it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from .cases import Pair
from .cells import Cell, cells_of

ROOT = Path(__file__).parents[2]
# These packages of accel do not influence any result.
_ELSEWHERE = {"cli", "compat", "demo", "deploying", "measuring", "serving", "testing", "tuning"}
_SWEEP = ("building", "cases", "cells", "engines", "gpu", "overrides", "questions", "rounding", "rows", "shrinking")
_COMMON = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
_RUNTIMES = {
    "cpu": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "cuda": ("onnxruntime-gpu",),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-libs",),
}


def versions(backends: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages that results of the given backends depend on."""
    names = [*_COMMON, *(name for backend in backends for name in _RUNTIMES.get(backend, ()))]
    installed = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def digest_of(backend: str) -> str:
    """Return eight characters that change if the code or a package version changes on which a backend's results depend."""
    plugins = {"openvino": ("openvino",), "pytorch": ()}.get(backend, ("ortkit", backend.replace("-", "_")))
    paths = [
        *(
            path
            for path in (ROOT / "accel").rglob("*.py")
            if path.relative_to(ROOT / "accel").parts[0] not in _ELSEWHERE
        ),
        *(path for plugin in plugins for path in (ROOT / "accel_plugins" / plugin).rglob("*.py")),
        *(Path(__file__).with_name(f"{name}.py") for name in _SWEEP),
    ]
    if backend == "pytorch":
        # Building a model does not depend on accel's code, only on the modules of the sweep.
        paths = [
            Path(__file__).with_name(f"{name}.py") for name in _SWEEP if name not in ("cells", "engines", "gpu", "rows")
        ]
    digest = hashlib.sha256(json.dumps(versions([backend]), sort_keys=True).encode())
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


class Store:
    """Store of results (`Cell`) by key, in a JSON file with one line for each result, or only in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.cells: dict[str, Cell] = {}
        if path is not None and path.is_file():
            read = json.loads(path.read_text(encoding="utf-8"))
            self.about = read["about"]
            field_names = {field.name for field in fields(Cell)}
            for key, values in read["cells"].items():
                architecture, task, backend, stage = key.split("/")
                fields_of_cell = {name: value for name, value in values.items() if name in field_names}
                self.cells[key] = Cell(
                    architecture=architecture, task=task, backend=backend, stage=stage, **fields_of_cell
                )

    def put(self, cell: Cell) -> None:
        """Replace an older result by a new result, without writing the file."""
        if cell.backend == "pytorch":
            # The model can no longer be built, so remove all older results of this pair.
            self._drop(cell, lambda old: old.backend != "pytorch")
        else:
            self._drop(cell, lambda old: old.backend == "pytorch")
        self.cells[cell.key] = cell

    def _drop(self, cell: Cell, is_dropped: Any) -> None:
        pair = (cell.architecture, cell.task)
        self.cells = {k: c for k, c in self.cells.items() if (c.architecture, c.task) != pair or not is_dropped(c)}

    def merge(self, other: Mapping[str, Cell]) -> None:
        """Add the results of another store."""
        for cell in other.values():
            self.put(cell)

    def keep(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Remove results whose (architecture, task) is not in `pairs`."""
        kept_pairs = set(pairs)
        self.cells = {key: cell for key, cell in self.cells.items() if (cell.architecture, cell.task) in kept_pairs}

    def write(self) -> None:
        """Write all results, sorted by key, with one result on each line. The file is replaced at once, so it is never
        incomplete.
        """
        if self.path is None:
            return
        # Replace only a regular JSON file, because replacing a device or a symbolic link would destroy it.
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()) or self.path.suffix != ".json":
            raise ValueError(f"{self.path} is not a JSON file.")
        lines = []
        for key, cell in sorted(self.cells.items()):
            values = cell.to_dict()
            for name in ("architecture", "task", "backend", "stage"):
                del values[name]
            lines.append(f"  {json.dumps(key)}: {json.dumps(values, ensure_ascii=False)}")
        text = (
            f'{{\n "about": {json.dumps(self.about, sort_keys=True)},\n "cells": {{\n' + ",\n".join(lines) + "\n }\n}\n"
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path)

    def recorded_cells(self, pair: Pair, backends: Sequence[str], digests: Mapping[str, str]) -> set[tuple[str, str]]:
        """Return the (backend, stage) combinations of a pair (architecture and task) whose results the current code has
        produced.
        """
        expected_cells = cells_of(pair, backends)
        build = self.cells.get(f"{pair.name}/pytorch/build")
        if build is not None and build.digest == digests["pytorch"]:
            return expected_cells
        stored = {key: self.cells.get("/".join((pair.name, *key))) for key in expected_cells}
        return {key for key, cell in stored.items() if cell is not None and cell.digest == digests[key[0]]}


def processor() -> str:
    """Return the model name of the processor, which does not identify the machine."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def about(backends: Sequence[str]) -> dict[str, Any]:
    """Return package versions and the processor, for the documentation page."""
    kind = f"{processor()}, {platform.system()} {platform.machine()}"
    return {"versions": versions(backends), "processor": kind}
