"""Import every module and run the CPU path without the names that Windows and macOS lack (`tests/platforms`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORMS = ("windows", "macos")

IMPORTS = """
import importlib, pkgutil
import accel, accel_plugins
from accel.errors import AccelError
failed = []
for package in (accel, accel_plugins):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except (AccelError, ModuleNotFoundError) as error:
            # Another package that is not installed.
            if getattr(error, "name", "") in ("fcntl", "resource", "pwd", "termios"):
                failed.append(f"{module.name}: {error!r}")
        except Exception as error:
            failed.append(f"{module.name}: {error!r}")
assert not failed, failed
"""

PATH = """
import os, sys
import accel
from accel.testing.models import save_tiny

def run():
    if os.environ["ACCEL_TEST_PLATFORM"] == "windows":
        assert not hasattr(os, "fork")
    save_tiny("model", "bert", "text-classification")
    os.makedirs("onnx")  # an empty folder is taken
    artifact = accel.export("model", "onnx")
    optimized = accel.optimize(artifact, "optimized", level="O2")
    accel.quantize(optimized, "int8", scheme="dynamic-int8")
    pipe = accel.pipeline("text-classification", model="int8")
    assert pipe("where is my card")[0]["label"]
    with accel.Engine("optimized") as engine:
        assert engine.run("where is my card")
    save_tiny("embedder", "bert", "feature-extraction")
    embedder = accel.ORTModelForFeatureExtraction.from_pretrained("embedder", pooling="mean")
    assert embedder.encode(["where is my card", "help"]).shape[0] == 2
    embedder.save_pretrained("saved")
    embedder.save_pretrained("saved", overwrite=True)
    left = [name for name in os.listdir() if name.startswith(".accel-staging-")]
    assert not left, left

if __name__ == "__main__":
    run()
"""


def run_on(platform: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ACCEL_TEST_PLATFORM": platform,
        "ACCEL_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "platforms"), str(ROOT)]),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_module_is_imported(platform: str, tmp_path: Path) -> None:
    done = run_on(platform, tmp_path, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_cpu_path_runs(platform: str, tmp_path: Path) -> None:
    (tmp_path / "path.py").write_text(PATH, encoding="utf-8")
    done = run_on(platform, tmp_path, "path.py")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_doctor_runs(platform: str, tmp_path: Path) -> None:
    done = run_on(platform, tmp_path, "-m", "accel", "doctor")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cpu" in done.stdout
