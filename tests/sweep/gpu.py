"""Float16 on a GPU: graphs made on a machine without one, and run on one that has it.

`export_for_gpu` leaves a folder a pair; `sweep_on_gpu` builds the same seeded model again, and asks the graph and PyTorch the
same questions. Eager float16 rounds, too, so the bar is a multiple of its error, not a number.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import accel
from accel.artifact import Artifact
from accel.errors import AccelError
from accel.tasks.infer import task_spec
from accel.tasks.spec import load

from .building import NotBuilt, build
from .cases import Pair
from .cells import (
    BUILD,
    FAILED,
    GENERATE,
    GPU,
    GREEDY,
    HALF,
    NOT_BUILT,
    OK,
    PYTORCH,
    REFUSED,
    WRONG,
    Announce,
    Report,
    cell_of,
    mistaken,
    reason_of,
)
from .questions import Tensors, is_decoder, make_inputs, prompts

DEVICE = "cuda"
Skip = Sequence[tuple[str, str]]

# Batch, sequence, padding: every form that the backend makes of a graph, short and long.
SHAPES = tuple(
    (batch, sequence, padding)
    for batch, sequence in ((1, 7), (2, 33), (4, 128), (16, 256))
    for padding in (("none", "right", "left") if batch > 1 else ("none",))
)
MOST = 3.0
"""How many times eager float16's error ours may be, both as norms of the difference from float32 over float32's norm."""
# Below it, one error is as good as another: half a unit in the last place of float16.
_SMALLEST = 5e-4
_CALLS = 4  # the first ones of a shape run the graph as it is, the later ones replay what was captured


def folder_of(root: Path, pair: Pair) -> Path:
    """Where a pair's graphs are."""
    return root / f"{pair.architecture}--{pair.task}"


def export_for_gpu(
    root: Path, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Export a pair and optimize it for the GPU; a refusal is a cell, and so is a model that was not built.

    Where the last stage wants the GPU itself, it is left for the machine that has one.
    """
    announce(PYTORCH, BUILD)
    started = time.perf_counter()
    folder = folder_of(root, pair)
    if (folder / "O4").is_dir() or (folder / "export").is_dir():
        return
    try:
        model = build(pair)
    except NotBuilt as error:
        report(cell_of(pair, PYTORCH, BUILD, NOT_BUILT, started, reason=str(error)))
        return
    announce(GPU, HALF)
    try:
        exported = accel.export(model, folder / "export", task=pair.task)
    except AccelError as error:
        report(cell_of(pair, GPU, HALF, REFUSED, started, reason=reason_of(error)))
        return
    try:
        accel.optimize(exported, folder / "O4", backend=GPU, level="O4")
    # Its comparison with the parent may need kernels that only a GPU has: tried again there.
    except Exception:  # noqa: BLE001
        return
    shutil.rmtree(folder / "export")


def sweep_on_gpu(
    root: Path, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Run what `export_for_gpu` made of a pair, and compare it with PyTorch."""
    announce(PYTORCH, BUILD)
    started = time.perf_counter()
    try:
        model = build(pair)
    except NotBuilt as error:
        report(cell_of(pair, PYTORCH, BUILD, NOT_BUILT, started, reason=str(error)))
        return
    artifact: Artifact | None = None
    for stage in (HALF, GENERATE) if pair.task == "text-generation" else (HALF,):
        if (GPU, stage) in skip and (stage == GENERATE or artifact is not None):
            continue
        announce(GPU, stage)
        started = time.perf_counter()
        status, reason, apart = OK, "", None
        try:
            artifact = artifact or _artifact(folder_of(root, pair))
            apart = _worst(pair, model, artifact) if stage == HALF else _tokens(pair, model, artifact)
            if not apart <= (MOST if stage == HALF else 0):
                status = WRONG
                reason = (
                    f"its error is {apart:.1f} times that of eager float16, more than {MOST:g}"
                    if stage == HALF
                    else f"{apart:.0f} tokens are not those of transformers in float32, where no two were close"
                )
        except AccelError as error:
            status, reason = REFUSED, reason_of(error)
        # Whatever else comes out of it is a finding about the library.
        except Exception as error:  # noqa: BLE001
            status, reason = FAILED, reason_of(error)
        shown = None if apart is None or apart == float("inf") else float(f"{apart:.2g}")
        report(cell_of(pair, GPU, stage, status, started, difference=shown, reason=reason))


def _artifact(folder: Path) -> Artifact:
    if not (folder / "O4").is_dir():
        return accel.optimize(folder / "export", folder / "O4", backend=GPU, level="O4")
    return Artifact.load(folder / "O4")


def _on_device(inputs: Tensors) -> Tensors:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


@torch.inference_mode()
def _worst(pair: Pair, model: Any, artifact: Artifact) -> float:
    """The largest ratio of our error to eager float16's over all shapes."""
    opened = load(task_spec(pair.task).model)(artifact, backend=GPU)
    exact, half = copy.deepcopy(model).to(DEVICE), copy.deepcopy(model).half().to(DEVICE)
    worst = 0.0
    # PyTorch's own float32 is the reference: without TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for seed, (batch, sequence, padding) in enumerate(SHAPES):
        if padding == "left" and not is_decoder(pair) and model.main_input_name != "input_ids":
            continue
        inputs, real = make_inputs(pair, model, batch, sequence, padding, seed)
        inputs = _on_device(inputs)
        narrow = {n: t.half() if t.is_floating_point() else t for n, t in inputs.items()}
        expected, eager = exact(**inputs), half(**narrow)
        names = [n for n in ("logits", "start_logits", "end_logits", "last_hidden_state") if n in expected]
        for call in range(_CALLS):
            found = opened(**inputs)
            if call not in (0, _CALLS - 1):
                continue
            for name in names:
                mask = None if real is None else real.to(DEVICE)
                ours = _error(found[name], expected[name], mask)
                theirs = _error(eager[name], expected[name], mask)
                worst = max(worst, ours / max(theirs, _SMALLEST))
    return worst


def _error(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of what was expected, at real positions."""
    if real is not None and expected.ndim >= 2 and expected.shape[:2] == real.shape:
        found, expected = found.to(expected.device)[real], expected[real]
    if found.shape != expected.shape:
        return float("inf")
    apart = float((found.to(expected.device).float() - expected.float()).norm() / expected.float().norm())
    return apart if apart == apart else float("inf")  # NaN is wrong, too


def _tokens(pair: Pair, model: Any, artifact: Artifact) -> float:
    """How many greedy tokens differ from float32's where its choice was clear of float16's rounding."""
    opened = load(task_spec(pair.task).model)(artifact, backend=GPU)
    opened.generation_config = copy.deepcopy(model.generation_config)
    inputs = _on_device(prompts(pair, model))
    exact = copy.deepcopy(model).to(DEVICE)
    expected = exact.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    return float(mistaken(opened.generate(**inputs, **GREEDY), expected, tie=2e-2))
