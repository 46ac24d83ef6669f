"""Pair the layers of two models, and split the error of each place into the error that is made there and the error that is carried.

The reference model runs a second time with the inputs and outputs of the layers of the other model. Each of its layers, and the code
between its layers (activations, attention, residual sums), then computes with the other model's values. The difference between the
other model's value and this value is made in this place. The rest of the error comes from earlier places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..interfaces.layer_traces import LayerTrace, LayerValues, TracedLayer

_SAMPLES = 4096
_RELATED = 0.5  # correlation of two weights that belong to the same layer


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer of the reference model and the layer of the other model.

    Attributes:
        reference, other: The layers.
        columns: Columns of the other layer's outputs that belong to the reference layer, if it is one of several layers in a product.
    """

    reference: TracedLayer
    other: TracedLayer
    columns: slice | None = None

    def output(self, values: LayerValues) -> torch.Tensor:
        """Return the outputs of the other model that belong to the reference layer."""
        output = values.outputs[self.other.name]
        return output if self.columns is None else output[..., self.columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceError:
    """The error in one place.

    Attributes:
        place: A layer (`LAYER`), the code before a layer (`before LAYER`), or an output of the model (`output NAME`).
        error: Root mean square of the error, relative to that of the reference values.
        made: The error that is made in this place.
        carried: The error that comes from earlier places.
        largest: Largest absolute value of the reference in this place.
    """

    place: str
    error: float
    made: float
    carried: float
    largest: float


def pair_layers(reference: Sequence[TracedLayer], other: Sequence[TracedLayer]) -> list[LayerPair]:
    """Pair layers by name, then by the order of equal shapes, then by the correlation of their weights.

    A name matches if it is equal, or if one name ends with the other (`bert.encoder.layer.0` and `encoder.layer.0`).
    """
    pairs: list[LayerPair] = []
    paired, used = set[str](), set[str]()

    def add(ours: TracedLayer, theirs: TracedLayer, columns: slice | None = None) -> None:
        pairs.append(LayerPair(ours, theirs, columns))
        paired.add(ours.name)
        used.add(theirs.name)

    by_name = {layer.name: layer for layer in reference}
    for theirs in other:
        parts = [_named(name, by_name, theirs.kind) for name in theirs.name.split("+")]
        if not all(parts):
            continue
        first = 0
        widths = [part.shape[-1] for part in parts if part is not None]
        if theirs.shape[-1] != sum(widths) or any(part.name in paired for part in parts if part is not None):
            continue
        for part, width in zip(parts, widths, strict=True):
            assert part is not None
            add(part, theirs, slice(first, first + width) if len(parts) > 1 else None)
            first += width
    left = [layer for layer in reference if layer.name not in paired]
    others = [layer for layer in other if layer.name not in used]
    for signature in dict.fromkeys((layer.kind, layer.shape) for layer in left):
        ours = [layer for layer in left if (layer.kind, layer.shape) == signature]
        theirs_alike = [layer for layer in others if (layer.kind, layer.shape) == signature]
        if len(ours) == len(theirs_alike):
            for a, b in zip(ours, theirs_alike, strict=True):
                add(a, b)
        else:
            _pair_by_weight(ours, theirs_alike, add)
    order = {layer.name: i for i, layer in enumerate(reference)}
    return sorted(pairs, key=lambda pair: order[pair.reference.name])


def _named(name: str, layers: Mapping[str, TracedLayer], kind: str) -> TracedLayer | None:
    layer = layers.get(name)
    if layer is None:
        ends = [v for k, v in layers.items() if k.endswith(f".{name}") or name.endswith(f".{k}")]
        layer = ends[0] if len(ends) == 1 else None
    return layer if layer is not None and layer.kind == kind else None


def _pair_by_weight(ours: Sequence[TracedLayer], theirs: Sequence[TracedLayer], add: object) -> None:
    assert callable(add)
    free = list(theirs)
    for layer in ours:
        scores = [(correlation(layer.weight(), candidate.weight()), candidate) for candidate in free]
        best = max(scores, key=lambda score: score[0], default=None)
        if best is not None and best[0] > _RELATED:
            add(layer, best[1])
            free.remove(best[1])


def correlation(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the cosine of some elements of two tensors; 0 if a tensor is missing or the shapes differ."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0
    step = max(1, a.numel() // _SAMPLES)
    x, y = a.double().flatten()[::step], b.double().flatten()[::step]
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size else 0.0


def relative(difference: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of a difference relative to that of the expected values; infinity for values that are not finite."""
    if not difference.numel():
        return 0.0
    size = float(expected.double().square().mean().sqrt())
    error = float(difference.double().square().mean().sqrt())
    if math.isnan(error) or math.isinf(error):
        return math.inf
    return error / size if size else error


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """The values of both models for one call, and the reference's values computed from the other model's values.

    Attributes:
        pairs: The paired layers.
        feeds: The inputs.
        expected: Values of the reference.
        actual: Values of the other model, by name of the reference's layers.
        recomputed: What the reference computes from the values of the other model.
    """

    pairs: tuple[LayerPair, ...]
    feeds: Mapping[str, torch.Tensor]
    expected: LayerValues
    actual: LayerValues
    recomputed: LayerValues

    def real(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of a value that do not belong to padding, in float64."""
        mask = self.feeds.get("attention_mask")
        if mask is not None and mask.ndim == 2 and value.shape[:2] == mask.shape:
            value = value[mask.bool()]
        return value.double()

    def values(self, kind: str, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the expected, the actual and the recomputed value in one shape. If the other model computes only the first token, the
        others are those of the first token.
        """
        expected, actual = getattr(self.expected, kind)[name], getattr(self.actual, kind)[name]
        recomputed = getattr(self.recomputed, kind)[name].reshape(expected.shape)
        if actual.numel() != expected.numel():
            expected, recomputed = expected[:, :1], recomputed[:, :1]
        return expected, actual.reshape(expected.shape), recomputed

    def places(self) -> list[PlaceError]:
        """Return the error of each place in the order of the computation."""
        errors = []
        for pair in self.pairs:
            name = pair.reference.name
            if name in self.actual.inputs:
                errors.append(self._place(f"before {name}", "inputs", name))
            if name in self.actual.outputs:
                errors.append(self._place(name, "outputs", name))
        errors += [
            self._place(f"output {name}", "results", name)
            for name, value in self.expected.results.items()
            if name in self.actual.results and value.is_floating_point()
        ]
        return errors

    def _place(self, place: str, kind: str, name: str) -> PlaceError:
        values = self.values(kind, name)
        if not values[0].is_floating_point():
            different = float((values[1].long() != values[0].long()).double().mean())
            return PlaceError(place=place, error=different, made=different, carried=0.0, largest=0.0)
        reference, value, computed = (self.real(item) for item in values)
        return PlaceError(
            place=place,
            error=relative(value - reference, reference),
            made=relative(value - computed, reference),
            carried=relative(computed - reference, reference),
            largest=float(reference.abs().max()) if reference.numel() else 0.0,
        )


def compare_layers(reference: LayerTrace, other: LayerTrace, feeds: Mapping[str, torch.Tensor]) -> LayerComparison:
    """Run both models and the reference with the other model's values."""
    expected, values = reference.run(feeds), other.run(feeds)
    pairs = [
        pair
        for pair in pair_layers(reference.layers, other.layers)
        if _fits(pair.output(values), expected.outputs[pair.reference.name])
    ]
    actual = values_of(pairs, values, expected)
    return LayerComparison(tuple(pairs), feeds, expected, actual, reference.run(feeds, actual))


def values_of(pairs: Sequence[LayerPair], values: LayerValues, expected: LayerValues) -> LayerValues:
    """Return the values of the other model by the names of the reference's layers."""
    inputs, outputs = {}, {}
    for pair in pairs:
        name = pair.reference.name
        outputs[name] = pair.output(values)
        reference_input, other = expected.inputs.get(name), values.inputs[pair.other.name]
        if reference_input is not None and _fits(other, reference_input):
            inputs[name] = other
    names = set(expected.results)
    results = dict(values.results)
    if not names <= set(results):
        results = dict(zip(expected.results, values.results.values(), strict=False))
    fitting = {n: v for n, v in results.items() if n in names and v.numel() == expected.results[n].numel()}
    return LayerValues(inputs, outputs, fitting)


def _fits(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a value has the elements of the expected value, or those of its first token."""
    first = expected[:, :1] if expected.ndim == 3 else expected
    return value.numel() in (expected.numel(), first.numel())
