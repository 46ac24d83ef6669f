"""Reference outputs of the PyTorch model for inputs of several shapes, and comparison of a graph's outputs with them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.tracing_wrapper import Tensors
from ..upstream.output_silencing import quiet
from .export_source import Source
from .graph_names import graph_name
from .noise import Noise
from .patch_samples import patch_sizes
from .samples import IMAGE_AXES, image_sizes, pad_id, parameters_of, point_sizes, safe_sizes
from .sound_samples import sound_sizes
from .tracer import first_lines


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of a graph, and the outputs of the PyTorch model for these inputs.

    Attributes:
        sizes: Axis sizes of the inputs, for reports.
        feeds: Inputs by name.
        expected: Outputs of the PyTorch model by name.
        stateful: Whether the graph has a KV cache or another state. The first case of a sequence starts with an empty state.
        skip: Number of positions at the start of the outputs that are not compared, because they are padding.
        then: The next case of a sequence, which continues the same state, or `None`.
        sources: Inputs of the model's other graphs, by name of the graph, from whose outputs inputs of this case were made.
    """

    sizes: Mapping[str, int]
    feeds: Tensors
    expected: Tensors
    stateful: bool = False
    skip: int = 0
    then: Case | None = None
    sources: Mapping[str, Mapping[str, torch.Tensor | Noise]] = field(default_factory=dict)


def reference_cases(source: Source) -> list[Case]:
    """Compute reference cases with other shapes than the sample inputs of the trace.

    The cases have one to three rows, shorter and longer sequences, a single token, and padding. If the graph accepts images of any size,
    the cases also have several image sizes. The last image size is not a multiple of the patch size, and this case is left out if the
    model fails.
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
                # Funnel and CANINE downsample texts by a factor of 2 or 4, and fail on very short texts.
                continue
            if uneven and seed == len(plans):
                # Some models accept only images whose size is a multiple of the patch size.
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
    """Measure how much the outputs of the PyTorch model change if a batch gets more padding.

    Return the largest difference divided by the largest value (at least 1). Return 0 if the difference is within the tolerance
    of the dtype. Return `None` if the model has no attention mask or fails on the padded inputs.

    The result is 0 for most models. More padding changes the outputs of XLNet, whose head reads the last token, and of Nystromformer,
    whose attention depends on the length of the padded text.
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
        expected, outputs = reference(source.model, feeds), reference(source.model, padded)
    # The model's own code may raise any exception.
    except Exception:  # noqa: BLE001
        return None
    cut = {}
    for name, value in expected.items():
        cut[name] = outputs[name]
        for i in range(value.ndim):
            if value.shape[i] == short and cut[name].shape[i] == longer:
                cut[name] = cut[name].narrow(i, 0, short)
    worst, scale = max_difference(cut, expected)
    # JSON manifests cannot contain infinity.
    return min(worst / max(1.0, scale), sys.float_info.max) if worst > tolerance(None, source.dtype, scale) else 0.0


def own_defaults_of(model: torch.nn.Module, example: Tensors) -> tuple[str, ...]:
    """Return the names of optional inputs for which the model computes a default other than zeros.

    For example, BigBird's question-answering head computes `token_type_ids` from the separator token if the caller passes none. GPT-2
    adds no embedding for missing `token_type_ids`, but it adds the embedding of token 0 for zeros.
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
    # The tolerance is relative to each value and not to the largest value, because BigBird writes -1e6 at invalid answers.
    same = all(
        torch.allclose(zeros[key].double(), value.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
        for key, value in left_out.items()
    )
    return () if same else (name,)


def own_rounding(model: torch.nn.Module, cases: Sequence[Case]) -> float:
    """Measure the rounding error of a float32 model, as the largest difference from the same model in float64.

    The difference is relative to the largest value of an output. Some models amplify rounding errors. For example, Grounding DINO and
    RT-DETR read image features at positions that depend on earlier results. The outputs of a graph cannot be expected to be closer to
    PyTorch's outputs than PyTorch's outputs are to the exact result. The function needs memory for a float64 copy of the weights.

    Args:
        model: The model in float32.
        cases: Reference cases of the complete model, not of its parts.

    Returns:
        The rounding error, or 0 if the model does not run in float64.
    """
    worst = 0.0
    try:
        exact = copy.deepcopy(model).double()
        for case in cases:
            for difference, scale in differences_by_output(case.expected, reference(exact, case.feeds)).values():
                worst = max(worst, difference / max(1.0, scale))
    # The model's own code may raise any exception. The usual reason is that the code creates tensors of a fixed dtype.
    except Exception:  # noqa: BLE001
        return 0.0
    return worst if math.isfinite(worst) else 0.0


@torch.inference_mode()
def reference(model: torch.nn.Module, feeds: Tensors) -> Tensors:
    """Run the PyTorch model, and return its output tensors by the names that the outputs have in the graph."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    with quiet():
        result = model(**inputs)
    return {graph_name(name): value for name, value in named_tensors(result).items()}


def named_tensors(result: Any) -> Tensors:
    """Return the tensors in a model's output by name. Elements of a tuple are named `output.0`, `output.1` and so on."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return {f"output.{index}": value for index, value in enumerate(result) if isinstance(value, torch.Tensor)}


def max_difference(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest absolute difference and the largest absolute expected value of all outputs.

    See `differences_by_output` for the pairing of outputs with expected outputs.
    """
    each = differences_by_output(actual, expected).values()
    return max((worst for worst, _ in each), default=0.0), max((scale for _, scale in each), default=0.0)


def differences_by_output(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Return the largest absolute difference and the largest absolute expected value of each output, by name.

    An output is compared with the expected output of the same name. If the names differ, outputs are compared in their order. The
    difference is infinite if an output is missing, if it has another shape, or if a value is finite in only one of the two tensors. For
    outputs of integers, the largest expected value is reported as 0, because the integers are indices or labels.
    """
    by_order = dict(zip(expected, actual.values(), strict=False))
    outputs = actual if set(expected) <= set(actual) else by_order
    return {name: _difference(outputs.get(name), tensor) for name, tensor in expected.items()}


def _difference(have: torch.Tensor | None, want: torch.Tensor) -> tuple[float, float]:
    if have is None or have.shape != want.shape:
        return float("inf"), 0.0
    if want.numel() == 0:
        return 0.0, 0.0
    # Some models write the smallest value of the dtype at invalid positions (Splinter at padding). The largest expected value, which
    # scales the tolerance, must not include these positions.
    hidden = torch.finfo(want.dtype).min / 2 if want.is_floating_point() else -float("inf")
    a, b = have.double().cpu(), want.double().cpu()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a <= hidden) & (b <= hidden))
    difference = torch.where(same, torch.zeros_like(b), (a - b).abs())
    worst = float(difference.nan_to_num(nan=float("inf")).max())
    unmasked = b[b.isfinite() & (b > hidden)]
    return worst, float(unmasked.abs().max()) if want.is_floating_point() and unmasked.numel() else 0.0


INTEGERS = "integers"
"""Value for the argument `dtype` of `tolerance` that selects the tolerance for models with quantized layers."""


def tolerance(config_atol: float | None, dtype: str, scale: float) -> float:
    """Return the largest accepted absolute difference between outputs.

    Args:
        config_atol: The user's setting, which is returned unchanged. `None` means the default for the dtype.
        dtype: Dtype of the model, or `INTEGERS`.
        scale: Largest absolute expected value. Values above 1 increase the default tolerance by this factor.
    """
    if config_atol is not None:
        return config_atol
    return {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1, INTEGERS: 1e-1}[dtype] * max(1.0, scale)
