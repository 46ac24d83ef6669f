"""Build a small model with random weights for a pair (an architecture and a task)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from accel.interfaces.task_registry import task_spec

from .cases import Pair
from .shrinking import BEGIN, LABELS, PAD, small_config

# Small models have about a million weights. A model above this limit was not made small, and would need minutes and
# much memory.
MOST_WEIGHTS = 30_000_000
# Scale of the random weight matrices. With a value below 1, the outputs of each layer become slightly smaller, so that
# rounding errors do not grow.
GAIN = 0.7


class NotBuilt(Exception):  # noqa: N818  # an expected result, not an error
    """Error that is raised if a small model cannot be built, or if it raises an error in PyTorch."""


def build(pair: Pair, seed: int = 0) -> Any:
    """Return the small model of a pair (architecture and task) in evaluation mode, with seeded random weights.

    Raises:
        NotBuilt: The model cannot be built. The message contains the reason.
    """
    try:
        # A question answering head has two outputs for each token, start and end.
        labels = 2 if task_spec(pair.task).name in ("question-answering", "document-question-answering") else LABELS
        config = small_config(pair.architecture)
        cls = getattr(transformers, pair.model)
        text = getattr(config, "text_config", None)
        if text is not None and cls.config_class is type(text):
            config = text  # as in transformers: the model class takes the text config, not the whole config
        config.num_labels = labels
        if pair.task == "text-generation" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # BERT and similar architectures generate text only with this setting
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
    # Catch all exceptions, because model code may raise any type of exception and may need libraries that are not
    # installed.
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
    """Set random weights that keep activations at magnitudes near 1, and biases that are not zero, so that a graph
    without a bias is detected.

    Parameters whose initial values in transformers are neither zeros, nor ones, nor a random matrix (a decay or a
    temperature) are unchanged. Frozen parameters are also unchanged, because transformers computes them and does not
    save them (for example Marian's sinusoidal positions).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.numel() or not parameter.requires_grad:
            continue
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim >= 2:
            # Scale by the number of summed inputs. It is the last axis for stacked expert matrices, the whole filter
            # for convolutions (also convolutions of patches), and 1 for embedding tables, from which a single row is
            # read.
            fan_in = parameter.shape[-1] if "expert" in name else parameter[0].numel()
            is_table = "embed" in name and parameter.ndim < 4
            parameter.copy_(GAIN * drawn / max(1, 1 if is_table else fan_in) ** 0.5)
        elif bool((parameter == 1).all()):
            parameter.copy_(1 + 0.1 * drawn)
        elif bool((parameter == 0).all()):
            parameter.copy_(0.1 * drawn)
    # Set the running means and variances of batch normalizations to values that fit the activations of the random
    # weights.
    for _, module in sorted(model.named_modules()):
        mean, variance = (module._buffers.get(name) for name in ("running_mean", "running_var"))
        if mean is not None and variance is not None:
            mean.copy_(0.1 * torch.randn(mean.shape, generator=generator))
            variance.copy_(GAIN**2 * torch.exp(0.2 * torch.randn(variance.shape, generator=generator)))


@torch.no_grad()
def _hide_the_last_token(model: Any) -> None:
    """Scale the embeddings down if the output head shares their weights.

    Otherwise the most probable next token would always be similar to the last token, and errors in the layers would
    have no effect.
    """
    try:
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # audio models have no token embeddings
        return
    if (
        embeddings is not None
        and head is not None
        and getattr(embeddings, "weight", None) is getattr(head, "weight", 0)
    ):
        embeddings.weight.mul_(0.3)


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the error's type and message in one line of at most `most` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    return text[:most]
