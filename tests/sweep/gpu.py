"""Test float16 graphs on a GPU. One machine without a GPU exports the graphs, and a machine with a GPU runs them.

`export_for_gpu` writes one folder for each pair (architecture and task). `sweep_on_gpu` builds the same seeded model
again, and runs the graph and PyTorch with the same inputs. Eager PyTorch in float16 also has rounding errors, so the
accepted error is a multiple of eager PyTorch's error, and not a fixed number.
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
    built,
    cell_of,
    mistaken,
    reason_of,
    stages_of,
)
from .questions import Tensors, is_decoder, make_inputs, prompts

DEVICE = "cuda"
Skip = Sequence[tuple[str, str]]

# Each entry is (batch size, sequence length, padding). There are short and long inputs for every variant of the graph
# that the backend creates.
SHAPES = tuple(
    (batch, sequence, padding)
    for batch, sequence in ((1, 7), (2, 33), (4, 128), (16, 256))
    for padding in (("none", "right", "left") if batch > 1 else ("none",))
)
MOST = 3.0
"""Largest accepted ratio of the graph's error to eager float16's error. An error is the norm of the difference from float32, divided
by the norm of float32."""
# Errors below half a unit in the last place of float16 count as equal errors.
_SMALLEST = 5e-4
_CALLS = 4  # the first calls of a shape run the graph directly, later calls replay the captured CUDA graph
_ROWS = 16  # minimum number of rows: the error of a single row with few labels is too random
_ANSWERS = ("logits", "start_logits", "end_logits", "last_hidden_state")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
# For models with experts, this fraction of tokens may be routed to other experts, by the graph or by eager float16. The
# number was chosen and not measured.
_ROUTED = 0.02
# Minimum number of tokens for models with experts. With 1,024 tokens, the norm of the remaining errors of PhiMoE
# differs by a factor of 3 between two random inputs, because later tokens attend to tokens that were routed to other
# experts. With 4,096 tokens, the ratio is 0.85 to 1.3.
_ROUTED_TOKENS = 4096


def folder_of(root: Path, pair: Pair) -> Path:
    """Return the folder with the graphs of a pair (architecture and task)."""
    return root / f"{pair.architecture}--{pair.task}"


def is_ready(root: Path, pair: Pair) -> bool:
    """Return whether the graph of a pair (architecture and task) has been exported."""
    return any((folder_of(root, pair) / name).is_dir() for name in ("O4", "export"))


def export_for_gpu(
    root: Path, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Export the model of a pair (architecture and task) and optimize it for the GPU. Report a result if the export is
    refused or the model cannot be built.

    If the optimization needs a GPU, keep only the export. The machine with the GPU then optimizes it.
    """
    folder = folder_of(root, pair)
    if is_ready(root, pair) or (build := built(pair, report, announce)) is None:
        return
    announce(GPU, HALF)
    started = time.perf_counter()
    try:
        exported = accel.export(build[0], folder / "export", task=pair.task)
    except AccelError as error:
        for stage in stages_of(pair, GPU):
            report(cell_of(pair, GPU, stage, REFUSED, started, reason=reason_of(error)))
        return
    try:
        accel.optimize(exported, folder / "O4", backend=GPU, level="O4")
    # Catch all exceptions, because the comparison with the exported graph may need kernels that only a GPU has. The
    # machine with the GPU repeats the comparison.
    except Exception:  # noqa: BLE001
        return
    shutil.rmtree(folder / "export")


def sweep_on_gpu(
    root: Path, pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Skip = ()
) -> None:
    """Run the graphs that `export_for_gpu` wrote for a pair (architecture and task), and compare them with PyTorch."""
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
        # Record every other type of error as a failure of accel.
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
    """Return the largest ratio of the graph's error to the error of eager float16. All shapes are compared, each with
    at least `_ROWS` rows.
    """
    opened = model_class(pair.task)(artifact, backend=GPU)
    exact, half = copy.deepcopy(model).to(DEVICE), copy.deepcopy(model).half().to(DEVICE)
    left_out = _ROUTED if _routes(model) else 0.0
    worst = 0.0
    # PyTorch in float32 is the reference, so disable TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or SHAPES[-1][1]
    limit = limit if limit > 0 else SHAPES[-1][1]  # XLNet uses -1 for "no limit"
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
                outputs = opened(**inputs)
                if call not in (0, _CALLS - 1):
                    continue
                # Compare only outputs that the graph returns. Moshi's decoder in PyTorch also returns hidden states,
                # and decoder graphs do not return them.
                for name in (n for n in _ANSWERS if n in expected and (n in outputs or "logits" not in outputs)):
                    ours.setdefault(name, []).append(_errors(outputs[name], expected[name], mask))
                    theirs.setdefault(name, []).append(_errors(eager[name], expected[name], mask))
        for name, errors in ours.items():
            worst = max(worst, _size(errors, left_out) / max(_size(theirs[name], left_out), _SMALLEST))
    return worst


def _references(exact: Any, half: Any, inputs: Tensors) -> tuple[Any, Any]:
    """Return PyTorch's outputs in float32 and in float16.

    Raises:
        NotBuilt: PyTorch raises an error for these inputs.
    """
    narrow = {name: value.half() if value.is_floating_point() else value for name, value in inputs.items()}
    try:
        return exact(**inputs), _eager(half, narrow, exact, inputs)
    # Catch all exceptions, because an error in the model code itself is not an error of accel.
    except Exception as error:
        raise NotBuilt(f"does not answer on {', '.join(inputs)} in PyTorch: {first_line(error)}") from error


def _eager(half: Any, narrow: Tensors, exact: Any, inputs: Tensors) -> Any:
    """Return the outputs of eager PyTorch in float16.

    If the model's code mixes data types, use autocast. If an operator has no float16 kernel, compute in float32 with
    weights that are rounded to float16.
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
    """Return whether the model routes tokens to experts. In such a model, a rounding error may change the expert of a
    token, which causes a much larger error.
    """
    config = model.config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def _errors(actual: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Return the relative error of each token or row, as a 1-D tensor without padding positions, relative to the mean output norm."""
    if actual.shape != expected.shape:
        return torch.tensor([float("inf")])
    actual, expected = actual.to(expected.device).float(), expected.float()
    if real is not None and expected.ndim >= 2 and expected.shape[:2] == real.shape:
        actual, expected = actual[real], expected[real]
    count = expected.shape[0]
    apart = (actual - expected).reshape(count, -1).norm(dim=1)
    return (apart / (expected.norm() / count**0.5)).nan_to_num(nan=float("inf")).cpu()


def _size(errors: Sequence[torch.Tensor], left_out: float) -> float:
    """Return the root mean square of the errors, without the fraction `left_out` of the largest errors."""
    every = torch.cat(list(errors)).sort().values
    smallest = every[: every.numel() - math.ceil(left_out * every.numel())] if left_out else every
    return float(smallest.square().mean().sqrt()) if smallest.numel() else 0.0


def _tokens(pair: Pair, model: Any, artifact: Artifact) -> float:
    """Return how many greedy tokens differ from the tokens of float32. A token counts only if the choice in float32 was
    clear compared with float16 rounding.
    """
    opened = model_class(pair.task)(artifact, backend=GPU)
    opened.generation_config = copy.deepcopy(model.generation_config)
    inputs = _on_device(prompts(pair, model))
    exact = copy.deepcopy(model).to(DEVICE)
    expected = exact.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    return float(mistaken(opened.generate(**inputs, **GREEDY), expected, tie=2e-2))
