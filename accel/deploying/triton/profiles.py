"""Sizes of axes for TensorRT in Triton: what is given, what an engine was built with, else what the server lets through."""

from __future__ import annotations

from collections.abc import Mapping

from ...artifact.manifest import Artifact
from ...errors import ConfigError
from ...interfaces.shape_profiles import LONGEST, Sizes, axes_of, read_profile


def profile_of(artifact: Artifact, given: str, rows: int, length: int | None) -> dict[str, Sizes]:
    """A size for every free axis of the inputs: what is given, what an engine was built with, else every batch and length that
    the server lets through.

    Raises:
        ConfigError: An axis that the graph does not have, or sizes that leave requests without a profile.
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
    if built and given:
        raise ConfigError("An engine has the profile that it was built with.", fix="leave profile out.")
    asked = built or read_profile(given)
    unknown = set(asked) - set(axes)
    if unknown:
        raise ConfigError(f"The graph has no axis {min(unknown)!r}.", fix=f"use {', '.join(axes)}.")
    most = length or component.max_sizes.get("sequence", LONGEST)
    usual = {"batch": Sizes(1, min(8, rows), rows)}
    made = {axis: asked.get(axis) or usual.get(axis) or Sizes(1, min(128, most), most) for axis in axes}
    for axis, needed in (("batch", rows), ("sequence", length)):
        sizes = made.get(axis)
        if not built and sizes is not None and needed is not None and not (sizes.least <= 1 and sizes.most >= needed):
            raise ConfigError(
                f"The profile has {axis} from {sizes.least} to {sizes.most}; requests have 1 to {needed}.",
                fix=f"use {axis}=1:{min(sizes.usual, needed)}:{needed}, or a smaller "
                f"{'max_batch_size' if axis == 'batch' else 'max_length'}.",
            )
    return made
