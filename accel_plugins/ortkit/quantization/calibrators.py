"""Activation ranges from calibration data, in memory that does not grow with the data.

The graph runs batch by batch with the activations as extra outputs; of each activation only the range of every channel is
kept, and for the methods that look at the distribution, in a second pass, a histogram of fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from accel.artifact import Component, scratch
from accel.config import Calibration, available_processors
from accel.errors import QuantizeError
from accel.interfaces.forks import kept_in_children
from accel.interfaces.protocols import Feeds

from ..graph.editing import save_graph

BINS = 2048
_LEVELS = 128
Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class ChannelRange:
    """Smallest and largest value of each channel (the last axis) of an activation, and the mean range of the batches.

    Attributes:
        low, high: `(channels,) float32`.
        low_sum, high_sum, rows: For the mean over batches, weighted by their rows.
    """

    low: np.ndarray
    high: np.ndarray
    low_sum: float = 0.0
    high_sum: float = 0.0
    rows: int = 0

    @property
    def largest(self) -> np.ndarray:
        """Largest absolute value of each channel: `(channels,) float32`."""
        largest: np.ndarray = np.maximum(np.abs(self.low), np.abs(self.high))
        return largest


@dataclass(slots=True)
class _Histogram:
    low: float
    high: float
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray) -> None:
        # In float16 the bins of a narrow range would have no width.
        self.counts += np.histogram(values.astype(np.float64), bins=BINS, range=(self.low, self.high))[0]


def prompt_inputs(component: Component, batch: int, sequence: int, feeds: Feeds) -> dict[str, torch.Tensor]:
    """Inputs of a decoder next to the tokens `(batch, sequence)`, with an empty cache, where they are not in `feeds`.

    A cache that grows has no tokens; a buffer of fixed capacity has room for these.
    """
    made: dict[str, torch.Tensor] = {}
    for spec in component.inputs:
        if spec.name == "attention_mask":
            made[spec.name] = feeds.get(spec.name, torch.ones((batch, sequence), dtype=torch.int64))
        elif spec.name == "position_ids":
            made[spec.name] = torch.arange(sequence).expand(batch, sequence).contiguous()
        elif spec.name == "logits_to_keep":
            made[spec.name] = torch.tensor([sequence - 1])
        elif spec.pair is not None:
            sizes = {"batch": batch, "past": 0}
            shape = [n if isinstance(n, int) else sizes.get(n, sequence) for n in spec.shape]
            made[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
    return made


class Prompts:
    """Calibration batches of a decoder, completed with its other inputs; iterable as often as the batches are."""

    def __init__(self, batches: Iterable[Feeds], component: Component) -> None:
        self._batches, self._component = batches, component

    def __iter__(self) -> Iterator[Feeds]:
        for batch in self._batches:
            rows, length = batch["input_ids"].shape
            yield {**prompt_inputs(self._component, rows, length, batch), **batch}


def batches_of(calibration: Iterable[Feeds], component: Component) -> Iterable[Feeds]:
    """The calibration batches of one graph: its own part where the model has several, completed where it has a cache."""
    parts: Mapping[str, Iterable[Feeds]] = getattr(calibration, "parts", {})
    batches = parts.get(component.name, calibration)
    return Prompts(batches, component) if component.stateful else batches


class Calibrator:
    """Runs a graph and watches some of its values.

    Args:
        model: The graph; the watched values become its outputs, so it must not be used for anything else.
        component: Its inputs.
        names: The values to watch, in the main graph.
        batches: Inputs, iterable more than once.
        samples: Rows to read at most.
    """

    def __init__(
        self, model: ir.Model, component: Component, names: Sequence[str], batches: Iterable[Feeds], samples: int
    ) -> None:
        self._names = list(names)
        self._batches = batches
        self._samples = samples
        self._component = component
        self._resources = ExitStack()
        path = self._resources.enter_context(scratch()) / "model.onnx"
        outputs = {value.name for value in model.graph.outputs}
        values = {value.name: value for node in model.graph for value in node.outputs}
        inputs = {value.name for value in model.graph.inputs}
        model.graph.outputs.extend(values[n] for n in self._names if n not in outputs and n not in inputs)
        self._from_inputs = [name for name in self._names if name in inputs]
        save_graph(model, path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = available_processors()
        options.log_severity_level = 3
        self._session = kept_in_children(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def rows(self) -> int:
        """Rows read in the last pass."""
        return self._rows

    def channel_ranges(self) -> dict[str, ChannelRange]:
        """First pass: the range of each channel.

        Raises:
            QuantizeError: No data, wrong inputs, or values that are not finite.
        """
        found: dict[str, ChannelRange] = {}
        for rows, values in self._observed():
            for name, array in values.items():
                low, high = _channel_extremes(array)
                if not (np.isfinite(low).all() and np.isfinite(high).all()):
                    raise QuantizeError(
                        f"The calibration data leads to values that are not finite in {name!r}.",
                        fix="look for missing or infinite values in the data, or exclude the layer that makes them.",
                    )
                seen = found.setdefault(name, ChannelRange(low, high))
                if seen.low.shape != low.shape:
                    # The last axis is no channel: it is as long as the texts (what `Softmax` makes, transposed keys).
                    seen.low, seen.high = seen.low.min(keepdims=True), seen.high.max(keepdims=True)
                    low, high = low.min(keepdims=True), high.max(keepdims=True)
                seen.low, seen.high = np.minimum(seen.low, low), np.maximum(seen.high, high)
                seen.low_sum += float(low.min()) * rows
                seen.high_sum += float(high.max()) * rows
                seen.rows += rows
        if not found:
            raise QuantizeError("The calibration data is empty.", fix="pass at least one batch of inputs.")
        return found

    def beyond(self, limit: float) -> frozenset[str]:
        """Names of the values with an element whose absolute value is above `limit` or not finite."""
        found: set[str] = set()
        for _, values in self._observed():
            # `not <=` holds for NaN, too.
            found |= {name for name, array in values.items() if array.size and not np.abs(array).max() <= limit}
        return frozenset(found)

    def ranges(
        self,
        channels: Mapping[str, ChannelRange],
        method: Calibration,
        *,
        percentile: float,
        divisors: Mapping[str, np.ndarray],
    ) -> dict[str, tuple[float, float]]:
        """The range of each activation that is kept; all but `minmax` take a second pass.

        Args:
            channels: From `channel_ranges`.
            method: How outliers are treated.
            percentile: For `percentile`.
            divisors: `(channels,)` by name, where activations are smoothed.

        Raises:
            QuantizeError: The data can be iterated only once.
        """
        whole = {}
        for name, seen in channels.items():
            divisor = divisors.get(name, np.float32(1))
            whole[name] = (min(float((seen.low / divisor).min()), 0.0), max(float((seen.high / divisor).max()), 0.0))
        if method == "minmax":
            return whole
        if method == "moving_average" and not divisors:
            return {n: (min(c.low_sum / c.rows, 0.0), max(c.high_sum / c.rows, 0.0)) for n, c in channels.items()}
        histograms = {name: _Histogram(*_widened(*limits)) for name, limits in whole.items()}
        sums = {name: [0.0, 0.0, 0.0] for name in whole}
        for rows, values in self._observed():
            for name, array in values.items():
                smoothed = array / divisors[name] if name in divisors else array
                if method == "moving_average":
                    total = sums[name]
                    total[0] += float(smoothed.min()) * rows
                    total[1] += float(smoothed.max()) * rows
                    total[2] += rows
                else:
                    histograms[name].add(smoothed)
        if method == "moving_average":
            if not any(total[2] for total in sums.values()):
                raise _exhausted()
            return {n: (min(t[0] / t[2], 0.0), max(t[1] / t[2], 0.0)) for n, t in sums.items()}
        if not any(histogram.counts.any() for histogram in histograms.values()):
            raise _exhausted()
        if method == "percentile":
            return {name: percentile_range(h.counts, h.low, h.high, percentile) for name, h in histograms.items()}
        return {name: entropy_range(h.counts, h.low, h.high) for name, h in histograms.items()}

    def _observed(self) -> Iterator[tuple[int, Arrays]]:
        """Rows and watched values of each batch."""
        self._rows = 0
        wanted = [spec.name for spec in self._component.inputs]
        watched = [name for name in self._names if name not in self._from_inputs]
        for batch in self._batches:
            missing = [name for name in wanted if name not in batch]
            if missing:
                raise QuantizeError(
                    f"A calibration batch holds {sorted(batch)}; the graph also takes {missing}.",
                    fix="make the batches with the model's own tokenizer or processor.",
                )
            left = self._samples - self._rows
            if left <= 0:
                return
            feeds = {}
            for spec in self._component.inputs:
                array = batch[spec.name][:left].detach().cpu().numpy()
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise QuantizeError(
                        f"A calibration batch holds values of {spec.name!r} that are not finite.", fix="clean the data."
                    )
                feeds[spec.name] = np.ascontiguousarray(array.astype(spec.dtype, copy=False))
            rows = len(next(iter(feeds.values())))
            if rows == 0:
                continue
            try:
                # Asked for nothing, ONNX Runtime returns everything.
                results = self._session.run(watched, feeds) if watched else []
            except Exception as error:
                shapes = {name: array.shape for name, array in feeds.items()}
                raise QuantizeError(
                    f"The graph does not run on a calibration batch {shapes}: {' '.join(str(error).split())[:300]}",
                    fix="check the data's shapes and types.",
                ) from error
            self._rows += rows
            values = dict(zip(watched, results, strict=True))
            values |= {name: feeds[name] for name in self._from_inputs}
            yield rows, values


def _exhausted() -> QuantizeError:
    return QuantizeError(
        "The calibration data could be read only once; this method reads it twice.",
        fix="pass a list or another object that can be iterated again, or use calibration='minmax'.",
    )


def _channel_extremes(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    return flat.min(axis=0).astype(np.float32), flat.max(axis=0).astype(np.float32)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that a histogram can have: not empty."""
    return (low, high) if high > low else (low, low + 1e-6)


def percentile_range(counts: np.ndarray, low: float, high: float, percentile: float) -> tuple[float, float]:
    """The range that holds a share of the values, the rest cut off half on each side; zero is kept inside.

    Args:
        counts: `(bins,)` how many values fell into each of equal bins between `low` and `high`.
        low: Where the first bin begins.
        high: Where the last bin ends.
        percentile: The share, in percent.
    """
    edges = np.linspace(low, high, len(counts) + 1)
    share = np.cumsum(counts) / max(int(counts.sum()), 1)
    tail = (1 - percentile / 100) / 2
    first = int(np.searchsorted(share, tail, side="right"))
    last = int(np.searchsorted(share, 1 - tail, side="left"))
    return min(float(edges[min(first, len(counts) - 1)]), 0.0), max(float(edges[min(last, len(counts) - 1) + 1]), 0.0)


def entropy_range(counts: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """The range whose 8-bit version tells least apart from the whole distribution (Kullback-Leibler divergence).

    As in Migacz, "8-bit Inference with TensorRT" (GTC 2017): thresholds on the absolute value are tried from 128 bins
    upwards; what is cut off counts at the threshold. `counts: (bins,)` are as for `percentile_range`.
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


def _divergence(reference: np.ndarray, kept: np.ndarray) -> float:
    """How badly `_LEVELS` steps describe a distribution."""
    groups = np.minimum(np.arange(len(kept)) * _LEVELS // len(kept), _LEVELS - 1)
    filled = kept > 0
    totals = np.bincount(groups, weights=kept, minlength=_LEVELS)
    sizes = np.bincount(groups, weights=filled, minlength=_LEVELS)
    quantized = np.where(filled, totals[groups] / np.maximum(sizes[groups], 1), 0.0)
    p, q = reference / max(reference.sum(), 1e-12), quantized / max(quantized.sum(), 1e-12)
    seen = p > 0
    return float(np.sum(p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))))
