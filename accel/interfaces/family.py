"""Base class of model families. Every method has a default, which works for most architectures.

A family is a class in its own module (`accel/families/NAME.py`, with an instance in `FAMILY`). `accel/families/__init__.py` lists
it by model type. A family never calls `accel.capture`: its methods get objects from capture and return changed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Axes = Mapping[str, Mapping[int, str]]
"""Names of the axes that may vary, by input and position."""

Sample = tuple[Tensors, Axes, tuple[str, ...]]
"""Sample inputs of a trace, their axis names, and the names of inputs that the model accepts but ignores."""

Replacement = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and the attribute's value during a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One of several graphs of a model.

    Attributes:
        name: Name of the graph.
        model: The module to trace.
        example: Sample inputs of the module.
        axes: Names of the sample's axes that may vary.
    """

    name: str
    model: torch.nn.Module
    example: Tensors
    axes: Axes


class Family:
    """Settings and methods for a family's models where they differ from most architectures.

    Attributes:
        positions: How a decoder computes positions without position ids: `place` counts all tokens of a row, `mask` counts tokens
            with 1 in the mask, `tokens` counts tokens that are not padding tokens, starting after `pad_token_id`.
        recomputes_long_texts: Whether `generate` recomputes all keys when a text exceeds the original positions (LongRoPE).
        processor_sizes: Settings of the image processor that contain the image size. The first existing one is used.
        sounds_of_any_length: For speech encoder-decoders: whether the encoder reads audio of any length with a padding mask.
        long_recordings: For speech encoder-decoders: whether `generate` processes long audio window by window.
        tiles: Whether an image is split into tiles: `pixel_values: (batch, tiles, channels, height, width)`.
        fixed_text_length: Length in tokens to which texts next to an image are padded; `None` pads to the longest in the batch.
        metric_depth: Whether depth outputs are in metres although the config does not contain this.
        required_inputs: Inputs that have a default in other families but are required here, with the text after `Fix:` in the
            error message.
    """

    positions: Literal["place", "mask", "tokens"] = "place"
    recomputes_long_texts: bool = False
    processor_sizes: Sequence[str] = ("crop_size", "size")
    sounds_of_any_length: bool = False
    long_recordings: bool = False
    tiles: bool = False
    fixed_text_length: int | None = None
    metric_depth: bool = False
    required_inputs: Mapping[str, str] = MappingProxyType({})

    # Methods that need only a config, which may be a `config.json`.

    def first_position(self, config: Mapping[str, Any]) -> int:
        """Return the number of leading rows of the position table that no token uses."""
        return 0

    def largest_box(self, config: Any) -> float | None:
        """Return the largest coordinate of bounding boxes `bbox: (batch, sequence, 4)`. The smallest is 0.

        It is an integer if the model looks coordinates up in a table, and a float if it computes with them. Return `None` for a model
        without bounding boxes.
        """
        rows = getattr(config, "max_2d_position_embeddings", None)
        return int(rows) - 1 if rows else None

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """Return the token that a head selects by a mask over the whole batch in transformers' code, or `None` for other heads."""
        return None

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor | None:
        """Return the padding mask `(batch, sequence) int64` that the model computes without one; `None` if it attends to all tokens."""
        return None

    def tokens_at_once(self, config: Any) -> int:
        """Return the number of tokens in a block that the model computes at once. Samples of traces are longer than two blocks."""
        return 0

    def image_size(self, config: Any, architecture: str) -> Any:
        """Return the config's image size in pixels: a number, a pair or a mapping. `None` means the image processor's size."""
        return getattr(config, "image_size", None)

    def tokens_around_images(self, config: Any) -> list[int]:
        """Return tokens that the processor writes around an image and that the model does not look up in its token embeddings."""
        return []

    # Methods for a trace

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a module with the same outputs as the model that can be traced."""
        return model

    def replacements(self, model: Any) -> list[Replacement]:
        """Return attributes of other objects to replace while the transformers model is traced."""
        return []

    def sample(self, model: Any, sample: Sample) -> Sample:
        """Return the sample inputs of a trace, changed for the family."""
        return sample

    def fill(self, feeds: Tensors, config: Any) -> None:
        """Change random inputs in place so that the model accepts them."""

    def max_sizes(self, model: Any, axes: Axes) -> dict[str, int]:
        """Return the largest sizes of axes that the general code cannot read from the config and the position tables."""
        return {}

    def parts(self, model: torch.nn.Module, example: Tensors, axes: Axes) -> tuple[ModelPart, ...]:
        """Return the graphs of a model that has several and does not generate."""
        return ()

    def image_features(self, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `(tokens, hidden)` of one image or tile `(1, channels, height, width)` in a prompt."""
        output = model.get_image_features(pixel_values=pixel_values)
        output = getattr(output, "pooler_output", output)
        features: torch.Tensor = output[0] if isinstance(output, list | tuple) else output
        return features.flatten(0, -2)

    def embeddings(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `(batch, sequence, hidden)` of a prompt's tokens."""
        embeddings: torch.Tensor = model.get_input_embeddings()(ids)
        return embeddings
