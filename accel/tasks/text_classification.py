"""Text classification and regression, of a text or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from ..config import check_number
from ..data.batches import Encoded, cut, from_tokenizer
from ..data.labels import numbers, texts
from ..data.rows import Rows
from ..deploying.triton.text_fronts import Facts, Tensor, TextFront
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Metric, Values, correlation, ratio
from ..measuring.accuracy.predictors import Classes, Model, Predictor
from ..models.base import ORTModel
from ..models.modality_models import TextModel
from ..models.text_rows import Activation, PairScorer, activation_of
from ..serving.batching import can_pad
from ..serving.job import Options, Prepared, Row
from ..serving.operations import READS_TEXT, Operation
from ..serving.text_work import check_lengths, check_options, check_texts, cutting, text_row

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForSequenceClassification(TextModel):
    """Text classification and regression: `logits: (batch, num_labels)`; cross-encoders rank documents."""

    task = "text-classification"

    def predict(
        self,
        pairs: Sequence[Sequence[str]],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        activation_fn: Activation | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Any:
        """Scores of pairs of texts, in their order, as Sentence Transformers' `CrossEncoder` gives them.

        Args:
            pairs: `[(query, document), ...]`.
            batch_size: Pairs a call; those of like length share one.
            tokenizer: The artifact's own when `None`.
            activation_fn: What turns outputs into scores. When `None`, what the model's files say, else a sigmoid for one output.
            prompt_name: One of the prompts that the model's files name; their default one when `None`.
            prompt: What is put before each query, in place of it.

        Returns:
            `(len(pairs),)` float32 of a model with one output, else `(len(pairs), num_labels)`, as NumPy.
        """
        single = len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
        given: Any = [pairs] if single else pairs
        found = _scores(
            self, given, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn, prompt_name=prompt_name,
            prompt=prompt,
        ).numpy()  # fmt: skip
        return found[0] if single else found

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        tokenizer: Any = None,
        activation_fn: Activation | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[dict[str, Any]]:
        """Documents by how well they answer a query, the best first: `[{"corpus_id": 2, "score": 0.98}, ...]`.

        Args:
            query: One text.
            documents: Texts; `corpus_id` is a place in them.
            top_k: How many of them; all when `None`.
            return_documents: Whether each has its `text`, too.
            batch_size, tokenizer, activation_fn, prompt_name, prompt: See `predict`.

        Raises:
            TaskError: The model has more outputs than one.
        """
        if self.config.num_labels != 1:
            raise TaskError(
                f"A model that ranks has one output, and this one has {self.config.num_labels}.",
                fix="use predict, or a cross-encoder with one label.",
            )
        if isinstance(documents, str):
            raise InputError("rank takes a list of documents.", fix="pass a list of texts.")
        pairs = [(query, text) for text in documents]
        found = _scores(
            self, pairs, batch_size=batch_size, tokenizer=tokenizer, activation=activation_fn, prompt_name=prompt_name,
            prompt=prompt,
        ).tolist()  # fmt: skip
        # The first of equals comes first.
        order = sorted(range(len(found)), key=lambda i: -found[i])[:top_k]
        texts = [{"text": documents[i]} if return_documents else {} for i in order]
        return [{"corpus_id": i, "score": found[i], **text} for i, text in zip(order, texts, strict=True)]


def _scores(
    model: Any,
    pairs: Sequence[Sequence[str]],
    *,
    batch_size: int,
    tokenizer: Any,
    activation: Activation | None,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> torch.Tensor:
    """Scores of pairs of texts: `(pairs,)` of a model with one output, else `(pairs, num_labels)`; float32 on the CPU.

    Raises:
        InputError: They are no pairs of texts.
        ConfigError: A batch of no rows, an unknown prompt or activation.
    """
    if isinstance(pairs, str) or not all(_is_pair(pair) for pair in pairs):
        raise InputError("predict takes pairs of texts.", fix="pass [(query, document), ...].")
    check_number("batch_size", batch_size, 1)
    scorer = PairScorer(model, tokenizer)
    function = activation or activation_of(model)
    before = prompt if prompt is not None else scorer.settings.prompt(prompt_name)
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    rows: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        first, second = ([pairs[i][side] for i in part] for side in (0, 1))
        for i, row in zip(part, function(scorer.logits(scorer.rows(first, second, prompt=before))), strict=True):
            rows[i] = row
    found = torch.stack(rows) if rows else torch.empty(0, model.config.num_labels)
    return found[:, 0] if found.shape[1] == 1 else found


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


class Numbers(Predictor):
    """A number a row: regression."""

    kind = "numbers"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: correlation(name) for name in ("spearmanr", "pearsonr")} | {"mse": _MSE}

    def _references(self) -> list[Any]:
        return numbers(self.rows, "label")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Numbers."""
        return self._by_row(model, what, lambda logits, part: logits.reshape(len(part), -1)[:, 0].tolist())

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Numbers are hardly ever the same."""
        return None


def _mse(predictions: Values, references: Values) -> dict[str, float]:
    found, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    return {"mse": float(np.mean((found - true) ** 2))}


def _squares(predictions: Values, references: Values) -> Floats:
    squared = (np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2
    return np.stack([squared, np.ones_like(squared)], axis=1)


_MSE = Metric(
    name="mse", key="mse", compute=_mse, sums=_squares, finish=ratio, points=1.0, higher_is_better=False,
)  # fmt: skip


class TextClassification(Task):
    """Text classification and regression, of a text or of a pair of texts."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: Rows, processor: Any, max_length: int | None) -> Encoded:
        both = [texts(rows, use) for use in ("text", "text_pair") if rows.has(use)]
        return from_tokenizer(processor(*both, **cut(max_length)), processor)

    def predictor(self, config: Any) -> type[Predictor]:
        kind = getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            raise TaskError("Models with several labels a row cannot be measured yet.", fix="measure them yourself.")
        return Numbers if kind == "regression" or getattr(config, "num_labels", 2) == 1 else Classes

    def can_serve(self, pipeline: str, config: Any) -> bool:
        # Zero-shot classification asks whether a text entails that a label fits.
        labels = getattr(config, "label2id", None) or {}
        return pipeline != "zero-shot-classification" or any(str(one).lower().startswith("entail") for one in labels)

    def operations(self) -> Sequence[Operation]:
        return (Rank(), Classify(), ZeroShot())

    def fronts(self) -> Mapping[str, TextFront]:
        return {"text-classification": CLASSIFICATION, "zero-shot-classification": ZERO_SHOT}


class Classify(Operation):
    """Labels of texts, or of pairs of texts."""

    name = "text-classification"
    reads = READS_TEXT
    may_read = ("text_pair",)
    tensor_options: ClassVar[Mapping[str, Any]] = {"top_k": None}

    def inputs(self, values: Mapping[str, Any]) -> Any:
        return dict(values) if "text_pair" in values else values["text"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        label = {"label": pa.string(), "score": pa.float64()}
        return label if options.get("top_k", 1) == 1 else {"labels": pa.list_(pa.struct(label))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options.get("top_k", 1) != 1:
            return {"labels": answer}
        best = answer[0] if isinstance(answer, list) else answer
        return {"label": best["label"], "score": best["score"]}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"LABEL": ("BYTES", 1), "SCORE": ("FP32", 1), "SCORES": ("FP32", model.config.num_labels)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        scores = {one["label"]: one["score"] for one in answer}
        best = max(answer, key=lambda one: one["score"])
        labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
        return {"LABEL": [best["label"]], "SCORE": [best["score"]], "SCORES": [scores[name] for name in labels]}

    def endpoint(self) -> Endpoint:
        from pydantic import Field
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Call, Endpoint
        from ..serving.http.replies import Json

        class Pair(Body):
            """Two texts that are read together."""

            text: str
            text_pair: str

        class ClassifyBody(Body):
            """What `/classify` takes; `truncate` cuts texts that are longer than the model reads."""

            model: str | None = None
            inputs: str | Pair | list[str | Pair]
            top_k: int | None = Field(default=None, ge=1)
            function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
            truncate: bool = False

        def plain(one: str | Pair) -> Any:
            return one.model_dump() if isinstance(one, Pair) else one

        async def answer(call: Call, body: ClassifyBody) -> Response:
            many = isinstance(body.inputs, list)
            inputs = [plain(one) for one in body.inputs] if isinstance(body.inputs, list) else plain(body.inputs)
            call.check_batch(len(inputs) if many else 1)
            options: dict[str, Any] = {"truncation": True} if body.truncate else {}
            # null is all labels, as the pipeline has it; without it an answer is the best one.
            if "top_k" in body.model_fields_set:
                options["top_k"] = body.top_k
            if body.function_to_apply is not None:
                options["function_to_apply"] = body.function_to_apply
            return Json(await call.ask(inputs, operation=self.name, model=body.model, **options))

        return Endpoint(
            path="/classify",
            answer=answer,
            body=ClassifyBody,
            summary="Labels of texts, or of pairs",
            tag="tasks",
            operation=self.name,
            example={"inputs": "I lost my card"},
        )


class ZeroShot(Operation):
    """Which of a request's own labels fit a text."""

    name = "zero-shot-classification"
    reads = READS_TEXT
    needs = ("candidate_labels",)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        best = {"label": pa.string(), "score": pa.float64()}
        return {**best, "labels": pa.list_(pa.string()), "scores": pa.list_(pa.float64())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        labels, scores = answer["labels"], answer["scores"]
        return {"label": labels[0], "score": scores[0], "labels": labels, "scores": scores}

    def endpoint(self) -> Endpoint:
        from pydantic import Field, field_validator
        from starlette.responses import Response

        from ..serving.http.endpoints import Call, Endpoint
        from ..serving.http.text_bodies import Texts, pipeline_answer

        class ZeroShotBody(Texts):
            """What `/zero-shot` takes."""

            candidate_labels: list[str] = Field(min_length=1)
            hypothesis_template: str = Field(default="This example is {}.", max_length=1000)
            multi_label: bool = False

            @field_validator("hypothesis_template")
            @classmethod
            def _plain(cls, template: str) -> str:
                """Python's formatting does more than to put a label in: `{:999999999}` makes a text of that length."""
                if template.count("{}") != 1 or set("{}") & set(template.replace("{}", "")):
                    raise ValueError("has {} once, where the label goes, and no other braces")
                return template

        ask = pipeline_answer(self.name, "candidate_labels", "hypothesis_template", "multi_label")

        async def answer(call: Call, body: ZeroShotBody) -> Response:
            call.check_batch(len(body.candidate_labels) * (len(body.inputs) if isinstance(body.inputs, list) else 1))
            # Each text is read with each label.
            call.check_texts(body.inputs, times=len(body.candidate_labels))
            return await ask(call, body)

        return Endpoint(
            path="/zero-shot",
            answer=answer,
            body=ZeroShotBody,
            summary="Which of your labels fit a text",
            tag="tasks",
            operation=self.name,
            example={"inputs": "I lost my card", "candidate_labels": ["bank", "sports"]},
        )


class Rank(Operation):
    """Documents by how well they answer a query."""

    name = "rank"
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "query": ("query", "question", "anchor"),
        "documents": ("documents", "passages", "candidates"),
    }
    lists = ("documents",)
    takes_lists = False

    def offered(self, model: ORTModel) -> bool:
        return hasattr(model, "rank") and getattr(model.config, "num_labels", 0) == 1

    def work(self, model: ORTModel, tokenizer: Any) -> Ranking:
        return Ranking(model, tokenizer)

    def count(self, inputs: Any) -> int:
        if not isinstance(inputs, list | tuple) or len(inputs) != 2 or not isinstance(inputs[1], list | tuple):
            raise InputError("Expected a (query, documents) pair.", fix="pass (query, documents).")
        return len(inputs[1]) or 1

    def inputs(self, values: Mapping[str, Any]) -> Any:
        return values["query"], values["documents"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        if options.get("top_k") is not None:
            raise InputError("The scores of all documents are written.", fix="leave top_k out.")
        return {"scores": pa.list_(pa.float64())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """In the order of the documents."""
        return {"scores": [one["score"] for one in sorted(answer, key=lambda one: one["corpus_id"])]}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"SCORES": ("FP32", -1), "RANKING": ("INT64", -1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        return {"SCORES": self.values(answer, {})["scores"], "RANKING": [one["corpus_id"] for one in answer]}

    def endpoint(self) -> Endpoint:
        from pydantic import Field, model_validator
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Call, Endpoint
        from ..serving.http.replies import Json, text_error
        from ..serving.http.text_bodies import Direction, cut_options

        class RerankBody(Body):
            """What `/rerank` takes; with `texts` instead of `documents` it is asked, and answers, as text-embeddings-inference does."""

            model: str | None = None
            query: str
            documents: list[str] | None = Field(default=None, min_length=1)
            top_n: int | None = Field(default=None, ge=1)
            return_documents: bool = False
            raw_scores: bool = False
            texts: list[str] | None = Field(default=None, min_length=1)
            return_text: bool = False
            truncate: bool | None = None
            truncation_direction: Direction = "right"

            @model_validator(mode="after")
            def _either(self) -> RerankBody:
                others = ("return_text", "truncate", "truncation_direction"), ("top_n", "return_documents")
                if (self.documents is None) == (self.texts is None):
                    raise ValueError("either documents or texts are ranked")
                wrong = [name for name in others[self.documents is None] if name in self.model_fields_set]
                if wrong:
                    raise ValueError(f"{', '.join(wrong)} belong to {'texts' if self.texts is None else 'documents'}")
                return self

        async def answer(call: Call, body: RerankBody) -> Response:
            documents = body.texts or body.documents or []
            call.check_batch(len(documents))
            call.check_texts(body.query, times=len(documents))
            model = call.server.model_for(body.model, self.name)
            ranked = await call.ask(
                (body.query, documents), operation=self.name, model=model, top_k=body.top_n,
                return_documents=body.return_documents or body.return_text, raw_scores=body.raw_scores,
                **cut_options(body.truncate, body.truncation_direction),
            )  # fmt: skip
            if body.texts is not None:
                return Json(
                    [
                        {
                            "index": one["corpus_id"],
                            "score": one["score"],
                            **({"text": one["text"]} if "text" in one else {}),
                        }
                        for one in ranked
                    ]
                )
            results = [
                {
                    "index": one["corpus_id"],
                    "relevance_score": one["score"],
                    **({"document": one["text"]} if "text" in one else {}),
                }
                for one in ranked
            ]
            return Json({"model": model, "results": results, "usage": {"total_tokens": call.timing.tokens}})

        return Endpoint(
            path="/rerank",
            answer=answer,
            body=RerankBody,
            summary="Documents by how well they answer a query",
            tag="tasks",
            error=text_error,
            operation=self.name,
            example={"query": "a lost card", "documents": ["I cannot find my card", "the exchange rate"]},
        )


class Ranking:
    """Documents by how well they answer a query, as `ORTModelForSequenceClassification.rank` gives them."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._scorer = PairScorer(model, tokenizer)
        self._pads = self._scorer.pads and can_pad(model)
        self._activation = activation_of(model)

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`; the inputs are a query and its documents."""
        check_options(options, ("top_k", "return_documents", "raw_scores", "truncation", "truncation_side"))
        query, documents = inputs
        texts = check_texts(documents)
        if not isinstance(query, str):
            raise InputError("The query is no text.", fix="pass (query, documents).")
        if not texts:
            return Prepared([])
        with cutting(self._scorer, options):
            rows = self._scorer.rows([query] * len(texts), texts)
        check_lengths(rows, self._scorer.max_length)
        return Prepared([[text_row("rank", self._pads, row)] for row in rows])

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        return list(self._scorer.logits([row.inputs for row in rows])[:, 0])

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        _, documents = inputs
        logits = torch.stack([one for (one,) in outputs]) if outputs else torch.empty(0)
        scores = (logits if options.get("raw_scores") else self._activation(logits)).tolist()
        # The first of equals comes first.
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: options.get("top_k")]
        return [
            {"corpus_id": i, "score": scores[i], **({"text": documents[i]} if options.get("return_documents") else {})}
            for i in order
        ]


def _function(facts: Facts) -> str:
    """What makes scores of a classifier's outputs, as transformers' pipeline decides it."""
    kind = facts.config.problem_type
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or facts.config.num_labels == 1 else "softmax"


def _entailment(facts: Facts) -> dict[str, Any]:
    found = next((i for i, label in enumerate(facts.labels) if label.lower().startswith("entail")), None)
    if found is None:
        raise TaskError(
            f"Zero-shot classification needs a model of entailment; the labels of this one are {facts.labels}.",
            fix="deploy it for text-classification, or name the label 'entailment' in its config.",
        )
    return {"entailment": found}


CLASSIFICATION = TextFront(
    module="classification",
    inputs=(Tensor(name="TEXT", dtype="string"), Tensor(name="TEXT_PAIR", dtype="string", optional=True)),
    outputs=lambda facts: (
        Tensor(name="LABEL", dtype="string"),
        Tensor(name="SCORE", dtype="float32"),
        Tensor(name="SCORES", dtype="float32", dims=(facts.config.num_labels,)),
    ),
    options=lambda facts: {"labels": facts.labels, "function": _function(facts)},
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
    labels="SCORES",
)
ZERO_SHOT = TextFront(
    module="zero_shot",
    inputs=(
        Tensor(name="TEXT", dtype="string"),
        Tensor(name="CANDIDATE_LABELS", dtype="string", dims=(-1,), ragged=True),
    ),
    outputs=lambda _: (
        Tensor(name="LABELS", dtype="string", dims=(-1,)),
        Tensor(name="SCORES", dtype="float32", dims=(-1,)),
    ),
    options=_entailment,
    sample={"TEXT": ["The card has not arrived."], "CANDIDATE_LABELS": ["delivery", "fees"]},
)
