"""Pipelines of encoder-decoder text models that transformers 5 removed: text2text-generation, summarization, translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..errors import ConfigError, InputError
from ..models.pipelines.generation_pipeline_base import GenerationPipeline
from ..upstream.pipeline_internals import inputs_for_translation

_TOKENIZER_OPTIONS = ("truncation", "max_length_input", "src_lang", "tgt_lang")
_OUTPUT_OPTIONS = ("clean_up_tokenization_spaces", "return_text", "return_tensors")


class Text2TextGenerationPipeline(GenerationPipeline):
    """Pipeline `text2text-generation`: returns `[{"generated_text": ...}]` per text.

    All arguments except `truncation`, `max_length_input`, `return_tensors`, `stop_sequence` and languages are passed to `generate`.
    """

    return_name = "generated"
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True
    # Defaults of transformers 4. A setting is used only if neither the caller nor the model's files set it.
    _default_generation_config = GenerationConfig(max_new_tokens=256, num_beams=4)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Generate from one text or a list of texts.

        Raises:
            InputError: An input is not a text, or is empty.
        """
        texts = [inputs] if isinstance(inputs, str) else inputs
        if isinstance(texts, list):
            for text in texts:
                _check_text(text)
        results = super().__call__(inputs, **kwargs)
        # As in transformers 4, a text with a single result gives one dictionary instead of a list.
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
        """Return the token id of a `stop_sequence`.

        Raises:
            ConfigError: The stop sequence is not exactly one token.
        """
        tokens: list[int] = self.tokenizer.encode(stop, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"stop_sequence={stop!r} consists of {len(tokens)} tokens, but a stop sequence must be exactly one token.",
                fix="pass stop_strings=[...] and tokenizer=... to generate, which stop at longer texts.",
            )
        return tokens[0]

    def preprocess(
        self,
        text: str,
        truncation: bool | str = False,
        max_length_input: int | None = None,
        prefix: str | None = None,
    ) -> Mapping[str, Any]:
        """Tokenize one text with a prefix in front. The default is the model's prefix for the task, such as "summarize: " for T5.

        Raises:
            InputError: The input is not a text, or is empty.
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
        return_text: bool = True,  # unused argument of transformers 4
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the generated sequences as texts, or as token ids under `<name>_token_ids`."""
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
    """Raise for inputs that are not texts, and for empty texts.

    Raises:
        InputError: The input is not a text, or is empty.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            f"An input is {text!r:.100}, but every input must be a string that is not empty.",
            fix="pass a string or a list of strings, and remove empty strings.",
        )


class SummarizationPipeline(Text2TextGenerationPipeline):
    """Pipeline `summarization`: returns `[{"summary_text": ...}]` per text."""

    return_name = "summary"


class TranslationPipeline(Text2TextGenerationPipeline):
    """Pipeline `translation`: returns `[{"translation_text": ...}]` per text.

    For multilingual models, pass `src_lang` and `tgt_lang` with the language names of the model's tokenizer. The task name
    `translation_xx_to_yy` also sets both languages.
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
        """Tokenize one text with its source and target language.

        Raises:
            ConfigError: Languages were passed, but the tokenizer does not support them.
            InputError: The input is not a text, or is empty.
        """
        _check_text(text)
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        if (inputs := inputs_for_translation(self.tokenizer, text, truncation=truncation, **languages)) is not None:
            return inputs
        prefix = None
        named = f"translation_{src_lang}_to_{tgt_lang}"
        if src_lang is not None and tgt_lang is not None and self.task != named:
            settings = self.task_settings(named)
            if not settings:
                raise ConfigError(
                    f"src_lang={src_lang!r} and tgt_lang={tgt_lang!r} are not supported by this model: its tokenizer has no languages, and "
                    f"its config has no prefix for {named!r}.",
                    fix="leave src_lang and tgt_lang out, or use a multilingual model.",
                )
            prefix = settings.get("prefix", "")
        return super().preprocess(text, truncation, max_length_input, prefix)
