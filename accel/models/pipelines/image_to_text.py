"""Captions and text recognition with an encoder-decoder of images, whose pipeline transformers 5 removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.image_utils import load_image
from transformers.pipelines.base import Pipeline

from ...errors import ConfigError


class ImageToTextPipeline(Pipeline):  # type: ignore[misc]  # transformers is untyped here
    """The text of each image, in the shape that transformers 4 had: `[{"generated_text": ...}]`, and a list of such for a list."""

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = True
    # What transformers 4 wrote at most where neither the caller nor the model said how much.
    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        """Read each image: paths, URLs or `PIL.Image`s.

        Args:
            images: One or a list.
            **kwargs: `max_new_tokens`, `generate_kwargs` for any other setting of `generate`, `timeout` in seconds for images from
                the web, `batch_size`.

        Raises:
            ConfigError: `max_new_tokens` was given twice, or a prompt, which these models do not read.
        """
        return super().__call__(images, **kwargs)

    def _sanitize_parameters(
        self,
        max_new_tokens: int | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if prompt is not None:
            raise ConfigError(
                "An encoder-decoder of images reads no prompt.",
                fix="leave prompt out, or use a model of images and text with the pipeline 'image-text-to-text'.",
            )
        settings = dict(generate_kwargs or {})
        if max_new_tokens is not None:
            if "max_new_tokens" in settings:
                raise ConfigError("max_new_tokens was given twice.", fix="leave it out of generate_kwargs.")
            settings["max_new_tokens"] = max_new_tokens
        return {} if timeout is None else {"timeout": timeout}, settings, {}

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, Any]:
        """Read one image."""
        picture = load_image(image, timeout=timeout)
        inputs: dict[str, Any] = self.image_processor(images=picture, return_tensors="pt").to(self.dtype)
        return {"pixel_values": inputs["pixel_values"]}

    def _forward(self, inputs: Mapping[str, Any], **generate: Any) -> Mapping[str, Any]:
        batch = inputs["pixel_values"].shape[0]
        tokens = self.model.generate(**inputs, **self._prepare_generate_kwargs(generate))
        return {"output_ids": tokens.reshape(batch, tokens.shape[0] // batch, *tokens.shape[1:])}

    def postprocess(self, outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each answer as text."""
        answers = outputs["output_ids"][0]
        return [{"generated_text": self.tokenizer.decode(tokens, skip_special_tokens=True)} for tokens in answers]
