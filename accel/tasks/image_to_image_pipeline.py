"""Images made of images, such as larger ones, which transformers 5 removed."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.image_utils import load_image
from transformers.pipelines.base import Pipeline

from ..errors import ConfigError
from ..models.pipelines.empty_inputs import check_not_empty


class ImageToImagePipeline(Pipeline):  # type: ignore[misc]  # transformers is untyped here
    """An image made of each image, in the shape that transformers 4 had: a `PIL.Image`, or a list of them.

    What a processor pads an image with is cut off again, which transformers 4 left in.
    """

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = False

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """Make an image of each: paths, URLs or `PIL.Image`s.

        Args:
            images: One or a list.
            **kwargs: `timeout` in seconds for images from the web; `batch_size`.
        """
        return super().__call__(images, **kwargs)

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        unknown = set(kwargs) - {"timeout"}
        if unknown:
            raise ConfigError(f"The pipeline has no option {sorted(unknown)}.", fix="use timeout=...")
        return kwargs, {}, {}

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, Any]:
        """Read one image.

        Raises:
            InputError: It has no pixels.
        """
        picture = load_image(image, timeout=timeout)
        check_not_empty(picture)
        inputs: dict[str, Any] = self.image_processor(images=[picture], return_tensors="pt").to(self.dtype)
        inputs["size"] = [(picture.height, picture.width)]
        return inputs

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:
        size = model_inputs.pop("size")
        made = self.model(**model_inputs)["reconstruction"]
        times = made.shape[-1] // model_inputs["pixel_values"].shape[-1]
        return {"reconstruction": made, "size": [(height * times, width * times) for height, width in size]}

    def postprocess(self, model_outputs: dict[str, Any]) -> Any:
        """The image without its padding, values from 0 to 1 as 0 to 255."""
        from PIL import Image

        ((height, width),) = model_outputs["size"]
        found = model_outputs["reconstruction"][0, :, :height, :width].float().cpu().clamp(0, 1).numpy()
        pixels = (np.moveaxis(found, 0, -1) * 255).round().astype(np.uint8)
        # Of one channel, pillow takes no axis for it.
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
