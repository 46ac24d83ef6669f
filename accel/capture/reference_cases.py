"""Reference outputs of the PyTorch model on several shapes, and their differences from a graph's outputs."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.wrapper import Tensors
from ..upstream.library_output import quiet
from .graph_names import graph_name
from .patch_samples import patch_sizes
from .samples import IMAGE_AXES, image_sizes, pad_id, parameters_of, point_sizes, safe_sizes
from .sound_samples import sound_sizes
from .source import Source
from .tracer import first_lines


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs, and the outputs of the PyTorch model for them.

    Attributes:
        sizes: Axis sizes, for reports.
        feeds: Inputs by name.
        expected: Outputs by name.
        stateful: Whether the graph has a state, which is new at the first case.
        skip: Number of leading padding positions in the outputs, which are not compared.
        then: The next case with the same state.
    """

    sizes: Mapping[str, int]
    feeds: Tensors
    expected: Tensors
    stateful: bool = False
    skip: int = 0
    then: Case | None = None


def reference_cases(source: Source) -> list[Case]:
    """Compute reference cases on shapes that differ from the trace's sample.

    The cases have one to three rows, shorter and longer sequences, a single token, and padding. A graph for images of any size
    also gets other image sizes. One of them does not consist of whole patches; it is skipped if the model fails on it.
    """
    axes = {axis for named in source.axes.values() for axis in named.values()}
    base = safe_sizes(source.example, source.axes)
    long = max(40, base.get("sequence", 0) + 11)
    long = min(long, source.max_sizes.get("sequence", long))
    plans = [(1, 3), (3, long), (1, long), (3, 3), (2, 1)]
    uneven = axes.issuperset(IMAGE_AXES)
    if uneven:
        plans.append((2, 3))
    cases = []
    for seed, (batch, sequence) in enumerate(plans, start=1):
        sizes = dict(base)
        if "batch" in axes:
            sizes["batch"] = batch
        if "sequence" in axes:
            sizes["sequence"] = sequence
        for others in (image_sizes, sound_sizes, point_sizes, patch_sizes):
            sizes |= others(sizes, seed - 1)
        feeds = source.sample(sizes, seed=seed)
        try:
            cases.append(Case(sizes, feeds, reference(source.model, feeds)))
        # The model's own code may raise any exception.
        except Exception as error:
            if sequence < base.get("sequence", 0):
                # Funnel and CANINE downsample texts by 2 or 4, and fail on texts that are too short for that.
                continue
            if uneven and seed == len(plans):
                # Models with windows or pyramids may accept only whole patches.
                continue
            raise ExportError(
                f"The PyTorch model {source.architecture} failed on sample inputs with the axis sizes {sizes}: "
                f"{type(error).__name__}: {first_lines(error)}",
                fix="check pad_token_id and the sizes in the model's config, or pass sample={...} and axes={...} with inputs that the "
                "model accepts. Give axes of equal size one name, and leave out axes that cannot vary. docs/families.md describes how "
                "to define sample inputs for an architecture.",
            ) from error
    return cases


def padding_difference(source: Source) -> float | None:
    """Measure how much longer, masked padding changes the model's outputs.

    Return the largest difference divided by the largest value (at least 1). Return 0 if the difference is within the tolerance
    of the dtype. Return `None` if the model has no mask or fails on such inputs.

    Most models give 0. Padding changes XLNet, which reads the last token, and Nystromformer, whose landmarks move.
    """
    axis = "sequence"
    if axis not in source.axes.get("attention_mask", {}).values():
        return None
    sizes = safe_sizes(source.example, source.axes)
    short = 6
    longer = min(11, source.max_sizes.get(axis, 11))
    feeds = source.sample({**sizes, axis: short})
    padded = {}
    for name, tensor in feeds.items():
        place = next((i for i, named in source.axes.get(name, {}).items() if named == axis), None)
        if place is None:
            padded[name] = tensor
            continue
        filled = torch.zeros_like(tensor.narrow(place, 0, 1)) + (pad_id(source.config) if name == "input_ids" else 0)
        padded[name] = torch.cat((tensor, *[filled] * (longer - short)), dim=place)
    try:
        expected, found = reference(source.model, feeds), reference(source.model, padded)
    # The model's own code may raise any exception.
    except Exception:  # noqa: BLE001
        return None
    cut = {}
    for name, value in expected.items():
        cut[name] = found[name]
        for i in range(value.ndim):
            if value.shape[i] == short and cut[name].shape[i] == longer:
                cut[name] = cut[name].narrow(i, 0, short)
    worst, scale = max_difference(cut, expected)
    # JSON manifests cannot contain infinity.
    return min(worst / max(1.0, scale), sys.float_info.max) if worst > tolerance(None, source.dtype, scale) else 0.0


def own_defaults_of(model: torch.nn.Module, example: Tensors) -> tuple[str, ...]:
    """Return the inputs for which the model computes a default that is not zero.

    BigBird's question-answering head computes token types from the separator token. GPT-2 adds no embedding without token types,
    but the embedding of token 0 for a token type of zero.
    """
    name = "token_type_ids"
    if name not in parameters_of(model) or "input_ids" not in example:
        return ()
    plain = {key: tensor for key, tensor in example.items() if key != name}
    try:
        left_out = reference(model, plain)
        zeros = reference(model, {**plain, name: torch.zeros_like(plain["input_ids"])})
    # The model's own code may raise any exception. A model that requires the input has no default.
    except Exception:  # noqa: BLE001
        return ()
    # Compared value by value: BigBird writes -1e6 at invalid answers, so a relative tolerance on the largest value would be useless.
    same = all(
        torch.allclose(zeros[key].double(), value.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
        for key, value in left_out.items()
    )
    return () if same else (name,)


def own_rounding(model: torch.nn.Module, cases: Sequence[Case]) -> float:
    """Measure the rounding error of a float32 model: its largest difference from float64, relative to an output's scale.

    Some models amplify rounding errors. For example, Grounding DINO and RT-DETR read image features at positions that they
    compute first. A graph cannot be closer to PyTorch than PyTorch is to the exact result. Needs memory for a float64 copy of the
    weights.

    Args:
        model: The model in float32.
        cases: Reference cases of the whole model, not of its parts.

    Returns:
        The rounding error. 0 if the model does not run in float64.
    """
    worst = 0.0
    try:
        exact = copy.deepcopy(model).double()
        for case in cases:
            for difference, scale in differences_by_output(case.expected, reference(exact, case.feeds)).values():
                worst = max(worst, difference / max(1.0, scale))
    # The model's own code may raise any exception. Usually it creates tensors of a fixed dtype.
    except Exception:  # noqa: BLE001
        return 0.0
    return worst if math.isfinite(worst) else 0.0


@torch.inference_mode()
def reference(model: torch.nn.Module, feeds: Tensors) -> Tensors:
    """Return the tensors among the PyTorch model's outputs, by graph name."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    with quiet():
        result = model(**inputs)
    return {graph_name(name): value for name, value in named_tensors(result).items()}


def named_tensors(result: Any) -> Tensors:
    """Return the tensors among a model's outputs, by name."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return {f"output.{index}": value for index, value in enumerate(result) if isinstance(value, torch.Tensor)}


def max_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest absolute difference and the largest absolute expected value over all outputs.

    `differences_by_output` describes how outputs are matched.
    """
    each = differences_by_output(found, expected).values()
    return max((worst for worst, _ in each), default=0.0), max((scale for _, scale in each), default=0.0)


def differences_by_output(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Return the largest absolute difference and the largest absolute expected value of each output, by name.

    Tolerances are scaled by the expected value. Outputs are matched by name, or by order if the names differ. The difference is
    infinite for a missing output, for another shape, and for a value that is finite on one side only. The scale of integer
    outputs is 0, because they are indices or labels.
    """
    by_order = dict(zip(expected, found.values(), strict=False))
    have = found if set(expected) <= set(found) else by_order
    return {name: _difference(have.get(name), want) for name, want in expected.items()}


def _difference(have: torch.Tensor | None, want: torch.Tensor) -> tuple[float, float]:
    if have is None or have.shape != want.shape:
        return float("inf"), 0.0
    if want.numel() == 0:
        return 0.0, 0.0
    # Models write the dtype's minimum at invalid choices (Splinter's padding). It must not scale the tolerance of other values.
    hidden = torch.finfo(want.dtype).min / 2 if want.is_floating_point() else -float("inf")
    a, b = have.double().cpu(), want.double().cpu()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a <= hidden) & (b <= hidden))
    difference = torch.where(same, torch.zeros_like(b), (a - b).abs())
    worst = float(difference.nan_to_num(nan=float("inf")).max())
    seen = b[b.isfinite() & (b > hidden)]
    return worst, float(seen.abs().max()) if want.is_floating_point() and seen.numel() else 0.0


INTEGERS = "integers"
"""Replaces the dtype for a model with quantized layers, where values may be rounded up or down."""


def tolerance(config_atol: float | None, dtype: str, scale: float) -> float:
    """Return the accepted absolute difference: `config_atol`, or a value for the dtype, scaled by the largest expected value."""
    if config_atol is not None:
        return config_atol
    return {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1, INTEGERS: 1e-1}[dtype] * max(1.0, scale)
