"""Graphs from strangers: damaged at random, with checksums that fit, opened and asked once; ours to refuse, soon, in our words."""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accel
from accel.artifact.checksums import sha256
from accel.artifact.manifest import MANIFEST
from accel.errors import AccelError
from accel.testing.folders import as_foreign, edit_manifest, unmark
from accel.testing.models import save_tiny

_SECONDS, _BYTES = 10.0, 2 << 30
_HUGE = (b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"../../..", b"/etc/pas")
_ROWS = {"input_ids": [[2, 5, 6, 3], [2, 7, 3, 0]], "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A copy with up to four damages: bits, runs of bytes, numbers of text, cuts, and parts that come twice."""
    made = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place, kind = chance.randrange(len(made)), chance.random()
        if kind < 0.5:
            made[place] ^= 1 << chance.randrange(8)
        elif kind < 0.7:
            made[place] = chance.choice(b"\x00\x01\x7f\x80\xff09/<")
        elif kind < 0.85:
            made[place : place + 8] = chance.choice(_HUGE)
        elif kind < 0.9:
            del made[place : place + chance.randint(1, 64)]
        elif kind < 0.95:
            made[place:place] = made[place : place + chance.randint(1, 64)]
        elif len(made) > 64:
            del made[chance.randrange(64, len(made)) :]
    return bytes(made)


def _opened(folder: Path) -> str:
    """Open a folder and ask once: how it ended."""
    import torch

    try:
        with accel.ORTModelForSequenceClassification.from_pretrained(folder) as model:
            names = {spec.name for spec in model.sessions["model"].inputs}
            model(**{name: torch.tensor(rows) for name, rows in _ROWS.items() if name in names})
    except AccelError:
        return "refused"
    return "answered"


def _in_a_process(
    action: Callable[[], str], stacks: Path, limit_s: float = 2 * _SECONDS
) -> tuple[int, str, float, int]:
    """Exit code, what it returned or raised, seconds and peak bytes of a forked process; where it hung or died is in `stacks`."""
    reading, writing = os.pipe()
    started = time.monotonic()
    number = os.fork()
    if not number:
        code = 1
        try:
            os.close(reading)
            file = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            faulthandler.enable()
            faulthandler.dump_traceback_later(_SECONDS)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(writing, action().encode())
            code = 0
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}"[:2000].encode(errors="replace"))
        finally:
            os._exit(code)
    os.close(writing)
    while True:
        ended, status, usage = os.wait4(number, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - started > limit_s:
            os.kill(number, signal.SIGKILL)
            _, status, usage = os.wait4(number, 0)
            break
        time.sleep(0.002)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), text, time.monotonic() - started, usage.ru_maxrss * 1024


def run(root: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Damage the graph of an export, of a folder of another tool, and of an IR, in turns.

    Args:
        root: A folder for all of it.
        count: Graphs.
        seed: Of the damages.
    """
    chance = random.Random(seed)
    root.mkdir(parents=True)
    (root / "home").mkdir()
    os.environ["ACCEL_HOME"] = str(root / "home")
    model = save_tiny(
        root / "model", "bert", num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2
    )
    onnx, ir = root / "inner" / "onnx", root / "inner" / "ir"
    stacks = root / "home" / "stacks"

    def export() -> str:
        accel.export(model, onnx)
        accel.export(model, ir, backend="openvino")
        return ""

    # Not here: a process that is forked from one in which OpenVINO compiled waits for threads that it does not have.
    code, text, _, _ = _in_a_process(export, stacks, limit_s=300)
    assert code == 0, text
    unmark(onnx / "model.onnx")
    foreign = as_foreign(onnx, root / "inner" / "foreign")
    places = [(onnx, "model.onnx"), (foreign, "model.onnx"), (ir, "model.xml")]
    places = [(folder, next(p.name for p in folder.glob(f"*{Path(name).suffix}"))) for folder, name in places]
    whole = {folder: (folder / name).read_bytes() for folder, name in places}
    before = _files(root)
    ends: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    for number in range(count):
        folder, name = places[number % len(places)]
        content = mutated(whole[folder], chance)
        (folder / name).write_bytes(content)
        if (folder / MANIFEST).exists():
            edit_manifest(folder, lambda values, f=folder, n=name: _record(values, f, n))
        code, text, seconds, peak = _in_a_process(lambda f=folder: _opened(f), stacks)
        how = text if code == 0 else f"signal {-code}" if code < 0 else text.split(":")[0]
        ends[f"{folder.name}: {how}"] += 1
        wrong = [] if code == 0 else [how if code < 0 else text[:300]]
        wrong += [f"{seconds:.1f} s"] if seconds > _SECONDS else []
        wrong += [f"{peak / 1e9:.1f} GB"] if peak > _BYTES else []
        new = {path for path, at in _files(root).items() if before.get(path) != at and "/home/" not in path}
        wrong += [f"wrote {path}" for path in new - {str(folder / name), str(folder / MANIFEST)}]
        if wrong:
            kept = root / "faults" / f"{number}-{folder.name}-{name}"
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(content)
            shutil.copy(stacks, kept.with_suffix(".stacks"))
            before = _files(root)
            faults.append({"graph": f"{folder.name}, number {number}", "what": "; ".join(wrong)})
            print(faults[-1], flush=True)
        (folder / name).write_bytes(whole[folder])
        before |= {str(p): p.stat().st_mtime_ns for p in (folder / name, folder / MANIFEST) if p.exists()}
    return {"ends": dict(ends), "total": count, "faults": faults}


def _record(values: dict[str, Any], folder: Path, name: str) -> None:
    for component in values["components"]:
        for record in component["files"]:
            if record["name"] == name:
                record |= {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}


def _files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
