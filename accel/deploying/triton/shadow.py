"""A repository's shadow: the same models, names and tensors, with ONNX graphs run by Python on the CPU, for servers that have the
Python backend alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .messages import CONFIG, kind, read, write
from .repository import SERVED, SETTINGS


def shadow(repository: Path, out: Path, *, threads: int = 1) -> list[str]:
    """Write the shadow of a repository into the folder `out`, which must not exist.

    Args:
        repository: A model repository.
        out: Where its shadow goes.
        threads: Of each graph.

    Returns:
        The models whose graphs cannot be run by Python; they are left out.
    """
    left_out = []
    shutil.copytree(repository, out)
    for path in sorted(out.glob(f"*/{CONFIG}")):
        config = read(path)
        backend = config.backend or config.platform
        if backend in ("python", "ensemble"):
            continue
        if not backend.startswith("onnxruntime"):
            left_out.append(path.parent.name)
            shutil.rmtree(path.parent)
            continue
        graph = config.default_model_filename or "model.onnx"
        config.backend, config.platform = "python", ""
        for field in ("optimization", "parameters", "default_model_filename", "instance_group"):
            config.ClearField(field)
        config.instance_group.add(count=1, kind=kind("KIND_CPU"))
        write(config, path.parent)
        for version in (one for one in path.parent.iterdir() if one.is_dir() and one.name.isdigit()):
            shutil.copyfile(SERVED / "graph.py", version / "model.py")
            settings = {"graph": graph, "threads": threads}
            (version / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return left_out
