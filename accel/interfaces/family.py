"""What an author of an architecture family implements. Everything has a default: the general way.

A family is a class in a module of its own (`accel/families/NAME.py`, an instance of it in `FAMILY`), listed by model type in
`accel/families/__init__.py`. It never calls `accel.capture`: its methods receive what capture made and return the changed thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Axes = Mapping[str, Mapping[int, str]]
"""Names of the axes that may vary, by input and position."""

Sample = tuple[Tensors, Axes, tuple[str, ...]]
"""Inputs for a trace, their axes, and the names of inputs that the model takes but ignores."""

Replacement = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and the value of that attribute while a model is traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One of several graphs of a model.

    Attributes:
        name: Of the graph.
        model: The module to trace.
        example: Its inputs.
        axes: Their axes.
    """

    name: str
    model: torch.nn.Module
    example: Tensors
    axes: Axes


class Family:
    """How the models of a family are read, where that differs from the general way.

    Attributes:
        positions: How a decoder numbers tokens if it is given no position ids: by their place in the row, by the mask (padding is
            not counted), or by the tokens themselves (padding tokens are not counted, and numbers start after `pad_token_id`).
        recomputes_long_texts: Whether `generate` computes all keys again when a text exceeds the original positions (LongRoPE).
        any_image_size: Whether a graph may take images of several sizes, where the PyTorch model does.
        processor_sizes: Settings of the image processor that say the size of an image, the first one first.
        sounds_of_any_length: For speech encoder-decoders: whether the encoder reads sounds of any length with their padding mask.
        long_recordings: For speech encoder-decoders: whether `generate` goes through long recordings window by window.
        tiles: Whether an image is several tiles: `pixel_values: (batch, tiles, channels, height, width)`.
        fixed_text_length: Length in tokens that all texts next to an image are padded to; `None` for the longest of the batch.
        metric_depth: Whether depths are in metres although the config does not say so.
    """

    positions: Literal["place", "mask", "tokens"] = "place"
    recomputes_long_texts: bool = False
    any_image_size: bool = True
    processor_sizes: Sequence[str] = ("crop_size", "size")
    sounds_of_any_length: bool = False
    long_recordings: bool = False
    tiles: bool = False
    fixed_text_length: int | None = None
    metric_depth: bool = False

    # From a config alone, which may be a `config.json`

    def first_position(self, config: Mapping[str, Any]) -> int:
        """Rows in front of a table of positions that no token has."""
        return 0

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """The token that a head of transformers' own code selects by a mask over the whole batch; `None` for other heads."""
        return None

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor | None:
        """The padding mask `(batch, sequence) int64` of a call without one; `None` where every token is attended to."""
        return None

    def tokens_at_once(self, config: Any) -> int:
        """Tokens that a model computes together: a trace needs texts of two such blocks and a part of one."""
        return 0

    def image_size(self, config: Any, architecture: str) -> Any:
        """Pixels that the config says: a number, a pair or a mapping; `None` leaves it to the image processor."""
        return getattr(config, "image_size", None)

    def tokens_around_images(self, config: Any) -> list[int]:
        """Tokens that the processor writes around an image and the model looks up elsewhere."""
        return []

    # For a trace

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """A module in place of the model, with the same answers, that a trace can follow."""
        return model

    def replacements(self, model: Any) -> list[Replacement]:
        """Attributes that have other values while the model, transformers' own, is traced."""
        return []

    def sample(self, model: Any, sample: Sample) -> Sample:
        """The inputs for a trace."""
        return sample

    def fill(self, feeds: Tensors, config: Any) -> None:
        """Change random inputs, in place, to inputs that the model answers."""

    def max_sizes(self, model: Any, axes: Axes) -> dict[str, int]:
        """Largest sizes of axes that the model's config and tables do not tell."""
        return {}

    def parts(self, model: torch.nn.Module, example: Tensors, axes: Axes) -> tuple[ModelPart, ...]:
        """The graphs of a model that has several and does not generate."""
        return ()

    def image_features(self, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embeddings `(tokens, hidden)` of one image or tile `(1, channels, height, width)` in a prompt."""
        found = model.get_image_features(pixel_values=pixel_values)
        found = getattr(found, "pooler_output", found)
        features: torch.Tensor = found[0] if isinstance(found, list | tuple) else found
        return features.flatten(0, -2)

    def embeddings(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `(batch, sequence, hidden)` of the tokens of a prompt."""
        found: torch.Tensor = model.get_input_embeddings()(ids)
        return found
