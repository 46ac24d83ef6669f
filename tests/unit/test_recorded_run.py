"""Tests of run settings in a manifest. A manifest is untrusted, so some of its settings are applied and other settings
are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.artifact import Artifact, FastestRunSettings
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.config import SessionOptions, available_processors
from accel.errors import ConfigError


@pytest.fixture
def recorded(tiny_artifact: Callable[..., Artifact]) -> Callable[..., Artifact]:
    """Return a function that returns the tiny classifier with a run record in its manifest."""
    artifact = tiny_artifact("bert")

    def get(backend: str = "cpu", **run: Any) -> Artifact:
        return Artifact(artifact.path, replace(artifact.manifest, run=FastestRunSettings(backend=backend, **run)))

    return get


@pytest.mark.parametrize(
    ("session", "named"),
    [
        (lambda out: {"native": {"optimized_model_filepath": out}}, "session.native"),
        (lambda _: {"native": {"onnxruntime.SessionOptions": 1}}, "session.native"),
        (lambda out: {"profile": out}, "session.profile"),
    ],
)
def test_recorded_settings_that_write_files_are_refused(
    recorded: Callable[..., Artifact], tmp_path: Path, session: Callable[[str], dict[str, Any]], named: str
) -> None:
    target = tmp_path / "written"
    with pytest.raises(ConfigError, match=named):
        open_plan(make_plan(recorded(session=session(str(target)))))
    assert not target.exists()


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("openvino", {"cache_dir": "/tmp/anywhere"}),
        ("openvino", {"CACHE_DIR": "/tmp/anywhere"}),
        ("cpu", {"device_id": 3}),
    ],
)
def test_recorded_provider_options_not_in_the_spec_are_refused(
    recorded: Callable[..., Artifact], backend: str, options: dict[str, Any]
) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    with pytest.raises(ConfigError, match=f"provider_options.{next(iter(options))}"):
        open_plan(make_plan(recorded(backend, provider_options=options)))


@pytest.mark.parametrize("name", ["threads", "inter_op_threads"])
def test_a_million_threads_are_refused(recorded: Callable[..., Artifact], name: str) -> None:
    with pytest.raises(ConfigError, match=f"SessionOptions.{name} is 1000000"):
        open_plan(make_plan(recorded(), RunPreferences(options=SessionOptions(**{name: 1_000_000}))))


def test_recorded_threads_are_limited_to_the_processors(recorded: Callable[..., Artifact]) -> None:
    opened = open_plan(make_plan(recorded(session={"threads": 100_000, "inter_op_threads": 100_000})))
    assert opened.options.threads == opened.options.inter_op_threads == available_processors()
    opened.close()


def test_settings_recorded_by_tune_are_applied(recorded: Callable[..., Artifact]) -> None:
    options = SessionOptions(threads=1, buckets=(8,), spinning=False)
    opened = open_plan(make_plan(recorded(session=options.to_dict())))
    assert opened.options == options
    opened.close()


def test_user_settings_override_refused_recorded_settings(recorded: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = recorded(session={"profile": str(tmp_path / "no")})
    preferences = RunPreferences(options=SessionOptions(profile=str(tmp_path / "yes")))
    opened = open_plan(make_plan(artifact, preferences))
    opened.close()
    assert not (tmp_path / "no").exists()
