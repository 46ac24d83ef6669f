"""Pipeline `image-to-text` (captions and text recognition with an encoder-decoder), which transformers 5 removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.image_utils import load_image

from ..errors import ConfigError
from ..models.pipelines.empty_media_check import check_not_empty
from ..models.pipelines.generation_pipeline_base import GenerationPipeline
from ..models.single_prompt import asked_of

# Names of the model's inputs. In this task, `attention_mask` marks which patches of the image are padding.
_READ = ("pixel_values", "flattened_patches", "attention_mask")


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class ImageToTextPipeline(GenerationPipeline):
    """Pipeline that generates text from images. The result of each image is `[{"generated_text": ...}]`, as in transformers 4."""

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = True
    # Default number of new tokens in transformers 4, used if neither the caller nor the model's generation config sets a limit.
    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """Generate text from images.

        Args:
            images: One image or a list of images, each a path, a URL or a `PIL.Image`.
            **kwargs: `max_new_tokens`; `generate_kwargs` for other arguments of `generate`; `timeout` in seconds for downloads of images;
                `batch_size`; `prompt`, the question for Pix2Struct question answering models, drawn above the image.

        Raises:
            ConfigError: `max_new_tokens` was passed twice, the model does not support prompts, or a required prompt is missing.
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
                raise ConfigError(
                    "max_new_tokens was passed twice: as an argument of the pipeline and in generate_kwargs.",
                    fix="remove max_new_tokens from generate_kwargs.",
                )
            settings["max_new_tokens"] = max_new_tokens
        return _set(timeout=timeout, prompt=prompt), settings, {}

    def preprocess(self, image: Any, timeout: float | None = None, prompt: str | None = None) -> dict[str, Any]:
        """Load and preprocess one image.

        Raises:
            InputError: The image has no pixels.
        """
        question = asked_of(self.image_processor, prompt)
        picture = load_image(image, timeout=timeout)
        check_not_empty(picture)
        inputs: dict[str, Any] = self.image_processor(images=picture, return_tensors="pt", **question).to(self.dtype)
        return {name: inputs[name] for name in _READ if name in inputs}

    def postprocess(self, outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Decode each generated sequence to text."""
        answers = outputs["output_ids"][0]
        return [{"generated_text": self.tokenizer.decode(tokens, skip_special_tokens=True)} for tokens in answers]
