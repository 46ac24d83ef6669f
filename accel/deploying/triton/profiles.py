"""Sizes of axes for TensorRT: the smallest, the usual and the largest, in the words of ONNX Runtime's provider."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...artifact.manifest import Artifact
from ...artifact.tensors import TensorSpec
from ...errors import ConfigError

_ENTRY = re.compile(r"\s*(?P<axis>\w+)\s*=\s*(?P<sizes>\d+(?::\d+:\d+)?)\s*\Z")
_INPUT = re.compile(r"(?P<name>[^,:]+):(?P<sizes>\d+(?:x\d+)*)")
_LONGEST = 512
"""Largest size of a sequence where nothing limits it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one axis: `least <= usual <= most`."""

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


def profile_of(artifact: Artifact, given: str, rows: int, length: int | None) -> dict[str, Sizes]:
    """A size for every free axis of the inputs: what is given, what an engine was built with, else every batch and length that
    the server lets through.

    Raises:
        ConfigError: An axis that the graph does not have, or sizes that leave requests without a profile.
    """
    component = artifact.components[0]
    axes = dict.fromkeys(axis for spec in component.inputs for axis in spec.shape if isinstance(axis, str))
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
    most = length or component.max_sizes.get("sequence", _LONGEST)
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


def shapes_text(inputs: Iterable[TensorSpec], profile: Profile, word: str) -> str:
    """A profile's `min`, `opt` or `max` as `input_ids:1x1,attention_mask:1x1`."""
    part = {"min": "least", "opt": "usual", "max": "most"}[word]
    shapes = []
    for spec in inputs:
        sizes = [str(size if isinstance(size, int) else getattr(profile[size], part)) for size in spec.shape]
        shapes.append(f"{spec.name}:{'x'.join(sizes)}")
    return ",".join(shapes)


def read_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Shapes by input, of what `shapes_text` wrote."""
    return {
        match["name"].strip(): tuple(int(size) for size in match["sizes"].split("x")) for match in _INPUT.finditer(text)
    }
