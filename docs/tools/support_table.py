"""Write docs/reference/support.md, what runs where, from the specs of tasks and backends.

python docs/tools/support_table.py            # write
python docs/tools/support_table.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from accel.interfaces.specs import BackendSpec, Capability, among
from accel.interfaces.task_registry import load_task
from accel.upstream.tested_versions import TESTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "support.md"
_INTRO = """# What runs where

This page shows the tasks, stages and devices that each backend supports. `docs/tools/support_table.py` generates the page from the
specs of the backends and the tasks.

To see which backends can run on your machine, run `accel doctor`. To see which backend `accel` would select for a model and why, run
`accel doctor MODEL`.
"""


def entries(group: str) -> dict[str, str]:
    """Return the entry points of a group, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["entry-points"][f"accel.{group}"])


def backends() -> list[BackendSpec]:
    """Return the specs of the backends in this repository, in alphabetical order."""
    specs = []
    for target in entries("backends").values():
        module, _, name = target.partition(":")
        specs.append(getattr(import_module(module), name))
    return sorted(specs, key=lambda spec: spec.name)


def covers(capability: Capability, task: str) -> bool:
    """Return whether a capability includes a task."""
    return ("*" in capability.tasks or among(task, capability.tasks)) and not among(task, capability.excludes)


def runs(spec: BackendSpec, task: str) -> bool:
    """Return whether a backend runs models of a task."""
    return any(c.stage == "run" and covers(c, task) for c in spec.capabilities)


def render() -> str:
    """Return the page."""
    specs = backends()
    lines = [_INTRO, "## Tasks and backends", ""]
    lines += [
        '"yes" means that the backend runs models of the task. `neural-compressor` only quantizes models; run the',
        "quantized models with `cpu` or `openvino`.",
        "",
    ]
    lines.append("| task | class | " + " | ".join(f"`{spec.name}`" for spec in specs) + " |")
    lines.append("| --- | --- |" + " :-: |" * len(specs))
    for task in entries("tasks"):
        model_class = load_task(task).model.__name__
        marks = " | ".join("yes" if runs(spec, task) else "" for spec in specs)
        lines.append(f"| {task} | `{model_class}` | {marks} |")
    lines += ["", "## Stages and devices", ""]
    lines += [
        'The columns "opens" and "exports" contain artifact formats. The columns "optimizes" and "quantizes" contain optimization levels',
        "and quantization schemes. The last column contains the extra that installs the backend. An empty cell means that the backend",
        "does not support the stage.",
        "",
    ]
    lines.append("| backend | devices | opens | exports | optimizes | quantizes | extra |")
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for spec in specs:
        of = {
            stage: [c for c in spec.capabilities if c.stage == stage]
            for stage in ("run", "export", "optimize", "quantize")
        }
        cells = [
            f"[`{spec.name}`](../backends/{spec.name}.md)",
            _joined(device for c in of["run"] for device in c.devices),
            _joined(c.consumes for c in of["run"]),
            _joined(c.produces for c in of["export"]),
            _joined(scheme for c in of["optimize"] for scheme in c.schemes),
            _joined(scheme for c in of["quantize"] for scheme in c.schemes),
            f"`[{spec.extra}]`",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Tested versions",
        "",
        "The table shows the oldest and the newest tested version of each library. With any other version, `accel` prints one warning",
        "in each process and continues. The TensorRT backend was tested only with a mock of the TensorRT library.",
        "",
    ]
    lines += ["| library | oldest tested version | newest tested version |", "| --- | --- | --- |"]
    tested = dict.fromkeys((*TESTED, *(row for spec in specs for row in spec.tested)))
    lines += [f"| {library} | {oldest} | {newest} |" for library, oldest, newest in sorted(tested)]
    return "\n".join(lines) + "\n"


def _joined(words: object) -> str:
    return ", ".join(dict.fromkeys(str(word) for word in words if word))  # type: ignore[attr-defined]


def main() -> int:
    """Write the page, or with --check report whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    if parser.parse_args().check:
        current = PAGE.is_file() and PAGE.read_text("utf-8") == render()
        if not current:
            print(f"{PAGE.name} is out of date. Fix: python docs/tools/support_table.py", file=sys.stderr)
        return int(not current)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
