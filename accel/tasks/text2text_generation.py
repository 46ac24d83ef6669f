"""Text generation by encoder-decoders: summarization, translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..interfaces.task import Task
from ..models.encoder_decoder import EncoderDecoder
from ..serving.operations import READS_TEXT, Operation


class ORTModelForSeq2SeqLM(EncoderDecoder):
    """Translation, summarization and other text to text."""

    task = "text2text-generation"

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' `generate`; with `tgt_lang` for models whose generation config has a token for each language (SeamlessM4T).

        Raises:
            InputError: A language that the model does not have, and what other generating models refuse.
        """
        language = kwargs.pop("tgt_lang", None)
        if language is not None:
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            count = 1 if ids is None else len(ids)
            kwargs["decoder_input_ids"] = torch.tensor([[self._token_of(language)]] * count, device=self.device)
        return super().generate(inputs, generation_config, **kwargs)

    def _token_of(self, language: str) -> int:
        """The token that the decoder starts with for a language, as its name or `__name__`.

        Raises:
            InputError: The model's generation config has none.
        """
        known: Mapping[str, int] = getattr(self.generation_config, "text_decoder_lang_to_code_id", None) or {}
        name = language.replace("__", "")
        if name not in known:
            raise InputError(
                f"tgt_lang is {language!r}; the model's generation config names {', '.join(known) or 'no languages'}.",
                fix="pass one of these."
                if known
                else "leave tgt_lang out; the tokenizer may have src_lang and tgt_lang.",
            )
        return known[name]


class Text2textGeneration(Task):
    """Text generation by encoder-decoders: summarization, translation."""

    model = ORTModelForSeq2SeqLM

    def pipeline(self, name: str) -> type[Any]:
        from .text2text_pipelines import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

        return {
            "text2text-generation": Text2TextGenerationPipeline,
            "summarization": SummarizationPipeline,
            "translation": TranslationPipeline,
        }[name]

    def operations(self) -> Sequence[Operation]:
        return (Write("summarization", "summary_text"), Write("translation", "translation_text"))


class Write(Operation):
    """A text of a text."""

    reads = READS_TEXT

    def __init__(self, name: str, key: str) -> None:
        super().__init__(name)
        self._key = key

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"text": pa.string()}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"text": answer[0][self._key]}
