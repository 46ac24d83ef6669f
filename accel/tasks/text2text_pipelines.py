"""The pipelines of encoder-decoder text models that transformers 5 removed: text to text, summaries, translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..errors import ConfigError, InputError
from ..models.pipelines.task_defaults import GenerationPipeline

_TOKENIZER_OPTIONS = ("truncation", "max_length_input", "src_lang", "tgt_lang")
_OUTPUT_OPTIONS = ("clean_up_tokenization_spaces", "return_text", "return_tensors")


class Text2TextGenerationPipeline(GenerationPipeline):
    """Text to text with an encoder-decoder: `[{"generated_text": ...}]` a text.

    Every argument that is not `truncation`, `max_length_input`, `return_tensors`, `stop_sequence` or a language goes to `generate`.
    """

    return_name = "generated"
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    # As in transformers 4, where neither the caller nor the model's files say how much.
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)

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
        if (stop := kwargs.pop("stop_sequence", None)) is not None:
            kwargs["eos_token_id"] = self._token_of(stop)
        return before, kwargs, after

    def _token_of(self, stop: str) -> int:
        """The token that a `stop_sequence` is.

        Raises:
            ConfigError: It is none, or several.
        """
        tokens: list[int] = self.tokenizer.encode(stop, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"stop_sequence={stop!r} is {len(tokens)} tokens; it is one token.",
                fix="pass stop_strings=[...] and tokenizer=..., which `generate` takes, for longer ones.",
            )
        return tokens[0]

    def preprocess(
        self,
        text: str,
        truncation: bool | str = False,
        max_length_input: int | None = None,
        prefix: str | None = None,
    ) -> Mapping[str, Any]:
        """Tokenize one text, after a prefix, by default the model's for the task (T5's "summarize: ").

        Raises:
            InputError: It is no text.
        """
        _check_text(text)
        encoded = self.tokenizer(
            (self.prefix if prefix is None else prefix) + text,
            truncation=truncation,
            max_length=max_length_input,
            return_tensors="pt",
        )
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}

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
        prefix = None
        named = f"translation_{src_lang}_to_{tgt_lang}"
        if src_lang is not None and tgt_lang is not None and self.task != named:
            settings = self.task_settings(named)
            if not settings:
                raise ConfigError(
                    f"This model's tokenizer does not choose languages, so {src_lang!r} to {tgt_lang!r} cannot be asked for.",
                    fix="leave src_lang and tgt_lang out.",
                )
            prefix = settings.get("prefix", "")
        return super().preprocess(text, truncation, max_length_input, prefix)
