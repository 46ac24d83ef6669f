"""Optimization profiles for TensorRT: from what is given, from data, from a model's limits; and as a provider's options."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from accel.artifact import Component
from accel.errors import ConfigError, InputError
from accel.interfaces.protocols import Feeds
from accel.interfaces.shape_profiles import LONGEST, Profile, Sizes, axes_of, shapes_text


def complete(component: Component, given: Profile, shapes: Mapping[str, int] | None = None) -> dict[str, Sizes]:
    """A profile for every axis: what is given, then fixed `shapes`, then 1 to 32 rows, and sequences up to the limit.

    Raises:
        ConfigError: An axis that the graph does not have, or a size beyond the model's positions.
    """
    axes = axes_of(component)
    for axis, sizes in given.items():
        if axis not in axes:
            raise ConfigError(f"The graph has no axis {axis!r}.", fix=f"use {', '.join(axes)}.")
        limit = component.max_sizes.get(axis)
        if limit is not None and sizes.most > limit:
            raise ConfigError(f"{axis} goes up to {sizes.most}; the model has {limit}.", fix=f"use at most {limit}.")
    made = {}
    for axis in axes:
        if axis in given:
            made[axis] = given[axis]
        elif shapes and axis in shapes:
            made[axis] = Sizes(*[shapes[axis]] * 3)
        elif axis == "batch":
            made[axis] = Sizes(1, 8, 32)
        else:
            most = component.max_sizes.get(axis, LONGEST)
            made[axis] = Sizes(1, min(128, most), most)
    return made


def from_data(component: Component, batches: Iterable[Feeds]) -> dict[str, Sizes]:
    """A profile that holds all batches; the usual size is the median.

    Raises:
        ConfigError: There are none.
        InputError: One does not fit the graph.
    """
    seen: dict[str, list[int]] = {}
    for batch in batches:
        for spec in component.inputs:
            tensor = batch.get(spec.name)
            if tensor is None or tensor.ndim != len(spec.shape):
                raise InputError(f"A batch has no {spec.name!r} of rank {len(spec.shape)}.", fix="pass whole batches.")
            for axis, size in zip(spec.shape, tensor.shape, strict=True):
                if isinstance(axis, str):
                    seen.setdefault(axis, []).append(int(size))
    if not seen:
        raise ConfigError("There is no data to take a profile from.", fix="pass at least one batch.")
    return {axis: Sizes(min(sizes), statistics.median_low(sizes), max(sizes)) for axis, sizes in seen.items()}


def provider_options(component: Component, profile: Profile) -> dict[str, str]:
    """A profile as ONNX Runtime's options: `input_ids:1x1,attention_mask:1x1` and so on."""
    varying = [spec for spec in component.inputs if any(isinstance(d, str) for d in spec.shape)]
    if not varying:
        return {}
    return {f"trt_profile_{word}_shapes": shapes_text(varying, profile, word) for word in ("min", "opt", "max")}
