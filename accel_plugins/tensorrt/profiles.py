"""Optimization profiles: the smallest, the usual and the largest size of each named axis, for which TensorRT builds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accel.artifact import Component, TensorSpec
from accel.backends.interfaces import Feeds
from accel.errors import ConfigError, InputError

_ENTRY = re.compile(r"\s*(?P<axis>\w+)\s*=\s*(?P<sizes>\d+(?::\d+:\d+)?)\s*\Z")
_LONGEST = 512
"""Largest size of a sequence where the model has no limit of its own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one axis: `least <= usual <= most`. Kernels are chosen by their speed at `usual`."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.usual <= self.most or not self.most:
            raise ConfigError(
                f"An axis cannot have the sizes {self}.", fix="use least:usual:most, each at least the one before."
            )

    def __str__(self) -> str:
        return f"{self.least}:{self.usual}:{self.most}"


Profile = Mapping[str, Sizes]
Shape = tuple[int, ...]


def read_profile(text: str) -> dict[str, Sizes]:
    """`"batch=1:8:32,sequence=128"` as a profile; one number is a fixed size.

    Raises:
        ConfigError: It is written otherwise.
    """
    found: dict[str, Sizes] = {}
    for entry in text.split(",") if text.strip() else ():
        match = _ENTRY.match(entry)
        if match is None:
            raise ConfigError(
                f"{entry!r} is no part of a profile.", fix='write it as in "batch=1:8:32,sequence=16:128:384".'
            )
        numbers = [int(number) for number in match["sizes"].split(":")]
        found[match["axis"]] = Sizes(*(numbers if len(numbers) == 3 else numbers * 3))
    return found


def axes_of(component: Component) -> tuple[str, ...]:
    """The axes whose sizes vary, as the inputs name them; those of caches are among them."""
    return tuple(dict.fromkeys(axis for spec in component.inputs for axis in spec.shape if isinstance(axis, str)))


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
            most = component.max_sizes.get(axis, _LONGEST)
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


def shapes_of(spec: TensorSpec, profile: Profile) -> tuple[Shape, Shape, Shape]:
    """Smallest, usual and largest shape of one input."""

    def at(name: str) -> Shape:
        return tuple(d if isinstance(d, int) else getattr(profile[d], name) for d in spec.shape)

    return at("least"), at("usual"), at("most")


def provider_options(component: Component, profile: Profile) -> dict[str, str]:
    """A profile as ONNX Runtime's options: `input_ids:1x1,attention_mask:1x1` and so on."""
    varying = [spec for spec in component.inputs if any(isinstance(d, str) for d in spec.shape)]
    options = {}
    for position, word in enumerate(("min", "opt", "max")):
        shapes = [(spec.name, shapes_of(spec, profile)[position]) for spec in varying]
        options[f"trt_profile_{word}_shapes"] = ",".join(
            f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes
        )
    return options if varying else {}
