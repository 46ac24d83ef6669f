"""Operations of the server and of `accel batch` for embedding models: dense, sparse and token embeddings of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from ..artifact.sentence_fields import TOKEN_VECTORS
from ..artifact.sentence_settings import DOCUMENT, QUERY
from ..errors import ConfigError, InputError, TaskError
from ..models.base import ORTModel
from ..models.embedding_and_scoring import (
    COUNTED,
    DENSE,
    MULTI_VECTOR,
    SPARSE,
    Embedder,
    TokenRow,
    offered_embeddings,
)
from ..serving.batch_formation import can_pad
from ..serving.job import Options, PreparedRequest, Row
from ..serving.operations import READS_TEXT, Operation
from ..serving.text_handlers import check_choice, check_lengths, check_options, cutting, find_prompt, text_row

if TYPE_CHECKING:
    from ..serving.http.endpoints import Endpoint


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
        return hasattr(model, "encode") and "input_ids" in model.input_names and DENSE in _offers(model)

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


class SparseEmbeddingOperation(Operation):
    """Operation that returns one sparse embedding per text: the tokens with a weight, and their weights."""

    name = "embed_sparse"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        return hasattr(model, "encode") and "input_ids" in model.input_names and SPARSE in _offers(model)

    def work(self, model: ORTModel, tokenizer: Any) -> EmbeddingHandler:
        return EmbeddingHandler(model, tokenizer, SPARSE)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())}

    def endpoint(self) -> Endpoint:
        def reply(result: Any) -> Any:
            return [
                [
                    {"index": index, "value": value}
                    for index, value in zip(row["indices"].tolist(), row["values"].tolist(), strict=True)
                ]
                for row in result
            ]

        return _token_endpoint("/embed_sparse", self.name, "Return the sparse embeddings of texts", reply)


class TokenEmbeddingOperation(Operation):
    """Operation that returns one vector per token: the embedding of a multi-vector model, or the hidden states of another model."""

    name = "embed_all"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        if not hasattr(model, "encode") or "input_ids" not in model.input_names:
            return False
        outputs = {spec.name for spec in model.artifact.components[0].outputs}
        return bool({TOKEN_VECTORS, "last_hidden_state"} & outputs)

    def work(self, model: ORTModel, tokenizer: Any) -> EmbeddingHandler:
        return EmbeddingHandler(model, tokenizer, MULTI_VECTOR)

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"vectors": pa.list_(pa.list_(pa.float32()))}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"vectors": list(answer)}

    def endpoint(self) -> Endpoint:
        return _token_endpoint(
            "/embed_all",
            self.name,
            "Return one vector for each token of texts",
            lambda result: [row.tolist() for row in result],
        )


def _token_endpoint(path: str, operation: str, summary: str, reply: Callable[[Any], Any]) -> Endpoint:
    """Return an endpoint with the request body of text-embeddings-inference."""
    from pydantic import Field
    from starlette.responses import Response

    from ..serving.http.bodies import Body
    from ..serving.http.endpoints import Endpoint, HttpCall
    from ..serving.http.replies import JsonReply, text_error
    from ..serving.http.text_bodies import Direction, TokenIds, cut_options, listed

    class TokenEmbeddingBody(Body):
        """Body of `/embed_sparse` and `/embed_all`. Texts longer than the model's limit are truncated unless `truncate` is false."""

        model: str | None = None
        inputs: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
        truncate: bool | None = None
        truncation_direction: Direction = "right"
        prompt_name: str | None = None

    async def answer(call: HttpCall, body: TokenEmbeddingBody) -> Response:
        texts = listed(body.inputs)
        call.check_batch(len(texts))
        # A multi-vector model computes queries differently, and the API has no other field that tells the two sides apart.
        side = body.prompt_name if body.prompt_name in (QUERY, DOCUMENT) else ""
        result = await call.ask(
            texts, operation=operation, model=body.model, prompt_name=body.prompt_name, side=side,
            **cut_options(body.truncate, body.truncation_direction),
        )  # fmt: skip
        return JsonReply(reply(result))

    return Endpoint(
        path=path,
        answer=answer,
        body=TokenEmbeddingBody,
        summary=summary,
        tag="tasks",
        error=text_error,
        operation=operation,
        example={"inputs": ["a lost card", "a stolen card"]},
    )


def _offers(model: Any) -> tuple[str, ...]:
    """Return the kinds of embeddings of a model. If its files have an unsupported setting, the error is raised for each request."""
    try:
        return offered_embeddings(model, model.sentence_vectors.settings)
    except (ConfigError, TaskError):
        return (DENSE,)


class EmbeddingHandler:
    """Request handler that computes one kind of embeddings like `ORTModelForFeatureExtraction.encode`.

    Dense embeddings are `(hidden,)` float32 for one text and `(texts, hidden)` for a list of texts. Other kinds are one result for one
    text and a list for a list of texts: `indices` and `values` of sparse embeddings, or a matrix `(tokens, size)` of multi-vector
    embeddings. A text can also be a list of token ids of the model's tokenizer.

    A request has these options:

    - `normalize_embeddings` scales each embedding to length 1.
    - `truncate_dim` is the number of dimensions to keep.
    - `prompt_name` is the name of one of the model's prompts, or a list of names, of which the first existing one is used.
    - `side` is `query` or `document`, for models that compute queries and documents differently. It does not select a prompt.
    - `truncation` and `truncation_side` define how texts that are too long are truncated.
    """

    def __init__(self, model: Any, tokenizer: Any, kind: str = DENSE) -> None:
        self._model, self._kind = model, kind
        self._embedder = Embedder(model, tokenizer)
        self._pads = self._embedder.pads and can_pad(model)

    def prepare(self, inputs: Any, options: Options) -> PreparedRequest:
        """Tokenize the inputs into rows; see `RequestHandler.prepare`."""
        dense = ("normalize_embeddings", "truncate_dim") if self._kind == DENSE else ()
        check_options(options, (*dense, "prompt_name", "side", "truncation", "truncation_side"))
        check_choice(options, "normalize_embeddings", (True, False))
        check_choice(options, "side", ("", QUERY, DOCUMENT))
        if (size := options.get("truncate_dim")) is not None and (type(size) is not int or size < 1):
            raise InputError(
                f"truncate_dim is {size!r:.100}, but it must be a whole number from 1.",
                fix="pass the number of dimensions to keep, or leave truncate_dim out.",
            )
        side = options.get("side", "")
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
            text_rows = iter(embedder.rows(texts, prompt=prompt, side=side) if texts else ())
        rows = [
            next(text_rows) if isinstance(item, str) else self._row_of_ids(item, i, side)
            for i, item in enumerate(items)
        ]
        check_lengths(rows, embedder.max_length)
        if options.get("truncation_side") == "left" and any(COUNTED in row for row in rows):
            raise InputError(
                "truncation_side='left' is not supported for this model: the model excludes its prompt from pooling, and truncation on the "
                "left would remove the prompt from long texts.",
                fix="use truncation_side='right' (in requests to /embed: truncation_direction='right').",
            )
        # Only rows of the same side share a batch, because a router may have another path for each side.
        return PreparedRequest([[text_row(f"{self._kind} {side}", self._pads, row)] for row in rows])

    def _row_of_ids(self, ids: Sequence[int], number: int, side: str) -> TokenRow:
        tokenizer, settings = self._embedder.tokenizer, self._embedder.settings
        if side == QUERY and settings.token_table is not None:
            raise InputError(
                f"Input {number} is a list of token ids, but this model computes queries without special tokens.",
                fix="send queries as texts.",
            )
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
        if settings.kind == "multi-vector encoder":
            return self._embedder.scored(inputs, side)
        return inputs if settings.include_prompt else {**inputs, COUNTED: [1] * len(ids)}

    def run(self, rows: Sequence[Row]) -> list[Any]:
        """Return the embedding of each row; see `RequestHandler.run`."""
        inputs = [row.inputs for row in rows]
        group: Any = rows[0].group
        side = group[0].partition(" ")[2]
        if self._kind == DENSE:
            # Convert to NumPy first: iterating over the rows of a torch tensor takes longer than the last layer of a small model.
            return list(self._embedder.embed(inputs, side=side).cpu().numpy())
        if self._kind in self._embedder.offers:
            computed = self._embedder.embeddings(inputs, (self._kind,), side=side)
            return [_plain(embeddings[self._kind]) for embeddings in computed]
        tensors = self._embedder.batch(inputs)
        tensors.pop(COUNTED, None)
        hidden = self._model(**tensors)["last_hidden_state"].float().cpu()
        mask = tensors.get("attention_mask", torch.ones(hidden.shape[:2])).bool()
        return [states[used].numpy() for states, used in zip(hidden, mask, strict=True)]

    def finish(self, inputs: Any, options: Options, memo: Any, outputs: list[list[Any]]) -> Any:
        """Combine the rows to one result, then truncate and normalize the embeddings as requested; see `RequestHandler.finish`."""
        if self._kind != DENSE:
            results = [result for (result,) in outputs]
            return results[0] if isinstance(inputs, str) else results
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


def _plain(embedding: torch.Tensor) -> Any:
    """Return a sparse embedding as its indices and values, and a multi-vector embedding as an array."""
    if not embedding.is_sparse:
        return embedding.cpu().numpy()
    embedding = embedding.coalesce().cpu()
    return {"indices": embedding.indices()[0].numpy(), "values": embedding.values().numpy()}


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
