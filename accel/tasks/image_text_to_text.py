"""Task `image-text-to-text`: text generation from prompts that contain images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..capture.generation_graphs import vision_language
from ..decoding.kv_cache import StateCache, one_cache
from ..errors import InputError
from ..interfaces.family_registry import family_of
from ..interfaces.protocols import Feeds
from ..interfaces.task import Task
from ..models.generation_mixin import Generator, tensor_of
from ..models.outputs import numpy_too
from ..upstream.cache_names import CACHE_NAME

_EMBEDS = "inputs_embeds"
_IMAGES = ("pixel_values", "pixel_attention_mask")


class ORTModelForImageTextToText(Generator):
    """Vision-language model that generates text from a prompt with images.

    Inputs are `input_ids: (batch, sequence)` and `pixel_values: (images, channels, height, width)`. For models that split images into tiles
    (Idefics3, SmolVLM), the second input is `pixel_values: (batch, tiles, channels, height, width)`.
    """

    task = "image-text-to-text"
    _decoder = "model"

    def _open(self) -> None:
        super()._open()
        self._vision, self._embedding = self._opened.sessions["vision"], self._opened.sessions["embedding"]

    def _embed(self, ids: torch.Tensor) -> Feeds:
        return {_EMBEDS: self._embedding.run({"input_ids": ids})[_EMBEDS]}

    @property
    def main_input_name(self) -> str:
        """Name of the main input, the token ids."""
        return "input_ids"

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Prepare the inputs of a decoder step.

        With a KV cache, only the first step, which processes the prompt `(batch, sequence)`, has images; later steps read them from the
        cache. Without a KV cache, every step has the images.
        """
        images = {name: kwargs.pop(name) for name in _IMAGES if kwargs.get(name) is not None}
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if is_first_iteration or prepared.get(CACHE_NAME) is None:
            prepared |= images
        return prepared

    @numpy_too
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: StateCache | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        **rest: Any,
    ) -> Any:
        """Run the vision encoder on the images, if any, then run the decoder once.

        Args:
            input_ids: New tokens `(batch, new)`, which follow the cached tokens. Image tokens are replaced by the images' features.
            pixel_values: Images `(images, channels, height, width)` in the order of their tokens; or tiles `(batch, tiles, channels,
                height, width)` for models that split images into tiles, where all-zero tiles are padding.
            attention_mask: Mask `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: Position ids `(batch, new)`; computed when `None`.
            past_key_values: Cache returned by an earlier call; it is changed in place.
            use_cache: Whether to return the cache (default).
            logits_to_keep: Number of last tokens whose logits are computed, 0 for all; or a tensor of token indices.
            cache: The name of `past_key_values` in transformers 5.24.
            pixel_attention_mask: Mask `(batch, tiles, height, width)` for models with tiles; all ones in every tile that is not padding.
            **rest: Other arguments of the transformers model; an error is raised if an argument would change the result.

        Raises:
            InputError: The number of image tokens does not match the images, a tile is partly padded, or the text inputs or the cache are
                invalid.
        """
        ids = self._ids(input_ids, rest)
        tokens = self._embed(ids)
        if pixel_values is not None:
            images = self._images(pixel_values, pixel_attention_mask)
            tokens = {_EMBEDS: self._with_images(tokens[_EMBEDS], ids, images)}
        past = one_cache(past_key_values, cache)
        return self._continued(tokens, attention_mask, position_ids, past, use_cache, logits_to_keep)

    def _images(self, pixel_values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the images, or the tiles that are not padding: `(images, channels, height, width)`."""
        pixel_values = tensor_of("pixel_values", pixel_values)
        tiled = family_of(self.config).tiles
        rank = 5 if tiled else 4
        if pixel_values.ndim != rank:
            raise InputError(
                f"pixel_values has {pixel_values.ndim} axes, but a {self.config.model_type} model needs {rank} axes: "
                f"({'batch, tiles' if tiled else 'images'}, channels, height, width).",
                fix="call the model's processor with the prompt and the images, and pass everything that it returns.",
            )
        if not tiled:
            self._check_rest({"pixel_attention_mask": mask})
            return pixel_values
        tiles, complete = _whole_tiles(pixel_values, mask)
        if not complete:
            raise InputError(
                "pixel_attention_mask has zeros inside of tiles, so some tiles are partly padded, which the graph does not support.",
                fix="call the model's processor with the prompt and the images; it resizes images to complete tiles.",
            )
        return tiles

    def _with_images(self, embeds: torch.Tensor, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """Replace the embeddings of image tokens by the features of the images."""
        by_image = [self._vision.run({"pixel_values": image[None]})["image_features"] for image in pixel_values]
        features = torch.cat(by_image) if by_image else embeds.new_empty((0, embeds.shape[-1]))
        is_image = input_ids == self.config.image_token_id
        if int(is_image.sum()) != len(features):
            raise InputError(
                f"The prompt has {int(is_image.sum())} image tokens, but {len(pixel_values)} images need {len(features)} image tokens.",
                fix="call the model's processor with the prompt and the images, and pass everything that it returns.",
            )
        ends = {0, *itertools.accumulate(map(len, by_image))}
        for row, end in enumerate(is_image.sum(1).cumsum(0).tolist()):
            if end not in ends:
                raise InputError(
                    f"The number of image tokens in row {row} does not match complete images, so a part of an image would be used for "
                    "the next row.",
                    fix="call the model's processor with the prompt and the images, and do not truncate its input_ids.",
                )
        return embeds.masked_scatter(is_image.unsqueeze(-1).to(embeds.device), features.to(embeds.dtype))


def _whole_tiles(pixels: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """Return two values: the tiles of a batch that are not padding, in order, and whether none of these tiles is partly padded.

    Args:
        pixels: Tiles `(batch, tiles, channels, height, width)`; all-zero tiles are padding.
        mask: Mask `(batch, tiles, height, width)`, 0 for padding; no padding when `None`.

    Raises:
        InputError: The shape of the mask does not match.
    """
    if mask is not None and mask.shape != (*pixels.shape[:2], *pixels.shape[3:]):
        raise InputError(
            f"pixel_attention_mask has the shape {tuple(mask.shape)}, which does not match pixel_values of shape {tuple(pixels.shape)}.",
            fix="create both with one call of the model's processor, or leave pixel_attention_mask out if no tile is padded.",
        )
    tiles = pixels.flatten(0, 1)
    not_padding = (tiles != 0).flatten(1).any(1)
    return tiles[not_padding], mask is None or bool(mask.flatten(0, 1)[not_padding].all())


class ImageTextToText(Task):
    """The task `image-text-to-text`: text generation from prompts that contain images."""

    model = ORTModelForImageTextToText

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return vision_language(source, fusion)

    def tiny_batch(self, config: Any, rows: int, draw: torch.Generator, texts: Any) -> dict[str, torch.Tensor]:
        batch, marks = texts(rows), torch.full((rows, 4), config.image_token_id)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        ids = torch.cat([ids[:, :5], marks, ids[:, 5:]], dim=1)
        mask = torch.cat([mask[:, :5], torch.ones_like(marks), mask[:, 5:]], dim=1)
        pixels = torch.randn((rows, 3, 16, 16), generator=draw)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
