"""Float16 on a GPU: graphs made on a machine without one, and run on one that has it.

`export_for_gpu` leaves a folder a pair; `sweep_on_gpu` builds the same seeded model again, and asks the graph and PyTorch the
same questions. Eager float16 rounds, too, so the bar is a multiple of its error, not a number.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import accel
from accel.artifact import Artifact
from accel.errors import AccelError
from accel.models.base import model_class

from .building import NotBuilt, build, first_line
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
    stages_of,
)
from .questions import Tensors, is_decoder, make_inputs, prompts, questions

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
_ROWS = 16  # the error of a single row of a few labels says more about the row than about who computed it
_ANSWERS = ("logits", "start_logits", "end_logits", "last_hidden_state")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
# Of models with experts: that share of tokens may be sent elsewhere, by us or by eager float16. Chosen, not measured.
_ROUTED = 0.02
# Of so many tokens at least: of 1,024 the errors' norm beyond that share differs by 3 between two draws, as what was sent
# elsewhere is seen by the tokens behind it (PhiMoE; of 4,096 ours is 0.85 to 1.3 times eager's).
_ROUTED_TOKENS = 4096


def folder_of(root: Path, pair: Pair) -> Path:
    """Where a pair's graphs are."""
    return root / f"{pair.architecture}--{pair.task}"


def is_ready(root: Path, pair: Pair) -> bool:
    """Whether there is a graph of a pair."""
    return any((folder_of(root, pair) / name).is_dir() for name in ("O4", "export"))


def export_for_gpu(
    root: Path, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Export a pair and optimize it for the GPU; a refusal is a cell, and so is a model that was not built.

    Where the last stage wants the GPU itself, it is left for the machine that has one.
    """
    announce(PYTORCH, BUILD)
    started = time.perf_counter()
    folder = folder_of(root, pair)
    if is_ready(root, pair):
        return
    try:
        model = build(pair)
        questions(pair, model)
    except NotBuilt as error:
        report(cell_of(pair, PYTORCH, BUILD, NOT_BUILT, started, reason=str(error)))
        return
    announce(GPU, HALF)
    try:
        exported = accel.export(model, folder / "export", task=pair.task)
    except AccelError as error:
        for stage in stages_of(pair, GPU):
            report(cell_of(pair, GPU, stage, REFUSED, started, reason=reason_of(error)))
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
        except NotBuilt as error:
            status, reason = NOT_BUILT, str(error)
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
    """The largest ratio of our error to eager float16's over all shapes, each taken over at least `_ROWS` rows."""
    opened = model_class(pair.task)(artifact, backend=GPU)
    exact, half = copy.deepcopy(model).to(DEVICE), copy.deepcopy(model).half().to(DEVICE)
    left_out = _ROUTED if _routes(model) else 0.0
    worst = 0.0
    # PyTorch's own float32 is the reference: without TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or SHAPES[-1][1]
    limit = limit if limit > 0 else SHAPES[-1][1]  # XLNet says that it has none by -1
    for seed, (batch, longest, padding) in enumerate(SHAPES):
        sequence = min(longest, limit)
        if padding == "left" and not is_decoder(pair) and model.main_input_name != "input_ids":
            continue
        ours: dict[str, list[torch.Tensor]] = {}
        theirs: dict[str, list[torch.Tensor]] = {}
        least = _ROUTED_TOKENS // (batch * sequence) if left_out else 0
        for draw in range(max(1, _ROWS // batch, least)):
            inputs, real = make_inputs(pair, model, batch, sequence, padding, seed + 1000 * draw)
            inputs = _on_device(inputs)
            expected, eager = _references(exact, half, inputs)
            mask = None if real is None else real.to(DEVICE)
            for call in range(_CALLS if draw == 0 else 1):
                found = opened(**inputs)
                if call not in (0, _CALLS - 1):
                    continue
                # Moshi's decoder answers with states beside its logits, which no graph of a decoder returns.
                for name in (n for n in _ANSWERS if n in expected and (n in found or "logits" not in found)):
                    ours.setdefault(name, []).append(_errors(found[name], expected[name], mask))
                    theirs.setdefault(name, []).append(_errors(eager[name], expected[name], mask))
        for name, errors in ours.items():
            worst = max(worst, _size(errors, left_out) / max(_size(theirs[name], left_out), _SMALLEST))
    return worst


def _references(exact: Any, half: Any, inputs: Tensors) -> tuple[Any, Any]:
    """The answers of PyTorch, in float32 and in float16.

    Raises:
        NotBuilt: It has none.
    """
    narrow = {name: value.half() if value.is_floating_point() else value for name, value in inputs.items()}
    try:
        return exact(**inputs), _eager(half, narrow, exact, inputs)
    # Foreign model code: what it does not take says nothing about ours.
    except Exception as error:
        raise NotBuilt(f"does not answer on {', '.join(inputs)} in PyTorch: {first_line(error)}") from error


def _eager(half: Any, narrow: Tensors, exact: Any, inputs: Tensors) -> Any:
    """The answer of eager float16; by autocast where a model's code mixes types, or of its rounded weights where it has an
    operator without float16.
    """
    try:
        return half(**narrow)
    except RuntimeError:
        try:
            with torch.autocast(DEVICE, torch.float16):
                return exact(**inputs)
        except RuntimeError:
            return copy.deepcopy(half).float()(**inputs)


def _routes(model: Any) -> bool:
    """Whether it sends tokens to some of its experts: one that is sent elsewhere by a rounding has an error of another kind."""
    config = model.config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def _errors(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """The difference of each token's, or each row's, answer as a share of the size of such an answer; 1-D, at real positions."""
    if found.shape != expected.shape:
        return torch.tensor([float("inf")])
    found, expected = found.to(expected.device).float(), expected.float()
    if real is not None and expected.ndim >= 2 and expected.shape[:2] == real.shape:
        found, expected = found[real], expected[real]
    count = expected.shape[0]
    apart = (found - expected).reshape(count, -1).norm(dim=1)
    return (apart / (expected.norm() / count**0.5)).nan_to_num(nan=float("inf")).cpu()


def _size(errors: Sequence[torch.Tensor], left_out: float) -> float:
    """Root of the mean square, without the share of the largest that is left out."""
    every = torch.cat(list(errors)).sort().values
    kept = every[: every.numel() - math.ceil(left_out * every.numel())] if left_out else every
    return float(kept.square().mean().sqrt()) if kept.numel() else 0.0


def _tokens(pair: Pair, model: Any, artifact: Artifact) -> float:
    """How many greedy tokens differ from float32's where its choice was clear of float16's rounding."""
    opened = model_class(pair.task)(artifact, backend=GPU)
    opened.generation_config = copy.deepcopy(model.generation_config)
    inputs = _on_device(prompts(pair, model))
    exact = copy.deepcopy(model).to(DEVICE)
    expected = exact.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    return float(mistaken(opened.generate(**inputs, **GREEDY), expected, tie=2e-2))
