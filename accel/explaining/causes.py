"""Name the cause of an error that is made in one place: compare weights, and test hypotheses until one explains the values.

A hypothesis is a wrong way to compute the place, such as another activation. It explains the error if the reference, computed in this
wrong way from the values of the other model, gives the other model's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..capture.module_values import ModuleTrace
from ..errors import AccelError
from ..interfaces.layer_traces import LayerTrace, LayerValues, TracedLayer
from .layer_errors import LayerComparison, LayerPair, PlaceError, correlation, relative

_EXPLAINED = 0.35  # largest part of an error that may remain
_SAME = 0.02  # relative difference of weights that quantization to 8 bits causes
_OUTLIER = 8.0
_HALF = 65504.0

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU with erf": functional.gelu,
    "GELU with tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "GELU with sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": torch.relu,
    "SiLU": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared ReLU": lambda x: torch.relu(x).square(),
    "ReLU6": functional.relu6,
    "LeakyReLU": functional.leaky_relu,
    "ELU": functional.elu,
    "softplus": functional.softplus,
    "identity": lambda x: x,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of an error.

    Attributes:
        kind: Class of the cause: `activation`, `weights`, `scale`, `bias`, `saturation`, `outlier channel`, `range of half precision`,
            `half precision`, `rounded weights`, `rounded activations`, `mask`, `pooling`, `positions`, `token types`, `token ids`,
            `normalization`, `attention scale`, `tokenizer`, `labels`, `kernel` or `operation`.
        place: The place; see `PlaceError`. `files` for files next to the graph.
        detail: Description in words.
    """

    kind: str
    place: str
    detail: str


class CauseFinder:
    """Finds causes of the errors in a comparison.

    Args:
        comparison: The comparison.
        reference: The reference model.
    """

    def __init__(self, comparison: LayerComparison, reference: LayerTrace) -> None:
        self._comparison, self._reference = comparison, reference
        self._pairs = {pair.reference.name: pair for pair in comparison.pairs}
        self._variants: list[tuple[str, str, LayerValues]] | None = None

    def cause(self, place: PlaceError) -> Cause:
        """Return the cause of the error that is made in a place."""
        name = place.place
        if name in self._pairs:
            kind, detail = self._of_layer(self._pairs[name], place)
        elif name.startswith("output "):
            kind, detail = self._between(name, "results", name.removeprefix("output "), place)
        else:
            kind, detail = self._between(name, "inputs", name.removeprefix("before "), place)
        return Cause(kind=kind, place=name, detail=detail)

    # Layers with weights.

    def _of_layer(self, pair: LayerPair, place: PlaceError) -> tuple[str, str]:
        name, kind = pair.reference.name, pair.reference.kind
        _, actual, computed = self._comparison.values("outputs", name)
        if not bool(torch.isfinite(actual).all()):
            return _overflow(place.largest)
        rounding = None
        ours, theirs = pair.reference.weight(), pair.other.weight()
        if theirs is not None and pair.columns is not None:
            theirs = theirs[..., pair.columns]
        if ours is not None and theirs is not None and ours.shape == theirs.shape:
            difference = relative(theirs - ours, ours)
            if difference > 1e-6:
                wrong = weight_fault(ours, theirs, name, self._reference.layers)
                if wrong is not None:
                    return wrong
                rounding = difference
        raw = actual
        actual, computed = self._comparison.real(actual), self._comparison.real(computed)
        if kind == "norm":
            return self._of_norm(pair, actual) or ("normalization", "the normalization computes another value")
        fault = _shifted_or_scaled(actual, computed, self._bias(name))
        if fault is not None:
            return fault
        inputs_of_layer = self._comparison.actual.inputs.get(name)
        if kind == "linear" and ours is not None and inputs_of_layer is not None:
            inputs = self._comparison.real(inputs_of_layer.reshape(*raw.shape[:-1], inputs_of_layer.shape[-1]))
            return self._of_product(pair, place, inputs, ours, actual, computed, rounding)
        return "kernel", "the weights are right, and the result is not"

    def _bias(self, name: str) -> torch.Tensor | None:
        try:
            return self._reference.bias(name).double() if isinstance(self._reference, ModuleTrace) else None
        except AttributeError:
            return None

    def _of_ids(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[str, str]:
        kind = "positions" if "position" in name else "token types" if "type" in name else "token ids"
        shift = set((theirs.reshape(-1) - ours.reshape(-1)).tolist())
        return kind, f"the table is read at other rows{f', shifted by {shift.pop()}' if len(shift) == 1 else ''}"

    def _of_norm(self, pair: LayerPair, actual: torch.Tensor) -> tuple[str, str] | None:
        inputs_of_layer = self._comparison.actual.inputs.get(pair.reference.name)
        weight, bias = pair.reference.weight(), self._bias(pair.reference.name)
        if inputs_of_layer is None or weight is None:
            return None
        x, weight = self._comparison.real(inputs_of_layer), weight.double()
        shift = 0.0 if bias is None else bias
        best, words = math.inf, ""
        for epsilon in (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
            for centred in (True, False):
                middle = x - x.mean(-1, keepdim=True) if centred else x
                value = middle * (middle.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight + shift
                error = relative(value - actual, actual)
                if error < best:
                    best, words = (
                        error,
                        f"{'layer' if centred else 'root mean square'} normalization with an epsilon of {epsilon:g}",
                    )
        return ("normalization", f"the values are those of {words}") if best < 1e-3 else None

    def _of_product(
        self, pair: LayerPair, place: PlaceError, inputs: torch.Tensor, weight: torch.Tensor, actual: torch.Tensor,
        computed: torch.Tensor, rounding: float | None,
    ) -> tuple[str, str]:  # fmt: skip
        error = relative(actual - computed, computed)
        weight = weight.double()
        limit = pair.other.limit
        if limit is not None and bool((inputs.abs() > limit).any()):
            clipped = computed + (inputs.clamp(-limit, limit) - inputs) @ weight
            share = float((inputs.abs() > limit).double().mean())
            if relative(actual - clipped, computed) < 0.7 * error:
                return (
                    "saturation",
                    f"{share:.2%} of the inputs are above {limit:.3g}, the largest value that the quantization represents; the largest "
                    f"input is {float(inputs.abs().max()):.3g}",
                )
        if max(place.largest, float(inputs.abs().max())) > _HALF and error > 0.01:
            return _overflow(max(place.largest, float(inputs.abs().max())))
        channels = inputs.abs().reshape(-1, inputs.shape[-1]).amax(0)
        typical = float(channels.median()) or 1e-30
        outlier = float(channels.max()) / typical
        quantized = rounding is not None or limit is not None or error > 3e-3
        if quantized and outlier > _OUTLIER and (pair.other.limit is not None or pair.other.weight() is None):
            return (
                "outlier channel",
                f"channel {int(channels.argmax())} of the input is {outlier:.0f} times as large as the median channel",
            )
        for words, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            rounded = inputs.to(dtype).double() @ weight.to(dtype).double() - inputs @ weight
            size = relative(rounded, computed)
            if size and relative(actual - computed - rounded, computed) < 0.8 * error and 0.3 < error / size < 3:
                return "half precision", f"the product is computed in {words}"
        if rounding is not None and error < 4 * rounding:
            return "rounded weights", f"the weights differ by {rounding:.2g}, as after quantization"
        if pair.other.weight() is None and error < 0.5:
            return "rounded activations", "weights and activations are rounded to integers"
        if limit is not None and error < 0.2:
            return "rounded activations", f"the step of the quantized input is {2 * limit / 255:.2g}"
        return "kernel", "the weights are right, and the product is not: the kernel computes another value"

    # Code between layers.

    def _between(self, place: str, kind: str, name: str, error: PlaceError) -> tuple[str, str]:
        comparison = self._comparison
        expected, actual, recomputed = comparison.values(kind, name)
        if not expected.is_floating_point():
            return self._of_ids(name, expected, actual)
        if not bool(torch.isfinite(actual).all()):
            return _overflow(error.largest)
        if self._variants is None:
            self._variants = list(self._run_variants())
        best = (math.inf, "", "")
        for sort, detail, values in self._variants:
            value = getattr(values, kind).get(name)
            if value is not None and value.ndim == 3 and actual.ndim == 3:
                value = value[:, : actual.shape[1]]
            if value is not None and value.numel() == actual.numel():
                real = comparison.real(value.reshape(actual.shape))
                best = min(best, (relative(comparison.real(actual) - real, comparison.real(expected)), sort, detail))
        pooled = self._pooled(name, kind, actual)
        best = min(best, *pooled) if pooled else best
        if best[0] < _EXPLAINED * error.made:
            return best[1], best[2]
        fault = _shifted_or_scaled(comparison.real(actual), comparison.real(recomputed), None)
        if fault is not None:
            return fault
        if error.made < 2e-2 and error.made > 2e-5:
            for words, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
                rounded = recomputed.to(dtype).to(recomputed.dtype)
                if 0.2 < error.made / (relative(rounded - recomputed, recomputed) or 1.0) < 5:
                    return "half precision", f"the error has the size of rounding to {words}"
        return "operation", f"the graph computes another value {place}; no tested cause gives this value"

    def _run_variants(self) -> Iterator[tuple[str, str, LayerValues]]:
        reference, feeds = self._reference, dict(self._comparison.feeds)
        changes: list[tuple[str, str, AbstractContextManager[Any], Mapping[str, torch.Tensor]]] = []
        mask = feeds.get("attention_mask")
        if mask is not None:
            changes.append(("mask", "the attention mask is ignored, so padding is seen", nullcontext(), {
                "attention_mask": torch.ones_like(mask)}))  # fmt: skip
            changes.append(("mask", "the attention mask is inverted", nullcontext(), {"attention_mask": 1 - mask}))
        if (types := feeds.get("token_type_ids")) is not None:
            changes.append(("token types", "the token types are ignored", nullcontext(), {
                "token_type_ids": torch.zeros_like(types)}))  # fmt: skip
        if isinstance(reference, ModuleTrace):
            changes += [(kind, detail, change, {}) for kind, detail, change in _changed_models(reference.model)]
        for kind, detail, change, other in changes:
            try:
                with change:
                    yield kind, detail, reference.run({**feeds, **other}, self._comparison.actual)
            # A changed model may fail in its own code with any exception.
            except (AccelError, RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError):
                continue

    def _pooled(self, name: str, kind: str, actual: torch.Tensor) -> list[tuple[float, str, str]]:
        """Compare a value `(batch, width)` with other ways to pool the last hidden states before it."""
        if actual.ndim != 2:
            return []
        states: torch.Tensor | None = None
        for pair in self._comparison.pairs:
            output = self._comparison.actual.outputs[pair.reference.name]
            if kind == "inputs" and pair.reference.name == name:
                break
            if output.ndim == 3 and output.shape[0] == actual.shape[0] and output.shape[2] == actual.shape[1]:
                states = output
        if states is None:
            return []
        states = states.double()
        mask = self._comparison.feeds.get("attention_mask")
        mask = torch.ones(states.shape[:2]) if mask is None or mask.shape != states.shape[:2] else mask
        weights = mask.double()[..., None]
        last = (mask * torch.arange(mask.shape[1])).argmax(1)
        rows = torch.arange(len(states))
        ways = {
            "the first token": states[:, 0],
            "the second token": states[:, min(1, states.shape[1] - 1)],
            "the last token that is not padding": states[rows, last.long()],
            "the last position, with padding": states[:, -1],
            "the mean": (states * weights).sum(1) / weights.sum(1),
            "the mean with padding": states.mean(1),
            "the maximum": states.masked_fill(weights == 0, -math.inf).amax(1),
            "the maximum with padding": states.amax(1),
            "the sum": (states * weights).sum(1),
            "the mean over the square root of the length": (states * weights).sum(1) / weights.sum(1).sqrt(),
        }
        errors = []
        for words, value in ways.items():
            for normalized, pooled in ((False, value), (True, functional.normalize(value, dim=-1))):
                error = relative(actual.double() - pooled, actual)
                errors.append((error, "pooling", f"the graph returns {words}{', normalized' if normalized else ''}"))
        return errors


def weight_fault(ours: torch.Tensor, theirs: torch.Tensor, name: str, layers: Any) -> tuple[str, str] | None:
    """Return the fault of a weight; `None` if the weights differ only by rounding."""
    ours, theirs = ours.double(), theirs.double()
    if not bool(torch.isfinite(theirs).all()):
        return "weights", "the weights contain infinite or NaN values"
    if not bool(theirs.any()):
        return "weights", "all weights are zero"
    alike = float((ours * theirs).sum() / (ours.norm() * theirs.norm()).clamp(min=1e-300))
    ratio = float(theirs.norm() / ours.norm().clamp(min=1e-300))
    if alike > 0.99 and abs(ratio - 1) > _SAME and relative(theirs - ratio * ours, ours) < 0.5 * abs(ratio - 1):
        return "scale", f"the weights are multiplied by {ratio:.4g}"
    if alike < -0.99:
        return "weights", "the sign of the weights is changed"
    if ours.ndim == 2:
        if ours.shape[0] == ours.shape[1] and relative(theirs - ours.T, ours) < 2 * _SAME:
            return "weights", "the matrix is transposed"
        for words, a, b in (("output", ours.T, theirs.T), ("input", ours, theirs)):
            fault = _wrong_rows(a, b, words)
            if fault is not None:
                return fault
    other = _other_layer(theirs, name, layers)
    if alike < 0.9 and other is not None:
        return "weights", f"the weights are those of {other}"
    if alike < 0.9:
        return "weights", f"the weights are other weights (cosine {alike:.2f})"
    wrong = (theirs - ours).abs() > 0.5 * ours.abs().max()
    if 0 < int(wrong.sum()) < 0.01 * ours.numel() + 1:
        return "weights", f"{int(wrong.sum())} of {ours.numel()} weights are wrong"
    return None


def _wrong_rows(ours: torch.Tensor, theirs: torch.Tensor, words: str) -> tuple[str, str] | None:
    """Return the fault of rows that belong to another place, have another scale, or are zero."""
    a, b = functional.normalize(ours, dim=1), functional.normalize(theirs, dim=1)
    cosines = (a * b).sum(1)
    wrong = (cosines < 0.9).nonzero().flatten()[:256]
    if len(wrong) and len(wrong) < len(ours):
        nearest = (b[wrong] @ a.T).max(1)
        if float(nearest.values.min()) > 0.95:
            return (
                "weights",
                f"{len(wrong)} {words} rows are swapped, such as row {int(wrong[0])} with row {int(nearest.indices[0])}",
            )
        if not bool(theirs[wrong].any()):
            return "weights", f"{len(wrong)} {words} rows are zero"
        if len(wrong) <= len(ours) // 2:
            return "weights", f"{len(wrong)} of {len(ours)} {words} rows are wrong, such as row {int(wrong[0])}"
    elif len(wrong) == len(ours) and len(wrong) > 1:
        nearest = (b[wrong] @ a.T).max(1)
        if float(nearest.values.min()) > 0.95:
            return "weights", f"all {words} rows are in another order"
    ratios = theirs.norm(dim=1) / ours.norm(dim=1).clamp(min=1e-300)
    rest = (theirs - ratios[:, None] * ours).norm(dim=1) / ours.norm(dim=1).clamp(min=1e-300)
    off = (
        ((ratios - 1).abs() > 4 * _SAME)
        & (cosines > 0.98)
        & (ours.norm(dim=1) > 1e-6)
        & (rest < 0.5 * (ratios - 1).abs())
    )
    if bool(off.any()):
        first = int(off.nonzero()[0])
        return (
            "scale",
            f"{int(off.sum())} of {len(ours)} {words} rows have another scale, such as row {first} ({float(ratios[first]):.3g})",
        )
    return None


def _other_layer(weight: torch.Tensor, name: str, layers: Any) -> str | None:
    alike: list[TracedLayer] = [layer for layer in layers if layer.name != name and layer.shape == tuple(weight.shape)]
    return next((layer.name for layer in alike if correlation(layer.weight(), weight.float()) > 0.95), None)


def _shifted_or_scaled(
    actual: torch.Tensor, computed: torch.Tensor, bias: torch.Tensor | None
) -> tuple[str, str] | None:
    """Return the fault of values that differ by a factor or by a constant vector."""
    error = relative(actual - computed, computed)
    if not math.isfinite(error) or actual.numel() < 2:
        return None
    factor = float((actual * computed).sum() / computed.square().sum().clamp(min=1e-300))
    if abs(factor - 1) > 0.01 and relative(actual - factor * computed, computed) < 0.2 * error:
        return "scale", f"the values are multiplied by {factor:.4g}"
    rows = (actual - computed).reshape(-1, actual.shape[-1])
    mean = rows.mean(0)
    if len(rows) > 2 and error > 1e-3 and relative(rows - mean, computed) < 0.1 * error:
        if bias is not None and relative(mean + bias, bias) < 0.05:
            return "bias", "the bias is missing"
        return "bias", "a constant is added to each row: the bias is another bias"
    return None


def _overflow(largest: float) -> tuple[str, str]:
    return (
        "range of half precision",
        f"the values overflow; PyTorch's largest value is {largest:.3g}, float16 ends at 65,504",
    )


def _changed_models(model: torch.nn.Module) -> Iterator[tuple[str, str, AbstractContextManager[Any]]]:
    """Yield wrong variants of a PyTorch model: other activations, other attention scales, products in half precision."""
    from transformers.activations import ACT2CLS

    activations = {cls[0] if isinstance(cls, tuple) else cls for cls in ACT2CLS.values()}
    modules = [m for m in model.modules() if type(m) in activations and not any(m.parameters())]
    for kind in dict.fromkeys(type(module) for module in modules):
        group = [module for module in modules if type(module) is kind]
        for words, function in ACTIVATIONS.items():
            yield (
                "activation",
                f"the activation is {words} instead of {kind.__name__}",
                _attributes(group, "forward", _always(function)),
            )
    scaled = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
    if scaled:
        for words, change in (
            ("missing", lambda _: 1.0),
            ("applied twice", lambda scale: scale * scale),
            ("half as large", lambda scale: scale / 2),
            ("twice as large", lambda scale: scale * 2),
        ):
            yield "attention scale", f"the scale of the attention is {words}", _attributes(scaled, "scaling", change)
    yield "half precision", "the operations are computed in bfloat16", torch.autocast("cpu", torch.bfloat16)


def _always(value: Any) -> Callable[[Any], Any]:
    """Return a function that returns a value."""
    return lambda _: value


@contextmanager
def _attributes(modules: list[torch.nn.Module], name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    before = [(module, getattr(module, name), name in vars(module)) for module in modules]
    for module, value, _ in before:
        setattr(module, name, change(value))
    try:
        yield
    finally:
        for module, value, is_instance_attribute in before:
            if is_instance_attribute:
                setattr(module, name, value)
            else:
                delattr(module, name)
