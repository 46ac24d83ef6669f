"""Base class of model families. The default of each method works for most architectures.

A family is a class in its own module `accel/families/NAME.py`, and `FAMILY` in this module is an instance of the class.
`accel/families/__init__.py` maps model types to these modules. A family never imports `accel.capture`. Its methods get objects from
`accel.capture` and return changed objects.
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
"""An object, the name of one of its attributes, and the value of this attribute during a trace."""


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
    """Settings and methods in which the models of a family differ from most architectures.

    Attributes:
        positions: How a decoder computes position ids if the caller passes none. `place` counts all tokens of a row. `mask` counts
            the tokens with 1 in the mask. `tokens` counts the tokens that are not the padding token, and starts after `pad_token_id`.
        recomputes_long_texts: Whether `generate` computes all keys again when a text becomes longer than the original number of
            positions (LongRoPE).
        processor_sizes: Names of image processor settings with the image size. The first setting that exists is used.
        sounds_of_any_length: For speech encoder-decoders: whether the encoder reads audio of any length with a padding mask.
        long_recordings: For speech encoder-decoders: whether `generate` processes long audio in several windows.
        tiles: Whether the processor splits an image into tiles, so that `pixel_values` is
            `(batch, tiles, channels, height, width)`.
        fixed_text_length: Number of tokens to which texts are padded in models of images and texts. `None` pads to the longest text
            of the batch.
        metric_depth: Whether the depth in the outputs is in metres although the config does not contain the unit.
        required_inputs: Names of inputs that callers must pass for this family, although other families have a default for them. The
            values are the texts after `Fix:` in the error message.
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

    # The following methods need only the model's config. It may be the content of a `config.json`.

    def first_position(self, config: Mapping[str, Any]) -> int:
        """Return the number of rows at the start of the position table that no token uses."""
        return 0

    def largest_box(self, config: Any) -> float | None:
        """Return the largest coordinate of bounding boxes `bbox: (batch, sequence, 4)`, or `None` for a model without bounding boxes.

        The result is an integer if coordinates are indices of an embedding table, and a float if the model computes with them. The
        smallest coordinate is always 0.
        """
        rows = getattr(config, "max_2d_position_embeddings", None)
        return int(rows) - 1 if rows else None

    def row_token(self, architecture: str, config: Mapping[str, Any]) -> int | None:
        """Return the id of the token whose hidden state the model's head reads, or `None` if the head does not search for a token.

        transformers' code searches for the token in the complete batch. So a graph of this code gives wrong results if a row does not
        contain the token, or if the rows contain the token a different number of times.
        """
        return None

    def default_mask(self, ids: torch.Tensor, config: Any) -> torch.Tensor | None:
        """Return the mask `(batch, sequence) int64` that the PyTorch model uses if the caller passes no attention mask.

        `None` means that the model attends to all tokens.
        """
        return None

    def tokens_at_once(self, config: Any) -> int:
        """Return the block size in tokens, for models that process texts in blocks. Sample texts of a trace are longer than two blocks."""
        return 0

    def image_size(self, config: Any, architecture: str) -> Any:
        """Return the image size in pixels from the config, as a number, a pair or a mapping.

        `None` means that the image size of the image processor is used.
        """
        return getattr(config, "image_size", None)

    def tokens_around_images(self, config: Any) -> list[int]:
        """Return the ids of tokens around an image whose embeddings are not in the model's table of token embeddings."""
        return []

    # The following methods change a model or its sample inputs for a trace.

    def traced_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a module that can be traced and has the same outputs as the model."""
        return model

    def replacements(self, model: Any) -> list[Replacement]:
        """Return the attributes of modules, classes or functions that are replaced while the model is traced."""
        return []

    def sample(self, model: Any, sample: Sample) -> Sample:
        """Return the sample inputs of a trace, changed for the family."""
        return sample

    def fill(self, feeds: Tensors, config: Any) -> None:
        """Change random sample inputs in place so that the model accepts them."""

    def max_sizes(self, model: Any, axes: Axes) -> dict[str, int]:
        """Return the largest size of each axis whose limit is neither in the config nor in a position table."""
        return {}

    def parts(self, model: torch.nn.Module, example: Tensors, axes: Axes) -> tuple[ModelPart, ...]:
        """Return the parts of a model that is exported as several graphs and does not generate text."""
        return ()

    def image_features(self, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `(tokens, hidden)` that replace the image tokens of a prompt.

        `pixel_values` is one image or one tile, `(1, channels, height, width)`.
        """
        output = model.get_image_features(pixel_values=pixel_values)
        output = getattr(output, "pooler_output", output)
        features: torch.Tensor = output[0] if isinstance(output, list | tuple) else output
        return features.flatten(0, -2)

    def embeddings(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `(batch, sequence, hidden)` of a prompt's tokens."""
        embeddings: torch.Tensor = model.get_input_embeddings()(ids)
        return embeddings
