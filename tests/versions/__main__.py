"""Create environments with the oldest and the newest versions that `pyproject.toml` declares, and run the tests in
them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RESOLUTION = {"oldest": "lowest-direct", "newest": "highest"}
# Old library versions use deprecated functions of other libraries, so these warnings are ignored.
_LENIENT = (
    "-W", "ignore::DeprecationWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning",
    "-W", "ignore:The given buffer is not writable:UserWarning",  # torch 2.11 causes this warning in its own `torch.export.load`
)  # fmt: skip
_SHOWN = ("transformers", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "openvino", "nncf", "numpy")


def pinned(names: list[str]) -> list[str]:
    """Return the lines of `constraints.txt` that pin the given packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0]: line for line in lines if "==" in line}
    unknown = sorted(set(names) - set(pins))
    if unknown:
        raise SystemExit(f"constraints.txt has no {', '.join(unknown)}; it has {', '.join(pins)}.")
    return [pins[name] for name in names]


def environment(version_set: str, interpreter: str, keep: list[str], flags: list[str]) -> Path:
    """Create an environment with the package installed, and return the path of its Python. uv installs the package,
    because pip cannot select the oldest versions.
    """
    folder = ROOT / f".venv-{version_set}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"], check=True)
    file = folder / "constraints.txt"
    file.write_text("\n".join(pinned(keep)) + "\n", encoding="utf-8")
    install = [
        python,
        "-m",
        "uv",
        "pip",
        "install",
        "-q",
        "--compile-bytecode",
        "--python",
        python,
        "--resolution",
        _RESOLUTION[version_set],
    ]
    subprocess.run([*install, *flags, "-c", file, "-e", f"{ROOT}[dev]"], check=True)
    return python


def installed(python: Path) -> str:
    """Return the installed versions of the most important packages as text."""
    lines = subprocess.check_output([python, "-m", "uv", "pip", "freeze", "--python", python], text=True).splitlines()
    return " ".join(line for line in lines if line.partition("==")[0] in _SHOWN)


def main() -> int:
    """Run the tests in each environment. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description=__doc__,
        epilog="Example: python -m tests.versions oldest --keep torch --tests tests/unit tests/integration/test_export.py",
    )
    parser.add_argument("which", nargs="+", choices=tuple(_RESOLUTION))
    parser.add_argument("--python", default=sys.executable, help="whose environments are made (%(default)s)")
    parser.add_argument(
        "--keep", action="append", default=[], help="a package whose version is that of constraints.txt"
    )
    parser.add_argument("--tests", nargs="*", default=["tests"], help="folders and files; all of them")
    parser.add_argument("--uv-flag", action="append", default=[], help="for uv pip install, such as --index=URL")
    args = parser.parse_args()
    failed = []
    for version_set in args.which:
        python = environment(version_set, args.python, args.keep, args.uv_flag)
        print(f"{version_set}: {installed(python)}", flush=True)
        command = [
            python,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "worksteal",
            "-m",
            "not thorough",
            *_LENIENT,
            *args.tests,
        ]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False).returncode:
            failed.append(version_set)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
