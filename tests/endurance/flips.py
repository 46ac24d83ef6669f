"""Flip one bit in an artifact, or remove one file. Loading the artifact must then raise an error that names the file."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import accel
from accel.artifact import Artifact
from accel.errors import AccelError
from accel.testing.models import save_tiny

_LEAST = 50


def run(root: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Flip random bits, one at a time, and then remove each file. The flips are distributed over the files by their
    size, with at least fifty flips in each file.

    Args:
        root: Folder for all files of the experiment.
        count: Minimum number of flips.
        seed: Seed of the random positions.
    """
    chance = random.Random(seed)
    root.mkdir(parents=True)
    artifact = accel.export(save_tiny(root / "model", "bert", hidden_size=64, intermediate_size=256), root / "artifact")
    folder = artifact.path
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size for path in files}
    each = {path: max(_LEAST, round(count * size / sum(sizes.values()))) for path, size in sizes.items()}
    flips: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    for path, times in each.items():
        name, content = str(path.relative_to(folder)), path.read_bytes()
        for _ in range(times):
            place, bit = chance.randrange(sizes[path]), 1 << chance.randrange(8)
            changed = bytearray(content)
            changed[place] ^= bit
            path.write_bytes(changed)
            flips[name] += 1
            if fault := _fault(folder, name):
                faults.append({"file": name, "place": str(place), "bit": str(bit), "what": fault})
        path.write_bytes(content)
    removed = {}
    for path in files:
        name, away = str(path.relative_to(folder)), root / "away"
        shutil.move(path, away)
        removed[name] = _fault(folder, name) or "found"
        shutil.move(away, path)
        if removed[name] != "found":
            faults.append({"file": name, "what": f"removed: {removed[name]}"})
    accel.ORTModelForSequenceClassification.from_pretrained(folder).close()
    return {"flips": dict(flips), "total": sum(flips.values()), "removed": removed, "faults": faults}


def _fault(folder: Path, name: str) -> str:
    """Load the damaged folder. Return an empty string if the error names the damaged file, and a description of the
    fault if not.
    """
    messages = []
    for load in (
        lambda: accel.ORTModelForSequenceClassification.from_pretrained(folder).close(),
        lambda: Artifact.load(folder).verify(),
    ):
        try:
            load()
        except AccelError as error:
            messages.append(str(error))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            return "it opened"
    return "" if Path(name).name in messages[0] else f"not named: {messages[0]}"
