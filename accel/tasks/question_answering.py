"""Task `question-answering`: extractive question answering, where the answer is a part of the context."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import progress
from ..data.encoded_rows import EncodedRows, from_tokenizer
from ..data.labels import accepted_answers, texts
from ..data.rows import DatasetRows
from ..deploying.triton.text_fronts import TextFront, TextModelFacts, TritonTensor
from ..errors import ConfigError, InputError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, divide, metric_of_sums, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from ..models.modality_models import TextModel
from ..serving.operations import Operation

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForQuestionAnswering(TextModel):
    """Extractive question answering model: `start_logits` and `end_logits`, each `(batch, sequence)`."""

    task = "question-answering"


_LONGEST = 384  # maximum number of tokens of a window: the question and a part of the context


def _normalized(text: str) -> str:
    """Return the text in lower case without punctuation, articles and extra spaces, like the official SQuAD 1.1 script."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def _overlap(predicted: str, true: str) -> float:
    a, b = _normalized(predicted).split(), _normalized(true).split()
    if not a or not b:
        return float(a == b)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b))


def _answer_sums(predictions: Values, references: Values) -> Floats:
    rows = []
    for predicted, accepted in zip(predictions, references, strict=True):
        accepted = accepted or [""]
        exact = any(_normalized(predicted) == _normalized(text) for text in accepted)
        rows.append((float(exact), 1.0, max(_overlap(predicted, text) for text in accepted)))
    return np.asarray(rows, np.float64)


_SQUAD = metric_of_sums(
    "squad",
    _answer_sums,
    {
        "exact_match": lambda sums: 100 * ratio(sums),
        "f1": lambda sums: 100 * divide(sums[..., 2], sums[..., 1]),
    },
    key="f1",
    points=1.0,
)
_EXACT_MATCH = metric_of_sums("exact_match", _answer_sums, {"exact_match": ratio}, rowwise=True)


class AnswerPredictor(Predictor):
    """Predictor of answers to questions about contexts. The question answering pipeline splits long contexts into windows."""

    kind = "answers"
    offline_metrics = (_SQUAD, _EXACT_MATCH)

    def _references(self) -> list[Any]:
        return [accepted_answers(value, self.rows) for value in self.rows.column("answers")]

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the answers as texts."""
        from ..models.pipelines.pipeline import pipeline

        pipe = pipeline("question-answering", model=model, tokenizer=self.processor)
        examples = [
            {"question": question, "context": context}
            for question, context in zip(texts(self.rows, "question"), texts(self.rows, "context"), strict=True)
        ]
        options: dict[str, Any] = {"handle_impossible_answer": any(not accepted for accepted in self.references)}
        if self.max_length is not None:
            options["max_seq_len"] = min(self.max_length, _LONGEST)
        predictions: list[Any] = []
        parts = [examples[i : i + self.batch_size] for i in range(0, len(examples), self.batch_size)]
        for part in progress.track(parts, what):
            predictions += [
                answer["answer"] if answer else "" for answer in pipe(part, batch_size=self.batch_size, **options)
            ]
        return predictions


class QuestionAnswering(Task):
    """The task `question-answering`: extractive question answering, where the answer is a part of the context."""

    model = ORTModelForQuestionAnswering

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        limits = {"truncation": "only_second", "max_length": min(max_length or _LONGEST, _LONGEST)}
        return from_tokenizer(processor(texts(rows, "question"), texts(rows, "context"), **limits), processor)

    def predictor(self, config: Any) -> type[Predictor]:
        return AnswerPredictor

    def pipeline(self, name: str) -> type[Any]:
        from .question_answering_pipeline import QuestionAnsweringPipeline

        return QuestionAnsweringPipeline

    def operations(self) -> Sequence[Operation]:
        return (AnswerOperation(),)

    def fronts(self) -> Mapping[str, TextFront]:
        return {"question-answering": ANSWERS}


class AnswerOperation(Operation):
    """Operation that returns the part of a text that answers a question."""

    name = "question-answering"
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "question": ("question", "query"),
        "context": ("context", "passage", "paragraph", "text"),
    }

    def inputs(self, values: Mapping[str, Any]) -> Any:
        return dict(values)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        if options.get("top_k", 1) != 1:
            raise InputError(
                f"top_k={options['top_k']} is not supported: for rows of a data set, accel writes exactly one answer for each question.",
                fix="leave top_k out.",
            )
        return {"answer": pa.string(), "score": pa.float64(), "start": pa.int64(), "end": pa.int64()}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"ANSWER": ("BYTES", 1), "SCORE": ("FP32", 1), "START": ("INT64", 1), "END": ("INT64", 1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        return {name: [answer[name.lower()]] for name in self.tensor_outputs(model)}

    def endpoint(self) -> Endpoint:
        from pydantic import Field
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Endpoint, HttpCall
        from ..serving.http.replies import JsonReply

        class QaBody(Body):
            """Body of `/qa`."""

            model: str | None = None
            question: str = Field(min_length=1)
            context: str = Field(min_length=1)
            top_k: int = Field(default=1, ge=1, le=100)
            max_answer_len: int = Field(default=15, ge=1, le=1000)
            handle_impossible_answer: bool = False

        async def answer(call: HttpCall, body: QaBody) -> Response:
            inputs = {"question": body.question, "context": body.context}
            names = ("top_k", "max_answer_len", "handle_impossible_answer")
            options = {name: getattr(body, name) for name in names}
            return JsonReply(await call.ask(inputs, operation=self.name, model=body.model, **options))

        return Endpoint(
            path="/qa",
            answer=answer,
            body=QaBody,
            summary="Return the part of a text that answers a question",
            tag="tasks",
            operation=self.name,
            example={"question": "Where do I live?", "context": "My name is Wolfgang and I live in Berlin."},
        )


def _windows(facts: TextModelFacts) -> dict[str, Any]:
    if facts.artifact.component().max_sizes.get("sequence", 384) < 16:
        raise ConfigError(
            f"The model accepts only {facts.artifact.component().max_sizes['sequence']} tokens; the Triton model that answers questions "
            "needs at least 16, for a question and a part of its context.",
            fix="deploy only the graph with layout='graph' (`accel deploy ... --layout graph`).",
        )
    return {"longest": 384, "no_answer": facts.tokenizer.cls_token_id}


ANSWERS = TextFront(
    service="answer_spans:QuestionAnswerer",
    inputs=(TritonTensor(name="QUESTION", dtype="string"), TritonTensor(name="CONTEXT", dtype="string")),
    outputs=lambda _: (
        TritonTensor(name="ANSWER", dtype="string", dims=(-1,)),
        TritonTensor(name="SCORE", dtype="float32", dims=(-1,)),
        TritonTensor(name="START", dtype="int64", dims=(-1,)),
        TritonTensor(name="END", dtype="int64", dims=(-1,)),
    ),
    reads=lambda _: ("start_logits", "end_logits"),
    options=_windows,
    sample={"QUESTION": ["Where does he live?"], "CONTEXT": ["Wolfgang lives in Berlin."]},
)
