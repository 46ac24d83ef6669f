"""Text generation for many requests in one batch: between two decoding steps, new rows are added and complete rows are removed.

Rows are padded on the left and the attention mask excludes the padding. Each row has its own options and random numbers. Token selection
and stop strings give the same results as `accel.decoding`, but this module does not use torch; tests/unit/test_next_token.py tests both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from .tokens import Array, InvalidRequestError, NonFiniteOutputError

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

_OPTIONS: Mapping[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda n: n >= 1, "a whole number of at least 1"),
    "do_sample": (bool, lambda _: True, "true or false"),
    "temperature": (float, lambda t: t > 0, "a number above 0"),
    "top_k": (int, lambda k: k >= 0, "a whole number of at least 0"),
    "top_p": (float, lambda p: 0 < p <= 1, "a number above 0 and at most 1"),
    "repetition_penalty": (float, lambda r: r > 0, "a number above 0"),
    "seed": (int, lambda s: s >= 0, "a whole number of at least 0"),
    "stop": (str, bool, "a text"),
}


class AnswerText:
    """The text that is generated for one request, returned in pieces that do not change later.

    Args:
        tokenizer: Tokenizer of the model.
        byte_tokens: Ids of the tokens that represent one byte each. A character of several bytes is complete only after its last byte.
        stop: Stop string; the text ends before it.
    """

    def __init__(self, tokenizer: Any, byte_tokens: Set[int], stop: str | None) -> None:
        self._tokenizer, self._bytes, self._stop = tokenizer, byte_tokens, stop
        self._sent = ""

    def piece(self, tokens: Sequence[int], *, ended: bool) -> tuple[str, bool]:
        """Return the text that became final with the last token, and whether the stop string was found."""
        text, stop = self._tokenizer.decode(tokens, skip_special_tokens=True), self._stop
        stopped = bool(stop) and stop in text
        if stop and stopped:
            text = text[: text.index(stop)]
        elif not ended:
            if text.endswith("\ufffd") or (tokens and tokens[-1] in self._bytes):
                # The last character may be incomplete, because some of its bytes may be missing.
                return "", False
            if stop:
                # Do not send the last characters yet, because they may be the beginning of the stop string.
                text = text[: max(len(self._sent), len(text) - len(stop) + 1)]
        sent, self._sent = self._sent, text if len(text) > len(self._sent) else self._sent
        return self._sent[len(sent) :], stopped


@dataclass
class TextRow:
    """One row of the running batch: the state of one request.

    Attributes:
        prompt: Token ids of the prompt.
        options: Options of the generation.
        text: The text generated so far.
        send: Sends a piece of text to the client.
        done: Called once at the end, with the error or `None`.
        cancelled: Returns whether the client cancelled the request.
    """

    prompt: list[int]
    options: Mapping[str, Any]
    text: AnswerText
    send: Callable[[str], None]
    done: Callable[[Exception | None], None]
    cancelled: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.made: list[int] = []
        self.random = np.random.default_rng(self.options.get("seed"))


class TextDecoder:
    """The running batch of a decoder.

    Args:
        run: Function that runs the graph. Its argument and its result are tensors by name.
        tokenizer: Tokenizer of the model.
        settings: `caches` describes each KV cache input: its output `present`, its `dtype`, and its `shape` without the batch axis, where
            -1 is the number of tokens. `takes` contains the names of the other inputs, `end` the ids of the end tokens, `limit` the number
            of positions (or null), and `defaults` the default options.
    """

    def __init__(self, run: Run, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._caches: Mapping[str, Mapping[str, Any]] = settings["caches"]
        self._takes = frozenset(settings["takes"])
        self._end = frozenset(settings["end"])
        self._limit: int | None = settings["limit"]
        self._defaults: Mapping[str, Any] = settings["defaults"]
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self._bytes = frozenset(token for name in names if (token := tokenizer.token_to_id(name)) is not None)
        self.rows: list[TextRow] = []
        self._past: dict[str, Array] = {}
        self._mask: Array = np.zeros((0, 0), dtype="int64")

    def read(self, prompt: str, options: Mapping[str, Any], **calls: Any) -> TextRow:
        """Convert a request to a row; `calls` are the function attributes of `TextRow`.

        Raises:
            Refused: The request is invalid.
        """
        chosen = {**self._defaults, **_checked(options)}
        ids = self._tokenizer.encode(prompt).ids
        if not ids:
            raise InvalidRequestError("the prompt of the request is empty")
        if self._limit is not None:
            most_new_tokens = self._limit - len(ids)
            if most_new_tokens < 1:
                raise InvalidRequestError(
                    f"the prompt has {len(ids)} tokens, but the model supports at most {self._limit} tokens, including new ones"
                )
            chosen["max_new_tokens"] = min(chosen["max_new_tokens"], most_new_tokens)
        text = AnswerText(self._tokenizer, self._bytes, chosen.get("stop"))
        return TextRow(list(ids), chosen, text, **calls)

    def add(self, row: TextRow) -> None:
        """Run the prompt of a row, generate the row's first token, and add the row to the batch."""
        length = len(row.prompt)
        past = {name: self._empty(cache) for name, cache in self._caches.items()}
        mask = np.ones((1, length), dtype="int64")
        logits, present = self._call([row.prompt], mask, [range(length)], past, length - 1)
        if self._take(row, logits[0]):
            return
        if not self.rows:
            self._past, self._mask, self.rows = present, mask, [row]
            return
        width = max(length, self._mask.shape[1])
        self._mask = np.concatenate([_widened(self._mask, width, 1), _widened(mask, width, 1)])
        self._past = {
            name: np.concatenate([_widened(self._past[name], width, 2), _widened(present[name], width, 2)])
            for name in self._caches
        }
        self.rows.append(row)

    def step(self) -> None:
        """Generate one token for each row, and remove the rows that have reached their end."""
        self._mask = np.concatenate([self._mask, np.ones((len(self.rows), 1), dtype="int64")], axis=1)
        ids = [[row.made[-1]] for row in self.rows]
        positions = [[len(row.prompt) + len(row.made) - 1] for row in self.rows]
        logits, self._past = self._call(ids, self._mask, positions, self._past, 0)
        ended = [self._left(row) or self._take(row, logits[i]) for i, row in enumerate(self.rows)]
        self._keep([i for i, gone in enumerate(ended) if not gone])

    def fail(self, error: Exception) -> None:
        """End all rows with an error."""
        for row in self.rows:
            row.done(error)
        self._keep([])

    @staticmethod
    def _left(row: TextRow) -> bool:
        """Return whether the client cancelled the request of a row; end the row if the request was cancelled.

        Do not call this method for a complete row, because Triton would crash with a segmentation fault.
        """
        gone = row.cancelled()
        if gone:
            row.done(None)
        return gone

    def _keep(self, chosen: Sequence[int]) -> None:
        if len(chosen) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in chosen]
        # Remove the columns that are padding in all remaining rows.
        mask = self._mask[chosen]
        unused = int(mask.argmax(axis=1).min()) if self.rows else mask.shape[1]
        self._mask = mask[:, unused:]
        self._past = {name: values[chosen][:, :, unused:] for name, values in self._past.items()}

    def _call(
        self, ids: Any, mask: Array, positions: Any, past: Mapping[str, Array], logits_to_keep: int
    ) -> tuple[Array, dict[str, Array]]:
        """Run the graph and return the logits of each row's last token, and the updated KV caches."""
        feeds = {
            "input_ids": np.array(ids, dtype="int64"),
            "attention_mask": mask,
            "position_ids": np.array([list(row) for row in positions], dtype="int64"),
            "logits_to_keep": np.array([logits_to_keep], dtype="int64"),
        }
        outputs = self._run({**{name: values for name, values in feeds.items() if name in self._takes}, **past})
        present = {name: outputs[cache["present"]][:, :, : mask.shape[1]] for name, cache in self._caches.items()}
        return outputs["logits"][:, -1].astype("float32"), present

    def _empty(self, cache: Mapping[str, Any]) -> Array:
        return np.zeros([1, *(0 if size == -1 else size for size in cache["shape"])], dtype=cache["dtype"])

    def _take(self, row: TextRow, logits: Array) -> bool:
        """Select the next token of a row and send final text; return whether the row is complete."""
        if not np.isfinite(logits.max()):
            # Checking the maximum is enough, because the maximum is NaN if any logit is NaN.
            row.done(
                NonFiniteOutputError(
                    "the model computed NaN or infinity for the next token; deploy the model in float32"
                )
            )
            return True
        chosen = choose(logits, row.prompt + row.made, row.options, row.random)
        ended = chosen in self._end
        if not ended:
            row.made.append(chosen)
        ended = ended or len(row.made) >= row.options["max_new_tokens"]
        piece, stopped = row.text.piece(row.made, ended=ended)
        if piece:
            row.send(piece)
        if ended or stopped:
            row.done(None)
        return ended or stopped


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    checked = {}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidRequestError(
                f"the request has the unknown parameter {name!r}; the parameters are {', '.join(_OPTIONS)}"
            )
        kind, fits, words = _OPTIONS[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool) or not fits(value):
            raise InvalidRequestError(f"the parameter {name} is {value!r}, but it must be {words}")
        checked[name] = value
    return checked


def choose(logits: Array, tokens: Sequence[int], options: Mapping[str, Any], random: np.random.Generator) -> int:
    """Return the next token after `tokens`, from logits `(vocabulary,)`: the most likely token, or with `do_sample` a sampled token."""
    logits = penalized(logits, tokens, options.get("repetition_penalty", 1.0))
    if not options.get("do_sample"):
        return int(logits.argmax())
    likeliest, probabilities = likely_tokens(logits, options)
    return int(random.choice(likeliest, p=probabilities))


def penalized(logits: Array, tokens: Sequence[int], penalty: float) -> Array:
    """Return logits `(vocabulary,)` after applying the repetition penalty for `tokens`."""
    if penalty == 1.0:
        return logits
    logits, unique_tokens = logits.copy(), np.unique(tokens)
    logits[unique_tokens] = np.where(
        logits[unique_tokens] < 0, logits[unique_tokens] * penalty, logits[unique_tokens] / penalty
    )
    return logits


def likely_tokens(logits: Array, options: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return the token ids that can be sampled, the most likely first, and their probabilities."""
    logits = logits / options.get("temperature", 1.0)
    order = np.argsort(-logits, kind="stable")
    order = order[: options.get("top_k") or len(order)]
    likely = np.exp(logits[order] - logits[order[0]])
    likely = likely / likely.sum()
    # Include the token with which the cumulative probability reaches `top_p`.
    count = int(np.searchsorted(np.cumsum(likely), options.get("top_p", 1.0))) + 1
    likely = likely[:count] / likely[:count].sum()
    return order[:count], likely / likely.sum()


def _widened(values: Array, width: int, axis: int) -> Array:
    """Pad an axis with zeros at the front, up to the given width."""
    missing = width - values.shape[axis]
    return np.pad(values, [(missing if i == axis else 0, 0) for i in range(values.ndim)]) if missing else values
