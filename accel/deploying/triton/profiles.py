"""Shape profiles for TensorRT in Triton.

A profile is configured, or recorded in a built engine, or chosen so that it covers all accepted requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...artifact.manifest import Artifact
from ...errors import ConfigError
from ...interfaces.shape_profiles import LONGEST, AxisSizes, axes_of, read_profile


def profile_of(artifact: Artifact, configured: str, rows: int, length: int | None) -> dict[str, AxisSizes]:
    """Return the smallest, usual and largest size of every dynamic input axis.

    The sizes come from the configured profile, or from the profile that an engine was built with. Axes without a profile get a range that
    covers all accepted requests.

    Raises:
        ConfigError: The graph does not have an axis, the profile does not cover all requests, or a profile was configured for an engine
            that was built with one.
    """
    component = artifact.components[0]
    axes = axes_of(component)
    recorded: Mapping[str, str] = next(
        (
            step.config["profile"][component.name]
            for step in reversed(artifact.manifest.steps)
            if "profile" in step.config
        ),
        {},
    )
    built = {axis: read_profile(f"{axis}={sizes}")[axis] for axis, sizes in recorded.items()}
    if built and configured:
        raise ConfigError("An engine has the profile that it was built with.", fix="leave profile out.")
    asked = built or read_profile(configured)
    unknown = set(asked) - set(axes)
    if unknown:
        raise ConfigError(f"The graph has no axis {min(unknown)!r}.", fix=f"use {', '.join(axes)}.")
    most = length or component.max_sizes.get("sequence", LONGEST)
    usual = {"batch": AxisSizes(1, min(8, rows), rows)}
    profile = {axis: asked.get(axis) or usual.get(axis) or AxisSizes(1, min(128, most), most) for axis in axes}
    for axis, needed in (("batch", rows), ("sequence", length)):
        sizes = profile.get(axis)
        if not built and sizes is not None and needed is not None and not (sizes.least <= 1 and sizes.most >= needed):
            raise ConfigError(
                f"The profile has {axis} from {sizes.least} to {sizes.most}; requests have 1 to {needed}.",
                fix=f"use {axis}=1:{min(sizes.usual, needed)}:{needed}, or a smaller "
                f"{'max_batch_size' if axis == 'batch' else 'max_length'}.",
            )
    return profile
