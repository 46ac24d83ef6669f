"""Shape profiles, for runtimes that compile a graph for ranges of sizes, such as TensorRT.

A profile has the smallest, the usual and the largest size of each named axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..artifact.manifest import Component
from ..artifact.tensor_specs import TensorSpec
from ..errors import ConfigError

_LARGEST = (1 << 31) - 1
_ENTRY = re.compile(r"\s*(?P<axis>\w+)\s*=\s*(?P<sizes>\d+(?::\d+:\d+)?)\s*\Z")
_PLUS = " + "  # joins the axes of a dimension that is their sum
LONGEST = 512
"""Largest sequence length in a profile for a model without a limit of the sequence length."""


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Smallest, usual and largest size of one axis. The runtime selects the kernels that are fastest for the usual size."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.usual <= self.most or not self.most:
            raise ConfigError(
                f"The sizes {self} of an axis in the shape profile are not in ascending order, or the largest size is 0.",
                fix="write the sizes as SMALLEST:USUAL:LARGEST, such as 1:8:32.",
            )

    def __str__(self) -> str:
        return f"{self.least}:{self.usual}:{self.most}"


Profile = Mapping[str, AxisSizes]
Shape = tuple[int, ...]


def read_profile(text: str) -> dict[str, AxisSizes]:
    """Parse a profile such as `"batch=1:8:32,sequence=128"`. An axis with a single number has a fixed size.

    Raises:
        ConfigError: The text has another format.
    """
    profile: dict[str, AxisSizes] = {}
    for entry in text.split(",") if text.strip() else ():
        match = _ENTRY.match(entry)
        if match is None:
            raise ConfigError(
                f"The entry {entry!r} of the shape profile is invalid; an entry has the form AXIS=SMALLEST:USUAL:LARGEST or AXIS=SIZE.",
                fix='write the profile like "batch=1:8:32,sequence=16:128:384".',
            )
        numbers = [int(number) for number in match["sizes"].split(":")]
        if match["axis"] in profile or max(numbers) > _LARGEST:
            reason = "the axis has two entries" if match["axis"] in profile else f"the largest size is {_LARGEST}"
            raise ConfigError(
                f"The entry {entry!r} of the shape profile is invalid: {reason}.",
                fix="write one entry per axis, with the sizes that the model will be called with.",
            )
        profile[match["axis"]] = AxisSizes(*(numbers if len(numbers) == 3 else numbers * 3))
    return profile


def axes_of(component: Component) -> tuple[str, ...]:
    """Return the names of all variable axes of a graph's inputs, in the order of the inputs. The KV cache inputs are included.

    A sum of axes, such as `capacity + sequence`, counts as its summands.
    """
    dims = (dim for spec in component.inputs for dim in spec.shape if isinstance(dim, str))
    return tuple(dict.fromkeys(axis for dim in dims for axis in dim.split(_PLUS)))


def shapes_of(spec: TensorSpec, profile: Profile) -> tuple[Shape, Shape, Shape]:
    """Return the smallest, usual and largest shape of one input."""

    def at(name: str) -> Shape:
        sizes = (
            d if isinstance(d, int) else sum(getattr(profile[axis], name) for axis in d.split(_PLUS))
            for d in spec.shape
        )
        return tuple(sizes)

    return at("least"), at("usual"), at("most")


def shapes_text(inputs: Iterable[TensorSpec], profile: Profile, word: str) -> str:
    """Return the shapes of a profile in the format of ONNX Runtime's TensorRT provider, such as `input_ids:1x1,attention_mask:1x1`.

    Args:
        inputs: Specs of the graph's inputs.
        profile: Sizes of each named axis.
        word: `min`, `opt` or `max`, for the smallest, usual or largest shapes.
    """
    position = ("min", "opt", "max").index(word)
    return ",".join(f"{spec.name}:{'x'.join(map(str, shapes_of(spec, profile)[position]))}" for spec in inputs)
