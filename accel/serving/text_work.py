"""Work on texts that no pipeline does: what such works share, and the tokens of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..artifact.sentence_settings import sentence_settings
from ..errors import InputError, did_you_mean
from ..models.text_rows import TextRows, TokenRow
from .job import Options, Prepared, Row, UnknownOptionError


class Tokenization:
    """The tokens of texts: `[{"id", "text", "start", "stop", "special"}, ...]` for each; needs no call of the model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        check_options(options, ("add_special_tokens", "prompt_name"))
        name = options.get("prompt_name")
        # Prompts are for embeddings: without a name there is none.
        before = "" if name is None else find_prompt(sentence_settings(self._model.artifact.path).prompts, name)
        special = options.get("add_special_tokens", True)
        return Prepared([], [self._tokens(f"{before}{text}", special) for text in check_texts(inputs)])

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


def find_prompt(prompts: Mapping[str, str], name: str | Sequence[str] | None) -> str | None:
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
def cutting(rows: TextRows, options: Options) -> Iterator[None]:
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


def check_lengths(rows: Sequence[TokenRow], longest: int | None) -> None:
    """Refuse rows that are longer than the model reads.

    Raises:
        InputError: There is one.
    """
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        if longest is not None and length > longest:
            raise InputError(
                f"Text {number} has {length} tokens; the model reads {longest}.",
                fix="shorten it, or have it cut: truncate.",
            )


def text_row(kind: str, pads: bool, inputs: TokenRow) -> Row:
    """Make a row of a batch; without `pads` it shares calls with rows of its length alone."""
    length = len(inputs["input_ids"])
    return Row(inputs=inputs, length=length, group=(kind,) if pads else (kind, length))


def check_texts(inputs: Any) -> list[str]:
    """Return texts as a list.

    Raises:
        InputError: The inputs are something else.
    """
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not all(isinstance(one, str) for one in inputs):
        raise InputError("Expected a list of texts.", fix="pass a list of strings.")
    return list(inputs)


def check_options(options: Options, known: Sequence[str]) -> None:
    """Refuse options that are unknown.

    Raises:
        UnknownOptionError: There is one.
    """
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnknownOptionError(f"There is no option {unknown}.", fix=f"use {', '.join(known)}.")
