"""Text generation about images in the prompt."""

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
    """Text from a prompt with images in it: `input_ids: (batch, sequence)`, `pixel_values: (images, channels, height, width)`, or
    `(batch, tiles, channels, height, width)` for models that read images as tiles (Idefics3, SmolVLM).
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
        """The tokens."""
        return "input_ids"

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:  # transformers' signature
        """Images are read with the prompt `(batch, sequence)`; behind it the cache holds them."""
        images = {name: kwargs.pop(name) for name in _IMAGES if kwargs.get(name) is not None}
        made: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if is_first_iteration or made.get(CACHE_NAME) is None:
            made |= images
        return made

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
        """Run the vision tower over the images, if any, then the decoder once.

        Args:
            input_ids: `(batch, new)` tokens behind those in the cache, with the image token where images stand.
            pixel_values: `(images, channels, height, width)`, in the order of their tokens; `(batch, tiles, channels, height,
                width)` for models that read tiles, where a tile of zeros is none.
            attention_mask: `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: `(batch, new)`; behind the cached ones when `None`.
            past_key_values: What an earlier call returned; continued in place.
            use_cache: Whether to return the cache (default).
            logits_to_keep: How many of the last logits to compute, 0 for all; or their positions.
            cache: `past_key_values` by its name in transformers 5.24.
            pixel_attention_mask: `(batch, tiles, height, width)`, for models that read tiles: all ones in every tile that is one.
            **rest: Refused where it would change the result.

        Raises:
            InputError: Image tokens that are not as many as the images need, padded tiles, and what `ORTModelForCausalLM` refuses.
        """
        ids = self._ids(input_ids, rest)
        tokens = self._embed(ids)
        if pixel_values is not None:
            images = self._images(pixel_values, pixel_attention_mask)
            tokens = {_EMBEDS: self._with_images(tokens[_EMBEDS], ids, images)}
        past = one_cache(past_key_values, cache)
        return self._continued(tokens, attention_mask, position_ids, past, use_cache, logits_to_keep)

    def _images(self, pixel_values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The images, or the tiles that are not empty: `(images, channels, height, width)`."""
        pixel_values = tensor_of("pixel_values", pixel_values)
        tiled = family_of(self.config).tiles
        rank = 5 if tiled else 4
        if pixel_values.ndim != rank:
            raise InputError(
                f"pixel_values have {pixel_values.ndim} axes; a {self.config.model_type} takes {rank}: "
                f"({'batch, tiles' if tiled else 'images'}, channels, height, width).",
                fix="make prompt and images with one call of the model's processor.",
            )
        if not tiled:
            self._check_rest({"pixel_attention_mask": mask})
            return pixel_values
        tiles, whole = _whole_tiles(pixel_values, mask)
        if not whole:
            raise InputError(
                "pixel_attention_mask has zeros: tiles are padded, which the graph does not take.",
                fix="make prompt and images with one call of the model's processor, which resizes images to whole tiles.",
            )
        return tiles

    def _with_images(self, embeds: torch.Tensor, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """The embeddings with the images' features in the place of the image tokens."""
        read = [self._vision.run({"pixel_values": image[None]})["image_features"] for image in pixel_values]
        features = torch.cat(read) if read else embeds.new_empty((0, embeds.shape[-1]))
        places = input_ids == self.config.image_token_id
        if int(places.sum()) != len(features):
            raise InputError(
                f"The prompt has {int(places.sum())} image tokens; {len(pixel_values)} images need {len(features)}.",
                fix="make prompt and images with one call of the model's processor.",
            )
        ends = {0, *itertools.accumulate(map(len, read))}
        for row, end in enumerate(places.sum(1).cumsum(0).tolist()):
            if end not in ends:
                raise InputError(
                    f"The image tokens of row {row} end within an image: a row would hold a part of another row's image.",
                    fix="make prompt and images with one call of the model's processor, and do not truncate image tokens.",
                )
        return embeds.masked_scatter(places.unsqueeze(-1).to(embeds.device), features.to(embeds.dtype))


def _whole_tiles(pixels: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The tiles of a batch that are not empty, in their order, and whether none of them is padded.

    Args:
        pixels: `(batch, tiles, channels, height, width)`; a tile of zeros is none.
        mask: `(batch, tiles, height, width)`, 0 for padding; no padding when `None`.

    Raises:
        InputError: A mask of other tiles.
    """
    if mask is not None and mask.shape != (*pixels.shape[:2], *pixels.shape[3:]):
        raise InputError(
            f"pixel_attention_mask is {tuple(mask.shape)}, and pixel_values are {tuple(pixels.shape)}.",
            fix="make both with one call of the model's processor, or leave the mask out where no tile is padded.",
        )
    tiles = pixels.flatten(0, 1)
    there = (tiles != 0).flatten(1).any(1)
    return tiles[there], mask is None or bool(mask.flatten(0, 1)[there].all())


class ImageTextToText(Task):
    """Text generation about images in the prompt."""

    model = ORTModelForImageTextToText

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return vision_language(source, fusion)
