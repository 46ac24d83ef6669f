"""Shape profiles for TensorRT in Triton: the smallest, usual and largest size of each dynamic axis.

The user configures a profile, or a built engine records its profile. If neither exists, accel chooses a profile for all accepted requests.
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
        ConfigError: The profile has an axis that the graph does not have, the profile does not cover all requests, or a profile was
            configured for an engine that already has a profile.
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
        raise ConfigError(
            f"profile={configured!r} is not supported for {artifact.path}: a TensorRT engine has the profile with which it was built.",
            fix="leave profile out, or build the engine again with another profile.",
        )
    requested = built or read_profile(configured)
    unknown = set(requested) - set(axes)
    if unknown:
        raise ConfigError(
            f"The profile has the axis {min(unknown)!r}, which the graph does not have; its dynamic axes are {', '.join(axes)}.",
            fix="use only the graph's axes in the profile, such as batch=1:8:32,sequence=1:64:128.",
        )
    most = length or component.max_sizes.get("sequence", LONGEST)
    usual = {"batch": AxisSizes(1, min(8, rows), rows)}
    profile = {axis: requested.get(axis) or usual.get(axis) or AxisSizes(1, min(128, most), most) for axis in axes}
    for axis, needed in (("batch", rows), ("sequence", length)):
        sizes = profile.get(axis)
        if not built and sizes is not None and needed is not None and not (sizes.least <= 1 and sizes.most >= needed):
            raise ConfigError(
                f"The profile covers the sizes {sizes.least} to {sizes.most} of the axis {axis!r}, but requests can have sizes from 1 to "
                f"{needed}.",
                fix=f"use {axis}=1:{min(sizes.usual, needed)}:{needed} in the profile, or set a smaller "
                f"{'max_batch_size' if axis == 'batch' else 'max_length'}.",
            )
    return profile
