"""Answers as columns: what an operation of the engine gives, in types that are the same in every part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ...errors import InputError

_LABELS = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
_ENTITIES = pa.list_(
    pa.struct(
        [
            ("entity", pa.string()),
            ("score", pa.float64()),
            ("word", pa.string()),
            ("start", pa.int64()),
            ("end", pa.int64()),
        ]
    )
)
_FILLS = pa.list_(
    pa.struct([("mask", pa.int64()), ("token_str", pa.string()), ("token", pa.int64()), ("score", pa.float64())])
)
_NUMBERS = pa.list_(pa.float64())


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns, and the values of a row for them.

    Attributes:
        columns: Types by name.
        values: Of an answer.
    """

    columns: Mapping[str, Any]
    values: Callable[[Any], Mapping[str, Any]]


def _classified(answer: Any) -> Mapping[str, Any]:
    best = answer[0] if isinstance(answer, list) else answer
    return {"label": best["label"], "score": best["score"]}


def _classified_many(answer: Any) -> Mapping[str, Any]:
    return {"labels": answer}


def _entities(answer: Any) -> Mapping[str, Any]:
    return {"entities": [{**one, "entity": one.get("entity_group", one.get("entity"))} for one in answer]}


def _zero_shot(answer: Any) -> Mapping[str, Any]:
    return {
        "label": answer["labels"][0],
        "score": answer["scores"][0],
        "labels": answer["labels"],
        "scores": answer["scores"],
    }


def _fills(answer: Any) -> Mapping[str, Any]:
    masks = answer if answer and isinstance(answer[0], list) else [answer]
    return {"fills": [{**fill, "mask": number} for number, fills in enumerate(masks) for fill in fills]}


def _ranked(answer: Any) -> Mapping[str, Any]:
    """In the order of the documents."""
    return {"scores": [one["score"] for one in sorted(answer, key=lambda one: one["corpus_id"])]}


def _tokens(answer: Any) -> Mapping[str, Any]:
    (tokens,) = answer
    return {"ids": [one["id"] for one in tokens], "tokens": [one["text"] for one in tokens]}


def _features(answer: Any) -> Mapping[str, Any]:
    (rows,) = answer
    return {"features": rows}


def _written(name: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda answer: {"text": answer[0][name]}


_TEXT = {"text": pa.string()}
_BEST = {"label": pa.string(), "score": pa.float64()}
_SHAPES: Mapping[str, Shape] = {
    "text-classification": Shape(_BEST, _classified),
    "token-classification": Shape({"entities": _ENTITIES}, _entities),
    "question-answering": Shape(
        {"answer": pa.string(), "score": pa.float64(), "start": pa.int64(), "end": pa.int64()}, dict
    ),
    "zero-shot-classification": Shape({**_BEST, "labels": pa.list_(pa.string()), "scores": _NUMBERS}, _zero_shot),
    "fill-mask": Shape({"fills": _FILLS}, _fills),
    "embed": Shape({"embedding": pa.list_(pa.float32())}, lambda answer: {"embedding": answer}),
    "feature-extraction": Shape({"features": pa.list_(pa.list_(pa.float32()))}, _features),
    "rank": Shape({"scores": _NUMBERS}, _ranked),
    "tokenize": Shape({"ids": pa.list_(pa.int64()), "tokens": pa.list_(pa.string())}, _tokens),
    "summarization": Shape(_TEXT, _written("summary_text")),
    "translation": Shape(_TEXT, _written("translation_text")),
    "generate": Shape(
        {**_TEXT, "finish": pa.string(), "prompt_tokens": pa.int64(), "new_tokens": pa.int64()},
        lambda answer: {name: getattr(answer, name) for name in ("text", "finish", "prompt_tokens", "new_tokens")},
    ),
}


def shape_of(operation: str, options: Mapping[str, Any]) -> Shape:
    """The columns of an operation's answers.

    Raises:
        InputError: An option that changes the answers to what has no column.
    """
    if operation == "text-classification" and options.get("top_k", 1) != 1:
        return Shape({"labels": _LABELS}, _classified_many)
    for refused in ("return_tensors", "return_documents"):
        if options.get(refused):
            raise InputError(f"{refused} has no column.", fix="leave it out.")
    if operation == "question-answering" and options.get("top_k", 1) != 1:
        raise InputError("One answer a question is written.", fix="leave top_k out.")
    if operation == "rank" and options.get("top_k") is not None:
        raise InputError("The scores of all documents are written.", fix="leave top_k out.")
    return _SHAPES[operation]


def table(
    shape: Shape,
    start: int,
    kept: Mapping[str, Sequence[Any]],
    kept_types: Mapping[str, Any],
    answers: Sequence[Any],
    errors: Sequence[str | None],
) -> Any:
    """The rows of a part: their numbers, the columns that are kept, the answers, and what was wrong.

    Args:
        shape: Of the answers.
        start: The first row's number.
        kept: Values of columns of the data.
        kept_types: Their types.
        answers: `None` for rows without one.
        errors: `None` for rows with one.
    """  # fmt: skip
    rows = [{} if answer is None else shape.values(answer) for answer in answers]
    try:
        copied = {name: pa.array(values, kept_types[name]) for name, values in kept.items()}
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"A column that is kept changes its type: {error}", fix="keep another one.") from error
    columns = {
        "row": pa.array(range(start, start + len(rows)), pa.int64()),
        **copied,
        **{name: pa.array([row.get(name) for row in rows], kind) for name, kind in shape.columns.items()},
        "error": pa.array(errors, pa.string()),
    }
    return pa.table(columns)
