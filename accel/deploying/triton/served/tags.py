"""Token classification: label tokens and group them into entities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .text_batches import option, softmax
from .tokens import Array, GraphRow, InvalidRequestError, NonFiniteOutputError, Tokens

STRATEGIES = ("none", "simple", "first", "average", "max")


@dataclass(frozen=True)
class _Text:
    """A text and the encodings of its windows. They are stored until the result of the request is computed."""

    text: str
    windows: Sequence[Any]


@dataclass(frozen=True)
class _Token:
    """A token of the text.

    Attributes:
        word: The token as written in the tokenizer's vocabulary; for an unknown token, the characters of the text.
        scores: Score of each label.
        start, end: Character positions of the token in the text.
        index: Index of the token in its window.
        continues: Whether the token continues the previous word.
    """

    word: str
    scores: Array
    start: int
    end: int
    index: int
    continues: bool


class TokenClassifier:
    """Service that labels tokens. Its input is `TEXT`; its output `ENTITIES` is the result of transformers' pipeline as a JSON list.

    Args:
        settings: `labels` in the order of the logits, and `unknown`: id of the unknown token, or null.
        tokens: The tokenizer.
    """

    options = ("aggregation_strategy", "ignore_labels", "stride")

    def __init__(self, settings: Mapping[str, Any], tokens: Tokens) -> None:
        self._labels: Sequence[str] = settings["labels"]
        self._unknown: int | None = settings["unknown"]
        self._tokens = tokens
        # Whether the tokenizer marks tokens that continue a word. If not, words are separated at spaces.
        self._marks_pieces = bool(getattr(tokens.tokenizer.model, "continuing_subword_prefix", None))

    def read(self, texts: Mapping[str, Sequence[str]], options: Mapping[str, Any]) -> tuple[_Text, list[GraphRow]]:
        """Return one row for a text or, with the option `stride`, one row for each window of the text."""
        strategy = option(options, "aggregation_strategy", "none", STRATEGIES)
        stride = option(options, "stride", None, int)
        if stride is not None and strategy == "none":
            raise InvalidRequestError(
                "the parameter stride needs an aggregation_strategy other than 'none', which joins the entities of several windows"
            )
        windows = self._tokens.encode(texts["TEXT"][0], cut="longest_first", stride=stride or 0)
        windows = windows if stride is not None else windows[:1]
        return _Text(texts["TEXT"][0], windows), [self._tokens.row(window) for window in windows]

    def write(
        self, memory: _Text, outputs: Sequence[Mapping[str, Array]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the entities in the order of the text, without the labels in the option `ignore_labels`."""
        strategy = option(options, "aggregation_strategy", "none", STRATEGIES)
        ignored = options.get("ignore_labels", "O")
        ignored = [label.strip() for label in ignored.split(",")] if isinstance(ignored, str) else ignored
        entities_kept = []
        for encoding, output in zip(memory.windows, outputs, strict=True):
            logits = self._tokens.unpadded(output["logits"].astype("float32"), len(encoding.ids))
            entities = self._entities(self._read_tokens(memory.text, encoding, softmax(logits)), strategy)
            entities_kept += [
                entity for entity in entities if entity.get("entity", entity.get("entity_group")) not in ignored
            ]
        if len(memory.windows) > 1:
            entities_kept = _without_overlaps(entities_kept)
        try:
            return {"ENTITIES": [json.dumps(entities_kept, ensure_ascii=False, allow_nan=False)]}
        except ValueError as error:
            raise NonFiniteOutputError(
                "the model computed a score that is NaN or infinite; deploy the model in float32"
            ) from error

    def _read_tokens(self, text: str, encoding: Any, scores: Array) -> list[_Token]:
        tokens = []
        for i, (start, end) in enumerate(encoding.offsets):
            if encoding.special_tokens_mask[i]:
                continue
            word, part = encoding.tokens[i], text[start:end]
            apart = start == 0 or " " in text[start - 1 : start + 1]
            continues = len(word) != len(part) if self._marks_pieces else not apart
            if encoding.ids[i] == self._unknown:
                word, continues = part, False
            tokens.append(_Token(word, scores[i], start, end, i, continues))
        return tokens

    def _entities(self, tokens: Sequence[_Token], strategy: str) -> list[dict[str, Any]]:
        if strategy in ("none", "simple"):
            each = [self._entity(token.scores, [token]) for token in tokens]
            if strategy == "none":
                return [{**entity, "index": token.index} for entity, token in zip(each, tokens, strict=True)]
        else:
            each = [self._word(word, strategy) for word in _words(tokens)]
        return self._groups(each)

    def _entity(self, scores: Array, tokens: Sequence[_Token]) -> dict[str, Any]:
        best = int(scores.argmax())
        words = [token.word for token in tokens]
        return {
            "entity": self._labels[best],
            "score": float(scores[best]),
            "word": words[0] if len(words) == 1 else self._joined(words),
            "start": tokens[0].start,
            "end": tokens[-1].end,
        }

    def _word(self, tokens: Sequence[_Token], strategy: str) -> dict[str, Any]:
        """Return the tokens of one word as one entity."""
        if strategy == "first":
            scores = tokens[0].scores
        elif strategy == "max":
            scores = max(tokens, key=lambda token: float(token.scores.max())).scores
        else:
            scores = np.mean([token.scores for token in tokens], axis=0)
        return {**self._entity(scores, tokens), "word": self._joined([token.word for token in tokens])}

    def _groups(self, entities: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Join adjacent entities of the same type. A label with `B-` starts a new entity."""
        groups: list[list[Mapping[str, Any]]] = []
        for entity in entities:
            begins, kind = _kind(entity["entity"])
            if groups and kind == _kind(groups[-1][-1]["entity"])[1] and not begins:
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": float(np.mean([entity["score"] for entity in group])),
                "word": self._joined([entity["word"] for entity in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]

    def _joined(self, words: Sequence[str]) -> str:
        decoder = self._tokens.tokenizer.decoder
        return " ".join(words) if decoder is None else str(decoder.decode(list(words)))


def _words(tokens: Sequence[_Token]) -> list[list[_Token]]:
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label starts an entity, and the type of the entity."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _without_overlaps(entities: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entities without overlaps.

    If two entities overlap, the result contains the longer entity. If both are equally long, it contains the entity with the higher score.
    """
    separate: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda entity: entity["start"]):
        if not separate or not separate[-1]["start"] <= entity["start"] < separate[-1]["end"]:
            separate.append(entity)
            continue
        last = separate[-1]
        if (entity["end"] - entity["start"], entity["score"]) > (last["end"] - last["start"], last["score"]):
            separate[-1] = entity
    return separate
