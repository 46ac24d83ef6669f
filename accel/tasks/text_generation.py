"""Task `text-generation`: text generation with decoder-only models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..data.encoded_rows import EncodedRows
from ..data.labels import texts
from ..decoding.kv_cache import StateCache, one_cache
from ..deploying.triton.text_fronts import TextFront, TritonTensor
from ..errors import InputError, TaskError
from ..interfaces.task import Task
from ..measuring.accuracy.metrics import Floats, TokenScores, Values, metric_of_sums, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from ..models.generation_mixin import Generator
from ..models.losses import computes_next_tokens_loss, loss_of
from ..models.outputs import fast_output, numpy_too
from ..serving.continuous_batching.scheduler import continues_text
from ..serving.job import RequestHandler
from ..serving.operations import READS_TEXT, Operation
from ..upstream.library_output import quiet

_WINDOW = 512
_TOKENS_A_CALL = 1024


class ORTModelForCausalLM(Generator):
    """Decoder-only text generation model: `input_ids: (batch, sequence)` to `logits: (batch, sequence, vocab_size)`."""

    task = "text-generation"
    _decoder = "model"

    @property
    def main_input_name(self) -> str:
        """Name of the main input, the token ids."""
        return "input_ids"

    @numpy_too
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        labels: torch.Tensor | None = None,
        cache: StateCache | None = None,
        **rest: Any,
    ) -> Any:
        """Run the decoder once.

        Args:
            input_ids: New tokens `(batch, new)`, which follow the cached tokens.
            attention_mask: Mask `(batch, cached + new)`, 0 for padding; all ones when `None`.
            position_ids: Position ids `(batch, new)`; computed when `None`.
            past_key_values: Cache returned by an earlier call, changed in place; or a `DynamicCache`, whose keys and values are copied in
                and out at each call. States of a state-space model are not copied: its `DynamicCache` must be empty at first.
            use_cache: Whether to return the cache (default).
            logits_to_keep: Number of last tokens whose logits are computed, 0 for all; or a tensor of token indices.
            labels: Token ids `(batch, new)`, -100 for ignored tokens. With labels, the result includes the next-token prediction loss.
            cache: Same as `past_key_values`, under its name in transformers 5.24.
            **rest: Other arguments; they raise if they would change the result.

        Raises:
            InputError: Sizes do not agree, the cache is of another type, there are more tokens than positions, or labels were passed for
                an architecture with another loss.
        """
        if labels is not None and not computes_next_tokens_loss(self.config):
            self._check_rest({"labels": labels})
        tokens = {"input_ids": self._ids(input_ids, rest)}
        past = one_cache(past_key_values, cache)
        output = self._continued(tokens, attention_mask, position_ids, past, use_cache, logits_to_keep)
        if labels is None:
            return output
        loss = loss_of("ForCausalLM", {"logits": output.logits}, {"labels": labels}, self.config)
        return fast_output(CausalLMOutputWithPast, {"loss": loss, **output})


def _losses(predictions: Values, _: Values) -> Floats:
    return np.asarray([(row.loss, row.tokens) for row in predictions], np.float64)


def _perplexity(sums: Floats) -> Floats:
    # The perplexity of a very large loss overflows to infinity.
    with np.errstate(over="ignore"):
        return np.exp(ratio(sums))


_PERPLEXITY = metric_of_sums(
    "perplexity",
    _losses,
    {"perplexity": _perplexity, "loss": ratio, "tokens": lambda sums: sums[..., 1]},
    points=1.0,
    higher_is_better=False,
)


class NextTokenPredictor(Predictor):
    """Predicts the loss of each next token of a row, in windows of `max_length` tokens without overlap."""

    kind = "tokens"
    offline_metrics = (_PERPLEXITY,)

    def _references(self) -> list[Any]:
        return [None] * len(self.rows)

    def _longest(self, limit: int | None, asked: int | None) -> int | None:
        # The logits of all tokens of a window are needed at once: 600 MB for 1,024 tokens and a vocabulary of 150,000.
        return asked or min(super()._longest(limit, asked) or _WINDOW, _WINDOW)

    def _encode(self) -> EncodedRows:
        length = self.max_length or _WINDOW
        self.batch_size = max(1, min(self.batch_size, _TOKENS_A_CALL // length))
        with quiet():
            ids_of_rows = self.processor(texts(self.rows, "text"))["input_ids"]
        pieces = [
            (row, tokens[i : i + length])
            for row, tokens in enumerate(ids_of_rows)
            for i in range(0, len(tokens), length)
            if len(tokens) - i > 1
        ]
        if not pieces:
            raise InputError(
                f"No text of {self.rows.sample.source} has two tokens: there is nothing to predict.",
                fix="give longer texts.",
            )
        self._row_of = [row for row, _ in pieces]
        tokens = [piece for _, piece in pieces]
        pad = self.processor.pad_token_id
        return EncodedRows(
            tokens={"input_ids": tokens, "attention_mask": [[1] * len(piece) for piece in tokens]},
            # The padding value does not matter: padding follows the last token of a window.
            padding={"input_ids": pad if pad is not None else tokens[0][0]},
        )

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return a `TokenScores` for each row, summed over its windows."""
        losses = np.zeros(len(self.rows))
        likeliest: list[list[int]] = [[] for _ in range(len(self.rows))]
        for part, feeds, output in self.batches(model, what):
            logits, targets = output["logits"][:, :-1].cpu(), feeds["input_ids"][:, 1:]
            counts = feeds["attention_mask"][:, 1:].sum(1).tolist()
            for place, window in enumerate(part):
                row, count = self._row_of[window], counts[place]
                kept = logits[place, :count].float()
                losses[row] += float(torch.nn.functional.cross_entropy(kept, targets[place, :count], reduction="sum"))
                likeliest[row] += kept.argmax(-1).tolist()
        return [TokenScores(float(loss), len(row), tuple(row)) for loss, row in zip(losses, likeliest, strict=True)]

    def agreement(self, first: Sequence[Any], second: Sequence[Any]) -> float | None:
        """Return the fraction of tokens for which two models predict the same next token."""
        return super().agreement([t for row in first for t in row.best], [t for row in second for t in row.best])


class TextGeneration(Task):
    """The task `text-generation`: text generation with decoder-only models."""

    model = ORTModelForCausalLM

    def predictor(self, config: Any) -> type[Predictor]:
        return NextTokenPredictor

    def operations(self) -> Sequence[Operation]:
        return (GenerationOperation(),)

    def fronts(self) -> Mapping[str, TextFront]:
        return {"text-generation": GENERATION}


class GenerationOperation(Operation):
    """Operation that continues a text, batched continuously with other requests."""

    name = "generate"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        return continues_text(model)

    def work(self, model: ORTModel, tokenizer: Any) -> RequestHandler:
        raise TaskError("Text is generated by the engine's generator.", fix="use engine.generator().")

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        import pyarrow as pa

        return {"text": pa.string(), "finish": pa.string(), "prompt_tokens": pa.int64(), "new_tokens": pa.int64()}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: getattr(answer, name) for name in ("text", "finish", "prompt_tokens", "new_tokens")}


GENERATION = TextFront(
    inputs=(TritonTensor(name="PROMPT", dtype="string"),),
    outputs=lambda _: (TritonTensor(name="TEXT", dtype="string"),),
    sample={"PROMPT": ["The card"]},
    generates=True,
)
