"""Span extraction: the task class, its pipeline, accuracy metric and serving operation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from accel import ORTModel
from accel.data.encoded_rows import EncodedRows, from_tokenizer
from accel.data.labels import texts
from accel.data.rows import DatasetRows
from accel.deploying.triton.text_fronts import TextFront, TritonTensor
from accel.interfaces.task import Sample, Task
from accel.measuring.accuracy.metrics import Floats, Values, divide, metric_of_sums
from accel.measuring.accuracy.predictors import Model, Predictor
from accel.serving.operations import READS_TEXT, Operation

from .model import SpanExtractor

_LONGEST = 12
"""Largest number of tokens in a span."""


class ORTModelForSpanExtraction(ORTModel):
    """Model that computes, for each label, the logits that a token is the first and the last token of a span.

    The outputs `start_logits` and `end_logits` have the shape `(batch, labels, sequence)`.
    """

    task = "span-extraction"


class SpanExtraction(Task):
    """Task that extracts the spans of a text that match the labels of the call."""

    model = ORTModelForSpanExtraction

    def load(self, folder: Path, **options: Any) -> torch.nn.Module:
        """Return the PyTorch model. A task defines this method if transformers has no class for its models."""
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return SpanExtractor.from_pretrained(folder, config=config, **options)

    def sample(self, module: torch.nn.Module, folder: Path | None) -> Sample:
        """Return sample inputs: two rows of different lengths with four label positions each.

        The label positions are at most 2, so that they are valid in the shortest text of the export's checks.
        """
        ids = torch.randint(5, module.config.vocab_size, (2, 8))
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        example = {"input_ids": ids, "attention_mask": mask, "label_positions": torch.tensor([[0, 1, 2, 1]] * 2)}
        axes = {name: {0: "batch", 1: "sequence"} for name in example}
        axes["label_positions"] = {0: "batch", 1: "labels"}
        return example, axes, ("token_type_ids",)

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        """Encode the labels and the text of each row as one sequence."""
        encoded = [
            ask(processor, labels, text, max_length)
            for labels, text in zip(rows.column("labels"), texts(rows, "text"), strict=True)
        ]
        encodings, positions = zip(*encoded, strict=True)
        tokens = {name: [encoding[name] for encoding in encodings] for name in ("input_ids", "attention_mask")}
        padding = from_tokenizer({}, processor).padding
        return AskedTexts(tokens=tokens, padding=padding, positions=positions)

    def predictor(self, config: Any) -> type[Predictor]:
        """Return the predictor class, which computes spans and measures their F1 score."""
        return Spans

    def pipeline(self, name: str) -> type[transformers.Pipeline]:
        """Return the class of the pipeline `span-extraction`."""
        return SpanExtractionPipeline

    def operations(self) -> Sequence[Operation]:
        """Return the operations that a server and `accel batch` offer for this task."""
        return (ExtractSpans(),)

    def fronts(self) -> Mapping[str, TextFront]:
        """Return the front models for Triton: models that receive texts and call the graph."""
        return {"span-extraction": FRONT}


# Rows to inputs


def ask(tokenizer: Any, labels: Sequence[str], text: str, max_length: int | None = None) -> tuple[Any, list[int]]:
    """Encode labels and a text as one sequence. Return the encoding and the index of each label's first token."""
    encoding = tokenizer(
        ", ".join(labels),
        text,
        truncation="only_second" if max_length else False,
        max_length=max_length,
        return_offsets_mapping=True,
    )
    starts = itertools.accumulate((len(label) + len(", ") for label in labels[:-1]), initial=0)
    return encoding, [encoding.char_to_token(0, start, 0) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTexts(EncodedRows):
    """Encoded rows of labels and texts.

    Attributes:
        positions: For each row, the index of the first token of each label.
    """

    positions: Sequence[Sequence[int]]

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the model inputs for some rows. If a row has fewer labels than others, index 0 fills its label positions."""
        labels = max(len(self.positions[i]) for i in rows)
        filled = [[*self.positions[i], *[0] * (labels - len(self.positions[i]))] for i in rows]
        return {**EncodedRows.batch(self, rows), "label_positions": torch.tensor(filled)}


# Outputs to answers


def found_spans(
    encoding: Any, labels: Sequence[str], starts: torch.Tensor, ends: torch.Tensor, text: str, threshold: float
) -> list[dict[str, Any]]:
    """Return the spans whose score reaches the threshold, in the order of the text.

    Args:
        encoding: The encoding that `ask` returned.
        labels: The labels of the row.
        starts: Logits of the first token of a span, `(labels, sequence)`.
        ends: Logits of the last token of a span, `(labels, sequence)`.
        text: The text of the row.
        threshold: Smallest score of a returned span, from 0 to 1. The score is the product of the probabilities of the span's first
            and last token.
    """
    first, last = starts.float().sigmoid(), ends.float().sigmoid()
    tokens = [i for i, sequence in enumerate(encoding.sequence_ids(0)) if sequence == 1]
    spans = []
    for number, label in enumerate(labels):
        for place, begin in enumerate(tokens):
            if first[number, begin] < threshold:
                continue
            stop = max(tokens[place : place + _LONGEST], key=lambda token: last[number, token])
            score = float(first[number, begin] * last[number, stop])
            if score >= threshold:
                start, end = encoding["offset_mapping"][begin][0], encoding["offset_mapping"][stop][1]
                spans.append({"label": label, "score": score, "start": start, "end": end, "text": text[start:end]})
    return sorted(spans, key=lambda span: (span["start"], span["end"], span["label"]))


class SpanExtractionPipeline(transformers.Pipeline):
    """Pipeline for span extraction.

    `pipe("Wolfgang lives in Berlin", labels=["city", "person"])` returns a list of `{"label", "score", "start", "end", "text"}`.
    """

    _load_tokenizer = True

    def _sanitize_parameters(
        self, labels: Sequence[str] = (), threshold: float | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {"labels": list(labels)} if labels else {}, {}, {} if threshold is None else {"threshold": threshold}

    def preprocess(self, text: str, labels: Sequence[str]) -> dict[str, Any]:
        """Return the model inputs for labels and a text."""
        encoding, positions = ask(self.tokenizer, labels, text, self.tokenizer.model_max_length)
        inputs = {name: torch.tensor([encoding[name]]) for name in ("input_ids", "attention_mask")}
        return {**inputs, "label_positions": torch.tensor([positions]), "labels": labels, "text": text}

    def _forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        labels, text = inputs.pop("labels"), inputs.pop("text")
        return {**self.model(**inputs), "labels": labels, "text": text}

    def postprocess(self, outputs: dict[str, Any], threshold: float = 0.5) -> list[dict[str, Any]]:
        """Convert the model's outputs to spans."""
        encoding, _ = ask(self.tokenizer, outputs["labels"], outputs["text"], self.tokenizer.model_max_length)
        starts, ends = outputs["start_logits"][0], outputs["end_logits"][0]
        return found_spans(encoding, outputs["labels"], starts, ends, outputs["text"], threshold)


# Accuracy


def _span_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for predicted, true in zip(predictions, references, strict=True):
        a, b = set(map(tuple, predicted)), set(map(tuple, true))
        rows.append((len(a & b), len(a), len(b)))
    return np.asarray(rows, np.float64)


def _f1(sums: Floats) -> Floats:
    return divide(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


class Spans(Predictor):
    """Predictor that returns the spans of each row as `[label, start, end]`.

    The predictions contain only JSON values, because `accel tune` saves them in files.
    """

    kind = "spans"
    offline_metrics = (metric_of_sums("span_f1", _span_sums, {"span_f1": _f1}),)

    def _references(self) -> list[Any]:
        return [[[span["label"], span["start"], span["end"]] for span in row] for row in self.rows.column("spans")]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return a list of spans for each row."""
        predictions: list[Any] = [None] * len(self.rows)
        labels, text = self.rows.column("labels"), texts(self.rows, "text")
        for part, _, output in self.batches(model, what):
            for i, starts, ends in zip(part, output["start_logits"], output["end_logits"], strict=True):
                encoding, _ = ask(self.processor, labels[i], text[i], self.max_length)
                spans = found_spans(encoding, labels[i], starts.cpu(), ends.cpu(), text[i], 0.5)
                predictions[i] = [[span["label"], span["start"], span["end"]] for span in spans]
        return predictions


# Serving


class ExtractSpans(Operation):
    """Operation that extracts spans, with the HTTP path `/spans` and the column `spans` in `accel batch`."""

    name = "span-extraction"
    reads = READS_TEXT
    needs = ("labels",)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the Arrow types of the output columns."""
        import pyarrow as pa

        names = {
            "label": pa.string(),
            "score": pa.float64(),
            "start": pa.int64(),
            "end": pa.int64(),
            "text": pa.string(),
        }
        return {"spans": pa.list_(pa.struct(names))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the output columns for one result."""
        return {"spans": answer}

    def endpoint(self) -> Any:
        """Return the HTTP endpoint: its path, the class of its request body, and an example.

        The HTTP libraries are imported in this method, because they are installed only with the extra `serve`.
        """
        from pydantic import Field

        from accel.serving.http.endpoints import Endpoint
        from accel.serving.http.text_bodies import TextsBody, pipeline_answer

        class SpansBody(TextsBody):
            """Body of `/spans`."""

            labels: list[str] = Field(min_length=1)
            threshold: float = Field(default=0.5, ge=0, le=1)

        return Endpoint(
            path="/spans", answer=pipeline_answer(self.name, "labels", "threshold"), body=SpansBody,
            summary="Spans for your labels", tag="tasks", operation=self.name,
            example={"inputs": "Wolfgang lives in Berlin", "labels": ["city", "person"]},
        )  # fmt: skip


FRONT = TextFront(
    service=f"{Path(__file__).with_name('triton_spans')}:SpanFinder",
    inputs=(
        TritonTensor(name="TEXT", dtype="string"),
        TritonTensor(name="LABELS", dtype="string", dims=(-1,), ragged=True),
    ),
    outputs=lambda _: (TritonTensor(name="SPANS", dtype="string"),),
    reads=lambda _: ("start_logits", "end_logits"),
    makes=("label_positions",),
    options=lambda _: {"longest": _LONGEST},
    sample={"TEXT": ["Wolfgang lives in Berlin."], "LABELS": ["city", "person"]},
)
