"""Task `text2text-generation`: text generation with encoder-decoders, such as summarization and translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder
from ..serving.operations import READS_TEXT, Operation


class ORTModelForSeq2SeqLM(EncoderDecoder):
    """Encoder-decoder model for translation, summarization and other text-to-text generation."""

    task = "text2text-generation"

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Generate text with transformers' `generate`.

        The argument `tgt_lang` is supported for models whose generation config lists languages, such as SeamlessM4T.

        Raises:
            InputError: The model does not support the language, or the prompt is invalid; see `Generator.generate`.
        """
        language = kwargs.pop("tgt_lang", None)
        if language is not None:
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            count = 1 if ids is None else len(ids)
            kwargs["decoder_input_ids"] = torch.tensor([[self._token_of(language)]] * count, device=self.device)
        return super().generate(inputs, generation_config, **kwargs)

    def _token_of(self, language: str) -> int:
        """Return the decoder's start token for a language, named as in the generation config (`eng`) or as a token (`__eng__`).

        Raises:
            InputError: The model's generation config does not list the language.
        """
        languages: Mapping[str, int] = getattr(self.generation_config, "text_decoder_lang_to_code_id", None) or {}
        name = language.replace("__", "")
        if name not in languages:
            raise InputError(
                f"tgt_lang is {language!r}, but the model's generation config has "
                f"{'the languages ' + ', '.join(languages) if languages else 'no languages'}.",
                fix="pass one of these languages as tgt_lang."
                if languages
                else "leave tgt_lang out of generate; set the attributes src_lang and tgt_lang of the tokenizer if it has them.",
            )
        return languages[name]


class Text2textGeneration(Task):
    """The task `text2text-generation`: text generation with encoder-decoders, such as summarization and translation."""

    model = ORTModelForSeq2SeqLM

    def pipeline(self, name: str) -> type[Any]:
        from .text2text_pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

        return {
            "text2text-generation": Text2TextGenerationPipeline,
            "summarization": SummarizationPipeline,
            "translation": TranslationPipeline,
        }[name]

    def operations(self) -> Sequence[Operation]:
        return (
            TextToTextOperation("summarization", "summary_text"),
            TextToTextOperation("translation", "translation_text"),
        )


class TextToTextOperation(Operation):
    """Operation that generates one text from another, such as a summary or a translation."""

    reads = READS_TEXT

    def __init__(self, name: str, key: str) -> None:
        super().__init__(name)
        self._key = key

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"text": pa.string()}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"text": answer[0][self._key]}
