"""Tests of `optimum-cli accel ...` with the real Optimum, which discovers accel's command automatically."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from accel.artifact import Artifact
from accel.testing.models import save_tiny

pytest.importorskip("optimum.commands.base", reason="the package optimum is not installed", exc_type=ImportError)
pytest.importorskip(
    "optimum.commands.register.register_accel", reason="the package of distributions/optimum-cli is not installed"
)


def optimum_cli(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    entry = next(
        candidate for candidate in metadata.entry_points(group="console_scripts") if candidate.name == "optimum-cli"
    )
    module, _, function = entry.value.partition(":")
    call = f"from {module} import {function} as main; main()"
    return subprocess.run(
        [sys.executable, "-c", call, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ACCEL_HOME": str(home), "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("optimum-cli")
    source = save_tiny(base / "bert", "bert")
    done = optimum_cli("accel", "export", str(source), str(base / "onnx"), "--json", home=base)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    return base


def test_export(base_folder: Path) -> None:
    assert Artifact.load(base_folder / "onnx").task == "text-classification"


@pytest.mark.parametrize("words", [("optimize", "--level", "O1"), ("quantize", "--scheme", "dynamic-int8")])
def test_optimize_and_quantize(base_folder: Path, words: tuple[str, ...]) -> None:
    out = base_folder / words[0]
    done = optimum_cli("accel", words[0], str(base_folder / "onnx"), str(out), *words[1:], home=base_folder)
    assert done.returncode == 0, done.stderr
    assert Artifact.load(out).manifest.steps[-1].stage == words[0]


def test_help_and_usage_errors_come_from_accel(base_folder: Path) -> None:
    done = optimum_cli("accel", "tune", "--help", home=base_folder)
    assert done.returncode == 0
    assert "optimum-cli accel tune" in done.stdout
    failed = optimum_cli("accel", "export", str(base_folder / "nothing"), str(base_folder / "out"), home=base_folder)
    assert failed.returncode == 1
    assert "Fix:" in failed.stderr


def test_command_is_listed_in_optimum_help(base_folder: Path) -> None:
    assert "accel" in optimum_cli("--help", home=base_folder).stdout
