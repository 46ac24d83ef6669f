"""The PyTorch model's answers on other shapes, and how far a graph is from them."""

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
    """Inputs and what the PyTorch model answers to them.

    Attributes:
        sizes: The axes' sizes, for the record.
        feeds: Inputs by name.
        expected: Outputs by name.
        stateful: Whether the graph keeps a state, new at the first case.
        skip: Leading positions of the outputs that are padding and not compared.
        then: What follows in the same state.
    """

    sizes: Mapping[str, int]
    feeds: Tensors
    expected: Tensors
    stateful: bool = False
    skip: int = 0
    then: Case | None = None


def reference_cases(source: Source) -> list[Case]:
    """One and three rows, a sequence shorter and one longer than the sample's, a single token, padding; images of other
    sizes where the graph takes any, among them one that fills no whole patches, where the model itself takes it.
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
        # Foreign model code, which may raise anything.
        except Exception as error:
            if sequence < base.get("sequence", 0):
                # Funnel and CANINE halve or quarter texts, and fail on those that are too short for that.
                continue
            if uneven and seed == len(plans):
                # Models of windows and pyramids may take whole patches alone.
                continue
            raise ExportError(
                f"{source.architecture} itself fails on inputs of sizes {sizes}: {type(error).__name__}: {first_lines(error)}",
                fix="check the model in PyTorch with such inputs (pad_token_id, sizes in its config), or pass sample={...} and "
                "axes={...} that it answers: equal axes by one name, axes that cannot vary left out. docs/families.md shows how "
                "an architecture gets inputs of its own.",
            ) from error
    return cases


def padding_difference(source: Source) -> float | None:
    """How much longer padding, all of it masked, changes the model's answers: the largest difference over the largest
    value, 1 at least; 0 within the tolerance of its type. `None` where there is no mask, or the model fails on such inputs.

    It changes nothing in most models. XLNet reads the last token, and Nystromformer's landmarks move.
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
    # Foreign model code, which may raise anything.
    except Exception:  # noqa: BLE001
        return None
    cut = {}
    for name, value in expected.items():
        cut[name] = found[name]
        for i in range(value.ndim):
            if value.shape[i] == short and cut[name].shape[i] == longer:
                cut[name] = cut[name].narrow(i, 0, short)
    worst, scale = max_difference(cut, expected)
    # Manifests are JSON, which has no infinity.
    return min(worst / max(1.0, scale), sys.float_info.max) if worst > tolerance(None, source.dtype, scale) else 0.0


def own_defaults_of(model: torch.nn.Module, example: Tensors) -> tuple[str, ...]:
    """Inputs that a model computes itself where they are left out, as something else than zeros.

    BigBird's head for questions tells question and context apart by the separator; GPT-2 adds no embedding, and that of
    token 0 for a zero.
    """
    name = "token_type_ids"
    if name not in parameters_of(model) or "input_ids" not in example:
        return ()
    plain = {key: tensor for key, tensor in example.items() if key != name}
    try:
        left_out = reference(model, plain)
        zeros = reference(model, {**plain, name: torch.zeros_like(plain["input_ids"])})
    # Foreign model code, which may raise anything: a model that cannot do without has no default.
    except Exception:  # noqa: BLE001
        return ()
    # Value by value: BigBird also writes -1e6 where no answer may be, beside which every other value is small.
    same = all(
        torch.allclose(zeros[key].double(), value.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
        for key, value in left_out.items()
    )
    return () if same else (name,)


def own_rounding(model: torch.nn.Module, cases: Sequence[Case]) -> float:
    """How far a model in float32 is from itself in float64: the largest difference for each 1 of an output's scale.

    Some models make much of little: what Grounding DINO and RT-DETR read from an image depends on places that they compute first.
    A graph cannot be expected to be nearer to PyTorch than PyTorch is to what is right. Costs a copy of twice the weights.

    Args:
        model: In float32.
        cases: Of the model as a whole, not of its parts.

    Returns:
        The rounding; 0 where the model does not compute in float64.
    """
    worst = 0.0
    try:
        exact = copy.deepcopy(model).double()
        for case in cases:
            for difference, scale in differences_by_output(case.expected, reference(exact, case.feeds)).values():
                worst = max(worst, difference / max(1.0, scale))
    # Foreign model code, which may raise anything: numbers of one type made in the middle of it are a usual reason.
    except Exception:  # noqa: BLE001
        return 0.0
    return worst if math.isfinite(worst) else 0.0


@torch.inference_mode()
def reference(model: torch.nn.Module, feeds: Tensors) -> Tensors:
    """The PyTorch model's outputs by name; only tensors."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    with quiet():
        result = model(**inputs)
    return {graph_name(name): value for name, value in named_tensors(result).items()}


def named_tensors(result: Any) -> Tensors:
    """What a model returned, by name; only tensors."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return {f"output.{index}": value for index, value in enumerate(result) if isinstance(value, torch.Tensor)}


def max_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Largest absolute difference over all outputs, and the largest absolute expected value; see `differences_by_output`."""
    each = differences_by_output(found, expected).values()
    return max((worst for worst, _ in each), default=0.0), max((scale for _, scale in each), default=0.0)


def differences_by_output(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Largest absolute difference of each output, and its largest absolute expected value, by which its tolerance is scaled.

    Outputs are matched by name where the names agree, else by order. A missing output or another shape counts as
    infinitely different, and so does a value that is not finite on one side only. Integers, which number something, have
    no scale.
    """
    by_order = dict(zip(expected, found.values(), strict=False))
    have = found if set(expected) <= set(found) else by_order
    return {name: _difference(have.get(name), want) for name, want in expected.items()}


def _difference(have: torch.Tensor | None, want: torch.Tensor) -> tuple[float, float]:
    if have is None or have.shape != want.shape:
        return float("inf"), 0.0
    if want.numel() == 0:
        return 0.0, 0.0
    # What a model writes where nothing may be chosen (Splinter's padding): no measure for the other values.
    hidden = torch.finfo(want.dtype).min / 2 if want.is_floating_point() else -float("inf")
    a, b = have.double().cpu(), want.double().cpu()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a <= hidden) & (b <= hidden))
    difference = torch.where(same, torch.zeros_like(b), (a - b).abs())
    worst = float(difference.nan_to_num(nan=float("inf")).max())
    seen = b[b.isfinite() & (b > hidden)]
    return worst, float(seen.abs().max()) if want.is_floating_point() and seen.numel() else 0.0


INTEGERS = "integers"
"""In place of a dtype: of a model with quantized layers, whose roundings may fall to either side."""


def tolerance(config_atol: float | None, dtype: str, scale: float) -> float:
    """The accepted absolute difference: as configured, or by dtype and scaled with the largest reference value."""
    if config_atol is not None:
        return config_atol
    return {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1, INTEGERS: 1e-1}[dtype] * max(1.0, scale)
