"""Run chains of export, optimization, quantization and inference that are built from the declarations in the backends'
specs.

Each pair of values occurs in at least one case. Every test run includes the pairs of the usual tasks. Thorough test
runs (mark `thorough`) add the pairs of the other tasks and every chain of every task. Tests with the mark `gpu` run the
cases for devices that not every machine has.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    CAPTURES,
    CASE_TASKS,
    COMPILES,
    OPTIONS,
    REFUSALS,
    SETTINGS,
    USUAL,
    Case,
    Refusal,
    combined,
    declared,
    elsewhere_cases,
    parsed,
    quick_cases,
    reached,
    refusal,
    specs,
    thorough_cases,
)
from chain import (
    Chains,
    convolves_roughly,
    error_of,
    kept_tokens,
    misread_by_the_processor,
    missing_device,
    tolerance,
)
from covering import cover, pairs

from accel.config import ExportConfig, OptimizeConfig, QuantizeConfig, SessionOptions
from accel.errors import AccelError
from accel.interfaces.specs import among


def parameters(cases: tuple[Case, ...], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=marks) for case in cases]


def answers(model: Any, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        outputs = model(**feeds)
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    "case",
    [
        *parameters(tuple(c for c in quick_cases() if c.task in USUAL)),
        *parameters(tuple(c for c in quick_cases() if c.task not in USUAL), pytest.mark.thorough),
        *parameters(tuple(sorted(set(thorough_cases()) - set(quick_cases()), key=str)), pytest.mark.thorough),
        *(pytest.param(case, id=str(case), marks=pytest.mark.gpu(case.runner)) for case in elsewhere_cases()),
    ],
)
def test_chain(case: Case, chains: Chains, tmp_path: Path) -> None:
    if reason := missing_device(case):
        pytest.skip(reason)
    source, expected = chains.expected(case)
    if reason := misread_by_the_processor(case, source):
        pytest.skip(reason)
    artifact = chains.artifact(case)
    assert (artifact.task, artifact.manifest.quantization is not None) == (case.task, bool(case.scheme))
    feeds = chains.inputs(case)
    mask = kept_tokens(feeds)
    model = chains.opened(case, artifact, tmp_path)
    outputs = answers(model, feeds)
    if case.capture.partition("=")[0] not in ("pooling", "normalize"):
        assert outputs.keys() & expected.keys()
    error = error_of(outputs, expected, mask)
    # Some models amplify rounding errors, and PyTorch in the same data type then also has a large error.
    assert error <= tolerance(case) or error <= 2 * chains.rounding(case)
    assert (model.backend, model.device.type) == (case.runner, case.device if case.device != "auto" else "cpu")
    model.save_pretrained(tmp_path / "saved")
    again = answers(chains.opened(case, tmp_path / "saved", tmp_path), feeds)
    assert error_of(again, outputs, mask) <= 1e-5
    check = chains.validated(case, tmp_path / "saved")
    # The tolerance of `accel.validate` considers data types, but it does not consider approximations and quantization.
    rough = (
        case.scheme
        or case.level in ("O3", "O4")
        or (case.generates and case.dtype != "float32")
        or convolves_roughly(case)
    )
    assert check.passed or rough, check
    assert check.backend == case.runner


@functools.cache
def left_out() -> dict[Refusal, Case]:
    """Return the first rejected case of each refusal, with at most one setting. Backends that compile models come last,
    because they are slow.
    """

    def is_short(case: Case) -> bool:
        settings = [word for word in (case.capture, case.setting, case.option) if word]
        plain = case.dtype == "float32" and not case.level
        return len(settings) <= 1 and (plain or case.task in tasks[-2:])

    tasks = (
        "text-classification", "text-generation", "text2text-generation", "image-classification", "image-to-text",
        "mask-generation", "table-question-answering", "keypoint-matching",
    )  # fmt: skip
    cases: dict[Refusal, Case] = {}
    for case in combined(sorted(specs(), key=lambda spec: spec.name in COMPILES), tasks, keeps=is_short):
        why = refusal(case)
        # Quantizers for GPUs check their settings before they check for a GPU, so their refusals can be tested on every
        # machine.
        if why is not None and (case.on_host or case.quantizer in ("cuda", "tensorrt", "tensorrt-rtx")):
            cases.setdefault(why, case)
            if len(cases) == len(REFUSALS):
                break
    return cases


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, id=refusal.message.replace(" ", "-"), marks=pytest.mark.thorough if refusal.takes_long else ()
        )
        for number, refusal in enumerate(REFUSALS)
    ],
)
def test_refused_combination_raises(number: int, chains: Chains, tmp_path: Path) -> None:
    refusal_of_case = REFUSALS[number]
    case = left_out().get(refusal_of_case)
    if case is None and refusal_of_case.unless:
        pytest.skip(refusal_of_case.unless)
    assert case is not None, "nothing declares it any more: leave the refusal out"
    with pytest.raises(AccelError, match=refusal_of_case.message):
        answers(chains.opened(case, chains.artifact(case), tmp_path), chains.inputs(case))


# Formats that are compiled from ONNX graphs; tests/backends/test_tensorrt_rtx.py compiles them.
COMPILED = ("tensorrt_rtx",)
NOT_MADE_HERE = {
    # accel exports ONNX in bfloat16 only for GPUs. OpenVINO also runs ONNX graphs in bfloat16, but only other tools
    # export such graphs for CPUs.
    "openvino run onnx: dtype bfloat16",
    "openvino optimize openvino_ir: dtype bfloat16",
}


def test_every_declared_capability_has_a_case() -> None:
    """Each declared value of each capability occurs in a case, on a device of every machine or on another device."""
    cases = reached()
    valid = declared(specs(), plain=True)
    missing = []
    for spec in specs():
        for capability in spec.capabilities:
            stage, format = capability.stage, capability.produces or capability.consumes
            if stage == "prepare":
                # A prepared model exists only in memory and is not part of a chain, so the conformance suite tests it.
                continue
            if format in COMPILED:
                # A compiled export follows other stages, and a chain begins with its export.
                continue
            mine = [case for case in cases if _does(case, spec.name, stage, capability.consumes, capability.produces)]
            words = [
                *(("device", device) for device in capability.devices if stage == "run"),
                *(("dtype", dtype) for dtype in capability.dtypes),
                # Artifacts that an exporter quantizes at once are compared with those of the three stages in
                # tests/integration/test_one_pass.py.
                *(("scheme", scheme) for scheme in capability.schemes if stage != "export"),
                *(("setting", f"{item.scheme} {name}") for item in capability.settings for name in item.names),
                *(("option", name) for name in capability.options),
                *(("task", task) for task in CASE_TASKS if among(task, capability.tasks)),
            ]
            tested = {word for case in mine for word in _values(case, stage)}
            missing += [
                f"{spec.name} {stage} {format}: {kind} {value}" for kind, value in words if (kind, value) not in tested
            ]
            if "*" in capability.tasks:
                tasks = {case.task for case in valid if case.runner == spec.name}
                supported_tasks = {task for task in CASE_TASKS if capability.does(task)}
                missing += [
                    f"{spec.name} {stage} {format}: task {item}" for item in supported_tasks - tasks if stage == "run"
                ]
    assert set(missing) == NOT_MADE_HERE, "declared, and in no case, or the other way round:\n" + "\n".join(missing)


def test_every_setting_has_test_values() -> None:
    settings = {
        ExportConfig: {*CAPTURES, "dtype", "options"},
        OptimizeConfig: {"level", "disable", "enable", "atol"},
        QuantizeConfig: {*SETTINGS, "scheme", "preset", "samples", "seed"},
        SessionOptions: {*OPTIONS, "native"},
    }
    for config, names in settings.items():
        assert {field.name for field in fields(config)} == names, f"{config.__name__}: add a value to try to cases.py"


def test_cover_contains_every_pair() -> None:
    pool = [{"a": str(a), "b": str(b), "c": str(a + b)} for a in range(4) for b in range(4) if a != 3 or b != 3]
    chosen = cover(pool, pairs, seed=1)
    assert {pair for case in chosen for pair in pairs(case)} == {pair for case in pool for pair in pairs(case)}
    assert chosen == cover(pool, pairs, seed=1)
    assert len(chosen) == len(pool), "a and b are free, so that each of their pairs needs a case of its own"
    assert len(cover([{"a": str(a), "b": "0"} for a in (0, 1, 1, 1)], pairs)) == 2
    assert sorted(cover(["2345", "123", "456"], list)) == ["123", "456"], "the largest is spare beside what came later"


def _does(case: Case, backend: str, stage: str, consumes: str | None, produces: str | None) -> bool:
    """Return whether a case uses a capability of a backend."""
    if stage == "export":
        return (case.exporter, case.format) == (backend, produces)
    if stage == "optimize":
        return case.optimizer == backend and case.format == consumes
    if stage == "quantize":
        return case.quantizer == backend and consumes in case.formats
    return case.runner == backend and consumes == case.formats[-1]


def _values(case: Case, stage: str) -> list[tuple[str, str]]:
    dtypes = {"export": [case.dtype], "optimize": [case.dtype, case.made_dtype]}.get(stage, [case.made_dtype])
    values = [("device", case.device), ("task", case.task), *(("dtype", dtype) for dtype in dtypes)]
    if stage == "optimize":
        values.append(("scheme", case.level))
    if stage == "quantize":
        values += [("scheme", case.scheme), ("setting", f"{case.scheme} {case.setting.partition('=')[0]}")]
    if stage == "export":
        values += [("option", name) for name in parsed(case.capture).get("options", ())]
    if stage == "run":
        values += [("option", name) for name in parsed(case.option).get("provider", ())]
        if case.scheme.endswith("int8"):
            values.append(("dtype", "int8"))
    return values
