"""Checks of a server: its answers are compared with those of PyTorch, under the conditions in which servers go wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..upstream.output_silencing import quiet
from .references import Variant
from .requests import AnswerError, ChatClient, OpenAiEmbeddings, TeiEmbeddings, TextClient, Vectors

TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 6e-2, "int8": 0.25}
"""Largest accepted difference by the data type in which the server computes: relative to the largest value of an embedding, or absolute
for scores between 0 and 1.
"""
_WORDS = (
    "I lost my card and cannot pay the fee at the machine in Paris when will a new one arrive please help me "
    "because the transfer of money to my old account failed twice today"
).split()
_TEXTS = (
    "I lost my card.",
    "Where is my NEW card?",
    "  The exchange rate is 1.25, isn't it?\n",
    "Zürich, São Paulo, naïve café",
    "東京タワー is tall",
    "a",
    "why why why why",
    "Please cancel the transfer of 1,000.50 EUR to account DE89 3704 0044.",
    "🙂 thanks!",
    "It was good. It was not bad. It was neither.",
)
_MANY = (1, 3, 33, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check.
        passed: Whether it passed; `None` if the server or the model has no such feature.
        difference: Largest difference from PyTorch, if the check compares values.
        cosine: Smallest cosine between an embedding and PyTorch's, if the check compares embeddings.
        detail: What was compared, and the likely cause of a failure.
    """

    name: str
    passed: bool | None
    difference: float | None = None
    cosine: float | None = None
    detail: str = ""


class Reference(Protocol):
    """Answers of PyTorch."""

    limit: int | None
    tokenizer: Any

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts."""

    def variants(self) -> Mapping[str, Variant]:
        """Return common faults by description."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    difference: float
    cosine: float
    worst: int


class TextAudit:
    """Checks of a server that returns a vector for each text.

    Args:
        client: The server.
        reference: PyTorch.
        directions: Whether vectors are embeddings, which are compared by direction.
        tolerance: Largest accepted difference.
        concurrency: Number of requests at the same time.
    """

    def __init__(
        self, client: TextClient, reference: Reference, *, directions: bool, tolerance: float, concurrency: int = 8
    ) -> None:
        self.client = client
        self.reference = reference
        self.directions = directions
        self.tolerance = tolerance
        self.concurrency = concurrency
        self._expected: dict[str, Any] = {}

    def run(self) -> list[Check]:
        """Run all checks. A check whose valid request fails is a failed check."""
        checks: list[tuple[str, Callable[[str], Check]]] = [
            ("values", self._values),
            ("lengths", self._lengths),
            ("truncation", self._truncation),
            ("order", self._order),
            ("batch", self._batch),
            ("repetition", self._repetition),
            ("rows", self._rows),
            ("concurrency", self._concurrency),
            ("bad input", self._bad_input),
        ]
        if self.directions:
            checks[3:3] = [
                ("normalization", self._normalization),
                ("prompts", self._prompts),
                ("dimensions", self._dimensions),
                ("base64", self._base64),
            ]
        results = []
        for name, check in checks:
            try:
                results.append(check(name))
            except AnswerError as error:
                results.append(Check(name=name, passed=False, detail=f"a valid request fails: {error}"))
        return results

    # Comparison of vectors.

    def _reference(self, texts: Sequence[str]) -> Vectors:
        missing = [text for text in dict.fromkeys(texts) if text not in self._expected]
        for text, vector in zip(missing, self.reference(missing), strict=True):
            self._expected[text] = vector
        return [self._expected[text] for text in texts]

    def _difference(self, actual: Any, expected: Any) -> tuple[float, float]:
        """Return the largest difference of two vectors, and their cosine."""
        if actual.shape != expected.shape or not np.isfinite(actual).all():
            return float("inf"), -1.0
        if not self.directions:
            return float(np.abs(actual - expected).max()), 1.0
        a, b = (vector / (np.linalg.norm(vector) or 1.0) for vector in (actual, expected))
        return float(np.abs(a - b).max() / (np.abs(b).max() or 1.0)), float(a @ b)

    def _compared(self, actual: Vectors, expected: Vectors) -> _Comparison:
        if len(actual) != len(expected):
            raise AnswerError(f"{len(expected)} texts get {len(actual)} answers")
        pairs = [self._difference(a, b) for a, b in zip(actual, expected, strict=True)]
        worst = max(range(len(pairs)), key=lambda i: pairs[i][0])
        return _Comparison(pairs[worst][0], min(cosine for _, cosine in pairs), worst)

    def _check(self, name: str, texts: Sequence[str], actual: Vectors, detail: str) -> Check:
        """Compare answers with PyTorch. If they differ, name the fault that explains them."""
        compared = self._compared(actual, self._reference(texts))
        passed = compared.difference <= self.tolerance
        if not passed:
            detail = f"{detail}; {texts[compared.worst]!r:.60} differs most: {self._cause(texts, actual, compared)}"
        cosine = compared.cosine if self.directions else None
        return Check(name=name, passed=passed, difference=compared.difference, cosine=cosine, detail=detail)

    def _cause(self, texts: Sequence[str], actual: Vectors, compared: _Comparison) -> str:
        sizes = {len(vector) for vector in actual}
        expected_size = len(self._reference(texts)[0])
        if sizes != {expected_size}:
            return f"the vectors have {sorted(sizes)} values, and PyTorch's have {expected_size}"
        # Only the differing texts tell the causes apart, and few of them are enough.
        differing = [
            (text, vector)
            for text, vector, expected in zip(texts, actual, self._reference(texts), strict=True)
            if self._difference(vector, expected)[0] > self.tolerance
        ][:4]
        for description, variant in self.reference.variants().items():
            answers = variant([text for text, _ in differing])
            if all(
                self._difference(vector, answer)[0] <= max(self.tolerance, 0.1 * compared.difference)
                for (_, vector), answer in zip(differing, answers, strict=True)
            ):
                return f"it looks as if {description}"
        if compared.difference <= TOLERANCES["float16"]:
            return "the difference has the size of rounding in half precision (--dtype float16 accepts it)"
        if compared.difference <= TOLERANCES["bfloat16"]:
            return "the difference has the size of rounding in bfloat16 or int8 (--dtype accepts it)"
        return "another model, revision or tokenizer, or another computation"

    # Checks.

    def _values(self, name: str) -> Check:
        answers = [vector for text in _TEXTS for vector in self.client.ask([text])]
        return self._check(name, _TEXTS, answers, f"{len(_TEXTS)} texts, one per request")

    def _text_of(self, tokens: int, seed: int) -> str:
        """Return a text with about this number of tokens."""
        draw = random.Random(seed)
        words = [draw.choice(_WORDS) for _ in range(tokens)]
        with quiet():
            ids = self.reference.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
        return " ".join(words[: max(1, round(tokens * tokens / max(len(ids), 1)))])

    def _lengths(self, name: str) -> Check:
        most = min(self.reference.limit or 512, 512) - 4
        texts = [
            self._text_of(max(1, round(most * share)), seed) for seed, share in enumerate((0.1, 0.25, 0.5, 0.8, 1.0))
        ]
        answers = [vector for text in texts for vector in self.client.ask([text])]
        return self._check(name, texts, answers, f"texts up to {most} tokens")

    def _truncation(self, name: str) -> Check:
        if self.reference.limit is None:
            return Check(name=name, passed=None, detail="the model has no maximum length")
        texts = [self._text_of(self.reference.limit * factor, 40 + factor) for factor in (2, 3)]
        try:
            answers = [vector for text in texts for vector in self.client.ask([text])]
        except AnswerError as error:
            rejected = str(error).startswith(("status 400", "status 413", "status 422"))
            return Check(name=name, passed=rejected, detail=f"too long texts are rejected: {error}"[:200])
        return self._check(name, texts, answers, f"texts longer than the {self.reference.limit} tokens of the model")

    def _normalization(self, name: str) -> Check:
        texts = _TEXTS[:4]
        norms = [float(np.linalg.norm(vector)) for vector in self.client.ask(texts)]
        expected = [float(np.linalg.norm(vector)) for vector in self._reference(texts)]
        accepted = max(self.tolerance, 1e-3)
        unit = max(abs(norm - 1) for norm in norms)
        same = max(abs(norm / (size or 1) - 1) for norm, size in zip(norms, expected, strict=True))
        detail = f"lengths {min(norms):.4g} to {max(norms):.4g}; PyTorch: {min(expected):.4g} to {max(expected):.4g}"
        if same > accepted and unit <= accepted:
            detail += "; the server normalizes, and the model's files do not"
        return Check(name=name, passed=min(same, unit) <= accepted, difference=min(same, unit), detail=detail)

    def _prompts(self, name: str) -> Check:
        prompts: Mapping[str, str] = self.reference.prompts() if hasattr(self.reference, "prompts") else {}
        named = {prompt: text for prompt, text in prompts.items() if text}
        if not named:
            return Check(name=name, passed=None, detail="the model has no prompts")
        if not isinstance(self.client, TeiEmbeddings):
            return Check(
                name=name, passed=None, detail="the API has no named prompts; `values` compares with the default prompt"
            )
        variants = self.reference.variants()
        worst, cosine = 0.0, 1.0
        for prompt in named:
            variant = variants.get(f"the prompt {prompt!r} is added")
            expected = self._reference(_TEXTS[:4]) if variant is None else variant(_TEXTS[:4])
            compared = self._compared(self.client.ask(_TEXTS[:4], prompt_name=prompt), expected)
            worst, cosine = max(worst, compared.difference), min(cosine, compared.cosine)
        detail = f"prompt_name: {', '.join(named)}"
        return Check(name=name, passed=worst <= self.tolerance, difference=worst, cosine=cosine, detail=detail)

    def _dimensions(self, name: str) -> Check:
        if not isinstance(self.client, OpenAiEmbeddings | TeiEmbeddings):
            return Check(name=name, passed=None, detail="the API has no field `dimensions`")
        texts = _TEXTS[:3]
        expected = self._reference(texts)
        size = max(1, len(expected[0]) // 2)
        try:
            actual = self.client.ask(texts, dimensions=size)
        except AnswerError as error:
            rejected = str(error).startswith("status 4")
            return Check(name=name, passed=rejected, detail=f"dimensions is rejected: {error}"[:200])
        compared = self._compared(actual, [vector[:size] for vector in expected])
        detail = f"the first {size} values"
        if {len(vector) for vector in actual} == {len(expected[0])}:
            detail = f"dimensions={size} is ignored without an error"
        norms = [float(np.linalg.norm(vector)) for vector in actual]
        full_norms = [float(np.linalg.norm(vector)) for vector in self.client.ask(texts)]
        passed = compared.difference <= self.tolerance
        if passed and max(abs(n - 1) for n in full_norms) < 1e-3 < max(abs(n - 1) for n in norms):
            # OpenAI normalizes shortened vectors again; sentence-transformers and infinity do not.
            detail += ", which are not normalized again: compare them with the cosine, not with the dot product"
        return Check(name=name, passed=passed, difference=compared.difference, cosine=compared.cosine, detail=detail)

    def _base64(self, name: str) -> Check:
        if not isinstance(self.client, OpenAiEmbeddings):
            return Check(name=name, passed=None, detail="the API has no field `encoding_format`")
        texts = _TEXTS[:3]
        try:
            actual = self.client.ask(texts, encoding_format="base64")
        except AnswerError as error:
            rejected = str(error).startswith("status 4")
            return Check(name=name, passed=rejected, detail=f"base64 is rejected: {error}"[:200])
        compared = self._compared(actual, self.client.ask(texts))
        passed = compared.difference <= self.tolerance
        detail = "float32 in base64 equals the list of numbers"
        return Check(name=name, passed=passed, difference=compared.difference, cosine=compared.cosine, detail=detail)

    def _order(self, name: str) -> Check:
        texts = [*_TEXTS, *(self._text_of(2 + 3 * i, i) for i in range(6))]
        mixed = random.Random(1).sample(texts, len(texts))
        answers = [*self.client.ask(mixed), *self.client.ask(mixed[::-1])]
        return self._matched(name, [*mixed, *mixed[::-1]], answers, f"{len(texts)} texts in two orders")

    def _batch(self, name: str) -> Check:
        """Compare texts alone and next to much longer texts: a mask that is ignored changes the short texts."""
        longer = [self._text_of(min(self.reference.limit or 256, 256) - 4, 7 + i) for i in range(3)]
        texts = [_TEXTS[0], longer[0], _TEXTS[5], longer[1], _TEXTS[1], longer[2]]
        together = self.client.ask(texts)
        return self._matched(name, texts, together, "short texts next to long texts in one request")

    def _repetition(self, name: str) -> Check:
        texts = [_TEXTS[0]] * 5 + [_TEXTS[1]] * 2
        return self._matched(
            name, texts * 2, [*self.client.ask(texts), *self.client.ask(texts)], "the same text several times"
        )

    def _rows(self, name: str) -> Check:
        texts, answers, sizes = [], [], []
        for count in _MANY:
            part = [f"{_TEXTS[i % len(_TEXTS)]} {i}" for i in range(count)]
            try:
                vectors = self.client.ask(part)
            except AnswerError as error:
                if str(error).startswith(("status 413", "status 422", "status 400")) and count > min(_MANY):
                    continue
                raise
            if len(vectors) != count:
                return Check(name=name, passed=False, detail=f"{count} texts in one request get {len(vectors)} answers")
            texts += part
            answers += vectors
            sizes.append(count)
        return self._matched(name, texts, answers, f"requests of {', '.join(map(str, sizes))} texts")

    def _concurrency(self, name: str) -> Check:
        draw = random.Random(3)
        pool = [*_TEXTS, *(self._text_of(3 + 5 * i, 20 + i) for i in range(8))]
        self._reference(pool)
        requests = [[draw.sample(pool, draw.randint(1, 4)) for _ in range(8)] for _ in range(self.concurrency)]
        barrier = threading.Barrier(self.concurrency)

        def caller(mine: list[list[str]]) -> list[tuple[list[str], Vectors]]:
            barrier.wait(timeout=30)
            return [(texts, self.client.ask(texts)) for texts in mine]

        with ThreadPoolExecutor(self.concurrency) as threads:
            results = [pair for part in threads.map(caller, requests) for pair in part]
        for texts, vectors in results:
            if len(texts) != len(vectors):
                return Check(
                    name=name, passed=False, detail=f"under load, {len(texts)} texts get {len(vectors)} answers"
                )
        texts = [text for part, _ in results for text in part]
        answers = [vector for _, part in results for vector in part]
        return self._matched(name, texts, answers, f"{len(results)} requests of {self.concurrency} callers")

    def _matched(self, name: str, texts: Sequence[str], answers: Vectors, detail: str) -> Check:
        """Compare answers with PyTorch. Of wrong answers, tell whether they belong to another text of the check."""
        compared = self._compared(answers, self._reference(texts))
        if compared.difference <= self.tolerance:
            return self._check(name, texts, answers, detail)
        wrong = answers[compared.worst]
        for other in dict.fromkeys(texts):
            if other != texts[compared.worst] and self._difference(wrong, self._expected[other])[0] <= self.tolerance:
                cosine = compared.cosine if self.directions else None
                return Check(
                    name=name, passed=False, difference=compared.difference, cosine=cosine,
                    detail=f"{detail}; {texts[compared.worst]!r:.40} gets the answer of {other!r:.40}",
                )  # fmt: skip
        return self._check(name, texts, answers, detail)

    def _bad_input(self, name: str) -> Check:
        """Send invalid requests. The server must answer with a status 4xx and stay alive."""
        wrong: list[str] = []
        valid = self.client.body(["a text"])
        field = next(key for key, value in valid.items() if isinstance(value, list))
        bodies = {
            "no texts": {**valid, field: []},
            "a number": {**valid, field: [1.5, None]},
            "no field": {key: value for key, value in valid.items() if key != field},
            "no object": [1],
        }
        for described, body in bodies.items():
            reply = self.client.connection.send(self.client.path, body)
            # An empty list of texts may get an empty list of answers.
            empty = described == "no texts" and reply.succeeded and reply.body in ([], {"results": []}, {"data": []})
            if not 400 <= reply.status < 500 and not empty:
                wrong.append(f"{described}: status {reply.status}")
        self.client.ask(["a text"])
        return Check(
            name=name, passed=not wrong, detail="; ".join(wrong) or f"{len(bodies)} invalid requests get a status 4xx"
        )


class ChatAudit:
    """Checks of a server of chats: greedy answers are compared with those of PyTorch.

    Args:
        client: The server.
        reference: PyTorch: returns the answer, and the number of tokens of the prompt.
        concurrency: Number of requests at the same time.
    """

    _MESSAGES = ("Hello!", "What is 2 + 2?", "Name a city in France.", "Write: a b c d e", "Why is the sky blue?")
    _TOKENS = 12

    def __init__(
        self, client: ChatClient, reference: Callable[[str, int], tuple[str, int]], *, concurrency: int = 8
    ) -> None:
        self.client = client
        self.reference = reference
        self.concurrency = concurrency

    def run(self) -> list[Check]:
        """Run all checks."""
        expected = {text: self.reference(text, self._TOKENS) for text in self._MESSAGES}
        results = []
        for name, check in (
            ("answers", self._answers),
            ("prompt", self._prompt),
            ("concurrency", self._load),
            ("bad input", self._bad),
        ):
            try:
                results.append(check(name, expected))
            except AnswerError as error:
                results.append(Check(name=name, passed=False, detail=f"a valid request fails: {error}"))
        return results

    def _answers(self, name: str, expected: Mapping[str, tuple[str, int]]) -> Check:
        wrong = []
        for text, (answer, _) in expected.items():
            actual, _ = self.client.ask(text, self._TOKENS)
            if actual.strip() != answer.strip():
                wrong.append(f"{text!r}: {actual!r:.60}, and PyTorch {answer!r:.60}")
        return Check(
            name=name, passed=not wrong, detail="; ".join(wrong) or f"{len(expected)} greedy answers are equal"
        )

    def _prompt(self, name: str, expected: Mapping[str, tuple[str, int]]) -> Check:
        wrong, reported = [], 0
        for text, (_, count) in expected.items():
            _, actual = self.client.ask(text, 1)
            if actual is None:
                continue
            reported += 1
            if actual != count:
                wrong.append(f"{text!r} has {actual} tokens, and with the chat template {count}")
        if not reported:
            return Check(name=name, passed=None, detail="the server does not report the tokens of the prompt")
        return Check(
            name=name, passed=not wrong, detail="; ".join(wrong) or "the prompts have the tokens of the chat template"
        )

    def _load(self, name: str, expected: Mapping[str, tuple[str, int]]) -> Check:
        texts = list(expected) * self.concurrency
        with ThreadPoolExecutor(self.concurrency) as threads:
            answers = list(threads.map(lambda text: self.client.ask(text, self._TOKENS)[0], texts))
        wrong = [
            text for text, answer in zip(texts, answers, strict=True) if answer.strip() != expected[text][0].strip()
        ]
        detail = (
            f"{len(wrong)} of {len(texts)} answers differ under load"
            if wrong
            else f"{len(texts)} answers of {self.concurrency} callers"
        )
        return Check(name=name, passed=not wrong, detail=detail)

    def _bad(self, name: str, expected: Mapping[str, tuple[str, int]]) -> Check:
        bodies: dict[str, dict[str, Any]] = {
            "no messages": {"messages": []},
            "a text": {"messages": "hello"},
            "no field": {},
        }
        wrong = []
        for described, change in bodies.items():
            body = {key: value for key, value in self.client.body("hello", 1).items() if key != "messages"}
            reply = self.client.connection.send(self.client.path, {**body, **change})
            if not 400 <= reply.status < 500:
                wrong.append(f"{described}: status {reply.status}")
        return Check(
            name=name, passed=not wrong, detail="; ".join(wrong) or f"{len(bodies)} invalid requests get a status 4xx"
        )
