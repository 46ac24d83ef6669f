"""Activation ranges from calibration data, with memory use that does not depend on the amount of data.

The graph runs batch by batch with the activations as additional outputs. For each activation, only the range of each
channel is stored. Methods that use the distribution of values read the data a second time and store a histogram of
fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from accel.artifact import Component
from accel.config import Calibration, available_processors
from accel.errors import QuantizeError
from accel.interfaces.fork_safety import kept_in_children
from accel.interfaces.protocols import Feeds

from ..graph.editing import INLINE_BYTES, in_memory, prepare_to_write, serialized

BINS = 2048
_LEVELS = 128
Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class MeanRange:
    """Mean range of batches: sums of the smallest and of the largest value of each batch, weighted by the number of rows."""

    low: float = 0.0
    high: float = 0.0
    rows: int = 0

    def add(self, values: np.ndarray, rows: int) -> None:
        """Add the range of a batch."""
        self.low += float(values.min()) * rows
        self.high += float(values.max()) * rows
        self.rows += rows

    @property
    def limits(self) -> tuple[float, float]:
        """Mean range (low, high) of the batches, extended to include zero."""
        return min(self.low / self.rows, 0.0), max(self.high / self.rows, 0.0)


@dataclass(slots=True)
class ChannelRange:
    """Smallest and largest value of each channel (last axis) of an activation, and the mean range over batches.

    Attributes:
        low, high: The smallest and the largest values, `(channels,) float32`.
        mean: The mean range over batches, for all channels together.
    """

    low: np.ndarray
    high: np.ndarray
    mean: MeanRange = field(default_factory=MeanRange)


@dataclass(slots=True)
class _Histogram:
    low: float
    high: float
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray, rows: int) -> None:
        # NumPy would compute the bins in the data type of the values; in float16, bins of a narrow range have no width.
        self.counts += np.histogram(values.astype(np.float64), bins=BINS, range=(self.low, self.high))[0]


def sums_of_axes(component: Component) -> tuple[str, ...]:
    """Return the dimensions of a graph's inputs and outputs that are sums of axes, such as `capacity + sequence`.

    A decoder has them if its KV cache grows, instead of being a buffer with a fixed capacity.
    """
    specs = (*component.inputs, *component.outputs)
    return tuple(dict.fromkeys(dim for spec in specs for dim in spec.shape if isinstance(dim, str) and " + " in dim))


def prompt_inputs(component: Component, batch: int, sequence: int, feeds: Feeds) -> dict[str, torch.Tensor]:
    """Return the inputs of a decoder for a prompt with an empty KV cache, except the token ids `(batch, sequence)`.

    Args:
        component: The decoder's component.
        batch: The number of rows.
        sequence: The number of tokens in each row.
        feeds: The inputs that the caller already has; if they contain an attention mask, the mask is returned.

    Returns:
        The inputs by name. A growing cache has zero tokens; a buffer of fixed capacity has space for `sequence` tokens.
    """
    inputs: dict[str, torch.Tensor] = {}
    for spec in component.inputs:
        if spec.name == "attention_mask":
            inputs[spec.name] = feeds.get(spec.name, torch.ones((batch, sequence), dtype=torch.int64))
        elif spec.name == "position_ids":
            inputs[spec.name] = torch.arange(sequence).expand(batch, sequence).contiguous()
        elif spec.name == "logits_to_keep":
            inputs[spec.name] = torch.tensor([sequence - 1])
        elif spec.pair is not None:
            sizes = {"batch": batch, "past": 0} | ({"capacity": 0} if sums_of_axes(component) else {})
            shape = [n if isinstance(n, int) else sizes.get(n, sequence) for n in spec.shape]
            inputs[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
    return inputs


class DecoderCalibrationBatches:
    """Calibration batches of a decoder, extended by the inputs for an empty KV cache.

    The batches can be iterated as often as the original batches.
    """

    def __init__(self, batches: Iterable[Feeds], component: Component) -> None:
        self._batches, self._component = batches, component

    def __iter__(self) -> Iterator[Feeds]:
        for batch in self._batches:
            rows, length = batch["input_ids"].shape
            yield {**prompt_inputs(self._component, rows, length, batch), **batch}


def batches_of(calibration: Iterable[Feeds], component: Component) -> Iterable[Feeds]:
    """Return the calibration batches of one graph.

    For a model with several graphs, the calibration data may contain separate batches for each graph. For a graph with
    a KV cache, the inputs for an empty cache are added to the batches.
    """
    parts: Mapping[str, Iterable[Feeds]] = getattr(calibration, "parts", {})
    batches = parts.get(component.name, calibration)
    return DecoderCalibrationBatches(batches, component) if component.stateful else batches


class Calibrator:
    """Runner that computes a graph on calibration data and measures some of the graph's values.

    Args:
        model: The graph; changed in place: the observed values become outputs. Do not use the graph afterwards.
        component: The component that describes the graph's inputs.
        names: The names of the values to observe, in the main graph.
        batches: The batches of inputs; must be iterable more than once for methods with a second pass.
        samples: The maximum number of rows to read.
    """

    def __init__(
        self, model: ir.Model, component: Component, names: Sequence[str], batches: Iterable[Feeds], samples: int
    ) -> None:
        self._names = list(names)
        self._batches = batches
        self._samples = samples
        self._component = component
        outputs = {value.name for value in model.graph.outputs}
        values = {value.name: value for node in model.graph for value in node.outputs}
        inputs = {value.name for value in model.graph.inputs}
        model.graph.outputs.extend(values[n] for n in self._names if n not in outputs and n not in inputs)
        self._from_inputs = [name for name in self._names if name in inputs]
        options = ort.SessionOptions()
        options.intra_op_num_threads = available_processors()
        options.log_severity_level = 3
        self._session = session_in_memory(model, options)

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(self, *_: object) -> None:
        del self._session

    @property
    def rows(self) -> int:
        """Number of rows that the last pass read."""
        return self._rows

    def channel_ranges(self) -> dict[str, ChannelRange]:
        """Make the first pass over the data and return the range of each channel by activation name.

        Raises:
            QuantizeError: The data is empty, inputs are missing or do not fit, or values are not finite.
        """
        ranges: dict[str, ChannelRange] = {}
        for rows, values in self._observed():
            for name, array in values.items():
                low, high = _channel_extremes(array)
                if not (np.isfinite(low).all() and np.isfinite(high).all()):
                    raise QuantizeError(
                        f"The calibration data produces infinite or NaN values in the activation {name!r}.",
                        fix="remove missing or infinite values from the data, or exclude the layer that produces them: exclude=...",
                    )
                channel_range = ranges.setdefault(name, ChannelRange(low, high))
                if channel_range.low.shape != low.shape:
                    # A last axis whose size changes with the text length (softmax output, transposed keys) is not a
                    # channel axis, so store one range for the whole activation.
                    channel_range.low, channel_range.high = (
                        channel_range.low.min(keepdims=True),
                        channel_range.high.max(keepdims=True),
                    )
                    low, high = low.min(keepdims=True), high.max(keepdims=True)
                channel_range.low, channel_range.high = (
                    np.minimum(channel_range.low, low),
                    np.maximum(channel_range.high, high),
                )
                channel_range.mean.add(array, rows)
        if not ranges:
            raise QuantizeError("The calibration data is empty.", fix="pass at least one batch of inputs.")
        return ranges

    def beyond(self, limit: float) -> frozenset[str]:
        """Return the names of values that have an element above `limit` in absolute value, or a non-finite element."""
        names: set[str] = set()
        for _, values in self._observed():
            # Write `not <=` instead of `>`, because `not <=` is also true for NaN.
            names |= {
                n for n, array in values.items() if array.size and not -limit <= array.min() <= array.max() <= limit
            }
        return frozenset(names)

    def ranges(
        self,
        channels: Mapping[str, ChannelRange],
        method: Calibration,
        *,
        percentile: float,
        divisors: Mapping[str, np.ndarray],
    ) -> dict[str, tuple[float, float]]:
        """Return the quantization range of each activation; methods other than `minmax` may read the data a second time.

        Args:
            channels: The result of `channel_ranges`.
            method: The method of treating outliers.
            percentile: The percentage of values that the range contains, for the method `percentile`.
            divisors: Divisors `(channels,)` by activation name, if activations are smoothed.

        Raises:
            QuantizeError: The data can be iterated only once.
        """
        full_ranges = {}
        for name, channel_range in channels.items():
            divisor = divisors.get(name, np.float32(1))
            full_ranges[name] = (
                min(float((channel_range.low / divisor).min()), 0.0),
                max(float((channel_range.high / divisor).max()), 0.0),
            )
        if method == "minmax":
            return full_ranges
        if method == "moving_average" and not divisors:
            return {name: channel_range.mean.limits for name, channel_range in channels.items()}
        means = {name: MeanRange() for name in full_ranges}
        histograms = {name: _Histogram(*_widened(*limits)) for name, limits in full_ranges.items()}
        counters: Mapping[str, MeanRange | _Histogram] = means if method == "moving_average" else histograms
        for rows, values in self._observed():
            for name, array in values.items():
                counters[name].add(array / divisors[name] if name in divisors else array, rows)
        if not self._rows:
            raise QuantizeError(
                f"The calibration data can be iterated only once, but calibration={method!r} reads it twice.",
                fix="pass a list of batches, or use calibration='minmax', which reads the data once.",
            )
        if method == "moving_average":
            return {name: mean.limits for name, mean in means.items()}
        if method == "percentile":
            return {name: percentile_range(h.counts, h.low, h.high, percentile) for name, h in histograms.items()}
        return {name: entropy_range(h.counts, h.low, h.high) for name, h in histograms.items()}

    def _observed(self) -> Iterator[tuple[int, Arrays]]:
        """Iterate over batches; yield the number of rows and the observed values by name."""
        self._rows = 0
        names = [spec.name for spec in self._component.inputs]
        watched = [name for name in self._names if name not in self._from_inputs]
        for batch in self._batches:
            missing = [name for name in names if name not in batch]
            if missing:
                raise QuantizeError(
                    f"A calibration batch contains {sorted(batch)}, but the graph also needs the inputs {missing}.",
                    fix="create the batches with the tokenizer or processor of this model.",
                )
            remaining = self._samples - self._rows
            if remaining <= 0:
                return
            feeds = {}
            for spec in self._component.inputs:
                array = batch[spec.name][:remaining].detach().cpu().numpy()
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise QuantizeError(
                        f"A calibration batch contains infinite or NaN values in {spec.name!r}.",
                        fix="remove these values from the calibration data.",
                    )
                feeds[spec.name] = np.ascontiguousarray(array.astype(spec.dtype, copy=False))
            rows = len(next(iter(feeds.values())))
            if rows == 0:
                continue
            try:
                # Do not call `run` with an empty list of outputs: ONNX Runtime would return all outputs.
                results = self._session.run(watched, feeds) if watched else []
            except Exception as error:
                shapes = {name: array.shape for name, array in feeds.items()}
                raise QuantizeError(
                    f"The graph does not run on a calibration batch with the shapes {shapes}: {' '.join(str(error).split())[:300]}",
                    fix="pass batches whose shapes and data types match the inputs of the graph.",
                ) from error
            self._rows += rows
            values = dict(zip(watched, results, strict=True))
            values |= {name: feeds[name] for name in self._from_inputs}
            yield rows, values


def session_in_memory(model: ir.Model, options: ort.SessionOptions) -> ort.InferenceSession:
    """Open a graph without a file; ONNX Runtime shares the memory (or the memory-mapped file) of large weights."""
    prepare_to_write(model)
    shared: dict[str, ort.OrtValue] = {}
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            # ONNX Runtime shares no weights of subgraphs, and no weights of data types that NumPy lacks.
            if graph is model.graph and tensor is not None and _is_shareable(tensor):
                shared[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
                value.const_value = ir.ExternalTensor("", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name)
            elif isinstance(tensor, ir.ExternalTensor):
                value.const_value = in_memory(tensor)
    options.add_external_initializers(list(shared), list(shared.values()))
    return kept_in_children(ort.InferenceSession(serialized(model), options, providers=["CPUExecutionProvider"]))


def _is_shareable(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= INLINE_BYTES and tensor.dtype.numpy().kind in "biuf"


def _channel_extremes(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    return flat.min(axis=0).astype(np.float32), flat.max(axis=0).astype(np.float32)


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return the range; if both ends are equal, return a slightly wider range, because a histogram requires two different ends."""
    return (low, high) if high > low else (low, low + 1e-6)


def percentile_range(counts: np.ndarray, low: float, high: float, percentile: float) -> tuple[float, float]:
    """Return the range that contains a percentage of the values.

    The same number of values is cut off at each end. The range is extended to include zero.

    Args:
        counts: `(bins,)`, the number of values in each of the equal bins between `low` and `high`.
        low: The lower end of the first bin.
        high: The upper end of the last bin.
        percentile: The percentage of values in the range.
    """
    edges = np.linspace(low, high, len(counts) + 1)
    cumulative = np.cumsum(counts) / max(int(counts.sum()), 1)
    tail = (1 - percentile / 100) / 2
    first_bin = int(np.searchsorted(cumulative, tail, side="right"))
    last_bin = int(np.searchsorted(cumulative, 1 - tail, side="left"))
    return min(float(edges[min(first_bin, len(counts) - 1)]), 0.0), max(
        float(edges[min(last_bin, len(counts) - 1) + 1]), 0.0
    )


def entropy_range(counts: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Return the range with the smallest Kullback-Leibler divergence between the 8-bit and the original distribution.

    The method is from Migacz, "8-bit Inference with TensorRT" (GTC 2017). The method tries thresholds for the absolute
    value, beginning with 128 bins; values above a threshold count as values at the threshold. For the arguments, see
    `percentile_range`.
    """
    edges = np.linspace(low, high, len(counts) + 1)
    centers = np.abs((edges[:-1] + edges[1:]) / 2)
    limit = max(abs(low), abs(high))
    absolute = np.histogram(centers, bins=BINS, range=(0, limit), weights=counts.astype(np.float64))[0]
    best, threshold = math.inf, limit
    for stop in range(_LEVELS, BINS + 1, 16):
        reference = absolute[:stop].copy()
        reference[-1] += absolute[stop:].sum()
        divergence = _divergence(reference, absolute[:stop])
        if divergence < best:
            best, threshold = divergence, limit * stop / BINS
    return max(low, -threshold), min(high, threshold)


def _divergence(reference: np.ndarray, distribution: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence between a reference and a distribution that is quantized to `_LEVELS` steps."""
    groups = np.minimum(np.arange(len(distribution)) * _LEVELS // len(distribution), _LEVELS - 1)
    filled = distribution > 0
    totals = np.bincount(groups, weights=distribution, minlength=_LEVELS)
    sizes = np.bincount(groups, weights=filled, minlength=_LEVELS)
    quantized = np.where(filled, totals[groups] / np.maximum(sizes[groups], 1), 0.0)
    p, q = reference / max(reference.sum(), 1e-12), quantized / max(quantized.sum(), 1e-12)
    nonzero = p > 0
    return float(np.sum(p[nonzero] * np.log(p[nonzero] / np.maximum(q[nonzero], 1e-9))))
