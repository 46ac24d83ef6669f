"""Tests of the choice of the next token and of stop texts, in `accel.decoding` and in its copy without torch for Triton
repositories.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from accel import GenerationOptions
from accel.decoding.host_threads import one_thread, use_one_thread
from accel.decoding.next_token import NextTokenSelector, RowTokenSelector
from accel.decoding.stop_text import TextPieces
from accel.deploying.triton.served import text_decoder
from accel.testing.generative_models import tiny_generator

IDS = torch.zeros((1, 1), dtype=torch.int64)


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    return NextTokenSelector(LogitsProcessorList())(IDS, scores)


def drawn(scores: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return NextTokenSelector(LogitsProcessorList(), draw=True, generator=generator)(IDS, scores)


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_choice_is_the_first_of_equal_tokens(rows: int) -> None:
    scores = torch.randn(rows, 70_000)
    scores[:, 500] = scores[:, 60_000] = 9.0
    assert likeliest(scores).tolist() == [500] * rows
    assert torch.equal(likeliest(scores.bfloat16()), scores.bfloat16().argmax(-1))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [0, 69_990])
def test_samples_equal_torch_multinomial(rows: int, hidden: int) -> None:
    scores = 5 * torch.randn(rows, 70_000)
    scores[:, :hidden] = -torch.inf
    for seed in range(20):
        generator, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        expected = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)
        assert torch.equal(drawn(scores, other), expected)
        assert torch.equal(generator.get_state(), other.get_state())
    torch.manual_seed(3)
    expected = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
    torch.manual_seed(3)
    assert torch.equal(drawn(scores), expected)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_scores_that_allow_no_token_raise(value: float) -> None:
    scores = torch.randn(2, 100)
    scores[1] = value
    with pytest.raises(RuntimeError, match="all tokens have the probability 0"):
        drawn(scores)


# The logits of eight tokens. The sequence before the new token contains the tokens 0 and 3.
LOGITS = [2.0, 1.5, 1.4, 1.0, 0.5, 0.0, -1.0, -2.0]
SEEN = [0, 3, 0]
# Each entry has sampling options and the tokens that can be chosen, with the most probable token first. Without a
# temperature, decoding is greedy.
CHOICES: dict[str, tuple[dict[str, float], list[int]]] = {
    "greedy": ({}, [0]),
    "greedy with a penalty": ({"repetition_penalty": 2.0}, [1]),
    "all tokens": ({"temperature": 1.0, "top_k": 0}, [0, 1, 2, 3, 4, 5, 6, 7]),
    "hot": ({"temperature": 5.0, "top_k": 0}, [0, 1, 2, 3, 4, 5, 6, 7]),
    "cold": ({"temperature": 1e-4}, [0]),
    "top-k": ({"temperature": 0.7, "top_k": 3}, [0, 1, 2]),
    "top-k of one": ({"temperature": 3.0, "top_k": 1}, [0]),
    "top-p": ({"temperature": 1.0, "top_p": 0.6}, [0, 1, 2]),
    "top-p of the likeliest": ({"temperature": 1.0, "top_p": 1e-6}, [0]),
    "temperature before top-p": ({"temperature": 4.0, "top_p": 0.6}, [0, 1, 2, 3]),
    "top-k before top-p": ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [0, 1]),
    "penalty before top-k": ({"temperature": 1.0, "repetition_penalty": 2.0, "top_k": 3}, [1, 2, 0]),
}


@pytest.fixture(scope="module")
def probabilities() -> Callable[[dict[str, float]], torch.Tensor]:
    """Return a function that computes the probability of each token with `accel.decoding`. Greedy decoding gives its
    token the probability 1.
    """
    model = tiny_generator("llama")

    def get(options: dict[str, float]) -> torch.Tensor:
        choice = RowTokenSelector(model, SEEN, GenerationOptions(**options))
        scores = choice.scores(torch.tensor([LOGITS]))
        return scores[0].softmax(-1) if "temperature" in options else (scores == scores.max()).float()[0]

    return get


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_that_can_be_chosen(name: str, probabilities: Callable[[dict[str, float]], torch.Tensor]) -> None:
    options, tokens = CHOICES[name]
    expected = probabilities(options)
    assert expected.nonzero().flatten().tolist() == sorted(tokens)
    logits = text_decoder.penalized(np.array(LOGITS, dtype="float32"), SEEN, options.get("repetition_penalty", 1.0))
    served = {"top_k": 50, **options, "do_sample": "temperature" in options}
    chosen, likely = text_decoder.likely_tokens(logits, served)
    if served["do_sample"]:
        assert chosen.tolist() == tokens
        np.testing.assert_allclose(likely, expected[tokens].numpy(), rtol=1e-5)
    draws = [text_decoder.choose(np.array(LOGITS), SEEN, served, np.random.default_rng(seed)) for seed in range(20)]
    assert set(draws) <= set(tokens)


def test_samples_without_torch_have_correct_frequencies() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype="float32"))
    random, options = np.random.default_rng(0), {"do_sample": True, "top_p": 0.9}
    drawn = np.bincount([text_decoder.choose(logits, [0], options, random) for _ in range(4000)], minlength=4) / 4000
    # The first three tokens have a total probability of 0.95. The tolerance is four standard deviations of 4,000
    # samples.
    np.testing.assert_allclose(drawn, np.array([0.5, 0.3, 0.15, 0.0]) / 0.95, atol=4 * 0.5 / 4000**0.5)


class ByteTokenizer:
    """Tokenizer whose tokens are bytes. Tokens below 256 are like tokens of a byte-level tokenizer, and tokens from 256
    are like the tokens `<0xNN>` of a SentencePiece tokenizer.

    If consecutive `<0xNN>` tokens are not valid UTF-8, each of their bytes becomes a replacement character.
    """

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = ""
        for named, run in itertools.groupby(ids, lambda token: token >= 256):
            data = bytes(token % 256 for token in run)
            try:
                text += data.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(data) if named else data.decode("utf-8", "replace")
        return text


def named(data: bytes) -> list[int]:
    return [256 + byte for byte in data]


# Each entry has tokens, a stop text, and the expected text.
TEXTS: dict[str, tuple[list[int], str | None, str]] = {
    "letters": (list(b"one two"), None, "one two"),
    "characters of several bytes": (list("a\xdf\u2192\U0001f600!".encode()), None, "a\xdf\u2192\U0001f600!"),
    "an unfinished character": (list("\U0001f600".encode()[:2]), None, "\ufffd"),
    "stop text": (list(b"one two three"), "two", "one "),
    "stop text at the start": (list(b"stop"), "stop", ""),
    "most of a stop text": (list(b"one tw"), "two", "one tw"),
    "a stop text after its beginning": (list(b"aab"), "ab", "a"),
    "a stop text of one character": (list("ein \xd6l".encode()), "\xd6", "ein "),
    "named bytes of a character": ([*named("\xe9".encode()), *b"ab"], None, "\xe9ab"),
    "named bytes that are no text": ([*named(b"\xc3\xa9\xc3"), *b"a"], None, "\ufffd\ufffd\ufffda"),
    "named bytes at the end": ([*b"a", *named("\U0001f642".encode())], None, "a\U0001f642"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_text_never_changes_later(name: str) -> None:
    tokens, stop, expected = TEXTS[name]
    byte_tokens = frozenset(range(256, 512))
    pieces = TextPieces(ByteTokenizer(), [stop] if stop else [], byte_tokens)
    ours = [*(pieces.push(token) for token in tokens), pieces.finish()]
    served, theirs = text_decoder.AnswerText(ByteTokenizer(), byte_tokens, stop), []
    for n in range(len(tokens)):
        piece, stopped = served.piece(tokens[: n + 1], ended=n + 1 == len(tokens))
        theirs.append(piece)
        if stopped:
            break
    assert "".join(ours) == "".join(theirs) == expected
    assert pieces.stopped == (stop is not None and stop in ByteTokenizer().decode(tokens))
    for streamed in (ours, theirs):
        assert all(expected.startswith("".join(streamed[:n])) for n in range(len(streamed)))


def test_first_of_several_stop_texts_ends_the_text() -> None:
    pieces = TextPieces(ByteTokenizer(), ["three", "two"])
    assert "".join(pieces.push(token) for token in b"one two three") == "one "
    assert pieces.stopped


def test_only_one_module_selects_tokens_from_logits() -> None:
    """Only the module `next_token` selects tokens from logits, and all other code calls this module. Beam search and
    other modes run in transformers.
    """
    root = Path(text_decoder.__file__).parents[3]
    places = {
        str(path.relative_to(root))
        for room in ("decoding", "models", "serving/continuous_batching", "upstream")
        for path in (root / room).glob("*.py")
        if re.search(r"argmax\(|multinomial\(", path.read_text(encoding="utf-8"))
    }
    assert places == {"decoding/next_token.py"}


def test_limited_threads_apply_to_this_thread_only() -> None:
    usual, begin = torch.get_num_threads(), threading.Event()
    threads: dict[str, int] = {}

    def count(name: str) -> None:
        threads[name] = torch.get_num_threads()

    def other() -> None:
        count("before")
        begin.wait()
        count("meanwhile")

    waiting = threading.Thread(target=other)
    waiting.start()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            begin.set()
            waiting.join()
            fresh = threading.Thread(target=count, args=("fresh",))
            fresh.start()
            fresh.join()
        assert torch.get_num_threads() == 2

        limited = threading.Thread(target=lambda: (use_one_thread(), count("limited")))
        limited.start()
        limited.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert threads["meanwhile"] == threads["before"]
    assert (threads["fresh"], threads["limited"]) == (2, 1)
