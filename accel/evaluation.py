"""`accel.evaluate`: how good a model is on labelled data, and how it compares with its PyTorch original on the same rows."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import accel

from . import capture, progress
from .artifact import MANIFEST, Artifact
from .calibration import BATCH_SIZE, Encoded, encode, for_graph, from_tokenizer, load_processor, longest
from .config import ExportConfig, SessionOptions
from .data import IGNORED, Rows, label_ids, load_rows, map_columns, numbers, take, texts
from .errors import ArtifactNotFoundError, ConfigError, InputError, TaskError
from .hub import HubOptions, locate
from .intervals import Interval, difference_interval
from .metrics import Metric, TokenScores, metric_for
from .modeling import ORTModel
from .tasks import infer_task, read_config, task_spec

logger = logging.getLogger(__name__)

Model = ORTModel | torch.nn.Module
_CLASSES = ("text-classification", "image-classification")
_EMBEDDINGS = ("sentence-similarity", "feature-extraction")
_LANGUAGE = "text-generation"
_WINDOW = 512
_TOKENS_A_CALL = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same rows.

    Attributes:
        against: What the model is compared with.
        value: The other's metric.
        difference: The model's metric minus the other's.
        interval: Confidence interval of the difference.
        agreement: Share of rows (for tags: of words) with the same prediction; `None` where predictions are numbers.
    """

    against: str
    value: float
    difference: float
    interval: Interval
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured.

    Attributes:
        metric: Its name.
        value: On the scale that the `evaluate` library gives it.
        scores: All that the metric returns.
        task: Of the model.
        rows: How many were measured.
        data: Which ones; see `accel.data.Sample`.
        backend: What ran the model; `pytorch` for a PyTorch model.
        compute_dtype: What its kernels computed in.
        batch_size: Rows a call. Dynamic quantization finds its ranges batch by batch, so it matters a little.
        max_length: Tokens that longer rows were cut to.
        seconds: For running the model over the rows.
        comparison: With the original, when asked for.
        predictions: One a row: a class, tags, an answer, a number or a `metrics.TokenScores`.
    """

    metric: str
    value: float
    scores: Mapping[str, float]
    task: str
    rows: int
    data: Mapping[str, Any]
    backend: str
    compute_dtype: str
    batch_size: int
    max_length: int | None
    seconds: float
    comparison: Comparison | None = None
    predictions: tuple[Any, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the predictions."""
        values = asdict(replace(self, predictions=()))
        del values["predictions"]
        return values


@dataclass(frozen=True, slots=True)
class Measured:
    """One model's scores and predictions on an `EvaluationSet`."""

    value: float
    scores: Mapping[str, float]
    predictions: tuple[Any, ...]
    seconds: float


class EvaluationSet:
    """Rows, references and a metric, prepared once; measures any number of models on them.

    Attributes:
        metric: What is measured.
        rows: The rows, their columns mapped.
        max_length: Tokens that longer rows are cut to.
        batch_size: Rows a call.
    """

    def __init__(
        self,
        data: Any,
        *,
        task: str,
        config: Any,
        processor: Any,
        metric: str | None = None,
        columns: Mapping[str, str] | None = None,
        split: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        samples: int | None = None,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        max_length: int | None = None,
        limit: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Read, map, label and tokenize.

        Args:
            data: Whatever `accel.data.load_rows` reads.
            task: Of the models.
            config: Their transformers config, for labels.
            processor: Their tokenizer or image processor.
            metric: See `accel.metrics.metric_for`.
            columns: Column by use, where it cannot be inferred.
            split, revision, token: Of a Hub data set.
            samples: Rows at most.
            seed: Of the choice of rows.
            batch_size: Rows a call.
            max_length: Tokens that longer rows are cut to.
            limit: The models' positions.
            trust_remote_code: Allow a metric of a Hub user.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
        self.task = task_spec(task).name
        regression = self._is_regression(config)
        # The metric first: a mistyped name should not cost a download.
        self.metric: Metric = metric_for(
            metric,
            self.task,
            classes=int(getattr(config, "num_labels", 2)),
            regression=regression,
            trust_remote_code=trust_remote_code,
        )
        loaded = load_rows(data, split=split, revision=revision, token=token)
        self.rows: Rows = take(map_columns(loaded, self.task, columns), samples, seed)
        self.batch_size = batch_size
        is_text = self.task != "image-classification"
        self.max_length = longest(limit, processor, max_length) if is_text else None
        self._processor = processor
        self._config = config
        self._regression = regression
        self.references: list[Any] = self._references()
        if self.task == _LANGUAGE:
            self._read_windows(max_length)
            return
        self.encoded: Encoded = encode(self.rows, self.task, processor, self.max_length)
        if self.task in _EMBEDDINGS:
            both = texts(self.rows, "text") + texts(self.rows, "text_pair")
            cut: dict[str, Any] = {"truncation": self.max_length is not None, "max_length": self.max_length}
            with capture.quiet():
                self.encoded = from_tokenizer(processor(both, **cut), processor)
        if self.encoded.words is not None:
            self._kept = [self._words(i) for i in range(len(self.rows))]
            self.references = [
                [tags[word] for word, _ in kept] for tags, kept in zip(self.references, self._kept, strict=True)
            ]

    def _read_windows(self, asked: int | None) -> None:
        """Texts as windows of `max_length` tokens, none of them left out, with no token of one seen from another."""
        # All tokens' logits are needed at once: 600 MB for 1,024 tokens of a vocabulary of 150,000.
        self.max_length = asked or min(self.max_length or _WINDOW, _WINDOW)
        self.batch_size = max(1, min(self.batch_size, _TOKENS_A_CALL // self.max_length))
        with capture.quiet():
            found = self._processor(texts(self.rows, "text"))["input_ids"]
        pieces = [
            (row, tokens[i : i + self.max_length])
            for row, tokens in enumerate(found)
            for i in range(0, len(tokens), self.max_length)
            if len(tokens) - i > 1
        ]
        if not pieces:
            raise InputError(
                f"No text of {self.rows.sample.source} has two tokens: there is nothing to predict.",
                fix="give longer texts.",
            )
        self._windows = [row for row, _ in pieces]
        tokens = [piece for _, piece in pieces]
        pad = self._processor.pad_token_id
        self.encoded = Encoded(
            tokens={"input_ids": tokens, "attention_mask": [[1] * len(piece) for piece in tokens]},
            # What stands behind the last token of a window is not looked at.
            padding={"input_ids": pad if pad is not None else tokens[0][0]},
        )

    def _is_regression(self, config: Any) -> bool:
        kind = getattr(config, "problem_type", None)
        if self.task == "text-classification" and kind == "multi_label_classification":
            raise TaskError("Models with several labels a row cannot be measured yet.", fix="measure them yourself.")
        return self.task == "text-classification" and (kind == "regression" or getattr(config, "num_labels", 2) == 1)

    def _references(self) -> list[Any]:
        if self.task in _EMBEDDINGS:
            return numbers(self.rows, "score")
        if self.task == "question-answering":
            return [_accepted(value, self.rows) for value in self.rows.column("answers")]
        if self.task == "token-classification":
            names = {int(i): str(name) for i, name in self._config.id2label.items()}
            return [
                [names.get(i) if i != IGNORED else None for i in row]
                for row in label_ids(self.rows, "tags", self._config)
            ]
        if self.task == _LANGUAGE:
            return [None] * len(self.rows)
        if self._regression:
            return numbers(self.rows, "label")
        return label_ids(self.rows, "label", self._config)

    def _words(self, row: int) -> list[tuple[int, int]]:
        """Labelled words of a row and the token that stands for each: its first one."""
        assert self.encoded.words is not None
        tags = self.references[row]
        first: dict[int, int] = {}
        for position, word in enumerate(self.encoded.words[row]):
            if word is not None:
                first.setdefault(word, position)
        if first and max(first) >= len(tags):
            raise InputError(
                f"Row {row} has {max(first) + 1} words and {len(tags)} tags.", fix="give one tag for each word."
            )
        return [(word, position) for word, position in first.items() if tags[word] is not None]

    # Running

    def measure(self, model: Model, what: str = "evaluating") -> Measured:
        """Run a model over all rows.

        Raises:
            InputError: The metric is not a number: all predictions are alike, or not finite.
        """
        started = time.perf_counter()
        predictions = self._answers(model, what) if self.task == "question-answering" else self._predict(model, what)
        seconds = time.perf_counter() - started
        scores = dict(self.metric.compute(predictions, self.references))
        value = scores[self.metric.key]
        if not math.isfinite(value):
            raise InputError(
                f"{self.metric.name} is {value}: the predictions or the references are all alike, or not finite.",
                fix="measure more rows, or with another metric.",
            )
        return Measured(value, scores, tuple(predictions), seconds)

    def compare(self, measured: Measured, other: Measured, name: str, confidence: float = 0.95) -> Comparison:
        """The difference of two models measured on these rows."""
        return Comparison(
            against=name,
            value=other.value,
            difference=measured.value - other.value,
            interval=difference_interval(
                self.metric, other.predictions, measured.predictions, self.references, confidence=confidence
            ),
            agreement=self._agreement(measured.predictions, other.predictions),
        )

    def _agreement(self, a: Sequence[Any], b: Sequence[Any]) -> float | None:
        if self._regression or self.task in _EMBEDDINGS:
            return None
        pairs = list(zip(a, b, strict=True))
        if self.task == _LANGUAGE:
            return float(np.mean(np.concatenate([x.best == y.best for x, y in pairs])))
        if self.task == "token-classification":
            pairs = [pair for x, y in pairs for pair in zip(x, y, strict=True)]
        return sum(bool(x == y) for x, y in pairs) / len(pairs)

    def batches(
        self, model: Model, what: str, rows: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]]:
        """Row numbers, inputs and outputs of the model, batch by batch; of some rows, or of all."""
        wanted = None if rows is None else set(rows)
        plan = self.encoded.plan(self.batch_size)
        if wanted is not None:
            plan = [kept for part in plan if (kept := [i for i in part if i in wanted])]
        takes = _takes(model)
        with torch.inference_mode():
            for part in progress.track(plan, what):
                feeds = self.encoded.batch(part)
                if isinstance(model, ORTModel) and not model.can_generate():
                    inputs: Mapping[str, torch.Tensor] = for_graph(feeds, model.artifact.components[0].inputs)
                else:
                    inputs = {name: value for name, value in feeds.items() if name in takes}
                yield part, feeds, model(**inputs)

    def _predict(self, model: Model, what: str) -> list[Any]:
        if self.task in _EMBEDDINGS:
            return self._similarities(model, what)
        if self.task == _LANGUAGE:
            return self._token_scores(model, what)
        predictions: list[Any] = [None] * len(self.rows)
        names = getattr(self._config, "id2label", {})
        for part, _, output in self.batches(model, what):
            logits = output["logits"].float().cpu()
            if self._regression:
                values: Sequence[Any] = logits.reshape(len(part), -1)[:, 0].tolist()
            elif self.encoded.words is not None:
                best = logits.argmax(-1)
                offset = [best.shape[1] - len(self.encoded.words[i]) if self.encoded.left else 0 for i in part]
                values = [
                    [str(names[int(best[place, offset[place] + position])]) for _, position in self._kept[i]]
                    for place, i in enumerate(part)
                ]
            else:
                values = logits.argmax(-1).tolist()
            for i, value in zip(part, values, strict=True):
                predictions[i] = value
        return predictions

    def _similarities(self, model: Model, what: str) -> list[float]:
        """Cosine of the two embeddings of each row."""
        rows: list[torch.Tensor] = [torch.empty(0)] * len(self.encoded)
        for part, feeds, output in self.batches(model, what):
            if "sentence_embedding" in output:
                pooled = output["sentence_embedding"].float().cpu()
            else:
                hidden = output["last_hidden_state"].float().cpu()
                mask = feeds["attention_mask"].unsqueeze(-1).float()
                pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            for i, row in zip(part, pooled, strict=True):
                rows[i] = row
        embeddings = torch.stack(rows)
        first, second = embeddings[: len(self.rows)], embeddings[len(self.rows) :]
        found: list[float] = torch.nn.functional.cosine_similarity(first, second).tolist()
        return found

    def _token_scores(self, model: Model, what: str) -> list[TokenScores]:
        """How well each row was predicted, its windows together."""
        losses = np.zeros(len(self.rows))
        found: list[list[np.ndarray]] = [[] for _ in range(len(self.rows))]
        for part, feeds, output in self.batches(model, what):
            logits, targets = output["logits"][:, :-1].cpu(), feeds["input_ids"][:, 1:]
            counts = feeds["attention_mask"][:, 1:].sum(1).tolist()
            for place, window in enumerate(part):
                row, count = self._windows[window], counts[place]
                kept = logits[place, :count].float()
                losses[row] += float(torch.nn.functional.cross_entropy(kept, targets[place, :count], reduction="sum"))
                found[row].append(kept.argmax(-1).numpy())
        best = [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in found]
        return [TokenScores(float(loss), len(row), row) for loss, row in zip(losses, best, strict=True)]

    def _answers(self, model: Model, what: str) -> list[str]:
        """Answers through the question-answering pipeline, which reads long contexts in windows."""
        from .pipelines import pipeline

        pipe = pipeline("question-answering", model=model, tokenizer=self._processor)
        examples = [
            {"question": question, "context": context}
            for question, context in zip(texts(self.rows, "question"), texts(self.rows, "context"), strict=True)
        ]
        options: dict[str, Any] = {"handle_impossible_answer": any(not accepted for accepted in self.references)}
        if self.max_length is not None:
            options["max_seq_len"] = min(self.max_length, 384)
        found: list[str] = []
        parts = [examples[i : i + self.batch_size] for i in range(0, len(examples), self.batch_size)]
        for part in progress.track(parts, what):
            found += [answer["answer"] for answer in pipe(part, batch_size=self.batch_size, **options)]
        return found


def _takes(model: Model) -> set[str]:
    """Names of the inputs of a PyTorch model's forward, or of a generating model's."""
    if isinstance(model, ORTModel):
        return {"input_ids", "attention_mask"}
    import inspect

    inner = model.model if isinstance(model, capture.SentenceEmbedder) else model
    return set(inspect.signature(inner.forward).parameters)


def _accepted(value: Any, rows: Rows) -> list[str]:
    """Accepted answers of a row: `{"text": [...]}` as in SQuAD, a list, or one text; empty for unanswerable."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return list(value)
    raise InputError(
        f"An answer of {rows.sample.source} is {value!r}.",
        fix="give a text, a list of texts, or {'text': [...]} as SQuAD does.",
    )


def evaluate(
    model: str | os.PathLike[str] | Artifact | Model,
    data: Any,
    *,
    metric: str | None = None,
    against: bool | str | os.PathLike[str] | Artifact | Model | None = None,
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    data_revision: str | None = None,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    max_length: int | None = None,
    processor: Any = None,
    confidence: float = 0.95,
    backend: str | None = None,
    device: str | None = None,
    session_options: SessionOptions | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Measure a model on labelled data and, when asked, compare it with another one on the same rows.

    Rows of like length share a batch. MiniLM on the 3,080 queries of BANKING77 takes a few seconds on two cores.

    Args:
        model: An artifact, a folder or Hub id (exported where needed), one of our models or a PyTorch one.
        data: A `datasets.Dataset`, a list of dictionaries, a CSV, JSON or Parquet file, or the name of a data set on the
            Hub.
        metric: `accuracy`, `f1`, `precision`, `recall`, `matthews_correlation`, `seqeval`, `squad`, `exact_match`,
            `spearmanr`, `pearsonr`, `mse` and `perplexity` work offline; other names go to the `evaluate` library. The task's default
            when `None`.
        against: `True` compares with the PyTorch model that the artifact was made from; or another model.
        task: Of a PyTorch model whose class does not tell.
        columns: Column by use (`{"text": "query", "label": "intent"}`) where it cannot be inferred.
        split: Split of the data.
        data_revision: Of a data set on the Hub.
        samples: Rows at most; all when `None`.
        seed: Of the choice of rows.
        batch_size: Rows a call.
        max_length: Tokens that longer rows are cut to; the model's limit when `None`. Of text generation, the tokens of
            the windows that rows are split into; 512 when `None`.
        processor: Tokenizer or image processor; the model's own when `None`.
        confidence: Of the interval of the difference.
        backend, device, session_options: How the model is run; see `from_pretrained`.
        revision, token, trust_remote_code: As in transformers.

    Raises:
        InputError: No rows, no labels, columns that do not map, or labels that the model does not know.
        ConfigError: An unknown metric, split or column.
        ArtifactNotFoundError: The model, its original or the data is not to be found.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}.", fix="use a number between 0 and 1, such as 0.95.")
    hub = HubOptions(revision=revision, token=token, trust_remote_code=trust_remote_code)
    how = {"backend": backend, "device": device, "session_options": session_options}
    opened = open_any(model, task, hub, how)
    try:
        artifact = opened.artifact if isinstance(opened, ORTModel) else None
        found_task = artifact.task if artifact else task or _task_of(opened)
        prepared = EvaluationSet(
            data,
            task=found_task,
            config=opened.config,
            processor=processor or _processor(opened, found_task, trust_remote_code),
            metric=metric,
            columns=columns,
            split=split,
            revision=data_revision,
            token=token,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
            max_length=max_length,
            limit=positions(artifact) if artifact else None,
            trust_remote_code=trust_remote_code,
        )
        other, name = _original(opened, against, found_task, hub)
        measured = prepared.measure(opened)
        comparison = None
        if other is not None:
            comparison = prepared.compare(measured, prepared.measure(other, f"evaluating {name}"), name, confidence)
            if other is not against:
                close(other)
        logger.info("%s %.4f on %d rows", prepared.metric.name, measured.value, len(prepared.rows))
        return Evaluation(
            metric=prepared.metric.name,
            value=measured.value,
            scores=measured.scores,
            task=found_task,
            rows=len(prepared.rows),
            data=prepared.rows.sample.to_dict(),
            backend=opened.backend if isinstance(opened, ORTModel) else "pytorch",
            compute_dtype=_compute_dtype(opened),
            batch_size=batch_size,
            max_length=prepared.max_length,
            seconds=round(measured.seconds, 3),
            comparison=comparison,
            predictions=measured.predictions,
        )
    finally:
        if opened is not model:
            close(opened)


def open_model(artifact: Artifact, **how: Any) -> ORTModel:
    """The model class of an artifact's task, opened."""
    cls: type[ORTModel] = getattr(accel, task_spec(artifact.task).model)
    return cls(artifact, **how)


def close(model: Model) -> None:
    """Give the runtime's memory back."""
    if isinstance(model, ORTModel):
        for session in model.sessions.values():
            session.close()


def open_any(model: Any, task: str | None, hub: HubOptions, how: Mapping[str, Any]) -> Model:
    """A model in any form, opened: an artifact, a folder or Hub id (exported where needed), or itself."""
    if isinstance(model, ORTModel | torch.nn.Module):
        if any(value is not None for value in how.values()):
            raise ConfigError(
                "backend, device and session_options are for a model given by id or folder.",
                fix="load the model with them.",
            )
        return model.eval() if isinstance(model, torch.nn.Module) else model
    if isinstance(model, Artifact):
        return open_model(model, **how)
    location = locate(model, hub)
    if (location.folder / MANIFEST).is_file():
        return open_model(Artifact.load(location.folder), **how)
    spec = task_spec(task or infer_task(read_config(location.folder), location.folder))
    cls: type[ORTModel] = getattr(accel, spec.model)
    return cls.from_pretrained(
        model, **how, revision=hub.revision, token=hub.token, trust_remote_code=hub.trust_remote_code
    )


def _task_of(model: Model) -> str:
    inner = model.model if isinstance(model, capture.SentenceEmbedder) else model
    return infer_task({"architectures": [type(inner).__name__]})


def positions(artifact: Artifact) -> int | None:
    """Tokens that a model of this artifact reads at most, where its config tells."""
    sizes = artifact.components[0].max_sizes
    return sizes.get("sequence", sizes.get("total"))


def _compute_dtype(model: Model) -> str:
    if isinstance(model, ORTModel):
        return model.compute_dtype
    return str(next((p.dtype for p in model.parameters() if p.is_floating_point()), "float32")).removeprefix("torch.")


def _processor(model: Model, task: str, trust_remote_code: bool) -> Any:
    if isinstance(model, ORTModel):
        return load_processor(model.artifact.path, task, trust_remote_code=trust_remote_code)
    name = getattr(model.config, "_name_or_path", "")
    if not name or not Path(name).is_dir():
        raise ConfigError("A PyTorch model comes without its tokenizer or processor.", fix="pass processor=...")
    return load_processor(Path(name), task, trust_remote_code=trust_remote_code)


def _original(model: Model, against: Any, task: str, hub: HubOptions) -> tuple[Model | None, str]:
    """What to compare with, and its name.

    Raises:
        ArtifactNotFoundError: The artifact does not say what it was made from, or it is gone.
    """
    if against is None or against is False:
        return None, ""
    if isinstance(against, ORTModel | torch.nn.Module):
        return against, type(against).__name__
    if isinstance(against, Artifact):
        return open_model(against), against.path.name
    artifact = model.artifact if isinstance(model, ORTModel) else None
    if against is True:
        if artifact is None or artifact.manifest.source is None:
            raise ArtifactNotFoundError(
                "The model does not say what it was made from.", fix="name the original: against=... (--against)."
            )
        against = artifact.manifest.source.id
        hub = replace(hub, revision=artifact.manifest.source.revision)
    location = locate(against, hub, want_graph=False)
    if (location.folder / MANIFEST).is_file():
        return open_model(Artifact.load(location.folder)), location.folder.name
    steps = artifact.manifest.steps if artifact else ()
    recorded = next((step.config for step in steps if step.stage == "export"), {})
    config = replace(ExportConfig.from_dict(recorded), dtype="float32", atol=None)
    source = capture.load_source(location, task=task, config=config, hub=hub)
    return source.model, f"{Path(location.id).name} (PyTorch, float32)"
