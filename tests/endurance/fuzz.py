"""Load and run randomly damaged graphs whose checksums match. Each graph must run, or quickly raise an error of accel."""

from __future__ import annotations

import faulthandler
import random
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import accel
from accel.artifact.checksums import sha256
from accel.artifact.manifest import MANIFEST
from accel.errors import AccelError
from accel.testing.copies_without_manifest import as_foreign, edit_manifest, unmark
from accel.testing.models import save_tiny

from .world import World, accel_command

_SECONDS, _BYTES, _REFUSED = 10.0, 2 << 30, 3
_HUGE = (b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"../../..", b"/etc/pas")
_ROWS = {"input_ids": [[2, 5, 6, 3], [2, 7, 3, 0]], "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a copy of a file's content with one to four damages: changed bits or bytes, replaced numbers, and removed,
    repeated or truncated parts.
    """
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place, kind = chance.randrange(len(changed)), chance.random()
        if kind < 0.5:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind < 0.7:
            changed[place] = chance.choice(b"\x00\x01\x7f\x80\xff09/<")
        elif kind < 0.85:
            changed[place : place + 8] = chance.choice(_HUGE)
        elif kind < 0.9:
            del changed[place : place + chance.randint(1, 64)]
        elif kind < 0.95:
            changed[place:place] = changed[place : place + chance.randint(1, 64)]
        elif len(changed) > 64:
            del changed[chance.randrange(64, len(changed)) :]
    return bytes(changed)


def _open(folder: Path) -> None:
    """Load a model and run it once. Exit with `_REFUSED` if accel raises an error."""
    import torch

    faulthandler.enable()
    faulthandler.dump_traceback_later(_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with accel.ORTModelForSequenceClassification.from_pretrained(folder) as model:
            names = {spec.name for spec in model.sessions["model"].inputs}
            model(**{name: torch.tensor(rows) for name, rows in _ROWS.items() if name in names})
    except AccelError:
        sys.exit(_REFUSED)


def run(root: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Damage three graphs one after another: the graph of an ONNX export, the graph of another tool's folder, and an
    OpenVINO IR.

    Args:
        root: Folder for all files of the experiment.
        count: Number of damaged graphs.
        seed: Seed of the random damages.
    """
    chance = random.Random(seed)
    world = World(root)
    model = save_tiny(
        root / "small", "bert", num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    onnx, ir = root / "inner" / "onnx", root / "inner" / "ir"

    # Export in another process. If OpenVINO compiled a model in this process, forked processes would wait for threads
    # that they do not have.
    for folder, more in ((onnx, ()), (ir, ("--backend", "openvino"))):
        assert (ended := world.run(accel_command(["export", model, folder, *more]))).code == 0, ended.text
    unmark(onnx / "model.onnx")
    foreign = as_foreign(onnx, root / "inner" / "foreign")
    places = [(onnx, "model.onnx"), (foreign, "model.onnx"), (ir, "model.xml")]
    places = [(folder, next(p.name for p in folder.glob(f"*{Path(name).suffix}"))) for folder, name in places]
    contents = {folder: (folder / name).read_bytes() for folder, name in places}
    before = _files(root)
    ends: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    for number in range(count):
        folder, name = places[number % len(places)]
        content = mutated(contents[folder], chance)
        (folder / name).write_bytes(content)
        if (folder / MANIFEST).exists():
            edit_manifest(folder, lambda values, f=folder, n=name: _record(values, f, n))
        ended = world.run(lambda f=folder: _open(f), limit_s=2 * _SECONDS)
        last = ended.text.strip().splitlines()[-1:]
        how = {0: "answered", _REFUSED: "refused"}.get(
            ended.code, f"signal {-ended.code}" if ended.code < 0 else str(last)
        )
        ends[f"{folder.name}: {how.split(':')[0]}"] += 1
        wrong = [] if ended.code in (0, _REFUSED) else [how[:300]]
        wrong += [f"{ended.seconds:.1f} s"] if ended.seconds > _SECONDS else []
        wrong += [f"{ended.peak_bytes / 1e9:.1f} GB"] if ended.peak_bytes > _BYTES else []
        new = {path for path, at in _files(root).items() if before.get(path) != at}
        wrong += [f"wrote {path}" for path in new - {str(folder / name), str(folder / MANIFEST)}]
        if wrong:
            saved = root / "faults" / f"{number}-{folder.name}-{name}"
            saved.parent.mkdir(exist_ok=True)
            saved.write_bytes(content)
            saved.with_suffix(".log").write_text(ended.text)
            before = _files(root)
            faults.append({"graph": f"{folder.name}, number {number}", "what": "; ".join(wrong)})
            print(faults[-1], flush=True)
        (folder / name).write_bytes(contents[folder])
        before |= {str(p): p.stat().st_mtime_ns for p in (folder / name, folder / MANIFEST) if p.exists()}
    return {"ends": dict(ends), "total": count, "faults": faults}


def _record(values: dict[str, Any], folder: Path, name: str) -> None:
    for component in values["components"]:
        for record in component["files"]:
            if record["name"] == name:
                record |= {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}


def _files(root: Path) -> dict[str, int]:
    """Return the modification times of all files, without the log and without the files in the home folder and the
    temporary folder.
    """
    everything = (path for path in root.rglob("*") if path.is_file() and path != root / "log")
    return {str(p): p.stat().st_mtime_ns for p in everything if p.relative_to(root).parts[0] not in ("home", "tmp")}
