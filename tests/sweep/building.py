"""The small random model of a pair."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from accel.interfaces.task_registry import task_spec

from .cases import Pair
from .shrinking import BEGIN, LABELS, PAD, small_config

# Small models have a million weights; one with more was not shrunk, and would take minutes and memory.
MOST_WEIGHTS = 30_000_000
# Of a matrix: each passes on a little less than it gets, so that rounding does not grow from layer to layer.
GAIN = 0.7


class NotBuilt(Exception):  # noqa: N818  # a finding, not a failure
    """The small model could not be made, or does not answer in PyTorch."""


def build(pair: Pair, seed: int = 0) -> Any:
    """The small model of a pair in evaluation mode, with seeded weights.

    Raises:
        NotBuilt: With the reason.
    """
    try:
        # A question-answering head has two outputs, start and end.
        labels = 2 if task_spec(pair.task).name in ("question-answering", "document-question-answering") else LABELS
        config = small_config(pair.architecture)
        cls = getattr(transformers, pair.model)
        text = getattr(config, "text_config", None)
        if text is not None and cls.config_class is type(text):
            config = text  # transformers does likewise: the part of the model that writes
        config.num_labels = labels
        if pair.task == "text-generation" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # BERT and its kind write only when they are told to
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = BEGIN
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in cls(config).parameters())
        if weights > MOST_WEIGHTS:
            raise NotBuilt(f"the small model has {weights / 1e6:.0f} million weights")
        torch.manual_seed(seed)
        model = cls(config).float()
        enliven(model, seed)
        if model.can_generate():
            _hide_the_last_token(model)
    except NotBuilt:
        raise
    # Foreign code, which may raise anything, and ask for libraries that are not installed.
    except Exception as error:
        raise NotBuilt(first_line(error)) from error
    if model.can_generate():
        for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
            setattr(model.generation_config, name, None)
        model.generation_config.pad_token_id = PAD
        model.generation_config.bos_token_id = BEGIN
        if model.config.is_encoder_decoder:
            model.generation_config.decoder_start_token_id = BEGIN
    return model.eval()


@torch.no_grad()
def enliven(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that pass values of order 1 on, and no bias that is zero: else a graph that lost one goes unnoticed.

    What transformers starts neither as zeros, nor as ones, nor as a matrix (a decay, a temperature) is left as it is, and
    so is what it computes and never trains (Marian's sines), which it saves in no file.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.numel() or not parameter.requires_grad:
            continue
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim >= 2:
            # Experts are matrices side by side; a convolution sums over all of a filter, that of patches, too; of a table one
            # row is taken.
            fan_in = parameter.shape[-1] if "expert" in name else parameter[0].numel()
            is_table = "embed" in name and parameter.ndim < 4
            parameter.copy_(GAIN * drawn / max(1, 1 if is_table else fan_in) ** 0.5)
        elif bool((parameter == 1).all()):
            parameter.copy_(1 + 0.1 * drawn)
        elif bool((parameter == 0).all()):
            parameter.copy_(0.1 * drawn)
    # What a batch normalization has seen in training: values such as these weights pass on.
    for _, module in sorted(model.named_modules()):
        mean, variance = (module._buffers.get(name) for name in ("running_mean", "running_var"))
        if mean is not None and variance is not None:
            mean.copy_(0.1 * torch.randn(mean.shape, generator=generator))
            variance.copy_(GAIN**2 * torch.exp(0.2 * torch.randn(variance.shape, generator=generator)))


@torch.no_grad()
def _hide_the_last_token(model: Any) -> None:
    """Make embeddings small where they are the head's weights as well.

    Else the likeliest next tokens are those most like the last one, whatever the layers say.
    """
    try:
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # models of sounds have none
        return
    if (
        embeddings is not None
        and head is not None
        and getattr(embeddings, "weight", None) is getattr(head, "weight", 0)
    ):
        embeddings.weight.mul_(0.3)


def first_line(error: BaseException, most: int = 300) -> str:
    """What an error says in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    return text[:most]
