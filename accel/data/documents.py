"""Rows of documents, questions about words with a box each, as model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import InputError
from .batches import Encoded, from_tokenizer
from .labels import texts
from .rows import Rows

BOX = "bbox"
_LARGEST = 1000
_SEPARATOR = [_LARGEST] * 4
_NOWHERE = [0] * 4


def encode_documents(rows: Rows, processor: Any, max_length: int | None) -> Encoded:
    """Questions with the words of their documents, which are cut where both are too long.

    Raises:
        InputError: Words without boxes, boxes in another form, or a tokenizer that does not say which word a token is of.
    """
    if not getattr(processor, "is_fast", False):
        raise InputError("Words need a fast tokenizer to be found again.", fix="load it with AutoTokenizer.")
    limit = max_length or min(processor.model_max_length, 512)
    cut = {"truncation": "only_second", "max_length": limit, "return_token_type_ids": True}
    questions, words = texts(rows, "question"), rows.column("words")
    boxes = [boxes_of(value, len(words[i]), i) for i, value in enumerate(rows.column("boxes"))]
    if BOX in processor.model_input_names:
        # LayoutLMv2's and 3's tokenizers read boxes themselves.
        found = processor(questions, words, boxes=boxes, **cut)
        return replace(from_tokenizer(found, processor), padding={**_padding(processor), BOX: 0})
    found = processor([text.split() for text in questions], words, is_split_into_words=True, **cut)
    places = [
        _boxes_of_tokens(found["input_ids"][i], found.sequence_ids(i), found.word_ids(i), boxes[i], processor)
        for i in range(len(questions))
    ]
    encoded = from_tokenizer(found, processor)
    return replace(encoded, tokens={**encoded.tokens, BOX: places}, padding={**encoded.padding, BOX: 0})


def _padding(processor: Any) -> dict[str, int]:
    return {"input_ids": processor.pad_token_id, "token_type_ids": processor.pad_token_type_id}


def _boxes_of_tokens(
    ids: Sequence[int],
    sequences: Sequence[int | None],
    words: Sequence[int | None],
    boxes: Sequence[Sequence[int]],
    tokenizer: Any,
) -> list[list[int]]:
    """A box a token, as transformers' pipeline gives LayoutLM: those of the words, and the page's far corner for separators."""
    return [
        list(boxes[word])
        if sequence == 1 and word is not None
        else _SEPARATOR
        if token == tokenizer.sep_token_id
        else _NOWHERE
        for token, sequence, word in zip(ids, sequences, words, strict=True)
    ]


def boxes_of(value: Any, count: int, row: int) -> list[list[int]]:
    """The boxes of a row's words: `[left, top, right, bottom]`, from 0 to 1000.

    Raises:
        InputError: Another form or number.
    """
    found = [[int(side) for side in box] for box in value]
    wrong = next(
        (b for b in found if len(b) != 4 or not 0 <= b[0] <= b[2] <= _LARGEST or not 0 <= b[1] <= b[3] <= _LARGEST),
        None,
    )
    if wrong is not None or len(found) != count:
        raise InputError(
            f"Row {row} has {count} words and {len(found)} boxes{f', one of them {wrong}' if wrong is not None else ''}.",
            fix="give each word [left, top, right, bottom] in thousandths of the page's width and height.",
        )
    return found
