"""Tests of warnings about versions of other libraries: tested versions cause no warning, and other versions cause one
warning with the tested range.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from accel.upstream.tested_versions import TESTED, untested, warn_of_untested_versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    warn_of_untested_versions.cache_clear()


@pytest.mark.parametrize(
    ("version", "reported"),
    [("2.11.0", None), ("2.13.1+cpu", None), ("2.10.0", "2.10.0"), ("2.14.0", "2.14.0"), ("3.0", "3.0")],
)
def test_release_lines(version: str, reported: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert untested("torch", "2.11", "2.13") == reported


def test_missing_library_is_not_mentioned() -> None:
    assert untested("no-such-distribution", "1.0", "1.0") is None


def test_untested_version_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9" if name == "transformers" else real(name))
    warn_of_untested_versions.cache_clear()  # an earlier test may have called the function
    with caplog.at_level(logging.WARNING):
        warn_of_untested_versions(TESTED)
        warn_of_untested_versions(TESTED)
    (record,) = [entry for entry in caplog.records if "transformers" in entry.getMessage()]
    assert "The installed version of transformers, 9.9.9, was not tested" in record.getMessage()
    assert 'pip install "transformers==5.24.*' in record.getMessage()


def test_tested_versions_are_in_the_declared_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {requirement.name: requirement.specifier for requirement in map(Requirement, project["dependencies"])}
    for distribution, oldest, newest in TESTED:
        assert {oldest, f"{newest}.99"} == set(declared[distribution].filter([oldest, f"{newest}.99"]))
