"""Compare rows of a batch with the same rows computed alone. The outputs of a row must not depend on the other rows.

The rows differ in length, in padding, and in the number and positions of special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accel.interfaces.task_registry import task_spec

from .building import NotBuilt, first_line
from .cases import Pair
from .questions import Tensors, answers, is_decoder, make_inputs, prompts
from .shrinking import FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN

ROWS, SEQUENCE, NEW_TOKENS = 6, 13, 4
_TOKENS_ALIKE = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "bbox")  # one value for each token
_SPECIAL = ("eos_token_id", "sep_token_id", "cls_token_id", "bos_token_id", "mask_token_id", "pad_token_id")
_PADDED_AT_THE_END = ("waveform", "spectrogram")  # outputs that are padded to the longest row of the batch
_CACHED = 1e-5  # PyTorch's outputs with and without a cache differ by less, except for the Mamba2 layers handled below
_TIE = 1e-3  # two next tokens whose logits differ by less than this, relative to the largest logit, count as equal; as in `cells`

INTEGER_PAIRS = frozenset({
    "albert/text-classification", "bart/text-classification", "bart/text2text-generation", "beit/image-classification",
    "bert/feature-extraction", "bert/fill-mask", "bert/question-answering", "bert/text-classification",
    "bert/token-classification", "bloom/text-generation", "clip/zero-shot-image-classification",
    "convbert/text-classification", "deberta-v2/text-classification", "deit/image-classification",
    "distilbert/text-classification", "electra/token-classification", "gpt2/text-generation", "gpt_neox/text-generation",
    "llama/text-generation", "mbart/text-classification", "mixtral/text-generation", "mpnet/feature-extraction",
    "qwen2/text-generation", "roberta/multiple-choice", "roberta/text-classification", "t5/text-classification",
    "t5/text2text-generation", "vit/image-classification", "wav2vec2/ctc",
    "whisper/automatic-speech-recognition",
})  # fmt: skip
"""Pairs (`architecture/task`) whose dynamic int8 graph is compared with the float32 graph, for rows alone and for rows in a batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch, computed alone.

    Attributes:
        name: Number of the row, and whether its padding was removed.
        inputs: Inputs by name, with one row.
        expected: PyTorch's outputs for this row alone.
        place: (number of the row, number of rows in the batch), to find the row in the batch, or `None` if its padding
            was removed.
        real: `(1, sequence)` boolean mask of the positions that are not padding, or `None` without padding.
    """

    name: str
    inputs: Tensors
    expected: Tensors
    place: tuple[int, int] | None = None
    real: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Company:
    """A batch of rows, and the same rows as batches of one row each."""

    inputs: Tensors
    rows: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class Apart:
    """Largest relative differences of two kinds: between rows alone and the expected outputs, and between rows alone
    and the same rows in the batch.
    """

    alone: float = 0.0
    in_batch: float = 0.0
    where: str = ""

    def add(self, *, alone: float = 0.0, in_batch: float = 0.0, where: str = "") -> None:
        """Add measured differences. The maximum of each kind is kept, together with the place of the largest
        difference.
        """
        if not max(alone, in_batch) <= self.worst:
            self.where = where
        self.alone, self.in_batch = max(self.alone, alone), max(self.in_batch, in_batch)

    def merge(self, other: Apart) -> None:
        """Add the differences of another comparison."""
        self.add(alone=other.alone, in_batch=other.in_batch, where=other.where)

    @property
    def worst(self) -> float:
        """The larger of the two differences, `alone` and `in_batch`."""
        return max(self.alone, self.in_batch)


def companies(pair: Pair, model: Any) -> list[Company]:
    """Return batches of different rows, each together with the same rows alone. There are two batches if the batch size
    of texts differs from the batch size of images or audio.

    Raises:
        NotBuilt: PyTorch raises an error for a row alone.
    """
    _remove_noise(model)
    padding = "ragged-left" if is_decoder(pair) else "ragged-right"
    inputs, _ = make_inputs(pair, model, ROWS, SEQUENCE, padding, seed=7)
    edited = _with_special_tokens(pair, model, inputs)
    counts = [ROWS]
    texts = inputs.get("input_ids")
    if texts is not None and texts.shape[0] == ROWS + 1:
        counts.append(ROWS + 1)
    return [_company(pair, model, edited, inputs, count) for count in counts]


def _remove_noise(model: Any) -> None:
    """Set the noise scales of VITS to 0, because a row in a batch gets different noise than the row alone."""
    for name in ("noise_scale", "noise_scale_duration"):
        if hasattr(model, name):
            setattr(model, name, 0.0)


def _company(pair: Pair, model: Any, edited: Tensors, plain: Tensors, count: int) -> Company:
    batch = Company({name: tensor.clone() for name, tensor in edited.items()})
    kept_outputs = task_spec(pair.task).keeps
    for i in range(count):
        try:
            alone = cut(edited, i, count)
            expected = _answer(model, alone, kept_outputs)
        except Exception:  # noqa: BLE001  # catch all exceptions of model code: the row is tried again without special tokens
            alone = cut(plain, i, count)
            for name, tensor in batch.inputs.items():
                _slice(tensor, i, count).copy_(_slice(plain[name], i, count))
            try:
                expected = _answer(model, alone, kept_outputs)
            except Exception as error:
                raise NotBuilt(f"does not answer a row alone in PyTorch: {first_line(error)}") from error
        mask = alone.get("attention_mask")
        by_token = isinstance(mask, torch.Tensor) and mask.ndim == 2 and "input_ids" in alone
        by_token = by_token and mask.shape == alone["input_ids"].shape and mask.shape[0] == 1
        hidden = by_token and not bool(mask.all())
        # The outputs of encoder-decoders follow the tokens of the decoder, which have no padding.
        decodes = "decoder_input_ids" in alone
        batch.rows.append(Row(f"row {i}", alone, expected, (i, count), mask.bool() if hidden and not decodes else None))
        if hidden:
            trimmed = {
                name: tensor[:, mask[0].bool()] if name in _TOKENS_ALIKE and tensor.shape[:2] == mask.shape else tensor
                for name, tensor in alone.items()
            }
            try:
                batch.rows.append(Row(f"row {i} without padding", trimmed, _answer(model, trimmed, kept_outputs)))
            except Exception:  # noqa: BLE001  # some models raise an error for very short texts
                continue
    return batch


def _answer(model: Any, inputs: Tensors, kept_outputs: Any) -> Tensors:
    outputs = answers(model, inputs)
    outputs = {name: value for name, value in outputs.items() if name in kept_outputs} or outputs
    if not all(bool(value.isfinite().all()) for value in outputs.values()):
        raise NotBuilt("is not finite for a row alone")
    return outputs


def _slice(tensor: torch.Tensor, i: int, count: int) -> torch.Tensor:
    """Return the part of a tensor that belongs to row `i` of `count` rows, or the whole tensor if it has no batch axis."""
    if tensor.ndim and tensor.shape[0] and tensor.shape[0] % count == 0:
        size = tensor.shape[0] // count
        return tensor[i * size : (i + 1) * size]
    if tensor.ndim > 1 and tensor.shape[1] == count:
        return tensor[:, i : i + 1]
    return tensor


def cut(tensors: Mapping[str, torch.Tensor], i: int, count: int) -> Tensors:
    """Return row `i` of `count` rows of a dictionary of inputs or outputs."""
    return {name: _slice(tensor, i, count).clone() for name, tensor in tensors.items()}


def _with_special_tokens(pair: Pair, model: Any, inputs: Tensors) -> Tensors:
    """Return inputs with `i` special tokens in row `i`, which replace other tokens at random positions."""
    ids = inputs.get("input_ids")
    if ids is None or ids.is_floating_point():
        return inputs
    config = model.config.get_text_config() if "pixel_values" in inputs else model.config
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    special = [value for value in (getattr(config, name, None) for name in _SPECIAL) if isinstance(value, int)]
    # Longformer's question answering head needs exactly three separators in each row, so no separator is added.
    barred = {getattr(config, "sep_token_id", None)} if config.model_type == "longformer" else set()
    special = [token for token in dict.fromkeys(special) if 0 <= token < vocabulary and token not in barred]
    if not special:
        return inputs
    draw = torch.Generator().manual_seed(13)
    edited = ids.clone()
    for i, row in enumerate(edited.view(-1, edited.shape[-1])):
        plain = ((row >= FIRST_PLAIN_TOKEN) & (row < LAST_PLAIN_TOKEN)).nonzero()[1:, 0]
        places = plain[torch.randperm(len(plain), generator=draw)][: i % ROWS]
        for k, place in enumerate(places.tolist()):
            row[place] = special[(i + k) % len(special)]
    return {**inputs, "input_ids": edited}


def apart(
    company: Company,
    answer: Callable[[Tensors], Tensors],
    expected: Callable[[Row], Tensors] | None = None,
    *,
    from_batch: bool = False,
) -> Apart:
    """Compute rows alone, and compare them with the expected outputs and with the same rows in the batch. Return the
    largest differences.

    Args:
        company: The batch and its rows.
        answer: Function from inputs to the outputs to test.
        expected: Function from a row to its expected outputs, or `None` for PyTorch's outputs for the row alone.
        from_batch: Compare rows of the batch, and not rows alone, with the expected outputs.
    """
    together = answer(company.inputs)
    scales: dict[str, float] = {}
    expected_rows = [expected(row) if expected is not None else row.expected for row in company.rows]
    for outputs in expected_rows:
        for name, value in outputs.items():
            scales[name] = max(scales.get(name, 1e-6), float(value.abs().max()) if value.numel() else 0.0)
    differences = Apart()
    for row, right in zip(company.rows, expected_rows, strict=True):
        if from_batch and row.place is None:
            continue
        alone = cut(together, *row.place) if from_batch and row.place is not None else answer(row.inputs)
        names = [name for name in right if name in alone and not name.startswith("encoder_")]
        if not names:
            differences.add(alone=float("inf"), where=f"{row.name} has none of {', '.join(right)}")
        in_batch = cut(together, *row.place) if row.place is not None else None
        for name in names:
            where = f"{name} of {row.name}"
            differences.add(alone=_relative(alone[name], right[name], row.real, scales[name]), where=f"{where}, alone")
            if in_batch is not None:
                if name in _PADDED_AT_THE_END:
                    in_batch[name] = in_batch[name][..., : alone[name].shape[-1]]
                difference = _relative(in_batch[name], alone[name], row.real, scales[name])
                differences.add(in_batch=difference, where=f"{where}, in the batch and alone")
    return differences


def _relative(a: torch.Tensor, b: torch.Tensor, real: torch.Tensor | None, scale: float) -> float:
    if real is not None and a.ndim >= 2 and a.shape[:2] == real.shape == b.shape[:2]:
        a, b = a[real], b[real]
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().nan_to_num(nan=float("inf")).max()) / scale if b.numel() else 0.0


@torch.inference_mode()
def generated_apart(pair: Pair, model: Any, opened: Any) -> Apart:
    """Compare the logits of a few generated tokens of each row, alone and in a batch. The comparison of a row ends at
    the first different token.
    """
    inputs = prompts(pair, model, batch=ROWS, sequence=SEQUENCE, ragged=True)
    inputs = _with_special_tokens(pair, model, inputs)
    together = _steps(opened, inputs)
    differences = Apart()
    for i in range(ROWS):
        row = cut(inputs, i, ROWS)
        right, alone = _steps(model, row), _steps(opened, row)
        in_batch = ([logits[i : i + 1] for logits in together[0]], together[1][i : i + 1])
        difference = _apart_by_step(alone, right)
        if difference > _CACHED:
            # In transformers 5.24, Mamba2 layers limit the time step in a forward pass of the whole text, but not in a
            # decoding step with a cache (Zamba2, NemotronH). The graph limits it in both, as in training.
            difference = min(difference, _apart_by_step(alone, _steps(model, row, use_cache=False)))
        differences.add(alone=difference, where=f"generated tokens of row {i}, alone")
        differences.add(
            in_batch=_apart_by_step(in_batch, alone), where=f"generated tokens of row {i}, in the batch and alone"
        )
    return differences


_Steps = tuple[list[torch.Tensor], torch.Tensor]


def _steps(model: Any, inputs: Tensors, **settings: Any) -> _Steps:
    """Return the logits of each new token, and the new tokens `(batch, steps)`."""
    result = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return [step_logits.float().cpu() for step_logits in result.logits], result.sequences[
        :, -len(result.logits) :
    ].cpu()


def _apart_by_step(actual: _Steps, right: _Steps) -> float:
    worst = 0.0
    for step, (a, b) in enumerate(zip(actual[0], right[0], strict=False)):
        finite = b.isfinite() & (b > -1e3)
        scale = max(float(b[finite].abs().max()), 1e-6)
        worst = max(worst, _relative(a[finite], b[finite], None, scale))
        chosen, other = int(right[1][0, step]), int(actual[1][0, step])
        if chosen != other:
            # If both tokens are almost equally probable, both continuations are correct, so the comparison stops.
            return worst if float(b[0, chosen] - b[0, other]) <= _TIE * scale else float("inf")
    return worst


def all_apart(pair: Pair, model: Any, opened: Any, batches: Sequence[Company]) -> Apart:
    """Run all comparisons of rows for a model in float32, and return the largest differences."""
    differences = Apart()
    _remove_noise(opened)
    for company in batches:
        differences.merge(apart(company, lambda inputs: answers(opened, inputs)))
    if task_spec(pair.task).generates:
        differences.merge(generated_apart(pair, model, opened))
    return differences
