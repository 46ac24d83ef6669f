"""Hidden states, and embeddings of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import modeling_outputs

from ..artifact.sentence_settings import embedding_roles, sentence_settings
from ..capture.sentence_embeddings import Normalize, sentence_layers
from ..config import check_number
from ..data.batches import Encoded, from_tokenizer
from ..data.labels import numbers, texts
from ..deploying.triton.text_fronts import Facts, Tensor, TextFront
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Metric, correlation
from ..measuring.accuracy.predictors import Cosines, Predictor
from ..models.base import ORTModel
from ..models.outputs import SentenceEmbeddingOutput
from ..models.text_rows import COUNTED, Embedder, SentenceRows, SentenceVectors, TokenRow, prompt_length
from ..serving.batching import can_pad
from ..serving.job import Options, Prepared, Row
from ..serving.operations import READS_TEXT, Operation
from ..serving.text_work import check_lengths, check_options, cutting, find_prompt, text_row
from ..stages.resolution import recorded_export
from ..upstream.library_output import quiet

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForFeatureExtraction(ORTModel):
    """Hidden states, and sentence embeddings where pooling is in the graph."""

    task = "feature-extraction"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if "logits" in names or "start_logits" in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)}, and no hidden states.",
                fix="use the class that the model was exported for.",
            )
        self._roles = embedding_roles(self._session.inputs, self._session.outputs)
        returned = {self._roles.get(name, name) for name in names}
        pools = self.artifact.task == "sentence-similarity" and "last_hidden_state" in returned
        self._pools = pools and "sentence_embedding" not in returned
        self._after = self._named_and_pooled if self._roles or self._pools else None
        self._vectors: SentenceVectors | None = None
        if self._pools or "sentence_embedding" in returned:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    @property
    def sentence_vectors(self) -> SentenceVectors:
        """What makes sentence embeddings of the outputs, as the files next to the graph say.

        Raises:
            TaskError: The model does not embed sentences.
            ConfigError, IntegrityError: The files are damaged, or have a setting that is not followed.
        """
        if self._vectors is None:
            recorded = recorded_export(self.artifact)
            settings = sentence_settings(self.artifact.path)
            self._vectors = SentenceVectors(settings, pooling=recorded.pooling, normalize=recorded.normalize)
        return self._vectors

    def _named_and_pooled(self, values: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by transformers' names, with the sentence embedding that the graph leaves out."""
        values = {self._roles.get(name, name): value for name, value in values.items()}
        if not self._pools:
            return values
        hidden = values["last_hidden_state"]
        mask = inputs.get("attention_mask")
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
        return {**values, "sentence_embedding": self.sentence_vectors.pool(hidden, mask)}

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        tokenizer: Any = None,
        convert_to_numpy: bool = True,
        normalize_embeddings: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Any:
        """Embeddings of texts, in their order.

        Texts of like length share a batch. What the files of sentence-transformers next to the graph say is followed: longest
        length, lower case, prompts, `truncate_dim`, and pooling where the graph has none. Without such files, hidden states are
        averaged over the tokens.

        Args:
            texts: One text or many.
            batch_size: Texts a call.
            tokenizer: The artifact's own when `None`.
            convert_to_numpy: NumPy (default) or `torch`.
            normalize_embeddings: Scale each to length 1, so that products are cosines.
            prompt_name: One of the prompts that the model's files name; their default one when `None`.
            prompt: What is put before each text, in place of it.

        Returns:
            `(len(texts), size)` float32; `(size,)` for one text.

        Raises:
            InputError: A text is not a string.
            TaskError: The model does not embed sentences: it is a cross-encoder, say.
            ConfigError: An unknown prompt, or a setting in the files next to the graph that accel does not follow.
        """
        single = isinstance(texts, str)
        items = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        if not all(isinstance(item, str) for item in items):
            raise InputError("encode takes texts.", fix="pass a string or a list of strings.")
        check_number("batch_size", batch_size, 1)
        embedder = Embedder(self, tokenizer)
        before = prompt if prompt is not None else embedder.settings.prompt(prompt_name)
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(items)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            for i, row in zip(
                part, embedder.embed(embedder.rows([items[i] for i in part], prompt=before)), strict=True
            ):
                rows[i] = row
        embeddings = torch.stack(rows) if rows else torch.empty(0, 0)
        if normalize_embeddings:
            embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
        result: Any = embeddings.cpu().numpy() if convert_to_numpy else embeddings
        return result[0] if single else result


class Similarities(Cosines):
    """How alike the embeddings of a row's two texts are: their cosine, or what the model's own files name."""

    kind = "similarities"

    @classmethod
    def metrics(cls, classes: int) -> Mapping[str, Metric]:
        """See `Predictor`."""
        return {name: correlation(name) for name in ("spearmanr", "pearsonr")}

    def _references(self) -> list[Any]:
        return numbers(self.rows, "score")

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        found = super()._longest(limit, asked)
        own = self.settings.max_length
        return found if own is None or (found is not None and found < own) else own

    def _encode(self) -> Encoded:
        both = texts(self.rows, "text") + texts(self.rows, "text_pair")
        self._vectors = SentenceVectors(self.settings)
        reader = SentenceRows(self.processor, self.settings, self.max_length)
        with quiet():
            rows = reader.rows(both)
        tokens = {name: [row[name] for row in rows] for name in rows[0]}
        return replace(from_tokenizer({}, self.processor), tokens=tokens)

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        return self._vectors(output, feeds.get("attention_mask"), feeds.get(COUNTED)).cpu()


class FeatureExtraction(Task):
    """Hidden states, and embeddings of sentences."""

    model = ORTModelForFeatureExtraction

    def predictor(self, config: Any) -> type[Predictor]:
        return Similarities

    def operations(self) -> Sequence[Operation]:
        return (Embed(), HiddenStates())

    def fronts(self) -> Mapping[str, TextFront]:
        return dict.fromkeys(("feature-extraction", "sentence-similarity"), EMBEDDINGS)


class HiddenStates(Operation):
    """The last hidden states of a text's tokens."""

    name = "feature-extraction"
    reads = READS_TEXT

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"features": pa.list_(pa.list_(pa.float32()))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        (rows,) = answer
        return {"features": rows}


class Embed(Operation):
    """One vector a text."""

    name = "embed"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        return hasattr(model, "encode") and "input_ids" in model.input_names

    def work(self, model: ORTModel, tokenizer: Any) -> Embedding:
        return Embedding(model, tokenizer)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"embedding": pa.list_(pa.float32())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"embedding": answer}

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        outputs = {spec.name: spec.shape[-1] for spec in model.artifact.components[0].outputs}
        size = outputs.get("sentence_embedding", outputs.get("last_hidden_state"))
        return {"EMBEDDING": ("FP32", size if isinstance(size, int) else -1)}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        return {"EMBEDDING": answer}

    def endpoint(self) -> Endpoint:
        from pydantic import Field
        from starlette.responses import Response

        from ..serving.http.bodies import Body
        from ..serving.http.endpoints import Call, Endpoint
        from ..serving.http.replies import Json, text_error
        from ..serving.http.text_bodies import Direction, TokenIds, cut_options, listed

        class EmbedBody(Body):
            """What `/embed` takes; texts that are longer than the model reads are cut unless `truncate` is false."""

            model: str | None = None
            inputs: str | TokenIds | list[str | TokenIds] = Field(min_length=1)
            normalize: bool = True
            truncate: bool | None = None
            truncation_direction: Direction = "right"
            prompt_name: str | None = None
            dimensions: int | None = Field(default=None, ge=1)

        async def answer(call: Call, body: EmbedBody) -> Response:
            texts = listed(body.inputs)
            call.check_batch(len(texts))
            found = await call.ask(
                texts, operation=self.name, model=body.model, normalize_embeddings=body.normalize, truncate_dim=body.dimensions,
                prompt_name=body.prompt_name, **cut_options(body.truncate, body.truncation_direction),
            )  # fmt: skip
            return Json(found.tolist())

        return Endpoint(
            path="/embed",
            answer=answer,
            body=EmbedBody,
            summary="Embeddings of texts, and nothing around them",
            tag="tasks",
            error=text_error,
            operation=self.name,
            example={"inputs": ["a lost card", "a stolen card"]},
        )


class Embedding:
    """Embeddings as `ORTModelForFeatureExtraction.encode` gives them: `(hidden,)` float32 for a text, `(texts, hidden)` for a list.

    Options: `normalize_embeddings`; `truncate_dim`, how many numbers of a vector are kept; `prompt_name`, one name of a prompt of
    the model, or several of which the first that it has is used; `truncation` and `truncation_side` of texts that are too long.
    A text may be token ids, as the tokenizer makes them.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._embedder = Embedder(model, tokenizer)
        self._pads = self._embedder.pads and can_pad(model)

    def prepare(self, inputs: Any, options: Options) -> Prepared:
        """See `Work`."""
        check_options(options, ("normalize_embeddings", "truncate_dim", "prompt_name", "truncation", "truncation_side"))
        items = [inputs] if isinstance(inputs, str) else _texts_or_ids(inputs)
        texts = [one for one in items if isinstance(one, str)]
        prompt = find_prompt(self._embedder.settings.prompts, options.get("prompt_name"))
        if prompt is not None and len(texts) < len(items):
            raise InputError(
                "A prompt cannot be put before token ids.", fix="send texts, or leave the prompt's name out."
            )
        embedder = self._embedder
        with cutting(embedder, options):
            made = iter(embedder.rows(texts, prompt=prompt) if texts else ())
        rows = [next(made) if isinstance(one, str) else self._row_of_ids(one, i) for i, one in enumerate(items)]
        check_lengths(rows, embedder.max_length)
        if options.get("truncation_side") == "left" and any(COUNTED in row for row in rows):
            raise InputError(
                "The prompt of this model is not pooled, and a text that is cut at its beginning loses it.",
                fix="have texts cut at their end.",
            )
        return Prepared([[text_row("embed", self._pads, row)] for row in rows])

    def _row_of_ids(self, ids: Sequence[int], number: int) -> TokenRow:
        tokenizer = self._embedder.tokenizer
        size = getattr(self._model.config, "vocab_size", len(tokenizer))
        before, after = _frame(tokenizer)
        if max(ids) >= size:
            raise InputError(
                f"Token {max(ids)} of text {number} is not one of the model's {size}.", fix=_OTHER_TOKENIZER
            )
        if [*ids[: len(before)]] != before or [*ids[len(ids) - len(after) :]] != after:
            raise InputError(
                f"The tokens of text {number} do not begin with {before} and end with {after}, as this model's own do.",
                fix=_OTHER_TOKENIZER,
            )
        row = {"input_ids": list(ids), "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        made = {name: row[name] for name in tokenizer.model_input_names if name in row}
        return made if self._embedder.settings.include_prompt else {**made, COUNTED: [1] * len(ids)}

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """See `Work`."""
        # NumPy's rows: handing out those of a tensor takes longer than computing a small model's last layer.
        return list(self._embedder.embed([row.inputs for row in rows]).cpu().numpy())

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """See `Work`."""
        found = np.stack([one for (one,) in outputs]) if outputs else np.empty((0, 0), np.float32)
        size = options.get("truncate_dim")
        if size is not None and outputs and size > found.shape[1]:
            raise InputError(
                f"{size} dimensions are asked for; the embeddings have {found.shape[1]} dimensions.",
                fix="ask for no more.",
            )
        found = found[:, :size]
        if options.get("normalize_embeddings"):
            found = torch.nn.functional.normalize(torch.from_numpy(found), dim=-1).numpy()
        return found[0] if isinstance(inputs, str) else found


_OTHER_TOKENIZER = "send texts (LangChain: check_embedding_ctx_length=False), or ids of the model's own tokenizer, which /tokenize gives."


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:start]), list(whole[start + len(bare) :])


def _texts_or_ids(inputs: Any) -> list[Any]:
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise InputError("Expected a list of texts.", fix="pass a list of strings.")
    for one in inputs:
        ids = isinstance(one, Sequence) and not isinstance(one, str) and len(one) > 0
        if not isinstance(one, str) and not (ids and all(type(i) is int and i >= 0 for i in one)):
            raise InputError("Expected a list of texts.", fix="pass a list of strings, or of token ids.")
    return list(inputs)


def _embedding(facts: Facts) -> dict[str, Any]:
    settings = sentence_settings(facts.artifact.path)
    component = facts.artifact.component()
    roles = embedding_roles(component.inputs, component.outputs)
    names = {roles.get(spec.name, spec.name): spec.name for spec in component.outputs}
    prompt = settings.prompt()
    text = prompt.lower() if settings.lower else prompt
    excluded = 0 if settings.include_prompt else prompt_length(facts.tokenizer, text)
    made = {"prompt": prompt, "lower": settings.lower, "size": settings.truncate_dim}
    if "sentence_embedding" in names and not excluded:
        return {**made, "output": names["sentence_embedding"], "pooled": True}
    if "last_hidden_state" not in names:
        raise TaskError(
            f"The graph of {facts.artifact.path} returns {', '.join(names)}: no sentence embeddings, and no hidden states to pool.",
            fix="export it with task='sentence-similarity'.",
        )
    recorded = recorded_export(facts.artifact)
    layers = sentence_layers(settings, pooling=recorded.pooling, normalize=recorded.normalize)
    others = [type(layer).__name__ for layer in layers.after if not isinstance(layer, Normalize)]
    if others:
        raise TaskError(
            f"The modules {', '.join(others)} of {facts.artifact.path} are not in its graph, and the front model does not compute them.",
            fix="export the model's weights by accel, which puts them into the graph: `accel export MODEL OUT`.",
        )
    return {
        **made,
        "output": names["last_hidden_state"],
        "pooled": False,
        "modes": list(layers.pooling.modes),
        "excluded": excluded,
        "normalize": len(layers.after) > 0,
    }


def _hidden_size(facts: Facts) -> int:
    settings = _embedding(facts)
    size = facts.sizes(settings["output"])[-1]
    if not isinstance(size, int):
        return settings["size"] or -1
    size *= len(settings.get("modes", "1"))
    return min(size, settings["size"] or size)


EMBEDDINGS = TextFront(
    module="embeddings",
    inputs=(Tensor(name="TEXT", dtype="string"),),
    outputs=lambda facts: (Tensor(name="EMBEDDING", dtype="float32", dims=(_hidden_size(facts),)),),
    reads=lambda facts: (_embedding(facts)["output"],),
    options=_embedding,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
)
