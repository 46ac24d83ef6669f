"""The tasks: which transformers class loads one, which of our classes runs it, what it is called elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TaskError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task.

    Attributes:
        name: The word of transformers' pipelines.
        auto_model: The transformers class that loads a PyTorch model for it.
        model: Our class that runs it.
        output: The class of `transformers.modeling_outputs` that it returns.
        suffixes: Endings of architecture names that do it.
        pipelines: Pipeline tasks that a model for it serves, besides its own.
        generates: Whether a model for it makes tokens one after another, with a cache.
    """

    name: str
    auto_model: str
    model: str
    output: str
    suffixes: tuple[str, ...]
    pipelines: tuple[str, ...] = ()
    generates: bool = False


TASKS: Mapping[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name="text-classification",
            auto_model="AutoModelForSequenceClassification",
            model="ORTModelForSequenceClassification",
            output="SequenceClassifierOutput",
            suffixes=("ForSequenceClassification",),
            pipelines=("zero-shot-classification",),
        ),
        TaskSpec(
            name="token-classification",
            auto_model="AutoModelForTokenClassification",
            model="ORTModelForTokenClassification",
            output="TokenClassifierOutput",
            suffixes=("ForTokenClassification",),
        ),
        TaskSpec(
            name="question-answering",
            auto_model="AutoModelForQuestionAnswering",
            model="ORTModelForQuestionAnswering",
            output="QuestionAnsweringModelOutput",
            suffixes=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
        ),
        TaskSpec(
            name="multiple-choice",
            auto_model="AutoModelForMultipleChoice",
            model="ORTModelForMultipleChoice",
            output="MultipleChoiceModelOutput",
            suffixes=("ForMultipleChoice",),
        ),
        TaskSpec(
            name="fill-mask",
            auto_model="AutoModelForMaskedLM",
            model="ORTModelForMaskedLM",
            output="MaskedLMOutput",
            suffixes=("ForMaskedLM", "WithLMHeadModel"),
        ),
        TaskSpec(
            name="feature-extraction",
            auto_model="AutoModel",
            model="ORTModelForFeatureExtraction",
            output="BaseModelOutput",
            suffixes=("Model",),
            pipelines=("sentence-similarity", "image-feature-extraction"),
        ),
        TaskSpec(
            name="sentence-similarity",
            auto_model="AutoModel",
            model="ORTModelForFeatureExtraction",
            output="BaseModelOutput",
            suffixes=(),
            pipelines=("feature-extraction",),
        ),
        TaskSpec(
            name="image-classification",
            auto_model="AutoModelForImageClassification",
            model="ORTModelForImageClassification",
            output="ImageClassifierOutput",
            suffixes=("ForImageClassification",),
        ),
        TaskSpec(
            name="text-generation",
            auto_model="AutoModelForCausalLM",
            model="ORTModelForCausalLM",
            output="CausalLMOutputWithPast",
            suffixes=("ForCausalLM", "LMHeadModel"),
            generates=True,
        ),
        TaskSpec(
            name="text2text-generation",
            auto_model="AutoModelForSeq2SeqLM",
            model="ORTModelForSeq2SeqLM",
            output="Seq2SeqLMOutput",
            suffixes=("ForConditionalGeneration", "MTModel"),
            pipelines=("summarization", "translation"),
            generates=True,
        ),
        TaskSpec(
            name="automatic-speech-recognition",
            auto_model="AutoModelForSpeechSeq2Seq",
            model="ORTModelForSpeechSeq2Seq",
            output="Seq2SeqLMOutput",
            suffixes=("WhisperForConditionalGeneration",),
            generates=True,
        ),
        TaskSpec(
            name="image-to-text",
            auto_model="AutoModelForImageTextToText",
            model="ORTModelForVision2Seq",
            output="Seq2SeqLMOutput",
            suffixes=("VisionEncoderDecoderModel",),
            generates=True,
        ),
        TaskSpec(
            name="image-text-to-text",
            auto_model="AutoModelForImageTextToText",
            model="ORTModelForImageTextToText",
            output="CausalLMOutputWithPast",
            suffixes=(),
            generates=True,
        ),
        TaskSpec(name="custom", auto_model="", model="ORTModelForCustomTasks", output="", suffixes=()),
    )
}

SYNONYMS: Mapping[str, str] = {
    "sequence-classification": "text-classification",
    "sentiment-analysis": "text-classification",
    "zero-shot-classification": "text-classification",
    "ner": "token-classification",
    "masked-lm": "fill-mask",
    "default": "feature-extraction",
    "embedding": "sentence-similarity",
    "embeddings": "sentence-similarity",
    "image-feature-extraction": "feature-extraction",
    "custom-tasks": "custom",
    "causal-lm": "text-generation",
    "text-generation-with-past": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "text2text-generation-with-past": "text2text-generation",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "automatic-speech-recognition-with-past": "automatic-speech-recognition",
    "speech-to-text": "automatic-speech-recognition",
    "vision-language": "image-text-to-text",
    "vision2seq": "image-to-text",
    "vision2seq-lm": "image-to-text",
}


def task_spec(name: str) -> TaskSpec:
    """The task of that name or synonym.

    Raises:
        TaskError: There is none.
    """
    # A translation task may name its languages: `translation_en_to_de`.
    known = "translation" if name.startswith("translation_") else name
    found = TASKS.get(SYNONYMS.get(known, known))
    if found is None:
        raise TaskError(
            f"{name!r} is not a task that accel knows.{did_you_mean(name, [*TASKS, *SYNONYMS])}",
            fix=f"use one of {', '.join(TASKS)}.",
        )
    return found


def infer_task(config: Mapping[str, Any], folder: Path | None = None) -> str:
    """The task of a model from its `config.json` (and `modules.json` of a sentence-transformers folder).

    Raises:
        TaskError: The config names no architecture, or one without a task here.
    """
    if folder is not None and (folder / "modules.json").is_file():
        return "sentence-similarity"
    architectures = config.get("architectures") or []
    if not architectures:
        raise TaskError("The model's config names no architecture to infer the task from.", fix="pass task=...")
    name = str(architectures[0])
    # Text and images in one prompt; by their names alone such models are encoder-decoders.
    if name.endswith("ForConditionalGeneration") and {"vision_config", "text_config"} <= set(config):
        return "image-text-to-text"
    fits = [(len(suffix), spec.name) for spec in TASKS.values() for suffix in spec.suffixes if name.endswith(suffix)]
    # `GPT2LMHeadModel` also ends with `Model`, the suffix of an encoder without a head; its head would be dropped.
    if not fits or (max(fits)[0] == len("Model") and name.endswith(("HeadModel", "HeadsModel"))):
        raise TaskError(
            f"The task of a {name} cannot be inferred, or accel does not support it yet.",
            fix=f"pass task=..., one of {', '.join(TASKS)}.",
        )
    return max(fits)[1]


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty when there is none.

    Raises:
        TaskError: It is not JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TaskError(f"{path} is not valid JSON: {error}.", fix="download or save the model again.") from error
    return values if isinstance(values, dict) else {}
