"""Tests of graph forms (variants of a graph for some inputs). A form whose results differ from the graph is detected
before its first use, disabled, and named in a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.artifact.home_folder import accel_home
from accel.backends import registry
from accel.backends.plan import Plan, RunPreferences, make_plan
from accel.backends.sessions import OpenSessions, open_plan
from accel.capture.fast_path_verification import FastPath, FastPathVerifier
from accel.config import SessionOptions
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec

PACKED = FastPath(name="packed", sizes={"batch": 3, "sequence": 6}, padding="right")


def checks_of(artifact: Artifact, compute_dtype: str = "float32", **versions: str) -> FastPathVerifier:
    return FastPathVerifier(
        artifact, artifact.components[0], device=DeviceSpec("cpu"), compute_dtype=compute_dtype, versions=versions
    )


class Counted:
    """Computation that records its calls and whose results have the error `error`."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.feeds: list[Mapping[str, torch.Tensor]] = []

    def __call__(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.feeds.append(feeds)
        logits = feeds["input_ids"].float().sum(1, keepdim=True).repeat(1, 3)
        return {"logits": logits * (1 + self.error)}


@pytest.fixture
def artifact(tiny_artifact: Callable[..., Artifact]) -> Artifact:
    return tiny_artifact("bert")


def test_correct_form_is_checked_once(artifact: Artifact) -> None:
    checks, form, plain = checks_of(artifact, run="once"), Counted(), Counted()
    assert all(checks.check(PACKED, form, plain).passed for _ in range(5))
    assert (len(form.feeds), len(plain.feeds)) == (1, 1)
    assert form.feeds[0]["attention_mask"].sum(1).tolist() == [6, 4, 1]
    again = checks_of(artifact, run="once")
    assert again.check(PACKED, form, plain).passed
    assert len(form.feeds) == 1, "it is remembered"
    assert checks_of(artifact, run="another version").check(PACKED, form, plain).passed
    assert len(form.feeds) == 2


@pytest.mark.parametrize(("compute_dtype", "error", "allowed"), [("float32", 2e-3, False), ("float16", 2e-3, True)])
def test_tolerance_depends_on_the_compute_dtype(
    artifact: Artifact, compute_dtype: str, error: float, allowed: bool
) -> None:
    assert checks_of(artifact, compute_dtype).check(PACKED, Counted(error), Counted()).passed is allowed


def test_wrong_form_is_named_in_a_warning(artifact: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="accel.capture.fast_path_verification"):
        assert not checks_of(artifact, run="wrong").check(PACKED, Counted(0.4), Counted()).passed
        assert "'packed'" in caplog.text
        assert "0.4" in caplog.text
        caplog.clear()
        assert not checks_of(artifact, run="wrong").check(PACKED, Counted(), Counted()).passed, "it is remembered"
        assert "'packed'" in caplog.text, "and said again in each process"


def test_non_finite_results_are_wrong(artifact: Artifact) -> None:
    assert not checks_of(artifact, run="nan").check(PACKED, Counted(float("nan")), Counted()).passed


def test_form_is_checked_again_if_the_result_is_not_stored(artifact: Artifact) -> None:
    (accel_home() / "forms.json").write_text("[", encoding="utf-8")
    form = Counted()
    for _ in range(2):
        assert checks_of(artifact, run="damaged").check(PACKED, form, Counted()).passed
    assert len(form.feeds) == 1


class _OffAtFixedShapes:
    """Session that returns wrong results for fixed shapes."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, feeds: Any, *, outputs: Sequence[str] | None = None, state: Any = None) -> dict[str, torch.Tensor]:
        results = self._session.run(feeds, outputs=outputs, state=state)
        return {name: tensor + 1 for name, tensor in results.items()}


def test_wrong_bucket_is_not_used(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeds = {
        "input_ids": torch.arange(5, 11).repeat(2, 1),
        "attention_mask": torch.tensor([[1] * 6, [1] * 3 + [0] * 3]),
        "token_type_ids": torch.zeros(2, 6, dtype=torch.int64),
    }
    feeds = {spec.name: feeds[spec.name] for spec in artifact.components[0].inputs}
    expected = open_plan(make_plan(artifact)).sessions["model"].run(feeds)["logits"]
    backend = registry.load(registry.describe("cpu"))
    open_right = backend.open

    def open_wrong(artifact: Artifact, request: OpenRequest) -> dict[str, Any]:
        sessions = open_right(artifact, request)
        return {n: _OffAtFixedShapes(s) for n, s in sessions.items()} if request.shapes else dict(sessions)

    monkeypatch.setenv("ACCEL_HOME", str(accel_home() / "wrong-bucket"))
    monkeypatch.setattr(backend, "open", open_wrong)
    session = open_plan(make_plan(artifact, RunPreferences(options=SessionOptions(buckets=(8,))))).sessions["model"]
    with caplog.at_level(logging.WARNING, logger="accel.capture.fast_path_verification"):
        assert (session.run(feeds)["logits"] - expected).abs().max() < 1e-5
    assert "'bucket of 8'" in caplog.text
    monkeypatch.setattr(backend, "open", open_right)


def test_wrong_padding_multiples_are_not_used(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the results of a runtime depend on padding, the first padded call detects the difference before it returns."""
    monkeypatch.setenv("ACCEL_HOME", str(accel_home() / "wrong-steps"))
    plain = open_plan(make_plan(artifact)).sessions["model"]
    session: Any = open_plan(
        make_plan(artifact, RunPreferences(options=SessionOptions(pad_to_multiple_of=8)))
    ).sessions["model"]
    right = session._plain.run

    def run(feeds: dict[str, torch.Tensor], **rest: Any) -> dict[str, torch.Tensor]:
        outputs = right(feeds, **rest)
        return {n: t + 0.5 for n, t in outputs.items()} if feeds["input_ids"].shape[1] % 8 == 0 else outputs

    monkeypatch.setattr(session._plain, "run", run)
    feeds = {spec.name: torch.ones(2, 5, dtype=torch.int64) for spec in artifact.components[0].inputs}
    with caplog.at_level(logging.WARNING, logger="accel.capture.fast_path_verification"):
        assert (session.run(feeds)["logits"] - plain.run(feeds)["logits"]).abs().max() < 1e-5
    assert "'multiples of 8'" in caplog.text


def test_validate_lists_every_form(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_buckets(plan: Plan, *, probes: bool) -> OpenSessions:
        return open_plan(plan.with_options(SessionOptions(buckets=(8, 16))), probes=probes)

    monkeypatch.setattr("accel.stages.validate.open_plan", with_buckets)
    report = accel.validate(artifact)
    assert report.passed
    assert [(form.form, form.passed) for form in report.forms] == [
        (f"bucket of {size}{side}", True) for size in (8, 16) for side in ("", ", padding in front")
    ]


@pytest.mark.parametrize("options", [SessionOptions(buckets=(16, 32)), SessionOptions(pad_to_multiple_of=8)], ids=str)
@pytest.mark.thorough
def test_left_padded_rows_are_not_padded_if_padding_changes_results(
    options: SessionOptions, tiny_artifact: Callable[..., Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    """Left-padded rows get no more padding if padding changes their results. DeBERTa's results change, because it
    classifies by the first token, and masked tokens attend to all padding.
    """
    artifact = tiny_artifact("deberta-v2")
    ids = torch.arange(5, 16).repeat(2, 1)
    for mask in (torch.tensor([[1] * 11, [0] * 4 + [1] * 7]), torch.tensor([[1] * 11, [1] * 7 + [0] * 4])):
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        feeds = {spec.name: feeds[spec.name] for spec in artifact.components[0].inputs}
        expected = open_plan(make_plan(artifact)).sessions["model"].run(feeds)["logits"]
        session = open_plan(make_plan(artifact, RunPreferences(options=options))).sessions["model"]
        torch.testing.assert_close(session.run(feeds)["logits"], expected, atol=1e-5, rtol=0)
    assert [record.message for record in caplog.records if "padding in front" in record.message]
    assert not [
        record.message for record in caplog.records if "faster way" in record.message and "front" not in record.message
    ]
