"""What backends declare has run: chains of export, optimization, quantization and run, made from the specs.

In every run each pair of values meets in some case; `thorough` runs every chain of every task. `gpu` has the cases of
devices that not every machine has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASE_TASKS, REFUSALS, Case, combined, declared, quick_cases, reached, specs, thorough_cases
from chain import Chains, error_of, inputs_of, missing_device, tolerance

from accel.errors import AccelError


def parameters(cases: tuple[Case, ...], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=marks) for case in cases]


def answers(model: Any, task: str) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        found = model(**inputs_of(task))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    "case",
    [
        *parameters(quick_cases()),
        *parameters(tuple(c for c in thorough_cases() if c not in set(quick_cases())), pytest.mark.thorough),
        *parameters(quick_cases(on_host=False), pytest.mark.gpu),
    ],
)
def test_chain(case: Case, chains: Chains, tmp_path: Path) -> None:
    if reason := missing_device(case):
        pytest.skip(reason)
    artifact = chains.made(case)
    assert (artifact.task, artifact.manifest.quantization is not None) == (case.task, bool(case.scheme))
    _, expected = chains.expected(case.task)
    feeds = inputs_of(case.task)
    mask = feeds.get("attention_mask") if "decoder_input_ids" not in feeds else None
    kept = mask.bool() if mask is not None else None
    model = chains.opened(case, artifact, tmp_path)
    found = answers(model, case.task)
    if case.capture.partition("=")[0] not in ("pooling", "normalize"):
        assert found.keys() & expected.keys()
    assert error_of(found, expected, kept) <= tolerance(case)
    assert (model.backend, model.device.type) == (case.runner, case.device if case.device != "auto" else "cpu")
    model.save_pretrained(tmp_path / "saved")
    again = answers(chains.opened(case, tmp_path / "saved", tmp_path), case.task)
    assert error_of(again, found, kept) <= 1e-5
    check = chains.validated(case, tmp_path / "saved")
    # The library's own tolerance knows dtypes, and no approximations and fewer bits.
    rough = case.scheme or case.level in ("O3", "O4") or (case.generates and case.dtype != "float32")
    assert check.passed or rough, check
    assert check.backend == case.runner


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[one.message.replace(" ", "-") for one in REFUSALS])
def test_what_is_left_out_is_refused(number: int, chains: Chains, tmp_path: Path) -> None:
    refusal = REFUSALS[number]
    tasks = ("text-classification", "text-generation", "text2text-generation", "image-classification")
    left = (
        case
        for case in combined(specs(), tasks, exports=lambda c: c.dtype == "float32" or "already" in refusal.message)
        if next((one for one in REFUSALS if one.when(case)), None) is refusal
    )
    case = next((one for one in left if not one.level or "already" in refusal.message), None)
    assert case is not None, "nothing declares it any more: leave the refusal out"
    with pytest.raises(AccelError, match=refusal.message):
        answers(chains.opened(case, chains.made(case), tmp_path), case.task)
