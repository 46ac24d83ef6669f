"""Task `text-classification`: classification and regression of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from ..artifact.sentence_settings import sentence_settings
from ..data.encoded_rows import EncodedRows, cut, from_tokenizer
from ..data.labels import numbers, texts
from ..data.rows import DatasetRows
from ..deploying.triton.text_fronts import TextFront, TextModelFacts, TritonTensor
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, Values, correlation, metric_of_sums, ratio
from ..measuring.accuracy.predictors import ClassPredictor, Model, Predictor
from ..models.base import ORTModel
from ..models.embedding_and_scoring import Activation, PairScorer, activation_of, in_batches
from ..models.modality_models import TextModel
from ..serving.batch_formation import can_pad
from ..serving.job import Options, PreparedRequest, Row
from ..serving.operations import READS_TEXT, Operation
from ..serving.text_handlers import check_lengths, check_options, check_texts, cutting, text_row

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForSequenceClassification(TextModel):
    """Model for text classification and regression: `logits: (batch, num_labels)`; cross-encoders can rank documents."""

    task = "text-classification"

    def _load_config(self) -> Any:
        config = super()._load_config()
        # The config of a language model that reranks has no labels. The model returns one score.
        if config is not None and sentence_settings(self.artifact.path).answers:
            config.num_labels = 1
        return config

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
        """Compute scores of text pairs, in the order of the pairs, like Sentence Transformers' `CrossEncoder.predict`.

        Args:
            pairs: Text pairs `[(query, document), ...]`.
            batch_size: Number of pairs per batch; pairs of similar length are batched together.
            tokenizer: The tokenizer; the artifact's own when `None`.
            activation_fn: Function that maps logits to scores. `None` uses the function in the model's files or, without one, a
                sigmoid for one label and the identity for several.
            prompt_name: Name of a prompt in the model's files; the model's default prompt when `None`.
            prompt: Text to put before each query, instead of a named prompt.

        Returns:
            NumPy array `(len(pairs),)` float32 for a model with one label, else `(len(pairs), num_labels)`.

        Raises:
            InputError: An item is not a pair of texts.
            ConfigError: The batch size is invalid, or the prompt or activation function is unknown.
        """
        single = not isinstance(pairs, str) and len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
        rows: Any = [pairs] if single else pairs
        if isinstance(rows, str) or not all(_is_pair(pair) for pair in rows):
            raise InputError(
                f"predict was called with {pairs!r:.100}, but it accepts only a list of text pairs.",
                fix="pass [(query, document), ...], where each query and document is a string.",
            )
        scorer = PairScorer(self, tokenizer)
        function = activation_fn or activation_of(self)
        before = prompt if prompt is not None else scorer.settings.prompt(prompt_name)

        def compute(part: list[Any]) -> torch.Tensor:
            first, second = ([pair[side] for pair in part] for side in (0, 1))
            return function(scorer.logits(scorer.rows(first, second, prompt=before)))

        scores = in_batches(rows, lambda pair: sum(map(len, pair)), batch_size, compute)
        results = torch.stack(scores) if scores else torch.empty(0, self.config.num_labels)
        array = (results[:, 0] if results.shape[1] == 1 else results).numpy()
        return array[0] if single else array

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
        """Rank documents by their relevance to a query, best first: `[{"corpus_id": 2, "score": 0.98}, ...]`.

        Args:
            query: Text of the query.
            documents: Texts of the documents; `corpus_id` is an index into this list.
            top_k: Number of documents to return; all when `None`.
            return_documents: Whether each result includes the document as `text`.
            batch_size, tokenizer, activation_fn, prompt_name, prompt: As in `predict`.

        Raises:
            TaskError: The model has more than one label.
        """
        if self.config.num_labels != 1:
            raise TaskError(
                f"The model has {self.config.num_labels} labels, but ranking needs a cross-encoder with exactly one label, the relevance.",
                fix="call predict for the scores of all labels, or use a cross-encoder with one label.",
            )
        if isinstance(documents, str):
            raise InputError(
                "rank was called with a single string as documents, but it needs a list of strings.",
                fix="pass documents as a list of strings.",
            )
        scores = self.predict(
            [(query, text) for text in documents], batch_size=batch_size, tokenizer=tokenizer, activation_fn=activation_fn,
            prompt_name=prompt_name, prompt=prompt,
        )  # fmt: skip
        return _ranked(scores, documents, top_k, return_documents=return_documents)


def _ranked(
    scores: Any, documents: Sequence[str], top_k: int | None, *, return_documents: bool
) -> list[dict[str, Any]]:
    """Return documents sorted by scores `(documents,)`, highest first; documents with equal scores keep their order."""
    values = scores.tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])[:top_k]
    return [{"corpus_id": i, "score": values[i], **({"text": documents[i]} if return_documents else {})} for i in order]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _squares(predictions: Values, references: Values) -> Floats:
    squared = (np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2
    return np.stack([squared, np.ones_like(squared)], axis=1)


_MSE = metric_of_sums("mse", _squares, {"mse": ratio}, points=1.0, higher_is_better=False)


class RegressionPredictor(Predictor):
    """Predictor of one number per row (regression)."""

    kind = "numbers"
    offline_metrics = (correlation("spearmanr"), correlation("pearsonr"), _MSE)

    def _references(self) -> list[Any]:
        return numbers(self.rows, "label")

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return the number that the model predicts for each row (regression)."""
        return self._by_row(model, what, lambda logits, part: logits.reshape(len(part), -1)[:, 0].tolist())


class TextClassification(Task):
    """The task `text-classification`: classification and regression of a text or a pair of texts."""

    model = ORTModelForSequenceClassification

    def encode(self, rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:
        both = [texts(rows, use) for use in ("text", "text_pair") if rows.has(use)]
        return from_tokenizer(processor(*both, **cut(max_length)), processor)

    def predictor(self, config: Any) -> type[Predictor]:
        kind = getattr(config, "problem_type", None)
        if kind == "multi_label_classification":
            raise TaskError(
                "The model's config has problem_type='multi_label_classification', and accel cannot measure the accuracy of "
                "multi-label models yet.",
                fix="compute the predictions with accel.pipeline('text-classification', ...), and measure them with your own metric.",
            )
        return RegressionPredictor if kind == "regression" or getattr(config, "num_labels", 2) == 1 else ClassPredictor

    def can_serve(self, pipeline: str, config: Any) -> bool:
        # Zero-shot classification needs a model with the label "entailment", which scores whether the text entails a candidate label.
        labels = getattr(config, "label2id", None) or {}
        return pipeline != "zero-shot-classification" or any(str(name).lower().startswith("entail") for name in labels)

    def operations(self) -> Sequence[Operation]:
        return (RankingOperation(), ClassificationOperation(), ZeroShotOperation())

    def fronts(self) -> Mapping[str, TextFront]:
        return {"text-classification": CLASSIFICATION, "zero-shot-classification": ZERO_SHOT}


class ClassificationOperation(Operation):
    """Operation that returns the labels of a text or a pair of texts."""

    name = "text-classification"
    reads = READS_TEXT
    may_read = ("text_pair",)
    tensor_options: ClassVar[Mapping[str, Any]] = {"top_k": None}

    def inputs(self, values: Mapping[str, Any]) -> Any:
        return dict(values) if "text_pair" in values else values["text"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        top_k = options.get("top_k")
        if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
            raise InputError(
                f"top_k is {top_k!r}; expected a whole number from 1 or None.",
                fix="pass the number of labels to write, or None (null) for all labels.",
            )
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
        scores = {label["label"]: label["score"] for label in answer}
        best = max(answer, key=lambda label: label["score"])
        labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
        return {"LABEL": [best["label"]], "SCORE": [best["score"]], "SCORES": [scores[name] for name in labels]}

    def endpoint(self) -> Endpoint:
        from pydantic import Field
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Endpoint, HttpCall
        from ..serving.http.replies import JsonReply

        class Pair(Body):
            """Two texts that are classified as a pair."""

            text: str
            text_pair: str

        class ClassifyBody(Body):
            """Body of `/classify`. With `truncate`, texts longer than the model's limit are truncated."""

            model: str | None = None
            inputs: str | Pair | list[str | Pair]
            top_k: int | None = Field(default=None, ge=1)
            function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
            truncate: bool = False

        def plain(text: str | Pair) -> Any:
            return text.model_dump() if isinstance(text, Pair) else text

        async def answer(call: HttpCall, body: ClassifyBody) -> Response:
            many = isinstance(body.inputs, list)
            inputs = [plain(text) for text in body.inputs] if isinstance(body.inputs, list) else plain(body.inputs)
            call.check_batch(len(inputs) if many else 1)
            options: dict[str, Any] = {"truncation": True} if body.truncate else {}
            # As in transformers' pipeline, `top_k: null` returns all labels, and a request without `top_k` returns the best label.
            if "top_k" in body.model_fields_set:
                options["top_k"] = body.top_k
            if body.function_to_apply is not None:
                options["function_to_apply"] = body.function_to_apply
            return JsonReply(await call.ask(inputs, operation=self.name, model=body.model, **options))

        return Endpoint(
            path="/classify",
            answer=answer,
            body=ClassifyBody,
            summary="Return the labels of texts or text pairs",
            tag="tasks",
            operation=self.name,
            example={"inputs": "I lost my card"},
        )


class ZeroShotOperation(Operation):
    """Operation that returns the candidate labels of a request, sorted by how well they fit the text."""

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

        from ..serving.http.endpoints import Endpoint, HttpCall
        from ..serving.http.text_bodies import TextsBody, pipeline_answer

        class ZeroShotBody(TextsBody):
            """Body of `/zero-shot`."""

            candidate_labels: list[str] = Field(min_length=1)
            hypothesis_template: str = Field(default="This example is {}.", max_length=1000)
            multi_label: bool = False

            @field_validator("hypothesis_template")
            @classmethod
            def _plain(cls, template: str) -> str:
                """Allow exactly one plain `{}`. Other format fields, such as `{:999999999}`, could create a text of any length."""
                if template.count("{}") != 1 or set("{}") & set(template.replace("{}", "")):
                    raise ValueError(
                        "must contain {} exactly once, as the placeholder for the label, and no other braces"
                    )
                return template

        ask = pipeline_answer(self.name, "candidate_labels", "hypothesis_template", "multi_label")

        async def answer(call: HttpCall, body: ZeroShotBody) -> Response:
            call.check_batch(len(body.candidate_labels) * (len(body.inputs) if isinstance(body.inputs, list) else 1))
            # The model processes each text once for each label.
            call.check_texts(body.inputs, times=len(body.candidate_labels))
            return await ask(call, body)

        return Endpoint(
            path="/zero-shot",
            answer=answer,
            body=ZeroShotBody,
            summary="Return which of the request's labels fit a text",
            tag="tasks",
            operation=self.name,
            example={"inputs": "I lost my card", "candidate_labels": ["bank", "sports"]},
        )


class RankingOperation(Operation):
    """Operation that ranks documents by their relevance to a query."""

    name = "rank"
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "query": ("query", "question", "anchor"),
        "documents": ("documents", "passages", "candidates"),
    }
    lists = ("documents",)
    takes_lists = False

    def offered(self, model: ORTModel) -> bool:
        return hasattr(model, "rank") and getattr(model.config, "num_labels", 0) == 1

    def work(self, model: ORTModel, tokenizer: Any) -> RankingRequestHandler:
        return RankingRequestHandler(model, tokenizer)

    def count(self, inputs: Any) -> int:
        if not isinstance(inputs, list | tuple) or len(inputs) != 2 or not isinstance(inputs[1], list | tuple):
            raise InputError(
                f"The input is {inputs!r:.100}, but ranking needs a pair of a query and a list of documents.",
                fix="pass (query, [document, ...]).",
            )
        return len(inputs[1]) or 1

    def inputs(self, values: Mapping[str, Any]) -> Any:
        return values["query"], values["documents"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        if options.get("top_k") is not None:
            raise InputError(
                f"top_k={options['top_k']} is not supported for the rows of a data set, because accel writes one score for each "
                "document of a row, in the order of the documents.",
                fix="leave top_k out.",
            )
        return {"scores": pa.list_(pa.float64())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the scores in the order of the documents."""
        return {"scores": [entry["score"] for entry in sorted(answer, key=lambda entry: entry["corpus_id"])]}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        return {"SCORES": ("FP32", -1), "RANKING": ("INT64", -1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        return {"SCORES": self.values(answer, {})["scores"], "RANKING": [entry["corpus_id"] for entry in answer]}

    def endpoint(self) -> Endpoint:
        from pydantic import Field, model_validator
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Endpoint, HttpCall
        from ..serving.http.replies import JsonReply, text_error
        from ..serving.http.text_bodies import Direction, cut_options

        class RerankBody(Body):
            """Body of `/rerank`. With `texts` instead of `documents`, request and response have the format of text-embeddings-inference."""

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
                    raise ValueError("must contain either documents or texts, and not both")
                wrong = [name for name in others[self.documents is None] if name in self.model_fields_set]
                if wrong:
                    ranked = "texts" if self.texts is None else "documents"
                    raise ValueError(
                        f"must not contain {', '.join(wrong)}, because a request without {ranked} has no such field"
                    )
                return self

        async def answer(call: HttpCall, body: RerankBody) -> Response:
            documents = body.texts or body.documents or []
            call.check_batch(len(documents))
            call.check_texts(body.query, times=len(documents))
            model = call.server.model_for(body.model, self.name)
            ranked = await call.ask(
                (body.query, documents), operation=self.name, model=model, top_k=body.top_n,
                return_documents=body.return_documents or body.return_text, raw_scores=body.raw_scores,
                **cut_options(body.truncate, body.truncation_direction),
            )  # fmt: skip
            score, text = ("relevance_score", "document") if body.texts is None else ("score", "text")
            names = {"corpus_id": "index", "score": score, "text": text}
            results = [{names[name]: value for name, value in document.items()} for document in ranked]
            if body.texts is not None:
                return JsonReply(results)
            return JsonReply({"model": model, "results": results, "usage": {"total_tokens": call.timing.tokens}})

        return Endpoint(
            path="/rerank",
            answer=answer,
            body=RerankBody,
            summary="Rank documents by their relevance to a query",
            tag="tasks",
            error=text_error,
            operation=self.name,
            example={"query": "a lost card", "documents": ["I cannot find my card", "the exchange rate"]},
        )


class RankingRequestHandler:
    """Request handler of the operation `rank`: ranks documents for a query, like `ORTModelForSequenceClassification.rank`."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._scorer = PairScorer(model, tokenizer)
        self._pads = self._scorer.pads and can_pad(model)
        self._activation = activation_of(model)

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Tokenize a query with each of its documents into rows; see `RequestHandler.prepare`."""
        check_options(options, ("top_k", "return_documents", "raw_scores", "truncation", "truncation_side"))
        query, documents = inputs
        texts = check_texts(documents)
        if not isinstance(query, str):
            raise InputError(
                f"The query is {query!r:.100}, but it must be a string.", fix="pass (query, [document, ...])."
            )
        if not texts:
            return PreparedRequest([])
        with cutting(self._scorer, options):
            rows = self._scorer.rows([query] * len(texts), texts)
        check_lengths(rows, self._scorer.max_length)
        return PreparedRequest([[text_row("rank", self._pads, row)] for row in rows])

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Return the logit of each row; see `RequestHandler.run`."""
        return list(self._scorer.logits([row.inputs for row in rows])[:, 0])

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Convert the logits to scores and rank the documents; see `RequestHandler.finish`."""
        _, documents = inputs
        logits = torch.stack([logit for (logit,) in outputs]) if outputs else torch.empty(0)
        scores = logits if options.get("raw_scores") else self._activation(logits)
        return _ranked(scores, documents, options.get("top_k"), return_documents=bool(options.get("return_documents")))


def _function(facts: TextModelFacts) -> str:
    """Return the name of the function that transformers' pipeline uses to convert this model's logits to scores."""
    kind = facts.config.problem_type
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or facts.config.num_labels == 1 else "softmax"


def _entailment(facts: TextModelFacts) -> dict[str, Any]:
    number = next((i for i, label in enumerate(facts.labels) if label.lower().startswith("entail")), None)
    if number is None:
        raise TaskError(
            f"Zero-shot classification needs a model with a label 'entailment', but the model's labels are {facts.labels}.",
            fix="deploy the model with `--task text-classification`, or rename the label in the id2label and label2id of its config.json.",
        )
    return {"entailment": number}


CLASSIFICATION = TextFront(
    service="classification:TextClassifier",
    inputs=(TritonTensor(name="TEXT", dtype="string"), TritonTensor(name="TEXT_PAIR", dtype="string", optional=True)),
    outputs=lambda facts: (
        TritonTensor(name="LABEL", dtype="string"),
        TritonTensor(name="SCORE", dtype="float32"),
        TritonTensor(name="SCORES", dtype="float32", dims=(facts.config.num_labels,)),
    ),
    options=lambda facts: {"labels": facts.labels, "function": _function(facts)},
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
    labels="SCORES",
)
ZERO_SHOT = TextFront(
    service="zero_shot:ZeroShotClassifier",
    inputs=(
        TritonTensor(name="TEXT", dtype="string"),
        TritonTensor(name="CANDIDATE_LABELS", dtype="string", dims=(-1,), ragged=True),
    ),
    outputs=lambda _: (
        TritonTensor(name="LABELS", dtype="string", dims=(-1,)),
        TritonTensor(name="SCORES", dtype="float32", dims=(-1,)),
    ),
    options=_entailment,
    sample={"TEXT": ["The card has not arrived."], "CANDIDATE_LABELS": ["delivery", "fees"]},
)
