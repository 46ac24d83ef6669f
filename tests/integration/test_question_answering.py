"""Tests of the question answering pipeline, which transformers 5 removed: it returns the same answers as transformers
4.57.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact

SHORT = "i lost my card in paris . the bank can open a new account in london ."
WITH_UNKNOWN = f"{SHORT} xyzzy quux."
LONG = " ".join(
    ["the money is here ."] * 12
    + [SHORT]
    + ["i can not pay with Wolfgang's phone app, please help me now!"] * 9
    + [SHORT]
)

# Each entry is (question, context, options, answers). The answers are outputs of transformers 4.57.6, as (score, start,
# answer), for the logits of `logits_by_token` and this tokenizer. Most answers in the long context occur in several
# windows and positions, whose scores are added. Among answers with equal scores, transformers 4 chooses by the instruction
# sets of the processor. Here the first position in the context is expected.
ANSWERS: list[tuple[str, str, dict[str, Any], list[tuple[float, int, str]]]] = [
    ("who", SHORT, {"top_k": 3, "align_to_words": False}, [
        (0.04241, 7, "my card"), (0.034395, 7, "my card in paris . the"), (0.024061, 0, "i lost my card"),
    ]),
    ("where is my card", LONG, {"max_seq_len": 62}, [(0.158174, 329, "Wolfgang's phone app, please")]),
    ("where", LONG, {"top_k": 4, "max_seq_len": 40}, [
        (0.354889, 329, "Wolfgang's phone app, please"), (0.316276, 349, ", please"), (0.14792, 13, "here"),
        (0.137643, 320, "pay with Wolfgang's phone app, please"),
    ]),
    ("where", LONG, {"top_k": 4, "max_seq_len": 40, "doc_stride": 10, "max_answer_len": 4}, [
        (0.236104, 349, ", please"), (0.108289, 13, "here"), (0.084461, 13, "here . the"),
        (0.052876, 310, "i can not pay"),
    ]),
    ("where", LONG, {"top_k": 4, "handle_impossible_answer": True, "max_seq_len": 50}, [
        (0.220173, 349, ", please"), (0.21832, 329, "Wolfgang's phone app, please"),
        (0.109608, 310, "i can not pay with Wolfgang's phone app, please"),
        (0.077194, 320, "pay with Wolfgang's phone app, please"),
    ]),
    ("where", SHORT, {"top_k": 4, "padding": "max_length", "max_seq_len": 50}, [
        (0.04241, 7, "my card"), (0.034395, 7, "my card in paris . the"), (0.024061, 0, "i lost my card"),
        (0.02252, 50, "account in london ."),
    ]),
    ("xyzzy quux", WITH_UNKNOWN, {"top_k": 6}, [
        (0.032367, 7, "my card"), (0.02625, 7, "my card in paris . the"), (0.018363, 0, "i lost my card"),
        (0.017187, 50, "account in london ."), (0.017187, 50, "account in london . xyzzy quux."),
        (0.014893, 0, "i lost my card in paris . the"),
    ]),
]  # fmt: skip


def logits_by_token(input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
    """Return start and end logits `(batch, sequence)` that are computed only from the token ids, so that the test needs
    no stored weights.
    """
    angles = input_ids.double() * 1.7
    return {
        "start_logits": (torch.sin(angles) * 3).float(),
        "end_logits": (torch.sin(angles * 1.3 + 0.5) * 3).float(),
    }


@pytest.fixture
def answer(tiny_artifact: Callable[..., Artifact]) -> Any:
    return accel.pipeline("question-answering", model=tiny_artifact("bert", "question-answering").path)


@pytest.mark.parametrize(
    ("question", "context", "options", "expected"), ANSWERS, ids=[str(number) for number in range(len(ANSWERS))]
)
def test_answers_equal_transformers_4(
    answer: Any, question: str, context: str, options: dict[str, Any], expected: list[tuple[float, int, str]]
) -> None:
    answer.model = logits_by_token
    results = answer(question=question, context=context, **options)
    results = results if isinstance(results, list) else [results]
    assert [(result["start"], result["answer"]) for result in results] == [(start, text) for _, start, text in expected]
    assert all(result["answer"] == context[result["start"] : result["end"]] for result in results)
    # The scores are stored with six decimals.
    assert [result["score"] for result in results] == pytest.approx([score for score, _, _ in expected], abs=1e-6)


def test_windows_overlap_by_at_most_128_tokens(answer: Any) -> None:
    query = {"question": "where", "context": "the money is here . " * 200}
    for longest, stride in ((90, 45), (384, 128)):
        named = list(answer.preprocess(query, max_seq_len=longest, doc_stride=stride))
        usual = list(answer.preprocess(query, max_seq_len=longest))
        assert [window["encoding"].ids for window in usual] == [window["encoding"].ids for window in named]


def test_window_length_is_limited_to_384_tokens_and_the_tokenizers_limit(answer: Any) -> None:
    query = {"question": "where", "context": "the money is here . " * 200}
    limit = answer.tokenizer.model_max_length
    assert len(next(iter(answer.preprocess(query)))["encoding"].ids) == min(limit, 384)
    answer.tokenizer.model_max_length = 10**9
    assert len(next(iter(answer.preprocess(query)))["encoding"].ids) == 384


def test_question_is_cut_to_max_question_len_tokens(answer: Any) -> None:
    query = {"question": "where is my card", "context": SHORT}
    cut = next(iter(answer.preprocess(query, max_question_len=2)))
    assert cut["encoding"].ids == answer.tokenizer("where is", SHORT)["input_ids"]
    uncut = next(iter(answer.preprocess(query, max_question_len=64)))
    assert uncut["encoding"].ids == answer.tokenizer("where is my card", SHORT)["input_ids"]


@pytest.mark.parametrize("options", [{}, {"max_seq_len": 40, "top_k": 3}])
def test_answers_with_left_padding(answer: Any, options: dict[str, Any]) -> None:
    answer.model, answer.tokenizer.padding_side = logits_by_token, "left"
    questions = ["where", "who is in london now"]
    queries = [{"question": question, "context": context} for question in questions for context in (SHORT, LONG[-300:])]
    alone = [answer(query, **options) for query in queries]
    together = answer(queries, batch_size=3, **options)
    for single, other, query in zip(alone, together, queries, strict=True):
        single, other = ([result] if isinstance(result, dict) else result for result in (single, other))
        assert all(result["answer"] == query["context"][result["start"] : result["end"]] != "" for result in single)
        assert [result["answer"] for result in single] == [result["answer"] for result in other]


def test_context_of_ignored_characters_has_no_answer(answer: Any) -> None:
    from tokenizers import normalizers

    answer.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    assert answer(question="where", context="~~") == []
