"""Run commands with a full disk, with a read-only ACCEL_HOME, and without a home folder. Each command must raise one
clear error and leave no files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .world import Ended, World, accel_command

_MEGABYTES = 20


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system of `megabytes` MB in memory on `folder` while the context is open. The process needs the
    permission to mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}M", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def run(root: Path, *, count: int, seed: int, only: str = "") -> dict[str, Any]:
    """Run every command that writes files, first with different amounts of free space for its output, and then for its
    ACCEL_HOME.

    Args:
        root: Folder for all files of the experiment.
        count: Number of amounts of free space to test for each command.
        seed: Not used, because the free space grows in equal steps from almost none to almost the whole disk.
        only: Regular expression for the names of the commands to run, such as "^export, output" or "tune, home".
    """
    world = World(root)
    # The model has about ten megabytes of weights, so two files with all weights do not fit on the disk.
    from accel.testing.models import save_tiny

    model = save_tiny(
        root / "large", "bert", hidden_size=256, num_attention_heads=4, intermediate_size=1024, num_hidden_layers=4
    )
    onnx, ir = root / "onnx", root / "ir"
    for folder, more in ((onnx, ()), (ir, ("--backend", "openvino"))):
        assert world.run(accel_command(["export", model, folder, *more])).code == 0
    data = ("--calibration", world.rows)
    tune = ("--backend", "cpu", "--sequence", 8, "--max-drop", 100, "--data", world.rows)
    results: dict[str, dict[str, int]] = {}
    faults: list[dict[str, str]] = []

    def judge(name: str, ended: Ended, leftovers: list[str]) -> None:
        tally = results.setdefault(name, {"done": 0, "refused": 0})
        tally["done" if ended.code == 0 else "refused"] += 1
        wrong = [f"exit code {ended.code}: {ended.text[-400:]}"] if ended.code not in (0, 1, 2) else []
        wrong += [f"a traceback: {ended.text[-600:]}"] if ended.raw else []
        wrong += [f"no remedy: {ended.text[-400:]}"] if ended.code and "Fix:" not in ended.text else []
        wrong += [f"left: {entry}" for entry in leftovers]
        for problem in wrong:
            faults.append({"command": name, "what": problem})
            print(f"{name}: {problem}", flush=True)

    def fill(folder: Path, step: int) -> None:
        """Fill the disk except for a free part that grows with `step`. At step 0, 4 KB are free."""
        free = (_MEGABYTES << 20) * step // count if step else 4096
        (folder / "filled").write_bytes(bytes((_MEGABYTES << 20) - free))

    disk = root / "disk"
    out = disk / "out"
    commands = {
        "export": ["export", model, out],
        "export to OpenVINO": ["export", model, out, "--backend", "openvino"],
        "optimize": ["optimize", onnx, out],
        "quantize": ["quantize", onnx, out, "--scheme", "dynamic-int8"],
        "quantize with data": ["quantize", onnx, out, "--scheme", "static-int8", *data],
        "quantize with NNCF": ["quantize", ir, out, "--scheme", "static-int8", *data],
        "tune": ["tune", model, out, *tune],
    }
    for name, arguments in commands.items():
        if not re.search(only, f"{name}, output"):
            continue
        for step in range(count):
            with small_disk(disk, _MEGABYTES):
                fill(disk, step)
                ended = world.run(accel_command(arguments))
                leftovers = [path.name for path in disk.iterdir() if path.name not in ("filled", "out")]
                if ended.code:
                    leftovers += ["out"] if out.exists() else []
                judge(f"{name}, output on a full disk", ended, leftovers)
        shutil.rmtree(world.home)
        world.home.mkdir()

    def cached() -> None:
        import typer

        import accel
        from accel.cli.application import command

        try:
            with command(False, False):
                accel.ORTModelForSequenceClassification.from_pretrained(model)
        except typer.Exit as ended:
            raise SystemExit(ended.exit_code) from ended

    for name, action in (
        ("from_pretrained", cached),
        ("tune", accel_command(["tune", model, world.work / "out", *tune])),
    ):
        if not re.search(only, f"{name}, home"):
            continue
        for step in range(count):
            with small_disk(world.home, _MEGABYTES):
                fill(world.home, step)
                ended = world.run(action)
                judge(f"{name}, home on a full disk", ended, [p.name for p in world.home.rglob(".accel-staging*")])
                shutil.rmtree(world.work / "out", ignore_errors=True)
        with small_disk(world.home, _MEGABYTES):
            subprocess.run(["mount", "-o", "remount,ro", world.home], check=True)
            judge(f"{name}, home cannot be written", world.run(action), [])
            shutil.rmtree(world.work / "out", ignore_errors=True)

        def homeless(action: Any = action) -> None:
            for variable in ("HOME", "ACCEL_HOME", "XDG_CACHE_HOME"):
                os.environ.pop(variable, None)
            # Change to a user id that is not in the user database, so that Python cannot find a home folder.
            os.setuid(54321)
            action()

        # Allow all users to read the model, because the command runs as another user.
        for folder in (root.parent, root):
            folder.chmod(0o755)
        world.work.chmod(0o777)
        judge(f"{name}, no home", world.run(homeless), [])
        shutil.rmtree(world.work / "out", ignore_errors=True)
    return {"runs": results, "total": sum(sum(t.values()) for t in results.values()), "faults": faults}
