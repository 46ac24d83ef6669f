"""Optimization profiles for TensorRT: the sizes that each axis of a graph may have, and their form as provider options."""

from __future__ import annotations

from collections.abc import Mapping

from accel.artifact import Component
from accel.errors import ConfigError
from accel.interfaces.shape_profiles import LONGEST, AxisSizes, Profile, axes_of, shapes_text


def complete(component: Component, requested: Profile, shapes: Mapping[str, int] | None = None) -> dict[str, AxisSizes]:
    """Return a profile with every axis of a graph.

    The sizes come from `requested`, then from the fixed `shapes`, then from defaults. The defaults are 1 to 32 rows, 0 to the
    model's limit for the tokens in a KV cache, and 1 to the model's limit for other axes.

    Raises:
        ConfigError: The graph does not have an axis, or a size exceeds the model's limit.
    """
    axes = axes_of(component)
    for axis, sizes in requested.items():
        if axis not in axes:
            raise ConfigError(
                f"The profile has sizes for the axis {axis!r}, but the graph has no axis {axis!r}.",
                fix=f"use the axes {', '.join(axes)}.",
            )
        limit = _limit(component, axis)
        if limit is not None and sizes.most > limit:
            raise ConfigError(
                f"The profile sets {axis} to at most {sizes.most}, but the model supports at most {limit}.",
                fix=f"use at most {limit}.",
            )
    # The first call of a decoder has an empty KV cache. The axes of cross-attention belong to other inputs, too.
    cached = {axis for spec in component.inputs if spec.role == "cache" for axis in spec.shape}
    cached -= {axis for spec in component.inputs if spec.role != "cache" for axis in spec.shape}
    profile = {}
    for axis in axes:
        most = _limit(component, axis) or LONGEST
        least = 0 if axis in cached else 1
        usual = AxisSizes(1, 8, 32) if axis == "batch" else AxisSizes(least, min(128, most), most)
        profile[axis] = requested.get(axis) or (AxisSizes(*[shapes[axis]] * 3) if shapes and axis in shapes else usual)
    return profile


def _limit(component: Component, axis: str) -> int | None:
    """Return the model's limit of an axis. The tokens of a decoder are limited together with those in the KV cache."""
    cache = {d for s in component.inputs if s.role == "cache" and s.name.startswith("past") for d in s.shape[2:3]}
    tokens = component.stateful and (axis == "sequence" or axis in cache)
    return component.max_sizes.get(axis) or (component.most_tokens if tokens else 0) or None


def provider_options(component: Component, profile: Profile, prefix: str) -> dict[str, str]:
    """Return a profile as ONNX Runtime's provider options: `input_ids:1x1,attention_mask:1x1` and so on.

    Args:
        component: The graph.
        profile: The sizes of all axes.
        prefix: The prefix of the option names: `trt` or `nv`.
    """
    varying = [spec for spec in component.inputs if any(isinstance(d, str) for d in spec.shape)]
    if not varying:
        return {}
    return {f"{prefix}_profile_{word}_shapes": shapes_text(varying, profile, word) for word in ("min", "opt", "max")}
