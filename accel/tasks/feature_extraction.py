"""Tasks `feature-extraction` and `sentence-similarity`: hidden states and sentence embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import numpy as np
import torch
from transformers import modeling_outputs

from ..artifact.sentence_fields import TOKEN_VECTORS, VECTORS
from ..artifact.sentence_settings import DOCUMENT, QUERY, embedding_roles, sentence_settings
from ..capture.sentence_embeddings import Normalize, sentence_layers
from ..data.encoded_rows import EncodedRows, from_tokenizer
from ..data.labels import numbers, texts
from ..deploying.triton.text_fronts import TextFront, TextModelFacts, TritonTensor
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import correlation
from ..measuring.accuracy.predictors import CosinePredictor, Predictor
from ..models.base import ORTModel
from ..models.embedding_and_scoring import (
    COUNTED,
    Embedder,
    SentenceEmbeddingFunction,
    SentenceRows,
    TokenRow,
    prompt_length,
)
from ..models.encoding import EncodeOptions, encode
from ..models.outputs import SentenceEmbeddingOutput
from ..models.vector_functions import Vectors, similarity
from ..serving.batch_formation import can_pad
from ..serving.job import Options, PreparedRequest, Row
from ..serving.operations import READS_TEXT, Operation
from ..serving.text_handlers import check_lengths, check_options, cutting, find_prompt, text_row
from ..stages.resolution import recorded_export
from ..upstream.output_silencing import quiet

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


class ORTModelForFeatureExtraction(ORTModel):
    """Model that returns hidden states, and sentence embeddings if its graph or its files define pooling."""

    task = "feature-extraction"

    def _choose_output(self, names: Sequence[str]) -> Any:
        if "logits" in names or "start_logits" in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)} and no hidden states, which {type(self).__name__} needs.",
                fix="load the folder with the ORTModelFor... class of the task that the model was exported for.",
            )
        self._roles = embedding_roles(self._session.inputs, self._session.outputs)
        returned = {self._roles.get(name, name) for name in names}
        pools = self.artifact.task == "sentence-similarity" and "last_hidden_state" in returned
        self._pools = pools and "sentence_embedding" not in returned
        self._after = self._named_and_pooled if self._roles or self._pools else None
        self._vectors: SentenceEmbeddingFunction | None = None
        if self._pools or returned & {VECTORS, TOKEN_VECTORS}:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    @property
    def sentence_vectors(self) -> SentenceEmbeddingFunction:
        """Function that computes sentence embeddings from outputs, configured by the files next to the graph.

        Raises:
            TaskError: The model does not embed sentences.
            ConfigError, IntegrityError: The files have an unsupported setting or are damaged.
        """
        if self._vectors is None:
            recorded = recorded_export(self.artifact)
            settings = sentence_settings(self.artifact.path)
            self._vectors = SentenceEmbeddingFunction(settings, pooling=recorded.pooling, normalize=recorded.normalize)
        return self._vectors

    def _named_and_pooled(self, values: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Rename outputs to transformers' names, and compute the sentence embedding if the graph does not return it."""
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
        side: Literal["", "query", "document"] = "",
        **options: Unpack[EncodeOptions],
    ) -> Any:
        """Compute embeddings of texts, in the order of the texts.

        Texts of similar length are batched together. The model's sentence-transformers files define the maximum length, lowercasing,
        prompts, `truncate_dim`, and the pooling if the graph has none. Without such files, hidden states are averaged over the tokens.

        Args:
            texts: One text or a list of texts.
            side: Whether the texts are queries or documents. Multi-vector models and models with a router compute them differently. It
                does not select a prompt; `encode_query` and `encode_document` do.
            **options: See `EncodeOptions`.

        Returns:
            Dense embeddings: `(len(texts), size)` float32, or `(size,)` for a single text. Sparse embeddings: a sparse torch tensor
            `(len(texts), vocab_size)` float32. Multi-vector embeddings: a list with a tensor `(tokens, size)` float32 for each text.
            If `outputs` is a list, a dict with one of these results for each name.

        Raises:
            InputError: A text is not a string, or `truncate_dim` is larger than the embeddings.
            TaskError: The model does not embed sentences; cross-encoders, for example, do not.
            ConfigError: An option is invalid, the prompt is unknown, or the files next to the graph have an unsupported setting.
        """
        return encode(self, texts, side, options)

    def encode_query(self, texts: str | Sequence[str], **options: Unpack[EncodeOptions]) -> Any:
        """Compute embeddings of queries: `encode` with the prompt named `query`, if the model has one.

        Raises:
            AccelError: As in `encode`.
        """
        return encode(self, texts, QUERY, options, default_prompt=True)

    def encode_document(self, texts: str | Sequence[str], **options: Unpack[EncodeOptions]) -> Any:
        """Compute embeddings of documents: `encode` with the prompt named `document`, `passage` or `corpus`, if the model has one.

        Raises:
            AccelError: As in `encode`.
        """
        return encode(self, texts, DOCUMENT, options, default_prompt=True)

    def similarity(self, first: Vectors, second: Vectors) -> torch.Tensor:
        """Return the similarity of each embedding in `first` to each in `second`, `(len(first), len(second))` float32.

        The function is the one in the model's files (`similarity_fn_name`). The default is `cosine`, `dot` for sparse encoders, and
        `maxsim` for multi-vector models.

        Raises:
            InputError: The embeddings have different numbers of dimensions.
        """
        return similarity(self.sentence_vectors.settings.similarity, first, second)


class SimilarityPredictor(CosinePredictor):
    """Predictor of the similarity of the embeddings of a row's two texts.

    The similarity is the cosine, or the function that the model's sentence-transformers files define.
    """

    kind = "similarities"
    offline_metrics = (correlation("spearmanr"), correlation("pearsonr"))

    def _references(self) -> list[Any]:
        return numbers(self.rows, "score")

    def _longest(self, limit: int | None, max_length: int | None) -> int | None:
        longest = super()._longest(limit, max_length)
        own_limit = self.settings.max_length
        return longest if own_limit is None or (longest is not None and longest < own_limit) else own_limit

    def _encode(self) -> EncodedRows:
        both = texts(self.rows, "text") + texts(self.rows, "text_pair")
        self._vectors = SentenceEmbeddingFunction(self.settings)
        reader = SentenceRows(self.processor, self.settings, self.max_length)
        with quiet():
            rows = reader.rows(both)
        tokens = {name: [row[name] for row in rows] for name in rows[0]}
        return replace(from_tokenizer({}, self.processor), tokens=tokens)

    def _embeddings(self, feeds: Mapping[str, torch.Tensor], output: Any) -> torch.Tensor:
        return self._vectors(output, feeds.get("attention_mask"), feeds.get(COUNTED)).cpu()


class FeatureExtraction(Task):
    """The tasks `feature-extraction` and `sentence-similarity`: hidden states and sentence embeddings."""

    model = ORTModelForFeatureExtraction

    def predictor(self, config: Any) -> type[Predictor]:
        return SimilarityPredictor

    def operations(self) -> Sequence[Operation]:
        return (EmbeddingOperation(), HiddenStatesOperation())

    def fronts(self) -> Mapping[str, TextFront]:
        return dict.fromkeys(("feature-extraction", "sentence-similarity"), EMBEDDINGS)


class HiddenStatesOperation(Operation):
    """Operation that returns the last hidden states of a text's tokens."""

    name = "feature-extraction"
    reads = READS_TEXT

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"features": pa.list_(pa.list_(pa.float32()))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        (rows,) = answer
        return {"features": rows}


class EmbeddingOperation(Operation):
    """Operation that returns one embedding per text."""

    name = "embed"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        return hasattr(model, "encode") and "input_ids" in model.input_names

    def work(self, model: ORTModel, tokenizer: Any) -> EmbeddingHandler:
        return EmbeddingHandler(model, tokenizer)

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
        from ..serving.http.endpoints import Endpoint, HttpCall
        from ..serving.http.replies import JsonReply, text_error
        from ..serving.http.text_bodies import Direction, TokenIds, cut_options, listed

        class EmbedBody(Body):
            """Body of `/embed`. Texts longer than the model's limit are truncated unless `truncate` is false."""

            model: str | None = None
            inputs: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
            normalize: bool = True
            truncate: bool | None = None
            truncation_direction: Direction = "right"
            prompt_name: str | None = None
            dimensions: int | None = Field(default=None, ge=1)

        async def answer(call: HttpCall, body: EmbedBody) -> Response:
            texts = listed(body.inputs)
            call.check_batch(len(texts))
            embeddings = await call.ask(
                texts, operation=self.name, model=body.model, normalize_embeddings=body.normalize, truncate_dim=body.dimensions,
                prompt_name=body.prompt_name, **cut_options(body.truncate, body.truncation_direction),
            )  # fmt: skip
            return JsonReply(embeddings.tolist())

        return Endpoint(
            path="/embed",
            answer=answer,
            body=EmbedBody,
            summary="Return the embeddings of texts as a plain list",
            tag="tasks",
            error=text_error,
            operation=self.name,
            example={"inputs": ["a lost card", "a stolen card"]},
        )


class EmbeddingHandler:
    """Request handler of the operation `embed`: computes embeddings like `ORTModelForFeatureExtraction.encode`.

    The result is `(hidden,)` float32 for one text and `(texts, hidden)` for a list of texts. A text can also be a list of token ids of the
    model's tokenizer.

    A request has these options:

    - `normalize_embeddings` scales each embedding to length 1.
    - `truncate_dim` is the number of dimensions to keep.
    - `prompt_name` is the name of one of the model's prompts, or a list of names, of which the first existing one is used.
    - `truncation` and `truncation_side` define how texts that are too long are truncated.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._embedder = Embedder(model, tokenizer)
        self._pads = self._embedder.pads and can_pad(model)

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Tokenize the inputs into rows; see `RequestHandler.prepare`."""
        check_options(options, ("normalize_embeddings", "truncate_dim", "prompt_name", "truncation", "truncation_side"))
        items = [inputs] if isinstance(inputs, str) else _texts_or_ids(inputs)
        texts = [item for item in items if isinstance(item, str)]
        prompt = find_prompt(self._embedder.settings.prompts, options.get("prompt_name"))
        if prompt is not None and len(texts) < len(items):
            raise InputError(
                f"The request has prompt_name={options.get('prompt_name')!r} and inputs that are token ids, but a prompt can only be put "
                "before a text.",
                fix="send the inputs as texts, or leave prompt_name out.",
            )
        embedder = self._embedder
        with cutting(embedder, options):
            text_rows = iter(embedder.rows(texts, prompt=prompt) if texts else ())
        rows = [next(text_rows) if isinstance(item, str) else self._row_of_ids(item, i) for i, item in enumerate(items)]
        check_lengths(rows, embedder.max_length)
        if options.get("truncation_side") == "left" and any(COUNTED in row for row in rows):
            raise InputError(
                "truncation_side='left' is not supported for this model: the model excludes its prompt from pooling, and truncation on the "
                "left would remove the prompt from long texts.",
                fix="use truncation_side='right' (in requests to /embed: truncation_direction='right').",
            )
        return PreparedRequest([[text_row("embed", self._pads, row)] for row in rows])

    def _row_of_ids(self, ids: Sequence[int], number: int) -> TokenRow:
        tokenizer = self._embedder.tokenizer
        size = getattr(self._model.config, "vocab_size", len(tokenizer))
        before, after = _frame(tokenizer)
        if max(ids) >= size:
            raise InputError(
                f"Input {number} contains the token id {max(ids)}, but the model's vocabulary has only the ids 0 to {size - 1}.",
                fix=_OTHER_TOKENIZER,
            )
        if [*ids[: len(before)]] != before or [*ids[len(ids) - len(after) :]] != after:
            raise InputError(
                f"The token ids of input {number} do not begin with {before} and end with {after}, the special tokens of this model's "
                "tokenizer.",
                fix=_OTHER_TOKENIZER,
            )
        row = {"input_ids": list(ids), "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        inputs = {name: row[name] for name in tokenizer.model_input_names if name in row}
        return inputs if self._embedder.settings.include_prompt else {**inputs, COUNTED: [1] * len(ids)}

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Return the embedding of each row; see `RequestHandler.run`."""
        # Convert to NumPy first: iterating over the rows of a torch tensor takes longer than the last layer of a small model.
        return list(self._embedder.embed([row.inputs for row in rows]).cpu().numpy())

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Combine the rows to one result, then truncate and normalize the embeddings as requested; see `RequestHandler.finish`."""
        vectors = np.stack([vector for (vector,) in outputs]) if outputs else np.empty((0, 0), np.float32)
        size = options.get("truncate_dim")
        if size is not None and outputs and size > vectors.shape[1]:
            raise InputError(
                f"The request wants embeddings with {size} dimensions, but the model's embeddings have only {vectors.shape[1]}.",
                fix=f"request at most {vectors.shape[1]} dimensions.",
            )
        vectors = vectors[:, :size]
        if options.get("normalize_embeddings"):
            vectors = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=-1).numpy()
        return vectors[0] if isinstance(inputs, str) else vectors


_OTHER_TOKENIZER = (
    "send texts instead of token ids (in LangChain, pass check_embedding_ctx_length=False), or token ids of the model's own "
    "tokenizer, which the server's endpoint /tokenize returns."
)


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    with_special, without_special = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    start = next(
        (i for i in range(len(with_special)) if with_special[i : i + len(without_special)] == without_special), 0
    )
    return list(with_special[:start]), list(with_special[start + len(without_special) :])


def _texts_or_ids(inputs: Any) -> list[Any]:
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise InputError(
            f"The inputs are a {type(inputs).__name__}, but a string or a list of strings is needed.",
            fix="pass a string, or a list of strings.",
        )
    for number, item in enumerate(inputs):
        ids = isinstance(item, Sequence) and not isinstance(item, str) and len(item) > 0
        if not isinstance(item, str) and not (ids and all(type(i) is int and i >= 0 for i in item)):
            raise InputError(
                f"Input {number} is {item!r:.100}, which is neither a string nor a list of token ids.",
                fix="pass a list of strings, or a list of lists of token ids.",
            )
    return list(inputs)


def _embedding(facts: TextModelFacts) -> dict[str, Any]:
    settings = sentence_settings(facts.artifact.path)
    component = facts.artifact.component()
    roles = embedding_roles(component.inputs, component.outputs)
    names = {roles.get(spec.name, spec.name): spec.name for spec in component.outputs}
    prompt = settings.prompt()
    text = prompt.lower() if settings.lower else prompt
    excluded = 0 if settings.include_prompt else prompt_length(facts.tokenizer, text)
    options = {"prompt": prompt, "lower": settings.lower, "size": settings.truncate_dim}
    if "sentence_embedding" in names and not excluded:
        return {**options, "output": names["sentence_embedding"], "pooled": True}
    if "last_hidden_state" not in names:
        raise TaskError(
            f"No embeddings can be computed: the graph in {facts.artifact.path} returns {', '.join(names)}, and neither "
            "sentence_embedding nor last_hidden_state.",
            fix="export the model again with `accel export --task sentence-similarity`.",
        )
    recorded = recorded_export(facts.artifact)
    layers = sentence_layers(settings, pooling=recorded.pooling, normalize=recorded.normalize)
    if any(not isinstance(layer, Normalize) for layer in layers.after):
        others = [layer.kind for layer in settings.layers if layer.kind not in {"Pooling", "Normalize"}]
        raise TaskError(
            f"The model in {facts.artifact.path} has the sentence-transformers modules {', '.join(others)}, which are not part of its "
            "graph and which the Triton model for texts cannot compute.",
            fix="export the original model with `accel export MODEL OUT`, which adds these modules to the graph.",
        )
    return {
        **options,
        "output": names["last_hidden_state"],
        "pooled": False,
        "modes": list(layers.modes),
        "excluded": excluded,
        "normalize": len(layers.after) > 0,
    }


def _hidden_size(facts: TextModelFacts) -> int:
    settings = _embedding(facts)
    size = facts.sizes(settings["output"])[-1]
    if not isinstance(size, int):
        return settings["size"] or -1
    size *= len(settings.get("modes", "1"))
    return min(size, settings["size"] or size)


EMBEDDINGS = TextFront(
    service="embeddings:TextEmbedder",
    inputs=(TritonTensor(name="TEXT", dtype="string"),),
    outputs=lambda facts: (TritonTensor(name="EMBEDDING", dtype="float32", dims=(_hidden_size(facts),)),),
    reads=lambda facts: (_embedding(facts)["output"],),
    options=_embedding,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
)
