"""Zero-shot classification: the labels are part of the request, and an entailment model scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .text_batches import option, softmax
from .tokens import Array, GraphRow, InvalidRequestError, Tokens


class ZeroShotClassifier:
    """Service that classifies texts with the labels of the request.

    Its inputs are `TEXT` and `CANDIDATE_LABELS`; its outputs are `LABELS` and `SCORES`, the best label first.

    Args:
        settings: `entailment` is the index of the label "entailment".
        tokens: The tokenizer.
    """

    options = ("hypothesis_template", "multi_label")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._entailment: int = settings["entailment"]
        self._tokens = tokens

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[list[str], list[GraphRow]]:
        """Return one row for each label: the text together with the hypothesis that contains the label."""
        labels = list(texts["CANDIDATE_LABELS"])
        if not texts["TEXT"][0]:
            raise InvalidRequestError("TEXT of a request is empty")
        template = option(options, "hypothesis_template", "This example is {}.", str)
        option(options, "multi_label", False, bool)
        try:
            hypotheses = [template.format(label) for label in labels]
        except (IndexError, KeyError, ValueError) as error:
            raise InvalidRequestError(
                f"the hypothesis_template {template!r} must contain {{}} exactly once, for the label: {error}"
            ) from error
        if not labels:
            raise InvalidRequestError("CANDIDATE_LABELS of a request is empty")
        if hypotheses[0] == template:
            raise InvalidRequestError(
                f"the hypothesis_template {template!r} must contain {{}}, which is replaced by a label"
            )
        encodings = [self._tokens.encode(texts["TEXT"][0], text, cut="only_first")[0] for text in hypotheses]
        return labels, [self._tokens.row(encoding) for encoding in encodings]

    def write(
        self, memory: list[str], outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the labels and their scores. The scores sum to 1 or, with `multi_label`, are independent."""
        logits = np.stack([output["logits"] for output in outputs]).astype("float32")
        if len(memory) == 1 or options.get("multi_label"):
            contradiction = -1 if self._entailment == 0 else 0
            scores = softmax(logits[:, [contradiction, self._entailment]])[:, 1]
        else:
            scores = softmax(logits[:, self._entailment])
        order = np.argsort(scores)[::-1]
        return {"LABELS": [memory[i] for i in order], "SCORES": scores[order]}
