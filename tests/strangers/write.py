"""Create the folders that tests/strangers reads, with the tools themselves: `python -m tests.strangers.write`.

The script creates a virtual environment for each tool, and removes the environment after the scripts of the tool have
run. To use an existing Python interpreter that has the tool, pass `--python optimum-onnx=/path/to/python`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from .folders import ARCHIVE

_SCRIPTS = ARCHIVE.parent
_TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Tool:
    """Virtual environment of a tool: packages to install, packages to remove afterwards, and scripts to run with their
    arguments.
    """

    name: str
    packages: tuple[str, ...]
    scripts: tuple[tuple[str, ...], ...]
    removed: tuple[str, ...] = ()


TOOLS = (
    Tool(
        "optimum-onnx",
        ("optimum-onnx[onnxruntime]==0.1.0", "transformers==4.57.6", _TORCH, "pillow"),
        (("models.py", "models"), ("optimum_onnx.py", "models", ".")),
    ),
    Tool(
        "optimum-intel",
        ("optimum-intel[openvino]==2.2.0", "huggingface-hub<1.22", _TORCH, "pillow"),
        (("optimum_intel.py", "models", "."),),
        removed=("torchvision",),
    ),
    Tool("peft", ("peft==0.21.2", "transformers==5.24.0", _TORCH), (("peft_adapters.py", "models", "."),)),
    Tool("genai", ("onnxruntime-genai==0.18.0",), (("genai.py", "foreign", "."),)),
    Tool(
        "setfit",
        ("setfit==1.2.0", "sentence-transformers==5.7.0", "transformers==4.57.6", _TORCH),
        (("setfit_heads.py", "models", "."),),
    ),
    *(
        Tool(
            f"sentence-transformers-{version.partition('.')[0]}",
            (f"sentence-transformers=={version}", f"transformers=={transformers}", "onnx", "onnxscript", _TORCH),
            (("../make_sentence_transformers.py", "."),),
        )
        # The newest version comes first, because it exports the graphs that the other versions copy.
        for version, transformers in (
            ("6.2.0", "5.24.0"),
            ("5.1.2", "4.57.1"),
            ("4.1.0", "4.51.3"),
            ("3.4.1", "4.49.0"),
        )
    ),
    Tool(
        "gliner",
        ("gliner==0.2.29", "onnx", "onnxscript", "onnxruntime", _TORCH),
        (("gliner_models.py", "models", "."),),
    ),
)


def interpreter(tool: Tool, folder: Path, pip: list[str]) -> Path:
    """Create the virtual environment of a tool and return the path of its Python interpreter."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *pip, *tool.packages], check=True)
    if tool.removed:
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *tool.removed], check=True)
    return python


def pack(folder: Path) -> None:
    """Write the archives with fixed file names and times, so that the same folders give the same bytes."""
    names = ("answers", "gliner", "intel", "models", "optimum", "peft", "setfit", "web")
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing:
        sys.exit(
            f"{folder} has no {', '.join(missing)} yet: run the other tools. The stored archive was left as it is."
        )
    subprocess.run([sys.executable, _SCRIPTS.parent / "strip.py", folder], check=True)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(path for name in names for path in (folder / name).rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mtime = path.stat().st_size, 1767225600
            with path.open("rb") as content:
                archive.addfile(entry, content)
    if (folder / "sentence_transformers").is_dir():
        subprocess.run(["sh", _SCRIPTS.parent / "pack_sentence_transformers.sh", folder], check=True)


def main() -> None:
    """Run the scripts of all tools, or of the tools named by `--only`, and write the archives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/strangers"))
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--pip", default="", help="options of pip install, such as an index")
    parser.add_argument("--only", action="append", default=[], metavar="TOOL")
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    if not arguments.only:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(_SCRIPTS.parent / "folders.tar.xz") as archive:
        archive.extractall(out / "foreign", filter="data")
    interpreters = dict(setting.split("=", 1) for setting in arguments.python)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    for tool in TOOLS:
        if arguments.only and tool.name not in arguments.only:
            continue
        place = out / "environment"
        python = interpreters.get(tool.name) or interpreter(tool, place, arguments.pip.split())
        for script, *words in tool.scripts:
            subprocess.run([python, _SCRIPTS / script, *words], check=True, cwd=out, env=environment)
        shutil.rmtree(place, ignore_errors=True)
    pack(out)


if __name__ == "__main__":
    main()
