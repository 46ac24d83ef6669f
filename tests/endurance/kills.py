"""Kill commands that write files at random moments. No incomplete output may remain, and the next run must succeed and
remove temporary files.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.artifact import Artifact

from .world import World, accel_command


@dataclass(frozen=True)
class Written:
    """Command that writes files.

    Attributes:
        name: Name of the command in the results.
        action: Function that runs the command.
        share: Weight of the command. The kills are distributed in proportion to the weights.
        prepare: Function that creates the files that the command needs.
    """

    name: str
    action: Callable[[], object]
    share: int
    prepare: Callable[[], object] = field(default=lambda: None)


def _commands(world: World) -> list[Written]:
    artifacts = world.root / "made"
    onnx, ir = artifacts / "onnx", artifacts / "ir"
    for folder, more in ((onnx, ()), (ir, ("--backend", "openvino"))):
        ended = world.run(accel_command(["export", world.model, folder, *more]))
        assert ended.code == 0, ended.text
    out, rows = world.work / "out", world.rows

    def cached() -> None:
        import accel

        accel.ORTModelForSequenceClassification.from_pretrained(world.model).save_pretrained(out)

    def fill() -> None:
        ended = world.run(cached)
        assert ended.code == 0, ended.text
        shutil.rmtree(out)

    data = ("--data", rows)
    tune = ["tune", world.model, out, *data, "--backend", "cpu", "--sequence", 8, "--max-drop", 100]
    return [
        Written("export", accel_command(["export", world.model, out]), 50),
        Written("export to OpenVINO", accel_command(["export", world.model, out, "--backend", "openvino"]), 30),
        Written("optimize", accel_command(["optimize", onnx, out, "--level", "O2"]), 40),
        Written("quantize", accel_command(["quantize", onnx, out, "--scheme", "dynamic-int8"]), 30),
        Written(
            "quantize with data",
            accel_command(["quantize", onnx, out, "--scheme", "static-int8", "--calibration", rows]),
            40,
        ),
        Written(
            "quantize with NNCF",
            accel_command(["quantize", ir, out, "--scheme", "static-int8", "--calibration", rows]),
            20,
        ),
        Written(
            "quantize in a budget",
            accel_command(["quantize", onnx, out, "--max-drop", 100, *data, "--calibration", rows]),
            20,
        ),
        Written("from_pretrained and save_pretrained", cached, 40),
        Written("cache clear", accel_command(["cache", "clear"]), 20, fill),
        Written("tune", accel_command(tune), 10),
    ]


def _state_of(out: Path) -> str:
    """Return a description of an incomplete output folder after a kill, or an empty string if the folder is complete or
    missing.
    """
    if not out.exists():
        return ""
    try:
        Artifact.load(out).verify()
    except Exception as error:
        return f"half an output: {error}"
    return ""


def run(root: Path, *, count: int, seed: int, only: str = "") -> dict[str, Any]:
    """Kill each command at random moments, check its output, run the command again, and check its output again.

    Args:
        root: Folder for all files of the experiment.
        count: Total number of kills of all commands.
        seed: Seed of the random moments.
        only: Regular expression for the names of the commands to kill.

    Returns:
        Number of kills and duration of each command, and the faults.
    """
    chance = random.Random(seed)
    world = World(root)
    every = _commands(world)
    commands = [command for command in every if re.search(only, command.name)]
    out = world.work / "out"
    seconds: dict[str, float] = {}
    for command in commands:
        command.prepare()
        ended = world.run(command.action)
        assert ended.code == 0, f"{command.name}: {ended.text}"
        seconds[command.name] = ended.seconds
        shutil.rmtree(out, ignore_errors=True)
        assert not world.leftovers(), (command.name, world.leftovers())
    total = sum(command.share for command in every)
    kills: Counter[str] = Counter()
    faults: list[dict[str, str]] = []
    for command in commands:
        target, tries = max(1, round(count * command.share / total)), 0
        # A run that ended before it could be killed does not count.
        while kills[command.name] < target and tries < 3 * target:
            tries += 1
            command.prepare()
            if command.name != "cache clear":
                shutil.rmtree(world.home)
                world.home.mkdir()
            moment = chance.uniform(0, seconds[command.name])
            ended = world.run(command.action, kill_after_s=moment)
            kills[command.name] += ended.code < 0
            problems = [_state_of(out), *world.orphans()]
            shutil.rmtree(out, ignore_errors=True)
            again = world.run(command.action)
            if again.code != 0:
                problems.append(f"the next run failed: {again.text[-500:]}")
            else:
                # Use the shortest duration, because other programs may have slowed the first run.
                seconds[command.name] = min(seconds[command.name], again.seconds)
                problems.append(_state_of(out))
            shutil.rmtree(out, ignore_errors=True)
            problems += [f"left behind: {name}" for name in world.leftovers()]
            for name in problems:
                if name:
                    faults.append({"command": command.name, "moment": f"{moment:.3f} s", "what": name})
                    print(f"{command.name} at {moment:.3f} s: {name}", flush=True)
            shutil.rmtree(world.temporary)
            world.temporary.mkdir()
        print(f"{command.name}: {kills[command.name]} kills in runs of {seconds[command.name]:.1f} s", flush=True)
    return {"kills": dict(kills), "total": sum(kills.values()), "seconds": seconds, "faults": faults}
