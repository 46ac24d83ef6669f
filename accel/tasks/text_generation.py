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
from ..measuring.accuracy.metrics import Floats, LanguageModelPrediction, Values, metric_of_sums, ratio
from ..measuring.accuracy.predictors import Model, Predictor
from ..models.base import ORTModel
from ..models.generation_mixin import Generator
from ..models.losses import computes_next_tokens_loss, loss_of
from ..models.outputs import fast_output, numpy_too
from ..serving.continuous_batching.scheduler import continues_text
from ..serving.job import RequestHandler
from ..serving.operations import READS_TEXT, Operation
from ..upstream.output_silencing import quiet

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
            past_key_values: Cache returned by an earlier call, which is changed in place, or a `DynamicCache`. The keys and values of a
                `DynamicCache` are copied to the runtime and back at each call. The states of a state-space model are not copied, so its
                `DynamicCache` must be empty at the first call.
            use_cache: Whether to return the cache (default).
            logits_to_keep: Number of last tokens whose logits are computed, 0 for all; or a tensor of token indices.
            labels: Token ids `(batch, new)`, -100 for ignored tokens. With labels, the result includes the next-token prediction loss.
            cache: The name of `past_key_values` in transformers 5.24.
            **rest: Other arguments of the transformers model; an error is raised if an argument would change the result.

        Raises:
            InputError: The sizes of the inputs do not match, the cache has an unsupported type, there are more tokens than the model has
                positions, or labels were passed for an architecture whose loss is not the next-token prediction loss.
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
    # Suppress NumPy's warning: the perplexity of a very large loss is larger than the largest float and becomes infinity.
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
    """Predictor of the next-token prediction loss of each row, computed in windows of `max_length` tokens that do not overlap."""

    kind = "tokens"
    offline_metrics = (_PERPLEXITY,)

    def _references(self) -> list[Any]:
        return [None] * len(self.rows)

    def _longest(self, limit: int | None, max_length: int | None) -> int | None:
        # A short default window saves memory: the float32 logits of 1,024 tokens and a vocabulary of 150,000 need 600 MB.
        return max_length or min(super()._longest(limit, max_length) or _WINDOW, _WINDOW)

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
                f"All texts of {self.rows.sample.source} have fewer than two tokens, so there is no next token to predict.",
                fix="use data with longer texts, or choose another text column.",
            )
        self._row_of = [row for row, _ in pieces]
        tokens = [piece for _, piece in pieces]
        pad = self.processor.pad_token_id
        return EncodedRows(
            tokens={"input_ids": tokens, "attention_mask": [[1] * len(piece) for piece in tokens]},
            # Any token can be the padding, because padding follows the last token of a window and earlier tokens do not attend to it.
            padding={"input_ids": pad if pad is not None else tokens[0][0]},
        )

    def predict(self, model: Model, what: str) -> list[Any]:
        """Return a `LanguageModelPrediction` for each row, summed over its windows."""
        losses = np.zeros(len(self.rows))
        likeliest: list[list[int]] = [[] for _ in range(len(self.rows))]
        for part, feeds, output in self.batches(model, what):
            logits, targets = output["logits"][:, :-1].cpu(), feeds["input_ids"][:, 1:]
            counts = feeds["attention_mask"][:, 1:].sum(1).tolist()
            for index, window in enumerate(part):
                row, count = self._row_of[window], counts[index]
                window_logits = logits[index, :count].float()
                true_tokens = targets[index, :count]
                losses[row] += float(torch.nn.functional.cross_entropy(window_logits, true_tokens, reduction="sum"))
                likeliest[row] += window_logits.argmax(-1).tolist()
        return [
            LanguageModelPrediction(float(loss), len(row), tuple(row))
            for loss, row in zip(losses, likeliest, strict=True)
        ]

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
    """Operation that continues a text. The engine adds running requests to one batch (continuous batching)."""

    name = "generate"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        return continues_text(model)

    def work(self, model: ORTModel, tokenizer: Any) -> RequestHandler:
        raise TaskError(
            "The operation 'generate' cannot run as a single call; the engine's generator runs it with continuous batching.",
            fix="use engine.generator().",
        )

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
