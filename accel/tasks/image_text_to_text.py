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

    Inputs are `input_ids: (batch, sequence)` and `pixel_values: (images, channels, height, width)`. Models that split images into tiles
    (Idefics3, SmolVLM) take `pixel_values: (batch, tiles, channels, height, width)`.
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
        """Prepare the inputs of a step. Images are passed only with the prompt `(batch, sequence)`; later the cache contains them."""
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
            input_ids: New tokens `(batch, new)`, which follow the cached tokens; image tokens mark the places of images.
            pixel_values: Images `(images, channels, height, width)` in the order of their tokens; or tiles `(batch, tiles, channels,
                height, width)` for models that split images into tiles, where all-zero tiles are padding.
            attention_mask: Mask `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: Position ids `(batch, new)`; computed when `None`.
            past_key_values: Cache returned by an earlier call; it is changed in place.
            use_cache: Whether to return the cache (default).
            logits_to_keep: Number of last tokens whose logits are computed, 0 for all; or a tensor of token indices.
            cache: Same as `past_key_values`, under its name in transformers 5.24.
            pixel_attention_mask: Mask `(batch, tiles, height, width)` for models with tiles; all ones in every tile that is not padding.
            **rest: Other arguments; they raise if they would change the result.

        Raises:
            InputError: The number of image tokens does not match the images, tiles are partly padded, or `ORTModelForCausalLM` would raise.
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
        """Replace the embeddings of image tokens by the features of the images."""
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
    """Return the tiles of a batch that are not padding, in order, and whether all of them are free of padding.

    Args:
        pixels: Tiles `(batch, tiles, channels, height, width)`; all-zero tiles are padding.
        mask: Mask `(batch, tiles, height, width)`, 0 for padding; no padding when `None`.

    Raises:
        InputError: The shape of the mask does not match.
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
