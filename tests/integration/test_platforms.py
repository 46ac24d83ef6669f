"""Import every module, and run the CPU code, in a simulated Windows or macOS: without the Python names that these
systems lack (`tests/platforms`).
"""

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

ROOMS = {
    "openvino": """
artifact = accel.export("model", "ir", backend="openvino")
accel.quantize(artifact, "ir-int8", scheme="weight-int8")
pipe = accel.pipeline("text-classification", model="ir-int8")
assert pipe("where is my card")[0]["label"]
""",
    "pytorch": """
model = accel.ORTModelForSequenceClassification.from_pretrained("model", backend="pytorch")
assert model.backend == "pytorch"
""",
    "neural_compressor": """
accel.quantize("model", "packed", backend="neural-compressor", scheme="weight-int8")
accel.export("packed", "packed-onnx")
""",
    "generation": """
save_generator(Path("decoder"), "llama")
for backend in ("cpu", "openvino"):
    decoder = accel.ORTModelForCausalLM.from_pretrained("decoder", backend=backend)
    ids = torch.tensor([[3, 4, 5]])
    assert decoder.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 7)
""",
    "measuring": """
accel.export("model", "onnx")
report = accel.benchmark(["onnx"], sequence=[8], rounds=2, calls=2)
assert report
with open("rows.csv", "w", encoding="utf-8") as file:
    file.write("text,label\\nwhere is my card,LABEL_0\\nhelp,LABEL_1\\n")
accel.evaluate("onnx", "rows.csv")
""",
    "batch": """
with open("rows.csv", "w", encoding="utf-8") as file:
    file.write("text\\nwhere is my card\\nhelp\\n")
for _ in range(2):
    command = [sys.executable, "-m", "accel", "batch", "model", "--data", "rows.csv", "--out", "answers"]
    done = subprocess.run([*command, "--format", "jsonl"])
    assert done.returncode == 0
""",
    "deploy": """
accel.export("model", "onnx")
done = subprocess.run([sys.executable, "-m", "accel", "deploy", "triton", "onnx", "repository"])
assert done.returncode == 0
""",
}
"""Body of `run` in each script, by name. It runs after a tiny classifier was saved as `model`."""

ROOM = """
import subprocess, sys
import accel
import torch
from pathlib import Path
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny

def run():
    save_tiny("model", "bert", "text-classification")
{body}

if __name__ == "__main__":
    run()
"""

SERVER = """
import json, subprocess, sys, time, urllib.request
from accel.testing.models import save_tiny

def run():
    save_tiny("model", "bert", "text-classification")
    command = [sys.executable, "-m", "accel", "serve", "model", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "http://" in line:
                break
        assert lines and "http://" in lines[-1], lines
        address = "http://" + lines[-1].split("http://", 1)[1].split()[0].split("/")[0]
        body = json.dumps({"inputs": "where is my card"}).encode()
        request = urllib.request.Request(address + "/classify", data=body, headers={"content-type": "application/json"})
        for _ in range(100):
            try:
                answer = urllib.request.urlopen(request, timeout=30)
                break
            except OSError:
                time.sleep(0.2)
        assert answer.status == 200
    finally:
        server.terminate()
        server.wait(30)

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
def test_every_module_can_be_imported(platform: str, tmp_path: Path) -> None:
    done = run_on(platform, tmp_path, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_cpu_code_runs(platform: str, tmp_path: Path) -> None:
    (tmp_path / "path.py").write_text(PATH, encoding="utf-8")
    done = run_on(platform, tmp_path, "path.py")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_package_runs(platform: str, room: str, tmp_path: Path) -> None:
    if (platform, room) == ("windows", "neural_compressor"):
        pytest.skip("Neural Compressor imports functions that this test removes to simulate another platform")
    body = "\n".join(f"    {line}" for line in ROOMS[room].strip().splitlines())
    (tmp_path / "room.py").write_text(ROOM.replace("{body}", body), encoding="utf-8")
    done = run_on(platform, tmp_path, "room.py")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_server_starts(platform: str, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    done = run_on(platform, tmp_path, "server.py")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_doctor_runs(platform: str, tmp_path: Path) -> None:
    done = run_on(platform, tmp_path, "-m", "accel", "doctor")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cpu" in done.stdout
