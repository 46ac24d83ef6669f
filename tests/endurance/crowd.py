"""Run four processes with the same ACCEL_HOME for minutes: searches, exports and cache removal. No command may fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from accel.artifact import Artifact

from .world import World, accel_command

_MEMBERS = 4


def run(root: Path, *, count: int, seed: int) -> dict[str, Any]:
    """Run several processes that execute random commands with the same ACCEL_HOME.

    Args:
        root: Folder for all files of the experiment.
        count: Duration in seconds.
        seed: Seed of the random commands.
    """
    world = World(root)
    until = time.monotonic() + count

    def member(number: int) -> None:
        chance = random.Random(seed * _MEMBERS + number)
        done: Counter[str] = Counter()
        bad: list[str] = []
        out = world.work / f"out{number}"
        while time.monotonic() < until:
            action = chance.choices(("tune", "load", "export", "clear"), (1, 8, 4, 4))[0]
            try:
                _run_action(action, world, out, chance)
            except SystemExit as error:
                if error.code:
                    bad.append(f"{action}: exit code {error.code}")
            except Exception as error:
                bad.append(f"{action}: {type(error).__name__}: {error}")
            done[action] += 1
            shutil.rmtree(out, ignore_errors=True)
        (world.root / f"member{number}.json").write_text(json.dumps({"done": done, "bad": bad}))

    numbers = [world.start(lambda n=n: member(n), world.root / f"log{n}") for n in range(_MEMBERS)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]
    faults = [{"what": f"member {n} ended with {code}"} for n, code in enumerate(codes) if code]
    total: Counter[str] = Counter()
    for n in range(_MEMBERS):
        report_file = world.root / f"member{n}.json"
        if report_file.exists():
            report = json.loads(report_file.read_text())
            total.update(report["done"])
            log = (world.root / f"log{n}").read_text(errors="replace")[-2000:]
            faults += [{"what": f"member {n}: {problem}", "log": log} for problem in report["bad"]]
    for folder in (*(world.home / "exports").glob("*/"), *(world.home / "tune" / "artifacts").glob("*/")):
        if not folder.name.startswith(".accel-staging-"):
            try:
                Artifact.load(folder)
            except Exception as error:
                faults.append({"what": f"in the store: {error}"})
    faults += [{"what": f"a process is left: {name}"} for name in world.orphans()]
    ended = world.run(accel_command(["tune", world.model, world.work / "last", *_tuning(world)]))
    faults += [{"what": f"the search after it failed: {ended.text[-500:]}"}] if ended.code else []
    faults += [{"what": f"left behind: {name}"} for name in world.leftovers()]
    for fault in faults:
        print(fault["what"], flush=True)
    return {"seconds": count, "done": dict(total), "total": total.total(), "faults": faults}


def _tuning(world: World) -> list[object]:
    return ["--data", world.rows, "--backend", "cpu", "--sequence", 8, "--max-drop", 100]


def _run_action(action: str, world: World, out: Path, chance: random.Random) -> None:
    import accel

    if action == "tune":
        accel_command(["tune", world.model, out, *_tuning(world)])()
    elif action == "load":
        opset = chance.choice((18, 20, 21))
        accel.ORTModelForSequenceClassification.from_pretrained(world.model, opset=opset).close()
    elif action == "export":
        accel_command(["export", world.model, out])()
    else:
        accel_command(["cache", "clear"])()
