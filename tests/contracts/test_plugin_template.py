"""Check that the plugin template installs as a separate package, and that it passes the conformance suite without
changes in accel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template"


@pytest.mark.thorough
def test_template_passes_the_conformance_suite(tmp_path: Path) -> None:
    source = shutil.copytree(TEMPLATE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(source)], check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "ACCEL_HOME": str(tmp_path / "home")}
    listed = subprocess.run(
        [sys.executable, "-c", "from accel.backends import registry; print(registry.describe('toy').summary)"],
        env=environment, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "template" in listed.stdout
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(source / "tests")],
        env=environment, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "32 passed" in done.stdout, "the template exercises every test of the suite, state included"
