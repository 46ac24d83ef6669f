"""Captions and text recognition with an encoder-decoder of images, whose pipeline transformers 5 removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.image_utils import load_image

from ..errors import ConfigError
from ..models.pipelines.empty_inputs import check_not_empty
from ..models.pipelines.task_defaults import GenerationPipeline
from ..models.single_prompt import asked_of

# With the mask of patches that are padding.
_READ = ("pixel_values", "flattened_patches", "attention_mask")


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class ImageToTextPipeline(GenerationPipeline):
    """The text of each image, in the shape that transformers 4 had: `[{"generated_text": ...}]`, and a list of such for a list."""

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = True
    # What transformers 4 wrote at most where neither the caller nor the model said how much.
    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """Read each image: paths, URLs or `PIL.Image`s.

        Args:
            images: One or a list.
            **kwargs: `max_new_tokens`, `generate_kwargs` for any other setting of `generate`, `timeout` in seconds for images from
                the web, `batch_size`; `prompt`, the question that a Pix2Struct model for questions reads above the image.

        Raises:
            ConfigError: `max_new_tokens` was given twice, a prompt for a model that reads none, or none for one that does.
        """
        return super().__call__(images, **kwargs)

    def _sanitize_parameters(
        self,
        max_new_tokens: int | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        settings = dict(generate_kwargs or {})
        if max_new_tokens is not None:
            if "max_new_tokens" in settings:
                raise ConfigError("max_new_tokens was given twice.", fix="leave it out of generate_kwargs.")
            settings["max_new_tokens"] = max_new_tokens
        return _set(timeout=timeout, prompt=prompt), settings, {}

    def preprocess(self, image: Any, timeout: float | None = None, prompt: str | None = None) -> dict[str, Any]:
        """Read one image.

        Raises:
            InputError: It has no pixels.
        """
        asked = asked_of(self.image_processor, prompt)
        picture = load_image(image, timeout=timeout)
        check_not_empty(picture)
        inputs: dict[str, Any] = self.image_processor(images=picture, return_tensors="pt", **asked).to(self.dtype)
        return {name: inputs[name] for name in _READ if name in inputs}

    def postprocess(self, outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each answer as text."""
        answers = outputs["output_ids"][0]
        return [{"generated_text": self.tokenizer.decode(tokens, skip_special_tokens=True)} for tokens in answers]
