"""Text generation by encoder-decoders: summarization, translation."""

from __future__ import annotations

from typing import Any

from ..interfaces.task import Task
from ..models.encoder_decoder import ORTModelForSeq2SeqLM


class Text2textGeneration(Task):
    """Text generation by encoder-decoders: summarization, translation."""

    model = ORTModelForSeq2SeqLM

    def pipeline(self, name: str) -> type[Any]:
        from ..models.pipelines.text_to_text import (
            SummarizationPipeline,
            Text2TextGenerationPipeline,
            TranslationPipeline,
        )

        return {
            "text2text-generation": Text2TextGenerationPipeline,
            "summarization": SummarizationPipeline,
            "translation": TranslationPipeline,
        }[name]
