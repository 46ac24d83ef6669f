"""Tests of the error that a search raises if no candidate meets the constraints."""

from __future__ import annotations

from accel.tuning.trials import no_fit


def test_untimed_candidates_are_listed_with_reasons() -> None:
    text = str(no_fit([], {"max_drop": 1.0}, None, {f"candidate{i}": f"reason {i}" for i in range(12)}))
    assert "\n  candidate0: reason 0" in text
    assert "candidate9" in text
    assert "candidate10" not in text
    assert "and 2 more" in text
