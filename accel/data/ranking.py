"""Queries with their documents as pairs of texts."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from .batches import Encoded, from_tokenizer
from .labels import texts
from .rows import Rows


def documents(rows: Rows) -> list[tuple[list[str], list[str]]]:
    """The relevant documents of each row, and the others.

    Raises:
        InputError: A row without a relevant one, or with none but relevant ones, or a document that is no text.
    """
    sides = [[[one] if isinstance(one, str) else list(one or []) for one in rows.column(use)] for use in _SIDES]
    found = list(zip(*sides, strict=True))
    for row, (good, bad) in enumerate(found):
        if not good or not bad or not all(isinstance(text, str) for text in (*good, *bad)):
            raise InputError(
                f"Row {row} of {rows.sample.source} has {len(good)} relevant documents and {len(bad)} others.",
                fix="give at least one text of each: without both there is no order to be right.",
            )
    return found


_SIDES = ("positive", "negative")


def encode_queries(rows: Rows, processor: Any, max_length: int | None, *, prompt: str = "") -> Encoded:
    """One pair of texts for each document of each query, in the order of `documents`; of rows without an irrelevant one (for
    calibration) what there is. The prompt is put before each query.
    """
    sides = [use for use in _SIDES if rows.has(use)]
    columns = [[[one] if isinstance(one, str) else list(one or []) for one in rows.column(use)] for use in sides]
    pairs = [
        (query, document)
        for query, *found in zip(texts(rows, "query"), *columns, strict=True)
        for several in found
        for document in several
    ]
    if not pairs:
        raise InputError(f"{rows.sample.source} holds no documents.", fix="give at least one document.")
    first, second = [prompt + query for query, _ in pairs], [document for _, document in pairs]
    cut = {"truncation": max_length is not None, "max_length": max_length}
    return from_tokenizer(processor(first, second, **cut), processor)
