"""Tokenize texts, and helper functions for operations on texts that are not pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..artifact.sentence_settings import sentence_settings
from ..errors import InputError, did_you_mean
from ..models.embedding_and_scoring import TextBatcher, TokenRow
from .job import Options, PreparedRequest, Row, UnknownOptionError


class TokenizationHandler:
    """Return the tokens of each text as `[{"id", "text", "start", "stop", "special"}, ...]`, without a model call."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Tokenize the texts of a request; there are no rows to run."""
        check_options(options, ("add_special_tokens", "prompt_name"))
        name = options.get("prompt_name")
        # The model's default prompt is for embeddings, so it is not applied here.
        before = "" if name is None else find_prompt(sentence_settings(self._model.artifact.path).prompts, name)
        special = options.get("add_special_tokens", True)
        return PreparedRequest([], [self._tokens(f"{before}{text}", special) for text in check_texts(inputs)])

    def _tokens(self, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
        fast = self._tokenizer.is_fast
        encoded = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_special_tokens_mask=True,
            return_offsets_mapping=fast,
            truncation=False,
            verbose=False,
        )
        ids = encoded["input_ids"]
        places = encoded["offset_mapping"] if fast else [(None, None)] * len(ids)
        words = self._tokenizer.convert_ids_to_tokens(ids)
        return [
            {"id": i, "text": word, "start": start, "stop": stop, "special": bool(special)}
            for i, word, (start, stop), special in zip(ids, words, places, encoded["special_tokens_mask"], strict=True)
        ]

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Return nothing, because tokenization makes no rows."""
        return []

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Return the tokens that `prepare` computed."""
        return memo


def find_prompt(prompts: Mapping[str, str], name: str | Sequence[str] | None) -> str | None:
    """Return the prompt with the given name.

    Args:
        prompts: Prompts by name.
        name: A name, or several: the first name that exists is used, and `None` is returned if none exists. `None` returns `None`.

    Raises:
        InputError: There is no prompt of the given single name.
    """
    if not isinstance(name, str):
        return next((prompts[candidate] for candidate in name or () if candidate in prompts), None)
    if name not in prompts:
        raise InputError(
            f"The model has no prompt {name!r}.{did_you_mean(name, prompts)}",
            fix=f"use one of {', '.join(prompts)} as prompt_name." if prompts else "leave prompt_name out.",
        )
    return prompts[name]


@contextmanager
def cutting(rows: TextBatcher, options: Options) -> Iterator[None]:
    """Apply the options `truncation` and `truncation_side` inside the `with` block.

    Raises:
        InputError: An option has an invalid value.
    """
    check_choice(options, "truncation", (True, False, None))
    check_choice(options, "truncation_side", ("left", "right"))
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
    """Raise if a row has more tokens than the model accepts.

    Raises:
        InputError: A row is too long.
    """
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        if longest is not None and length > longest:
            raise InputError(
                f"Text {number} has {length} tokens, but the model accepts at most {longest}.",
                fix="shorten the text, or remove the option that disables truncation.",
            )


def text_row(kind: str, pads: bool, inputs: TokenRow) -> Row:
    """Return tokens as a row of a batch. With `pads=False`, the row shares a model call only with rows of the same length."""
    length = len(inputs["input_ids"])
    return Row(inputs=inputs, length=length, group=(kind,) if pads else (kind, length))


def check_texts(inputs: Any) -> list[str]:
    """Return the inputs as a list of texts.

    Raises:
        InputError: The inputs are not a list of texts.
    """
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not all(isinstance(text, str) for text in inputs):
        raise InputError("The inputs are not a list of texts.", fix="pass a list of strings.")
    return list(inputs)


def check_choice(options: Options, name: str, values: Sequence[Any]) -> None:
    """Raise if an option has another value than `values`. A missing option is accepted.

    Raises:
        InputError: The value is invalid.
    """
    if name in options and not any(type(options[name]) is type(value) and options[name] == value for value in values):
        raise InputError(
            f"{name} is {options[name]!r:.100}.", fix=f"pass {' or '.join(map(repr, values))}, or leave {name} out."
        )


def check_options(options: Options, supported: Sequence[str]) -> None:
    """Raise if a request has unknown options.

    Raises:
        UnknownOptionError: An option is not in `supported`.
    """
    unknown = sorted(set(options) - set(supported))
    if unknown:
        raise UnknownOptionError(
            f"The operation does not support the options {', '.join(unknown)}.", fix=f"use only {', '.join(supported)}."
        )
