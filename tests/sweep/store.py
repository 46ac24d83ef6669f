"""What is known so far: `benchmarks/sweep.json`, one line a cell, and which code it was made with."""

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
from .cells import Cell, wanted

ROOT = Path(__file__).parents[2]
# Rooms that no cell's answer depends on.
_ELSEWHERE = {"cli", "compat", "demo", "deploying", "measuring", "serving", "testing", "tuning"}
_SWEEP = ("building", "cases", "cells", "gpu", "overrides", "questions", "rounding", "rows", "shrinking")
_COMMON = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
_RUNTIMES = {"cpu": ("onnxruntime",), "openvino": ("openvino", "nncf"), "cuda": ("onnxruntime-gpu",)}


def versions(backends: Iterable[str]) -> dict[str, str]:
    """Versions of what the cells of some backends depend on; what is not installed is left out."""
    names = [*_COMMON, *(name for backend in backends for name in _RUNTIMES.get(backend, ()))]
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def digest_of(backend: str) -> str:
    """Eight characters that change with the code and the versions that a backend's cells depend on."""
    plugins = {"openvino": ("openvino",), "pytorch": ()}.get(backend, ("ortkit", backend))
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
        # Whether a model can be built has nothing to do with the library.
        paths = [Path(__file__).with_name(f"{name}.py") for name in _SWEEP if name not in ("cells", "gpu", "rows")]
    made = hashlib.sha256(json.dumps(versions([backend]), sort_keys=True).encode())
    for path in sorted(paths):
        made.update(path.name.encode() + path.read_bytes())
    return made.hexdigest()[:8]


class Store:
    """Cells by key, in a file that holds one line for each, or in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.cells: dict[str, Cell] = {}
        if path is not None and path.is_file():
            read = json.loads(path.read_text(encoding="utf-8"))
            self.about = read["about"]
            known = {one.name for one in fields(Cell)}
            for key, values in read["cells"].items():
                architecture, task, backend, stage = key.split("/")
                kept = {name: value for name, value in values.items() if name in known}
                self.cells[key] = Cell(architecture=architecture, task=task, backend=backend, stage=stage, **kept)

    def put(self, cell: Cell) -> None:
        """Keep a cell in place of an older one; nothing is written yet."""
        if cell.backend == "pytorch":
            # There is no model to try: what an earlier one gave is gone.
            self._drop(cell, lambda old: old.backend != "pytorch")
        else:
            self._drop(cell, lambda old: old.backend == "pytorch")
        self.cells[cell.key] = cell

    def _drop(self, cell: Cell, which: Any) -> None:
        pair = (cell.architecture, cell.task)
        self.cells = {k: c for k, c in self.cells.items() if (c.architecture, c.task) != pair or not which(c)}

    def merge(self, other: Mapping[str, Cell]) -> None:
        """Take another store's cells."""
        for cell in other.values():
            self.put(cell)

    def keep(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Forget pairs of an architecture and a task that are swept no more."""
        known = set(pairs)
        self.cells = {key: cell for key, cell in self.cells.items() if (cell.architecture, cell.task) in known}

    def write(self) -> None:
        """Write everything, a line a cell, in order; the file is whole or as it was."""
        if self.path is None:
            return
        # Whatever is replaced below must be a file of ours: a device or a link would be lost.
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

    def known(self, pair: Pair, backends: Sequence[str], digests: Mapping[str, str]) -> set[tuple[str, str]]:
        """Backends and stages of a pair whose cells were made with this very code."""
        wanted_here = wanted(pair, backends)
        build = self.cells.get(f"{pair.name}/pytorch/build")
        if build is not None and build.digest == digests["pytorch"]:
            return wanted_here
        found = {key: self.cells.get("/".join((pair.name, *key))) for key in wanted_here}
        return {key for key, cell in found.items() if cell is not None and cell.digest == digests[key[0]]}


def processor() -> str:
    """The kind of processor, without the machine's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def about(backends: Sequence[str]) -> dict[str, Any]:
    """Versions and the kind of processor, for the page."""
    kind = f"{processor()}, {platform.system()} {platform.machine()}"
    return {"versions": versions(backends), "processor": kind}
