"""Tests that the candidates of a search are exactly the capabilities that backends declare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel.backends import registry
from accel.config import SessionOptions
from accel.interfaces.specs import (
    GENERATES,
    BackendSpec,
    Capability,
    DeviceSpec,
    OptionTrial,
    Probe,
    Reason,
    SchemeSettings,
)
from accel.tuning.candidates import Candidate, Recipe, SearchSpace, buckets_for, combined
from accel.tuning.tune_proposals import in_turns

VENDOR = BackendSpec(
    name="vendor",
    summary="made up",
    extra="vendor",
    impl="nowhere:Nothing",
    capabilities=(
        Capability(stage="export", produces="vendor_graph", dtypes=("float32", "float16")),
        Capability(stage="optimize", consumes="vendor_graph", produces="vendor_graph", schemes=("fast",)),
        Capability(stage="quantize", consumes="vendor_graph", produces="vendor_graph", schemes=("static-4", "odd")),
        Capability(stage="run", consumes="vendor_graph", dtypes=("float32", "bfloat16")),
    ),
)
ABSENT = BackendSpec(name="absent", summary="not here", extra="absent", impl="nowhere:Nothing")


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> SearchSpace:
    probes = {
        "vendor": Probe(devices=(DeviceSpec("cpu"),)),
        "absent": Probe(reasons=(Reason("not-installed", "absent is not installed", "pip install absent"),)),
    }
    monkeypatch.setattr(registry, "describe_all", lambda: ((VENDOR, ABSENT), {}))
    monkeypatch.setattr(registry, "describe", lambda name: {"vendor": VENDOR, "absent": ABSENT}[name])
    monkeypatch.setattr(registry, "probe", lambda spec: probes[spec.name])
    return SearchSpace(task="text-classification", device=None, backends=None, half_exports=False, calibrated=False)


def test_every_declared_step_is_a_recipe(space: SearchSpace) -> None:
    (export,) = space.exports()
    assert str(export) == "vendor_graph float32"
    assert [str(r) for r in space.optimizations(export, "float32")] == ["vendor_graph float32 > fast"]
    assert [r.setting for r in space.quantizations(export, "float32")] == ["odd"]
    assert [str(c) for c in space.candidates(export, "float32")] == ["vendor: vendor_graph float32"]


def test_scheme_trials_are_limited_to_their_tasks(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Capability(
        stage="quantize", consumes="vendor_graph", produces="vendor_graph", schemes=("weight-4",),
        settings=(SchemeSettings("weight-4", ("block_size",), (OptionTrial("block_size", 128, tasks=(GENERATES,)),)),),
    )  # fmt: skip
    vendor = replace(VENDOR, capabilities=(*VENDOR.capabilities, weights))
    monkeypatch.setattr(registry, "describe_all", lambda: ((vendor,), {}))
    monkeypatch.setattr(registry, "describe", lambda name: vendor)
    for task, sizes in (
        ("text-classification", ["weight-4"]),
        ("text-generation", ["weight-4", "weight-4 block_size=128"]),
    ):
        other = SearchSpace(task=task, device=None, backends=None, half_exports=False, calibrated=True)
        recipes = [str(recipe) for recipe in other.quantizations(other.exports()[0], "float32")]
        assert [title.split(" > ")[1] for title in recipes if "weight-4" in title] == sizes


def test_run_only_backend_uses_exports_of_another_backend(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = next(item for item in VENDOR.capabilities if item.stage == "run")
    runner = BackendSpec(
        name="runner", summary="runs alone", extra="runner", impl="nowhere:Nothing", capabilities=(runs,)
    )
    specs = {"vendor": VENDOR, "runner": runner}
    monkeypatch.setattr(registry, "describe_all", lambda: (tuple(specs.values()), {}))
    monkeypatch.setattr(registry, "describe", lambda name: specs[name])
    monkeypatch.setattr(registry, "probe", lambda spec: Probe(devices=(DeviceSpec("cpu"),)))
    borrowing_space = SearchSpace(
        task="text-classification", device=None, backends=["runner"], half_exports=False, calibrated=False
    )
    (export,) = borrowing_space.exports()
    assert export.backend == "vendor"
    assert [str(item) for item in borrowing_space.candidates(export, "float32")] == ["runner: vendor_graph float32"]
    assert not borrowing_space.optimizations(export, "float32")


def test_skipped_candidates_have_a_reason(space: SearchSpace) -> None:
    (export,) = space.exports()
    space.quantizations(export, "float32")
    reasons = {skipped.name: skipped.reason for skipped in space.skipped}
    assert reasons["absent"] == "absent is not installed (pip install absent)"
    assert "calibration" in reasons["vendor: static-4"]
    assert "smaller but not faster" in reasons["vendor: vendor_graph float16"]


def test_exported_formats_are_not_converted_again(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = BackendSpec(
        name="converter",
        summary="made up",
        extra="converter",
        impl="nowhere:Nothing",
        capabilities=(
            Capability(stage="export", produces="other"),
            Capability(stage="optimize", consumes="vendor_graph", produces="other", schemes=("O1",)),
            Capability(stage="quantize", consumes="vendor_graph", produces="other", schemes=("odd",)),
            Capability(stage="run", consumes="other"),
        ),
    )
    monkeypatch.setattr(registry, "describe_all", lambda: ((VENDOR, converter), {}))
    monkeypatch.setattr(registry, "probe", lambda spec: Probe(devices=(DeviceSpec("cpu"),)))
    both = SearchSpace(task="text-classification", device=None, backends=None, half_exports=False, calibrated=True)
    export = next(recipe for recipe in both.exports() if recipe.format == "vendor_graph")
    assert [r.backend for r in both.optimizations(export, "float32")] == ["vendor"]
    assert {r.backend for r in both.quantizations(export, "float32")} == {"vendor"}
    assert [s.name for s in both.skipped if "better graphs" in s.reason] == ["converter: vendor_graph to other"]


def test_run_options_vary_one_at_a_time(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.tuning.candidates.available_processors", lambda: 4)
    (candidate,) = space.candidates(space.exports()[0], "float32")
    varied = space.variations(candidate, dtype="float32", lengths=[20, 32], masked=True)
    assert [c.options for c in varied] == [
        SessionOptions(compute_dtype="bfloat16"),
        SessionOptions(buckets=(8, 16, 20, 32)),
        SessionOptions(threads=1),
        SessionOptions(threads=2),
    ]
    without_mask = space.variations(candidate, dtype="float32", lengths=[20, 32], masked=False)
    assert not any(c.options.buckets for c in without_mask)


def test_backend_options_are_tried_on_their_devices(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = (OptionTrial("quantization", "odd"), OptionTrial("quantization", "float8", ("cuda",)))
    runs = Capability(stage="run", consumes="vendor_graph", trials=trials)
    vendor = replace(VENDOR, capabilities=(VENDOR.capabilities[0], runs), recorded_options=("quantization",))
    monkeypatch.setattr(registry, "describe", lambda name: vendor)
    (candidate,) = space.candidates(space.exports()[0], "float32")
    varied = space.variations(candidate, dtype="float32", lengths=[32], masked=False)
    (tried,) = [variation for variation in varied if variation.provider_options]
    assert tried.provider_options == {"quantization": "odd"}
    assert str(tried) == "vendor: vendor_graph float32 (quantization odd)"
    assert not any(
        variation.provider_options != tried.provider_options
        for variation in space.variations(tried, dtype="float32", lengths=[32], masked=False)
    )
    fewer = next(variation for variation in varied if variation.options.threads == 1)
    assert combined([fewer, tried]).provider_options == tried.provider_options
    assert combined([fewer, tried]).options == fewer.options


def test_backend_options_are_tried_for_their_tasks(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = OptionTrial("cache", "8 bits", tasks=(GENERATES,))
    runs = Capability(stage="run", consumes="vendor_graph", trials=(trial,))
    vendor = replace(VENDOR, capabilities=(VENDOR.capabilities[0], runs), recorded_options=("cache",))
    monkeypatch.setattr(registry, "describe_all", lambda: ((vendor,), {}))
    monkeypatch.setattr(registry, "describe", lambda name: vendor)
    tried = {}
    for task in ("text-classification", "text-generation"):
        searched = SearchSpace(task=task, device=None, backends=None, half_exports=False, calibrated=True)
        (candidate,) = searched.candidates(searched.exports()[0], "float32")
        varied = searched.variations(candidate, dtype="float32", lengths=[32], masked=False)
        tried[task] = [variation.provider_options for variation in varied if variation.provider_options]
    assert tried == {"text-classification": [], "text-generation": [{"cache": "8 bits"}]}


def test_combined_candidate_has_every_change() -> None:
    base = Candidate(
        recipe=Recipe(stage="export", backend="a", format="f", setting="float32"), backend="a", device="cpu"
    )
    changes = [
        Candidate(recipe=base.recipe, backend="a", device="cpu", options=options)
        for options in (SessionOptions(buckets=(8,)), SessionOptions(compute_dtype="bfloat16"))
    ]
    assert combined(changes).options == SessionOptions(buckets=(8,), compute_dtype="bfloat16")


def test_buckets_double() -> None:
    assert buckets_for([32, 100]) == (8, 16, 32, 64, 100)
    assert buckets_for(range(5, 40)) == (8, 16, 32, 39)


def test_plain_exports_are_screened_last_and_backends_alternate() -> None:
    def candidate(backend: str, setting: str, *, plain: bool = False) -> Candidate:
        recipe = Recipe(stage="export" if plain else "optimize", backend=backend, format=backend, setting=setting)
        return Candidate(recipe=recipe, backend=backend, device="cpu")

    plain = [candidate("a", "float32", plain=True), candidate("b", "float32", plain=True)]
    ordered = in_turns([*plain, candidate("a", "O1"), candidate("a", "O2")])
    assert [(c.backend, c.recipe.setting) for c in ordered] == [
        ("a", "O2"),
        ("b", "float32"),
        ("a", "O1"),
        ("a", "float32"),
    ]


def test_options_without_effect_are_not_tried(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.tuning.candidates.available_processors", lambda: 2)
    (candidate,) = space.candidates(space.exports()[0], "bfloat16")

    def options(**how: Any) -> list[SessionOptions]:
        variations = space.variations(candidate, dtype="bfloat16", masked=True, **how)
        return [c.options for c in variations if c.options.compute_dtype is None]

    assert options(lengths=[16, 16], threads=1) == [], "one length, and the one thread is used anyway"
    assert "all calls have the same length" in {skip.name: skip.reason for skip in space.skipped}["vendor: buckets"]
    assert options(lengths=[8, 16]) == [SessionOptions(buckets=(8, 16)), SessionOptions(threads=1)]
    monkeypatch.setattr("accel.tuning.candidates.available_processors", lambda: 1)
    assert options(lengths=[16]) == []
    fixed = replace(VENDOR, capabilities=tuple(replace(c, fixed_shapes=True) for c in VENDOR.capabilities))
    monkeypatch.setattr(registry, "describe", lambda name: fixed)
    assert options(lengths=[16]) == [SessionOptions(buckets=(8, 16))]


def test_simpler_candidates_come_first() -> None:
    export = Recipe(stage="export", backend="a", format="f", setting="float32")
    half = replace(export, setting="float16")
    better = Recipe(stage="optimize", backend="a", format="f", setting="O2", parent=export)
    int8 = Recipe(stage="quantize", backend="a", format="f", setting="dynamic-int8", parent=export)

    def candidate(recipe: Recipe, provider: dict[str, Any] | None = None, **options: Any) -> Candidate:
        how = SessionOptions(**options)
        return Candidate(recipe=recipe, backend="a", device="cpu", options=how, provider_options=provider or {})

    ordered = [
        candidate(export),
        candidate(better),
        candidate(export, threads=1),
        candidate(better, {"own": 1}),
        candidate(export, threads=1, buckets=(8,)),
        candidate(half),
        candidate(export, compute_dtype="bfloat16"),
        candidate(int8),
        candidate(int8, threads=1),
    ]
    backwards = ordered[::-1]
    assert sorted(backwards, key=lambda tried: tried.complexity) == ordered
