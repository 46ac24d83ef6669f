"""Tokenization and batching of texts for embedding models and cross-encoders, and computation of their embeddings and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..artifact.sentence_fields import STATIC_PADDING, TOKEN_VECTORS, TOKEN_WEIGHTS, VECTORS, output_of_side
from ..artifact.sentence_settings import DOCUMENT, QUERY, SentenceSettings, sentence_settings
from ..capture.sentence_embeddings import SentenceLayers, activation_function, sentence_layers, token_table
from ..config import check_number
from ..data.batches import longest
from ..data.encoded_rows import padded
from ..errors import InputError, TaskError
from .processors import kept_companion_of
from .vector_functions import truncated

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Function that maps outputs of a cross-encoder to scores."""
TokenRow = Mapping[str, Sequence[int]]
"""Token ids, attention mask and other inputs of one text."""
COUNTED = "counted"
"""Key of a row's pooling mask. Rows have the mask only if the model excludes its prompt from pooling."""
SCORED = "scored"
"""Key of the mask of tokens whose vectors a multi-vector model returns."""
DENSE, SPARSE, MULTI_VECTOR = "dense", "sparse", "multi_vector"
"""Kinds of embeddings: one vector per text, weights of tokens of the vocabulary, and one vector per token."""


class TextBatcher:
    """Tokenizer and batcher of texts. Threads must not share an object, because a fast tokenizer stores settings between calls.

    Args:
        tokenizer: The model's tokenizer.
        max_length: Number of tokens to which longer texts are truncated; `None` means no truncation.
    """

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        pads = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
        self._padding = {name: value for name, value in pads.items() if value is not None}
        self._left: bool | None = None

    @property
    def pads(self) -> bool:
        """Whether rows of different length can be in one batch."""
        return "input_ids" in self._padding

    def rows(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[TokenRow]:
        """Return one tokenized row per text, or per pair of texts."""
        return self._tokenized(texts, pairs, self.max_length)

    def _tokenized(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        max_length: int | None,
        *,
        add_special_tokens: bool = True,
    ) -> list[TokenRow]:
        encoding = self.tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=max_length is not None,
            max_length=max_length,
            add_special_tokens=add_special_tokens,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoding]
        return [{name: encoding[name][i] for name in names} for i in range(len(texts))]

    def batch(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Return rows as tensors `(rows, longest) int64`, padded on the tokenizer's padding side.

        Raises:
            InputError: The rows differ in length and the tokenizer has no padding token.
        """
        if not self.pads and len({len(row["input_ids"]) for row in rows}) > 1:
            raise InputError(
                "The tokenizer has no padding token, so texts with different numbers of tokens cannot be in one batch.",
                fix="set tokenizer.pad_token, or pass batch_size=1.",
            )
        left = self.tokenizer.padding_side == "left" if self._left is None else self._left
        return {name: padded([row[name] for row in rows], self._padding.get(name, 0), left=left) for name in rows[0]}


class SentenceRows(TextBatcher):
    """Tokenizer of texts that uses the prompt, lowercasing and maximum length in a model's sentence-transformers files.

    For multi-vector models, it also appends tokens to queries and marks the tokens whose vectors are used for scores.

    Args:
        tokenizer: The model's tokenizer.
        settings: Settings from the sentence-transformers files.
        max_length: Maximum number of tokens of the model; `None` if it has no limit.
    """

    def __init__(self, tokenizer: Any, settings: SentenceSettings, max_length: int | None) -> None:
        own_limit = tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None
        limits = [max_length, own_limit, settings.max_length]
        super().__init__(tokenizer, min((n for n in limits if n), default=None))
        self.settings = settings
        self._positions = max_length
        if settings.kind == "multi-vector encoder":
            _add_prefixes(tokenizer, settings.prefixes)
            self._skipped = _ids_of(tokenizer, settings.skipped_words)

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str | None = None, side: str = ""
    ) -> list[TokenRow]:
        """Return one tokenized row per text.

        If the model excludes the prompt from pooling, each row also has `counted`, a mask of the pooled tokens. The rows of a
        multi-vector model have `scored`, a mask of the tokens whose vectors are used.

        Args:
            texts: The texts.
            pairs: Second texts of pairs.
            prompt: Text to put before each text; the model's default prompt when `None`.
            side: `query`, `document`, or empty if the texts are neither.

        Raises:
            InputError: A text is not a string.
        """
        if not all(isinstance(text, str) for text in texts):
            kinds = sorted({type(text).__name__ for text in texts if not isinstance(text, str)})
            raise InputError(
                f"The inputs contain values of type {', '.join(kinds)}, but embeddings can be computed only for strings.",
                fix="pass a string or a list of strings.",
            )
        before = self.settings.prompt() if prompt is None else prompt
        texts = [self._cased(before + text) for text in texts]
        if side == QUERY and self.settings.token_table is not None:
            return self._tokenized(texts, None, self.max_length, add_special_tokens=False)
        rows = self._tokenized(texts, pairs, self._length_of(side))
        if self.tokenizer.pad_token == STATIC_PADDING:
            # The vector of this token is zero, and so is the vector of a text without tokens.
            blank = {"input_ids": [self.tokenizer.pad_token_id], "attention_mask": [1]}
            rows = [row if row["input_ids"] else blank for row in rows]
        if self.settings.kind == "multi-vector encoder":
            return [self.scored(row, side) for row in rows]
        if self.settings.include_prompt:
            return rows
        length = prompt_length(self.tokenizer, self._cased(before))
        return [{**row, COUNTED: [int(i >= length) for i in range(len(row["input_ids"]))]} for row in rows]

    def _cased(self, text: str) -> str:
        return text.lower() if self.settings.lower else text

    def _length_of(self, side: str) -> int | None:
        """Return the largest number of tokens of a query or document."""
        expansion = self.settings.expansion if side == QUERY else None
        length = self.settings.lengths.get(side)
        if expansion is not None and expansion.truncates:
            length = expansion.length
        elif expansion is not None and length is not None:
            length = max(length, expansion.length)
        if length is None or self.max_length is None:
            return self.max_length
        return length if self._positions is None else min(length, self._positions)

    def scored(self, row: TokenRow, side: str) -> TokenRow:
        """Return a row with the tokens of a query expansion, and with the mask of the tokens whose vectors are used."""
        settings, expansion = self.settings, self.settings.expansion
        if side == QUERY and expansion is not None and (missing := expansion.length - len(row["input_ids"])) > 0:
            token = _expansion_token(self.tokenizer, expansion.token)
            added = {"input_ids": token, "attention_mask": int(expansion.attended)}
            before = self.tokenizer.padding_side == "left" and expansion.truncates
            row = {
                name: [*[added.get(name, 0)] * missing, *values]
                if before
                else [*values, *[added.get(name, 0)] * missing]
                for name, values in row.items()
            }
        ids = row["input_ids"]
        skipped = self._skipped if (side or DOCUMENT) in settings.skipped_sides else frozenset()
        only = settings.scored_ids if side != QUERY else ()
        return {**row, SCORED: [int(i not in skipped and (not only or i in only)) for i in ids]}


def _expansion_token(tokenizer: Any, token: str | None) -> int:
    chosen = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if token is not None:
        chosen = tokenizer.convert_tokens_to_ids(token)
    if chosen is None:
        raise InputError(
            f"The tokenizer has no token {token or 'for masks or the end of a text'}, which the model appends to queries.",
            fix="use the tokenizer in the model's folder.",
        )
    return int(chosen)


def _add_prefixes(tokenizer: Any, prefixes: Sequence[str]) -> None:
    """Make a tokenizer read the prefixes of queries and documents as one token, if its vocabulary contains them."""
    from transformers import AddedToken

    vocabulary = tokenizer.get_vocab()
    for prefix in prefixes:
        for token in (prefix, *prefix.split(None, 1)[:1]):
            if token in vocabulary:
                if tokenizer.tokenize(token) != [token]:
                    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True)], special_tokens=True)
                break


def _ids_of(tokenizer: Any, words: Sequence[str]) -> frozenset[int]:
    """Return the ids of words that are tokens of the vocabulary."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    return frozenset(
        i for word, i in ids.items() if i is not None and (i != tokenizer.unk_token_id or word == tokenizer.unk_token)
    )


def in_batches(
    rows: Sequence[Any], length: Callable[[Any], int], batch_size: int, compute: Callable[[list[Any]], Iterable[Any]]
) -> list[Any]:
    """Compute results in batches of rows that have similar lengths; return the results in the original order of the rows."""
    check_number("batch_size", batch_size, 1)
    order = sorted(range(len(rows)), key=lambda i: length(rows[i]))
    results: list[Any] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        for i, result in zip(part, compute([rows[i] for i in part]), strict=True):
            results[i] = result
    return results


def prompt_length(tokenizer: Any, prompt: str) -> int:
    """Return the number of tokens of a prompt in front of a text; a special token at the prompt's end is not counted."""
    if not prompt:
        return 0
    ids = tokenizer(prompt)["input_ids"]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids)


class SentenceEmbeddingFunction:
    """Function that computes sentence embeddings in float32 from a model's outputs.

    Args:
        settings: Settings from the model's sentence-transformers files.
        pooling: Pooling that the graph was exported with; replaces the setting in the files.
        normalize: Whether the graph normalizes embeddings to length 1; replaces the setting in the files.
    """

    def __init__(
        self, settings: SentenceSettings, *, pooling: str | None = None, normalize: bool | None = None
    ) -> None:
        if settings.kind not in ("", "embedder"):
            settings.check_embeds()
        self.settings = settings
        self._pooling, self._normalize = pooling, normalize
        self._layers: dict[bool, SentenceLayers] = {}

    def __call__(
        self,
        output: Any,
        mask: torch.Tensor | None,
        counted: torch.Tensor | None = None,
        *,
        side: str = "",
        size: int | None = None,
    ) -> torch.Tensor:
        """Return the embeddings, `(batch, size)` float32.

        Args:
            output: The model's outputs with `sentence_embedding`, or with `last_hidden_state` to pool.
            mask: Attention mask, `(batch, sequence)`.
            counted: Mask of pooled tokens, if it differs from `mask`.
            side: `query`, `document`, or empty. It selects the path of a model with a router.
            size: Number of leading dimensions to return; the model's `truncate_dim` when `None`.
        """
        other = bool(side) and side != self.settings.side and bool(self.settings.other_layers)
        name = output_of_side(side) if other else VECTORS
        if name in output and (counted is None or mask is None or bool((counted == mask).all())):
            vectors: torch.Tensor = output[name].float()
        elif (
            states := "logits" if self.settings.kind == "sparse encoder" and "logits" in output else "last_hidden_state"
        ) in output:
            hidden: torch.Tensor = output[states]
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
            vectors = self.pool(hidden, mask, counted, other=other)
        else:
            raise TaskError(
                f"No embeddings can be computed: the graph in {self.settings.folder} returns {', '.join(output)}, and neither "
                f"{name} nor last_hidden_state.",
                fix="export the model again with `accel export --task sentence-similarity`."
                if self.settings.kind != "multi-vector encoder"
                else "call encode_query and encode_document, which return one vector per token.",
            )
        return vectors[:, : self.settings.truncate_dim] if size is None else truncated(vectors, size)

    def pool(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        counted: torch.Tensor | None = None,
        *,
        other: bool = False,
    ) -> torch.Tensor:
        """Pool hidden states `(batch, sequence, hidden)` and return the embeddings at full size; see `SentenceLayers.forward`.

        With `other`, the path of the router is used that is not its default path.
        """
        if other not in self._layers:
            settings = replace(self.settings, layers=self.settings.other_layers) if other else self.settings
            self._layers[other] = sentence_layers(settings, pooling=self._pooling, normalize=self._normalize)
        layers = self._layers[other].to(hidden.device)
        counted = counted.to(hidden.device) if counted is not None else None
        with torch.inference_mode():
            vectors: torch.Tensor = layers(hidden, mask.to(hidden.device), counted)
        return vectors


class Embedder(SentenceRows):
    """Embedder of texts, for models that return hidden states or embeddings.

    If the graph has no pooling, the embedder pools the hidden states according to the model's sentence-transformers files. If the model
    has no such files, the embedding is the mean of the hidden states of all tokens.

    Args:
        model: An `ORTModelForFeatureExtraction`.
        tokenizer: The tokenizer; the artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self._vectors: SentenceEmbeddingFunction = model.sentence_vectors
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        super().__init__(tokenizer, self._vectors.settings, model.artifact.components[0].max_sizes.get("sequence"))
        self._table: torch.Tensor | None = None
        self.offers = offered_embeddings(model, self.settings)

    def embed(self, rows: Sequence[TokenRow], *, side: str = "", size: int | None = None) -> torch.Tensor:
        """Return the embeddings of rows: `(rows, size)` float32. The arguments are those of `SentenceEmbeddingFunction`."""
        inputs = self.batch(rows)
        counted = inputs.pop(COUNTED, None)
        return self._vectors(self.model(**inputs), inputs.get("attention_mask"), counted, side=side, size=size)

    def embeddings(
        self,
        rows: Sequence[TokenRow],
        names: Sequence[str],
        *,
        side: str = "",
        size: int | None = None,
        max_active_dims: int | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """Compute several kinds of embeddings of rows in one pass of the model, and return them by kind for each row.

        Dense embeddings are `(size,)` float32, sparse embeddings `(vocab_size,)` float32 sparse tensors, and multi-vector embeddings
        `(tokens, size)` float32.

        Args:
            rows: Rows of `SentenceRows.rows` with the same `side`.
            names: Kinds of embeddings from `offers`.
            side: `query`, `document` or empty.
            size: Number of leading dimensions of dense embeddings; the model's `truncate_dim` when `None`.
            max_active_dims: Largest number of dimensions of sparse embeddings that are not zero; the model's setting when `None`.
        """
        active = max_active_dims or self.settings.max_active_dims
        if side == QUERY and self.settings.token_table is not None:
            return [{SPARSE: most_active(self._looked_up(row["input_ids"]), active)} for row in rows]
        inputs = self.batch(rows)
        counted, scored = inputs.pop(COUNTED, None), inputs.pop(SCORED, None)
        output, mask = self.model(**inputs), inputs.get("attention_mask")
        columns: dict[str, Sequence[torch.Tensor]] = {}
        if DENSE in names:
            columns[DENSE] = list(self._vectors(output, mask, counted, side=side, size=size))
        if SPARSE in names and TOKEN_WEIGHTS in output:
            columns[SPARSE] = self._lexical(inputs["input_ids"], output[TOKEN_WEIGHTS].float().cpu(), active)
        elif SPARSE in names:
            vectors = self._vectors(output, mask, counted, side=side)
            columns[SPARSE] = [most_active(vector.to_sparse(), active) for vector in vectors]
        if MULTI_VECTOR in names:
            vectors = output[TOKEN_VECTORS].float()
            if scored is None:
                # BGE-M3 uses the vectors of all tokens except the first.
                scored = torch.ones_like(inputs["input_ids"]) if mask is None else mask
                scored = scored * (scored.cumsum(1) > 1)
            columns[MULTI_VECTOR] = [
                row[used] for row, used in zip(vectors, scored.bool().to(vectors.device), strict=True)
            ]
        return [{name: columns[name][i] for name in names} for i in range(len(rows))]

    def _looked_up(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the sparse embedding of token ids whose weights are in a table."""
        assert self.settings.token_table is not None
        if self._table is None:
            self._table = token_table(self.settings.token_table)
        tokens = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        weights = self._table[tokens]
        return _sparse(tokens[weights != 0], weights[weights != 0], len(self._table))

    def _lexical(self, ids: torch.Tensor, weights: torch.Tensor, active: int | None) -> list[torch.Tensor]:
        """Return sparse embeddings with the largest weight of each token. Special tokens have no weight."""
        tokenizer = self.tokenizer
        special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        unused = torch.tensor(sorted(i for i in special if i is not None), dtype=torch.int64)
        size = self.model.config.vocab_size
        results = []
        for row, values in zip(ids.cpu(), weights, strict=True):
            used = (values > 0) & ~torch.isin(row, unused)
            tokens, places = torch.unique(row[used], return_inverse=True)
            largest = torch.zeros(len(tokens)).scatter_reduce(0, places, values[used], "amax")
            results.append(most_active(_sparse(tokens, largest, size), active))
        return results


def offered_embeddings(model: Any, settings: SentenceSettings) -> tuple[str, ...]:
    """Return the kinds of embeddings that a model computes; the kind that `encode` returns by default comes first."""
    if settings.kind == "sparse encoder":
        return (SPARSE,)
    if settings.kind == "multi-vector encoder":
        return (MULTI_VECTOR,)
    outputs = {spec.name for spec in model.artifact.components[0].outputs}
    more = {SPARSE: TOKEN_WEIGHTS, MULTI_VECTOR: TOKEN_VECTORS}
    return (DENSE, *(name for name, output in more.items() if output in outputs))


def most_active(vector: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return a sparse vector with at most `count` dimensions that are not zero, those with the largest absolute values."""
    vector = vector.coalesce()
    indices, values = vector.indices()[0], vector.values()
    if count is None or len(values) <= count:
        return vector
    largest = values.abs().topk(count).indices.sort().values
    return _sparse(indices[largest], values[largest], vector.shape[0])


def _sparse(indices: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices[None], values, (size,), is_coalesced=True, check_invariants=True)


class PairScorer(TextBatcher):
    """Scorer of text pairs that returns the logits of a cross-encoder, before the activation function.

    Args:
        model: An `ORTModelForSequenceClassification`.
        tokenizer: The tokenizer; the artifact's own when `None`.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        tokenizer = tokenizer or kept_companion_of(model, "AutoTokenizer")
        self.model = model
        self.settings = sentence_settings(model.artifact.path)
        limit = model.artifact.components[0].max_sizes.get("sequence")
        super().__init__(tokenizer, longest(limit, tokenizer, self.settings.max_length))
        # A language model reads only the tokens to the left, so padding on the right does not change its scores.
        self._left = False if self.settings.answers else None

    def rows(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, prompt: str | None = None
    ) -> list[TokenRow]:
        """Return one row per pair. The prompt is put before the first text; `None` means the model's default prompt.

        For a model with a chat template, the prompt is the system message, and the texts are messages of the roles `query` and
        `document`.
        """
        before = self.settings.prompt() if prompt is None else prompt
        if self.settings.lower:
            texts = [text.lower() for text in texts]
            pairs = [text.lower() for text in pairs] if pairs is not None else None
            before = before.lower()
        if self.settings.chat:
            if pairs is None:
                raise InputError(
                    "The model reranks with a chat template, which needs a query and a document, but only one text was passed.",
                    fix="pass pairs of texts.",
                )
            return [self._chat_row(before, query, document) for query, document in zip(texts, pairs, strict=True)]
        return super().rows([before + text for text in texts], pairs)

    def _chat_row(self, prompt: str, query: str, document: str) -> TokenRow:
        """Return the row of a pair in the chat template. The end of the template is kept if the row is truncated."""
        ids = self._rendered(prompt, query, document)
        if self.max_length is not None and len(ids) > self.max_length:
            ending = _common_end(self._rendered(prompt, "0", "0"), self._rendered(prompt, "1 2 3 4", "1 2 3 4"))
            end = ending[-self.max_length :]
            start = ids[: self.max_length - len(end)]
            if self.tokenizer.truncation_side == "left":
                start = ids[-self.max_length : len(ids) - len(end)]
            ids = [*start, *end]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        return {name: row[name] for name in self.tokenizer.model_input_names if name in row}

    def _rendered(self, prompt: str, query: str, document: str) -> list[int]:
        system = [("system", prompt)] if prompt else []
        messages = [
            {"role": role, "content": text if self.settings.chat == "flat" else [{"type": "text", "text": text}]}
            for role, text in [*system, (QUERY, query), (DOCUMENT, document)]
        ]
        # Templates are code of the model's author, and may raise any exception.
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        except Exception as error:
            raise TaskError(
                f"The chat template of the model in {self.settings.folder} cannot render a query and a document: {error}",
                fix="use the chat template that the model's author wrote for reranking, with the roles query and document.",
            ) from error
        return list(rendered["input_ids"])

    def logits(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        """Return the logits of rows: `(rows, num_labels)` float32 on the CPU."""
        logits: torch.Tensor = self.model(**self.batch(rows)).logits.float().cpu()
        return logits


def _common_end(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the tokens at the end of both rows that are equal, up to the first difference."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return list(first[len(first) - count :])


def activation_of(model: Any) -> Activation:
    """Return the function that maps a model's logits to scores; see `activation_path`."""
    return activation_function(activation_path(model.config, sentence_settings(model.artifact.path)))


def activation_path(config: Any, settings: SentenceSettings) -> str:
    """Return the import path of a cross-encoder's activation function.

    Sentence Transformers 6 stores the path in its own file, and earlier versions in the model's config.json. The default is a sigmoid for
    models with one label and the identity function for models with several labels.
    """
    if settings.answers:
        return settings.activation or "torch.nn.Sigmoid"
    written = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    path = settings.activation or written.get("activation_fn") or older
    return str(path or ("torch.nn.Sigmoid" if config.num_labels == 1 else "torch.nn.Identity"))
