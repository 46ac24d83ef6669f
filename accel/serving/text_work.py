"""Work on texts that no pipeline does: embeddings, and scores of documents for a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..models.ranking import activation_of
from ..models.texts import Embedder, PairScorer, TokenRow
from .job import Prepared, Row, UnknownOptionError
from .work import Options, can_pad


class Embedding:
    """Embeddings as `ORTModelForFeatureExtraction.encode` gives them: `(hidden,)` float32 for a text, `(texts, hidden)` for a list."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._embedder = Embedder(model, tokenizer)
        self._pads = self._embedder.pads and can_pad(model)

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        _no_others(options, ("normalize_embeddings",))
        rows = self._embedder.rows([inputs] if isinstance(inputs, str) else _texts(inputs))
        return Prepared([[_row("embed", self._pads, row)] for row in rows])

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        # NumPy's rows: handing out those of a tensor takes longer than computing a small model's last layer.
        return list(self._embedder.embed([row.inputs for row in rows]).cpu().numpy())

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        found = np.stack([one for (one,) in outputs]) if outputs else np.empty((0, 0), np.float32)
        if options.get("normalize_embeddings"):
            found = torch.nn.functional.normalize(torch.from_numpy(found), dim=-1).numpy()
        return found[0] if isinstance(inputs, str) else found


class Ranking:
    """Documents by how well they answer a query, as `ORTModelForSequenceClassification.rank` gives them."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._scorer = PairScorer(model, tokenizer)
        self._pads = self._scorer.pads and can_pad(model)
        self._activation = activation_of(model)

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`; the inputs are a query and its documents."""
        _no_others(options, ("top_k", "return_documents", "raw_scores"))
        query, documents = inputs
        texts = _texts(documents)
        if not isinstance(query, str):
            raise InputError("The query is no text.", fix="pass (query, documents).")
        if not texts:
            return Prepared([])
        rows = self._scorer.rows([query] * len(texts), texts)
        return Prepared([[_row("rank", self._pads, row)] for row in rows])

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        return list(self._scorer.logits([row.inputs for row in rows])[:, 0])

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        _, documents = inputs
        logits = torch.stack([one for (one,) in outputs]) if outputs else torch.empty(0)
        scores = (logits if options.get("raw_scores") else self._activation(logits)).tolist()
        # The first of equals comes first.
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: options.get("top_k")]
        return [
            {"corpus_id": i, "score": scores[i], **({"text": documents[i]} if options.get("return_documents") else {})}
            for i in order
        ]


class Tokenization:
    """The tokens of texts: `[{"id", "text", "start", "stop", "special"}, ...]` for each; needs no call of the model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        _no_others(options, ("add_special_tokens",))
        return Prepared([], [self._tokens(text, options.get("add_special_tokens", True)) for text in _texts(inputs)])

    def _tokens(self, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
        fast = self._tokenizer.is_fast
        found = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_special_tokens_mask=True,
            return_offsets_mapping=fast,
            truncation=False,
            verbose=False,
        )
        ids = found["input_ids"]
        places = found["offset_mapping"] if fast else [(None, None)] * len(ids)
        words = self._tokenizer.convert_ids_to_tokens(ids)
        return [
            {"id": i, "text": word, "start": start, "stop": stop, "special": bool(special)}
            for i, word, (start, stop), special in zip(ids, words, places, found["special_tokens_mask"], strict=True)
        ]

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`; there are no rows."""
        return []

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        return memo


def _row(kind: str, pads: bool, inputs: TokenRow) -> Row:
    length = len(inputs["input_ids"])
    return Row(inputs=inputs, length=length, group=(kind,) if pads else (kind, length))


def _texts(inputs: Any) -> list[str]:
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not all(isinstance(one, str) for one in inputs):
        raise InputError("These are no texts.", fix="pass a list of strings.")
    return list(inputs)


def _no_others(options: Options, known: Sequence[str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnknownOptionError(f"There is no option {unknown}.", fix=f"use {', '.join(known)}.")
