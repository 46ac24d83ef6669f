"""Work on texts that no pipeline does: embeddings, and scores of documents for a query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..artifact.sentence_settings import sentence_settings
from ..errors import InputError, did_you_mean
from ..models.texts import COUNTED, Embedder, PairScorer, TextRows, TokenRow, activation_of
from .job import Prepared, Row, UnknownOptionError
from .pipeline_work import Options, can_pad


class Embedding:
    """Embeddings as `ORTModelForFeatureExtraction.encode` gives them: `(hidden,)` float32 for a text, `(texts, hidden)` for a list.

    Options: `normalize_embeddings`; `truncate_dim`, how many numbers of a vector are kept; `prompt_name`, one name of a prompt of
    the model, or several of which the first that it has is used; `truncation` and `truncation_side` of texts that are too long.
    A text may be token ids, as the tokenizer makes them.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._embedder = Embedder(model, tokenizer)
        self._pads = self._embedder.pads and can_pad(model)

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        _no_others(options, ("normalize_embeddings", "truncate_dim", "prompt_name", "truncation", "truncation_side"))
        items = [inputs] if isinstance(inputs, str) else _texts_or_ids(inputs)
        texts = [one for one in items if isinstance(one, str)]
        prompt = _prompt(self._embedder.settings.prompts, options.get("prompt_name"))
        if prompt is not None and len(texts) < len(items):
            raise InputError(
                "A prompt cannot be put before token ids.", fix="send texts, or leave the prompt's name out."
            )
        embedder = self._embedder
        with _cutting(embedder, options):
            made = iter(embedder.rows(texts, prompt=prompt) if texts else ())
        rows = [next(made) if isinstance(one, str) else self._row_of_ids(one, i) for i, one in enumerate(items)]
        _check_lengths(rows, embedder.max_length)
        if options.get("truncation_side") == "left" and any(COUNTED in row for row in rows):
            raise InputError(
                "The prompt of this model is not pooled, and a text that is cut at its beginning loses it.",
                fix="have texts cut at their end.",
            )
        return Prepared([[_row("embed", self._pads, row)] for row in rows])

    def _row_of_ids(self, ids: Sequence[int], number: int) -> TokenRow:
        tokenizer = self._embedder.tokenizer
        size = getattr(self._model.config, "vocab_size", len(tokenizer))
        before, after = _frame(tokenizer)
        if max(ids) >= size:
            raise InputError(
                f"Token {max(ids)} of text {number} is not one of the model's {size}.", fix=_OTHER_TOKENIZER
            )
        if [*ids[: len(before)]] != before or [*ids[len(ids) - len(after) :]] != after:
            raise InputError(
                f"The tokens of text {number} do not begin with {before} and end with {after}, as this model's own do.",
                fix=_OTHER_TOKENIZER,
            )
        row = {"input_ids": list(ids), "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        made = {name: row[name] for name in tokenizer.model_input_names if name in row}
        return made if self._embedder.settings.include_prompt else {**made, COUNTED: [1] * len(ids)}

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        # NumPy's rows: handing out those of a tensor takes longer than computing a small model's last layer.
        return list(self._embedder.embed([row.inputs for row in rows]).cpu().numpy())

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        found = np.stack([one for (one,) in outputs]) if outputs else np.empty((0, 0), np.float32)
        size = options.get("truncate_dim")
        if size is not None and outputs and size > found.shape[1]:
            raise InputError(
                f"{size} dimensions are asked for; the embeddings have {found.shape[1]} dimensions.",
                fix="ask for no more.",
            )
        found = found[:, :size]
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
        _no_others(options, ("top_k", "return_documents", "raw_scores", "truncation", "truncation_side"))
        query, documents = inputs
        texts = _texts(documents)
        if not isinstance(query, str):
            raise InputError("The query is no text.", fix="pass (query, documents).")
        if not texts:
            return Prepared([])
        with _cutting(self._scorer, options):
            rows = self._scorer.rows([query] * len(texts), texts)
        _check_lengths(rows, self._scorer.max_length)
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
        self._model, self._tokenizer = model, tokenizer

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        _no_others(options, ("add_special_tokens", "prompt_name"))
        name = options.get("prompt_name")
        # Prompts are for embeddings: without a name there is none.
        before = "" if name is None else _prompt(sentence_settings(self._model.artifact.path).prompts, name)
        special = options.get("add_special_tokens", True)
        return Prepared([], [self._tokens(f"{before}{text}", special) for text in _texts(inputs)])

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


_OTHER_TOKENIZER = "send texts (LangChain: check_embedding_ctx_length=False), or ids of the model's own tokenizer, which /tokenize gives."


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:start]), list(whole[start + len(bare) :])


def _prompt(prompts: Mapping[str, str], name: str | Sequence[str] | None) -> str | None:
    """The prompt of a name, or of the first name that there is; `None`: the default one.

    Raises:
        InputError: There is no prompt of that name.
    """
    if not isinstance(name, str):
        return next((prompts[one] for one in name or () if one in prompts), None)
    if name not in prompts:
        raise InputError(
            f"The model has no prompt {name!r}.{did_you_mean(name, prompts)}",
            fix=f"use one of {', '.join(prompts)} as prompt_name." if prompts else "leave prompt_name out.",
        )
    return prompts[name]


@contextmanager
def _cutting(rows: TextRows, options: Options) -> Iterator[None]:
    """Cut texts at the side that is asked for, or not at all, while rows are made."""
    tokenizer = rows.tokenizer
    side, longest = tokenizer.truncation_side, rows.max_length
    try:
        tokenizer.truncation_side = options.get("truncation_side", side)
        if options.get("truncation") is False:
            rows.max_length = None
        yield
    finally:
        tokenizer.truncation_side, rows.max_length = side, longest


def _check_lengths(rows: Sequence[TokenRow], longest: int | None) -> None:
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        if longest is not None and length > longest:
            raise InputError(
                f"Text {number} has {length} tokens; the model reads {longest}.",
                fix="shorten it, or have it cut: truncate.",
            )


def _texts_or_ids(inputs: Any) -> list[Any]:
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise InputError("These are no texts.", fix="pass a list of strings.")
    for one in inputs:
        ids = isinstance(one, Sequence) and not isinstance(one, str) and len(one) > 0
        if not isinstance(one, str) and not (ids and all(type(i) is int and i >= 0 for i in one)):
            raise InputError("These are no texts.", fix="pass a list of strings, or of token ids.")
    return list(inputs)


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
