"""Make environments with the oldest and the newest declared versions, and run the tests in them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
_EXTRA = "dev"


def declared() -> Iterator[Requirement]:
    """What the package needs, and what the extras add with which it is tested; not the tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    yield from map(Requirement, project["dependencies"])
    for one in map(Requirement, extras[_EXTRA]):
        for inner in sorted(one.extras - {"docs"}) if one.name == project["name"] else ():
            yield from map(Requirement, extras[inner])


def oldest(one: Requirement) -> str | None:
    """The requirement at its lower bound, any patch of it; `None` where it has none."""
    bounds = [spec.version for spec in one.specifier if spec.operator in (">=", "==")]
    return f"{one.name}=={bounds[0]}.*" if bounds else None


def kept(names: list[str]) -> dict[str, str]:
    """The lines of `constraints.txt` about some packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0]: line for line in lines if "==" in line}
    unknown = sorted(set(names) - set(pins))
    if unknown:
        raise SystemExit(f"constraints.txt has no {', '.join(unknown)}; it has {', '.join(pins)}.")
    return {name: pins[name] for name in names}


def constraints(which: str, keep: list[str]) -> list[str]:
    """Lines for `pip install -c`."""
    pinned = kept(keep)
    if which == "oldest":
        wanted = {one.name: line for one in declared() if (line := oldest(one)) is not None}
        return sorted({**wanted, **pinned}.values())
    return sorted(pinned.values())


def environment(which: str, lines: list[str], flags: list[str], fresh: bool) -> Path:
    """An environment in which the package is installed; its Python."""
    folder = ROOT / f".venv-{which}"
    python = folder / "bin" / "python"
    if fresh or not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    file = folder / "constraints.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"]
    wanted = [*flags, *upgrade, "-c", str(file), "-e", f"{ROOT}[{_EXTRA}]"]
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted], check=True)
    return python


def main() -> int:
    """Run the tests in each environment; 1 when one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description=__doc__,
        epilog="Example: python -m tests.versions oldest --keep torch --tests tests/unit tests/integration/test_export.py",
    )
    parser.add_argument("which", nargs="+", choices=("oldest", "newest"))
    parser.add_argument(
        "--keep", action="append", default=[], help="a package whose version is that of constraints.txt"
    )
    parser.add_argument("--tests", nargs="*", default=["tests"], help="folders and files; all of them")
    parser.add_argument(
        "--pip-flag", action="append", default=[], help="for pip install, such as --extra-index-url=URL"
    )
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    args = parser.parse_args()
    failed = []
    for which in args.which:
        lines = constraints(which, args.keep)
        python = environment(which, lines, args.pip_flag, args.fresh)
        print(f"{which}: {', '.join(lines) or 'whatever pip takes'}", flush=True)
        command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not thorough", *args.tests]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False).returncode:
            failed.append(which)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
