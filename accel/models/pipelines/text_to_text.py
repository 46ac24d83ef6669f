"""The pipelines of encoder-decoder text models that transformers 5 removed: text to text, summaries, translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.pipelines.base import Pipeline

from ...errors import ConfigError, InputError

_TOKENIZER_OPTIONS = ("truncation", "max_length_input", "src_lang", "tgt_lang")
_OUTPUT_OPTIONS = ("clean_up_tokenization_spaces", "return_text", "return_tensors")


class Text2TextGenerationPipeline(Pipeline):  # type: ignore[misc]  # transformers is untyped here
    """Text to text with an encoder-decoder: `[{"generated_text": ...}]` a text.

    Every argument that is not `truncation`, `max_length_input`, `return_tensors` or a language goes to `generate`.
    """

    return_name = "generated"
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    _pipeline_calls_generate = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        specific = getattr(self.model.config, "task_specific_params", None) or {}
        settings = specific.get(self.task) or {}
        self.prefix = settings.get("prefix") or getattr(self.model.config, "prefix", None) or ""

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """One text or a list of texts.

        Raises:
            InputError: Something else, or an empty text.
        """
        texts = [inputs] if isinstance(inputs, str) else inputs
        if isinstance(texts, list):
            for text in texts:
                _check_text(text)
        results = super().__call__(inputs, **kwargs)
        # One text with one answer is a list of one, as it was in transformers 4.
        if isinstance(inputs, list) and all(isinstance(result, list) and len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before = {name: kwargs.pop(name) for name in _TOKENIZER_OPTIONS if name in kwargs}
        after = {name: kwargs.pop(name) for name in _OUTPUT_OPTIONS if name in kwargs}
        return before, kwargs, after

    def preprocess(
        self, text: str, truncation: bool | str = False, max_length_input: int | None = None
    ) -> Mapping[str, Any]:
        """Tokenize one text, behind the model's prefix for the task (T5's "summarize: ").

        Raises:
            InputError: It is no text.
        """
        _check_text(text)
        encoded = self.tokenizer(
            self.prefix + text, truncation=truncation, max_length=max_length_input, return_tensors="pt"
        )
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}

    def _forward(self, inputs: Mapping[str, Any], **generate: Any) -> Mapping[str, Any]:
        batch = inputs["input_ids"].shape[0]
        tokens = self.model.generate(**inputs, **self._prepare_generate_kwargs(generate))
        return {"output_ids": tokens.reshape(batch, tokens.shape[0] // batch, *tokens.shape[1:])}

    def postprocess(
        self,
        outputs: Mapping[str, Any],
        return_tensors: bool = False,
        return_text: bool = True,  # an argument of transformers 4
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Answers as text, or as `<name>_token_ids`."""
        records = []
        for tokens in outputs["output_ids"][0]:
            if return_tensors:
                records.append({f"{self.return_name}_token_ids": tokens})
                continue
            text = self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            )
            records.append({f"{self.return_name}_text": text})
        return records


def _check_text(text: Any) -> None:
    """Refuse what is no text, or an empty one.

    Raises:
        InputError: It is one of these.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError("Every input must be a text that is not empty.", fix="pass a string or a list of strings.")


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Summaries: `[{"summary_text": ...}]` a text."""

    return_name = "summary"


class TranslationPipeline(Text2TextGenerationPipeline):
    """Translations: `[{"translation_text": ...}]` a text.

    Multilingual models take `src_lang` and `tgt_lang`, as their tokenizer names the languages; `translation_xx_to_yy` as
    the task sets them too.
    """

    return_name = "translation"

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before, generate, after = super()._sanitize_parameters(**kwargs)
        words = (self.task or "").split("_")
        if len(words) == 4 and words[2] == "to":
            before.setdefault("src_lang", words[1])
            before.setdefault("tgt_lang", words[3])
        return before, generate, after

    def preprocess(
        self,
        text: str,
        truncation: bool | str = False,
        max_length_input: int | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
    ) -> Mapping[str, Any]:
        """Tokenize one text in its language.

        Raises:
            ConfigError: Languages were named and the tokenizer knows none.
            InputError: It is no text.
        """
        _check_text(text)
        build = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build is not None:
            encoded = build(text, return_tensors="pt", truncation=truncation, src_lang=src_lang, tgt_lang=tgt_lang)
            return dict(encoded)
        settings = getattr(self.model.config, "task_specific_params", None) or {}
        named = f"translation_{src_lang}_to_{tgt_lang}"
        if src_lang is not None and tgt_lang is not None and self.task != named:
            if named not in settings:
                raise ConfigError(
                    f"This model's tokenizer does not choose languages, so {src_lang!r} to {tgt_lang!r} cannot be asked for.",
                    fix="leave src_lang and tgt_lang out.",
                )
            self.prefix = settings[named].get("prefix", "")
        return super().preprocess(text, truncation, max_length_input)
