"""Pipeline `image-to-image`, which transformers 5 removed."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.image_utils import load_image
from transformers.pipelines.base import Pipeline

from ..config import check_names
from ..models.pipelines.empty_media_check import check_not_empty


class ImageToImagePipeline(Pipeline):  # type: ignore[misc]  # transformers is untyped here
    """Pipeline that generates an image from each input image. It returns a `PIL.Image`, or a list for a list, as in transformers 4.

    The pipeline removes the padding that the processor adds; the images of transformers 4 contained this padding.
    """

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = False

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """Generate an image from each input image.

        Args:
            images: One image or a list of images, each a path, a URL or a `PIL.Image`.
            **kwargs: `timeout` in seconds for downloads of images; `batch_size`.
        """
        return super().__call__(images, **kwargs)

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        check_names("The pipeline 'image-to-image'", "option", kwargs, ("timeout",))
        return kwargs, {}, {}

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, Any]:
        """Load and preprocess one image.

        Raises:
            InputError: The image has no pixels.
        """
        picture = load_image(image, timeout=timeout)
        check_not_empty(picture)
        inputs: dict[str, Any] = self.image_processor(images=[picture], return_tensors="pt").to(self.dtype)
        inputs["size"] = [(picture.height, picture.width)]
        return inputs

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        size = model_inputs.pop("size")
        images = self.model(**model_inputs)["reconstruction"]
        times = images.shape[-1] // model_inputs["pixel_values"].shape[-1]
        return {"reconstruction": images, "size": [(height * times, width * times) for height, width in size]}

    def postprocess(self, model_outputs: dict[str, Any]) -> Any:
        """Convert the output to an image without padding; values from 0 to 1 become 0 to 255."""
        from PIL import Image

        ((height, width),) = model_outputs["size"]
        values = model_outputs["reconstruction"][0, :, :height, :width].float().cpu().clamp(0, 1).numpy()
        pixels = (np.moveaxis(values, 0, -1) * 255).round().astype(np.uint8)
        # Pillow needs arrays without a channel axis for images with one channel.
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
