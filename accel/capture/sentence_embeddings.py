"""Modules that compute sentence embeddings from hidden states: pooling and the modules after the pooling.

An exported graph can contain these modules. If not, accel runs them on the outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifact.sentence_settings import SentenceModule, SentenceSettings
from ..errors import ConfigError, ExportError, IntegrityError
from ..interfaces.tracing_wrapper import Tensors, Wrapper
from .layer_outputs import inner_states

_WORDS = {"last": "lasttoken"}
"""Maps pooling modes of `ExportConfig` to the names in sentence-transformers, for modes whose names differ."""


class Pooling(torch.nn.Module):
    """Pool hidden states with one or more pooling modes, and concatenate the results. The computation is in float32.

    Args:
        modes: Names from `sentence_settings.POOLING_MODES`.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Pool `hidden: (batch, sequence, hidden)` over the tokens with 1 in `counted: (batch, sequence)`.

        A token with 1 in `attention_mask` and 0 in `counted` belongs to a prompt and is not pooled. In the mode `weightedmean`, the weight
        of a token is its position, and the tokens of the prompt count as positions.
        """
        hidden = hidden.float()
        return torch.cat([_pooled(mode, hidden, attention_mask, counted) for mode in self.modes], dim=-1)


def _at(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of each row at the given position."""
    return hidden.gather(1, places[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token of each row that is not padding.

    The values of a row that are passed to argmax are all different, because runtimes return different indices for equal values.
    """
    return (mask * torch.arange(mask.shape[1], 0, -1, device=mask.device)).argmax(1)


def _pooled(mode: str, hidden: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Pool hidden states with one pooling mode, and return `(batch, hidden)`."""
    token_weights = counted.unsqueeze(-1).to(hidden.dtype)
    if mode == "cls":
        return _at(hidden, _first(counted))
    if mode == "lasttoken":
        return _at(hidden, (counted * torch.arange(1, counted.shape[1] + 1, device=counted.device)).argmax(1))
    if mode == "max":
        return hidden.masked_fill(token_weights == 0, torch.finfo(hidden.dtype).min).amax(1)
    if mode == "weightedmean":
        # The weight of a token is its position. The first token that is not padding has the weight 1.
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) - _first(mask).unsqueeze(1)
        token_weights = token_weights * positions.unsqueeze(-1).to(hidden.dtype)
    weights = token_weights.sum(1).clamp(min=1e-9)
    return (hidden * token_weights).sum(1) / (weights.sqrt() if mode == "mean_sqrt_len_tokens" else weights)


class Normalize(torch.nn.Module):
    """Scale vectors to length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Divide the vectors by their Euclidean norm."""
        return torch.nn.functional.normalize(vectors, dim=-1)


class SentenceLayers(torch.nn.Module):
    """Compute sentence embeddings from hidden states with a pooling module and the modules after it.

    Args:
        pooling: The pooling module.
        after: The modules after the pooling, in the order in which they run.
    """

    def __init__(self, pooling: Pooling, *after: torch.nn.Module) -> None:
        super().__init__()
        self.pooling = pooling
        self.after = torch.nn.Sequential(*after)

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return sentence embeddings `(batch, size)` in float32. `Pooling.forward` describes the arguments."""
        embeddings: torch.Tensor = self.after(
            self.pooling(hidden, attention_mask, attention_mask if counted is None else counted)
        )
        return embeddings


class SentenceEmbedder(Wrapper):
    """A transformers model with the modules that compute sentence embeddings, so that its graph returns sentence embeddings.

    The outputs are `last_hidden_state: (batch, sequence, hidden)` and `sentence_embedding: (batch, size)`.
    """

    def __init__(self, model: torch.nn.Module, layers: SentenceLayers) -> None:
        super().__init__(model)
        self.layers = layers

    def forward(self, attention_mask: torch.Tensor, **inputs: torch.Tensor) -> Tensors:
        """Run the model and pool its last hidden state over the tokens with 1 in `attention_mask: (batch, sequence)`."""
        outputs = self.model(attention_mask=attention_mask, **inputs)
        hidden = outputs["last_hidden_state"]
        # The layers compute in float32, because sums over tokens would overflow in float16.
        vectors = self.layers(hidden, attention_mask).to(hidden.dtype)
        return {"last_hidden_state": hidden, "sentence_embedding": vectors, **inner_states(outputs)}


def sentence_layers(
    settings: SentenceSettings | None,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    default: str = "mean",
) -> SentenceLayers:
    """Create the modules of a sentence-embedding model.

    Args:
        settings: sentence-transformers settings from the model's folder, or `None` for a model in memory.
        pooling: Pooling mode that replaces the pooling mode in `settings`.
        normalize: `True` adds a normalization at the end if the last module is not a normalization. `False` removes all normalizations.
        default: Pooling mode if neither `settings` nor `pooling` contains one.

    Raises:
        TaskError: The model in the folder computes no sentence embeddings, or uses unsupported modules.
        ExportError: Weights of a module are missing.
        IntegrityError: The weights of a module have wrong names or shapes.
    """
    if settings is not None:
        settings.check_embeds()
    layers = settings.layers if settings is not None else ()
    modes = layers[0].modes if layers else (default,)
    if pooling is not None:
        modes = (_WORDS.get(pooling, pooling),)
    after = [_module(layer) for layer in layers[1:] if layer.kind != "Normalize" or normalize is not False]
    if normalize and not (after and isinstance(after[-1], Normalize)):
        after.append(Normalize())
    return SentenceLayers(Pooling([_WORDS.get(mode, mode) for mode in modes]), *after).eval()


def activation_function(path: str) -> torch.nn.Module:
    """Create an activation module of `torch.nn` from a class path such as `torch.nn.modules.activation.Tanh`.

    Raises:
        ConfigError: The class does not exist in `torch.nn`, or requires arguments.
    """
    package, _, name = str(path).rpartition(".")
    kind: Any = getattr(torch.nn, name, None)
    if package.partition(".")[0] != "torch" or not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
        raise ConfigError(
            f"The sentence-transformers config of the model contains the activation {path!r}, which is not a class of torch.nn.",
            fix="use sentence-transformers for this model.",
        )
    try:
        activation: torch.nn.Module = kind()
    except TypeError as error:
        raise ConfigError(
            f"The sentence-transformers config of the model contains the activation {path!r}, which cannot be created without "
            f"arguments: {error}",
            fix="use sentence-transformers for this model.",
        ) from error
    return activation


def _module(layer: SentenceModule) -> torch.nn.Module:
    if layer.kind == "Normalize":
        return Normalize()
    weights = _weights(layer.folder)
    prefix = "norm" if layer.kind == "LayerNorm" else "linear"
    weight, bias = (weights.get(f"{prefix}.{name}") for name in ("weight", "bias"))
    if weight is None or weight.dim() != (1 if layer.kind == "LayerNorm" else 2):
        raise IntegrityError(
            f"{layer.folder} does not contain the weights of a {layer.kind} module; it contains {sorted(weights)}.",
            fix="download the model's files again.",
        )
    module: torch.nn.Module
    if layer.kind == "LayerNorm":
        module = torch.nn.LayerNorm(weight.shape[0], dtype=torch.float32)
    else:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float32)
    module.load_state_dict({name.partition(".")[2]: value.float() for name, value in weights.items()})
    return torch.nn.Sequential(module, activation_function(layer.activation)) if layer.kind == "Dense" else module


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    file, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if file.is_file():
        stored: dict[str, torch.Tensor] = load_file(file)
        return stored
    if pickled.is_file():
        unpickled: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
        return unpickled
    raise ExportError(
        f"{folder} contains no weights: model.safetensors and pytorch_model.bin do not exist.",
        fix="download the model again with its weights.",
    )
