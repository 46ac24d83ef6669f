"""Code of the front model for span extraction, which runs inside Triton.

`accel deploy triton` copies this file into the Triton model repository. It imports only NumPy, tokenizers and other files of the
repository.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .text_batches import option, sigmoid
from .tokens import Array, GraphRow, InvalidRequestError, Tokens


@dataclass(frozen=True)
class _Asked:
    """A text, its labels, and their common encoding."""

    text: str
    labels: Sequence[str]
    encoding: Any


class SpanFinder:
    """Front model that computes `SPANS` from `TEXT` and `LABELS`. `SPANS` is the result of the pipeline as a JSON list.

    Args:
        settings: Settings of the model. `longest` is the largest number of tokens in a span.
        tokens: The tokenizer of the texts.
    """

    options = ("threshold",)

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._longest: int = settings["longest"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[_Asked, list[GraphRow]]:
        """Encode a text and its labels as one row."""
        option(options, "threshold", 0.5, float)
        text, labels = texts["TEXT"][0], list(texts["LABELS"])
        if not labels:
            raise InvalidRequestError("there are no labels")
        (encoding, *_) = self._tokens.encode(", ".join(labels), text, cut="only_second")
        starts = itertools.accumulate((len(label) + len(", ") for label in labels[:-1]), initial=0)
        places = [encoding.char_to_token(start, 0) for start in starts]
        # In Triton, every input must have one number for each token. The positions after the last label are filled with 0, and `write`
        # ignores their scores.
        row = self._tokens.row(encoding)
        padded = [*places, *[0] * (row.length - len(places))]
        return _Asked(text, labels, encoding), [GraphRow({**row.values, "label_positions": padded})]

    def write(
        self, memory: _Asked, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the spans whose score reaches the threshold, in the order of the text."""
        threshold = option(options, "threshold", 0.5, float)
        first, last = sigmoid(outputs[0]["start_logits"]), sigmoid(outputs[0]["end_logits"])
        tokens = [i for i, sequence in enumerate(memory.encoding.sequence_ids) if sequence == 1]
        spans = []
        for number, label in enumerate(memory.labels):
            for place, begin in enumerate(tokens):
                if first[number, begin] < threshold:
                    continue
                stop = max(tokens[place : place + self._longest], key=lambda token: last[number, token])
                score = float(first[number, begin] * last[number, stop])
                if score >= threshold:
                    start, end = memory.encoding.offsets[begin][0], memory.encoding.offsets[stop][1]
                    text = memory.text[start:end]
                    spans.append({"label": label, "score": score, "start": start, "end": end, "text": text})
        spans.sort(key=lambda span: (span["start"], span["end"], span["label"]))
        return {"SPANS": [json.dumps(spans, ensure_ascii=False)]}
