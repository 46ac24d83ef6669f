"""Modules that compute embeddings from the outputs of a transformer: pooling, projections, and the heads of sparse and multi-vector
models.

An exported graph can contain these modules. If not, accel runs pooling and the modules after it on the outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifact.sentence_fields import TOKEN_VECTORS, TOKEN_WEIGHTS, VECTORS, output_of_side
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


class SpladePooling(torch.nn.Module):
    """Pool the logits of a masked language model to one weight per token of the vocabulary. The computation is in float32.

    Args:
        sums: Whether the weights of all positions are added. Otherwise, the largest weight is used.
        twice: Whether the logarithm is applied twice.
    """

    def __init__(self, *, sums: bool, twice: bool) -> None:
        super().__init__()
        self.sums, self.twice = sums, twice

    def forward(self, logits: torch.Tensor, attention_mask: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Pool `logits: (batch, sequence, vocab_size)` over the tokens with 1 in `counted`; see `Pooling.forward`."""
        weights = torch.log1p(torch.relu(logits.float()))
        if self.twice:
            weights = torch.log1p(weights)
        weights = weights * counted.unsqueeze(-1).to(weights.dtype)
        return weights.sum(1) if self.sums else weights.amax(1)


class SparseAutoEncoder(torch.nn.Module):
    """Encode a vector as a sparse vector, in which only the largest dimensions are not zero.

    Args:
        weight: Weight of the linear layer, `(size, input)`.
        bias: Bias of the linear layer, `(size,)`.
        input_bias: Vector that is subtracted from each input, `(input,)`.
        active: Largest number of dimensions that are not zero.
        standardized: Whether each input vector is standardized first.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    input_bias: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, input_bias: torch.Tensor, *, active: int, standardized: bool
    ) -> None:
        super().__init__()
        self.active, self.standardized = active, standardized
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())
        self.register_buffer("input_bias", input_bias.float())

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return sparse vectors `(batch, size)` float32 as a dense tensor."""
        if self.standardized:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
            vectors = vectors / (vectors.std(dim=-1, keepdim=True) + 1e-5)
        latent = torch.nn.functional.linear(vectors - self.input_bias, self.weight, self.bias)
        largest = torch.topk(latent, self.active, dim=-1)
        return torch.relu(torch.zeros_like(latent).scatter(-1, largest.indices, largest.values))


class ResidualDense(torch.nn.Module):
    """A linear layer with an activation function, whose input is added to its output.

    Args:
        dense: The linear layer and the activation function.
        residual: Linear layer for the added input, if the layer changes the size.
    """

    def __init__(self, dense: torch.nn.Module, residual: torch.nn.Module | None) -> None:
        super().__init__()
        self.dense, self.residual = dense, residual

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of the layer's output size."""
        added = vectors if self.residual is None else self.residual(vectors)
        output: torch.Tensor = self.dense(vectors) + added
        return output


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

    def __init__(self, pooling: Pooling | SpladePooling, *after: torch.nn.Module) -> None:
        super().__init__()
        self.pooling = pooling
        self.after = torch.nn.Sequential(*after)

    @property
    def modes(self) -> tuple[str, ...]:
        """Pooling modes; empty for a sparse encoder."""
        return self.pooling.modes if isinstance(self.pooling, Pooling) else ()

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return sentence embeddings `(batch, size)` in float32. `Pooling.forward` describes the arguments."""
        embeddings: torch.Tensor = self.after(
            self.pooling(hidden, attention_mask, attention_mask if counted is None else counted)
        )
        return embeddings


class TokenLayers(torch.nn.Module):
    """Compute one vector per token with the modules of a multi-vector model.

    Args:
        layers: The modules, in the order in which they run.
    """

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return vectors `(batch, sequence, size)` in float32. The vectors of padding are undefined."""
        vectors: torch.Tensor = self.layers(hidden.float())
        return vectors


class TokenWeights(torch.nn.Module):
    """Compute one weight per token, as the sparse output of BGE-M3.

    Args:
        linear: Linear layer with one output.
    """

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return weights `(batch, sequence)` in float32. The weights of padding are 0."""
        weights = torch.relu(self.linear(hidden.float())).squeeze(-1)
        return weights * attention_mask.to(weights.dtype)


class SentenceEmbedder(Wrapper):
    """A transformers model with the modules that compute embeddings, so that its graph returns embeddings.

    Args:
        model: The transformers model. It returns `last_hidden_state` or, with a language model head, `logits`.
        heads: Modules that compute an output from hidden states and an attention mask, by the name of the output.
    """

    def __init__(self, model: torch.nn.Module, heads: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(model)
        self.heads = torch.nn.ModuleDict(heads)

    def forward(self, attention_mask: torch.Tensor, **inputs: torch.Tensor) -> Tensors:
        """Run the model and compute each output over the tokens with 1 in `attention_mask: (batch, sequence)`.

        The result also has `last_hidden_state: (batch, sequence, hidden)`, except for models with a language model head, whose logits
        are much larger, and for multi-vector models.
        """
        outputs = self.model(attention_mask=attention_mask, **inputs)
        hidden = outputs["last_hidden_state"] if "last_hidden_state" in outputs else outputs["logits"]
        returned = {"last_hidden_state": hidden} if "last_hidden_state" in outputs and VECTORS in self.heads else {}
        # The heads compute in float32, because sums over tokens would overflow in float16.
        vectors = {name: head(hidden, attention_mask).to(hidden.dtype) for name, head in self.heads.items()}
        return {**returned, **vectors, **inner_states(outputs)}


def embedding_heads(
    settings: SentenceSettings | None,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    default: str = "mean",
) -> dict[str, torch.nn.Module]:
    """Create the modules that compute the outputs of an embedding model, by the name of the output. The arguments and the errors are those
    of `sentence_layers`.

    Raises:
        ConfigError: A pooling was chosen for a sparse or multi-vector model.
    """
    if settings is not None and settings.kind in ("sparse encoder", "multi-vector encoder"):
        settings.check_embeds()
        if pooling is not None or normalize is not None:
            raise ConfigError(
                f"pooling and normalize were passed for {settings.folder}, but the vectors of a {settings.kind} are computed in another "
                "way.",
                fix="leave pooling and normalize out.",
            )
    if settings is not None and settings.kind == "multi-vector encoder":
        return {TOKEN_VECTORS: TokenLayers(*(_module(layer) for layer in settings.layers)).eval()}
    heads: dict[str, torch.nn.Module] = {
        VECTORS: sentence_layers(settings, pooling=pooling, normalize=normalize, default=default)
    }
    if settings is None:
        return heads
    if settings.other_layers:
        other = SentenceSettings(folder=settings.folder, kind=settings.kind, layers=settings.other_layers)
        heads[output_of_side(settings.other_side)] = sentence_layers(other, pooling=pooling, normalize=normalize)
    if settings.sparse_head is not None:
        heads[TOKEN_WEIGHTS] = TokenWeights(_saved_linear(settings.sparse_head)).eval()
    if settings.multi_vector_head is not None:
        heads[TOKEN_VECTORS] = TokenLayers(_saved_linear(settings.multi_vector_head), Normalize()).eval()
    return heads


def _saved_linear(file: Path) -> torch.nn.Linear:
    """Create a linear layer from a file with its state dict.

    Raises:
        IntegrityError: The file contains something else.
    """
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    # The unpickler raises errors of many types for a damaged file.
    except Exception as error:
        raise IntegrityError(f"{file} cannot be read: {error}", fix="download the model's files again.") from error
    weight, bias = (state.get(name) if isinstance(state, dict) else None for name in ("weight", "bias"))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise IntegrityError(
            f"{file} does not contain the weights of a linear layer.", fix="download the model's files again."
        )
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float32)
    linear.load_state_dict({name: value.float() for name, value in state.items()})
    return linear


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
    if layers and layers[0].kind == "SpladePooling":
        splade = SpladePooling(sums=layers[0].sums, twice=layers[0].twice)
        return SentenceLayers(splade, *(_module(layer) for layer in layers[1:])).eval()
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
    weights = module_weights(layer.folder)
    if layer.kind == "SparseAutoEncoder":
        # The decoder has the same weight, and a file has the weight only once, under either name.
        weight = weights.get("encoder.weight", weights.get("decoder.linear.weight"))
        bias, input_bias = weights.get("latent_bias"), weights.get("pre_bias")
        if weight is None or bias is None or input_bias is None:
            raise _incomplete(layer, weights, "encoder.weight")
        return SparseAutoEncoder(weight, bias, input_bias, active=layer.active, standardized=layer.standardized)
    if layer.kind == "LayerNorm":
        weight, bias = weights.get("norm.weight"), weights.get("norm.bias")
        if weight is None or bias is None or weight.dim() != 1:
            raise _incomplete(layer, weights, "norm.weight")
        norm = torch.nn.LayerNorm(weight.shape[0], dtype=torch.float32)
        norm.load_state_dict({"weight": weight.float(), "bias": bias.float()})
        return norm
    dense = torch.nn.Sequential(_linear(layer, weights, "linear"), activation_function(layer.activation))
    if not layer.residual:
        return dense
    return ResidualDense(dense, _linear(layer, weights, "residual") if "residual.weight" in weights else None)


def _linear(layer: SentenceModule, weights: Mapping[str, torch.Tensor], name: str) -> torch.nn.Linear:
    weight, bias = (weights.get(f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.dim() != 2:
        raise _incomplete(layer, weights, f"{name}.weight")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float32)
    linear.load_state_dict(
        {part: value.float() for part, value in (("weight", weight), ("bias", bias)) if value is not None}
    )
    return linear


def _incomplete(layer: SentenceModule, weights: Mapping[str, torch.Tensor], name: str) -> IntegrityError:
    return IntegrityError(
        f"{layer.folder} does not contain the weights of a {layer.kind} module: it has no valid {name}; it contains {sorted(weights)}.",
        fix="download the model's files again.",
    )


def token_table(folder: Path) -> torch.Tensor:
    """Return the weight of each token, `(vocab_size,)` float32, of a sparse model's path without a transformer.

    Raises:
        ExportError, IntegrityError: The weights are missing or have another shape.
    """
    weight = module_weights(folder).get("weight")
    if weight is None or weight.dim() != 1:
        raise IntegrityError(
            f"{folder} does not contain one weight per token.", fix="download the model's files again."
        )
    return weight.float()


def module_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the folder of a module, by name.

    Raises:
        ExportError: The folder contains no weights.
    """
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
