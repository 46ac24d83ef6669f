"""Description of a model for an export: the PyTorch model, its sample inputs, and the names of the axes that may vary."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..artifact.manifest import Origin, Quantization
from ..interfaces.family import Axes
from ..interfaces.task_registry import task_spec
from ..interfaces.tracing_wrapper import Tensors, Wrapper, unwrapped
from .layer_outputs import EagerAttentionInTrace
from .position_limits import position_bounds, rows_of_table, text_rows
from .quantized_linears import record_of
from .samples import IMAGE_AXES, parameters_of, resize, usual_sizes
from .streamed_weights import StreamedWeights

logger = logging.getLogger(__name__)

# Names of masks with 1 for tokens and 0 for padding. Other masks, such as `global_attention_mask`, may have rows of only 0.
_MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A PyTorch model that becomes one graph, with everything that an export needs.

    Attributes:
        model: The model in evaluation mode, in the dtype of the export.
        task: Name of the task.
        folder: Folder of the config and processor files, or `None` for a model in memory.
        origin: Origin of the model, for the manifest.
        example: Sample inputs of the trace, by name.
        axes: Names of the axes that may vary, by input name and axis number.
        max_sizes: Largest size of each axis that has a limit.
        unused_inputs: Names of inputs that do not affect the outputs.
        own_defaults: Names of inputs for which the model computes a default that is not zero (see `Component`).
        dtype: Dtype of the weights.
        name: Name of the graph. If a model becomes several graphs, each graph has its own `Source`.
        stateful: Whether the graph reads and writes a KV cache (inputs `past_…`, outputs `present_…`).
        croppable: Whether tokens can be removed from the end of the cache (see `Component`).
        streamed: The weights that are in the checkpoint's files and not in the model's memory, or `None` if all weights are in memory.
        continues: How many new tokens a call may have if the cache already contains tokens (see `Component`).
    """

    model: torch.nn.Module
    task: str
    folder: Path | None
    origin: Origin
    example: Tensors
    axes: Axes
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    unused_inputs: tuple[str, ...] = ()
    own_defaults: tuple[str, ...] = ()
    dtype: str = "float32"
    name: str = "model"
    stateful: bool = False
    croppable: bool = True
    continues: Literal["any", "one", "none"] = "any"
    streamed: StreamedWeights | None = None

    @property
    def config(self) -> Any:
        """The transformers config of the model, or `None` for a module that is not a transformers model."""
        return getattr(self.model, "config", None)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        inner = unwrapped(self.model)
        return type(inner).__name__

    @property
    def quantization(self) -> Quantization | None:
        """Settings and report of the model's quantization, or `None` for a model without quantized layers."""
        return record_of(self.model)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers of the model."""
        return (*self.model.parameters(), *self.model.buffers())

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(tensor.nbytes for tensor in self.weights)

    def sample(self, sizes: Mapping[str, int], *, seed: int = 0) -> Tensors:
        """Make random inputs with the names and dtypes of `example` and the given axis sizes. The masks contain padding."""
        return resize(self.example, self.axes, sizes, self.config, seed)

    @property
    def required(self) -> dict[str, int]:
        """Id of the token that each row of an input must contain, by input name. Empty if the model requires no token."""
        token = self.model.required_token if isinstance(self.model, Wrapper) else None
        return {} if token is None else {"input_ids": token}

    def bounds(self, *, stateful: bool = False) -> dict[str, tuple[int, int]]:
        """Return the smallest and largest valid value of masks and of inputs that are indices of a table, by input name.

        Token ids, token types, position ids and bounding boxes are indices of a table. If prompts can contain image or audio tokens, the
        result has no bounds for token ids, because these tokens may be outside of the embedding table.

        Args:
            stateful: Whether the bounds are for the graph with the KV cache, whose token ids are those of the decoder.
        """
        model: Any = unwrapped(self.model)
        config = getattr(model, "config", None)
        if config is None:
            return {}
        encodes = bool(getattr(config, "is_encoder_decoder", False))
        positions = {"position_ids": position_bounds(model.get_decoder() if encodes and stateful else model)}
        # A 2 in the mask marks tokens with global attention (Longformer, LED).
        most = 2 if "global_attention_mask" in parameters_of(model) else 1
        others = positions | dict.fromkeys(_MASKS, (0, most))
        generates = task_spec(self.task).generates
        senses = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        # In an encoder-decoder (Pix2Struct), the encoder reads the images, so the decoder's prompt contains no image tokens.
        if senses and not (generates and encodes):
            rows = None if generates or _mixes(config) else text_rows(model)
            return others if rows is None else others | {"input_ids": (0, rows - 1)}
        types = _named_table(model, "token_type_embeddings")
        # This table has one row for each x coordinate on a page. The bounding boxes in `bbox` are indices of the table.
        places = _named_table(model, "x_position_embeddings")
        tables = {"input_ids": _table(model), "token_type_ids": types, "bbox": places}
        if encodes:
            tables["decoder_input_ids"] = _table(model.get_decoder())
            if stateful:
                tables["input_ids"] = tables["decoder_input_ids"]
        ids = {name: (0, rows - 1) for name, rows in tables.items() if rows is not None}
        return ids | others

    def with_plain_attention(self) -> Source | None:
        """Return a source that is traced with eager attention, or `None` if the model needs no eager attention.

        Only audio models with a padding mask need eager attention.
        """
        sounds = {"samples", "frames"} & set(self.axes.get("attention_mask", {}).values())
        # Generating models are traced with accel's own attention function.
        if not sounds or isinstance(self.model, Wrapper) or task_spec(self.task).generates:
            return None
        return replace(self, model=EagerAttentionInTrace(self.model).eval())

    def with_fixed_images(self) -> Source | None:
        """Return a source whose image size is fixed, or `None` if the image size is already fixed."""
        named = self.axes.get("pixel_values", {})
        if not set(IMAGE_AXES) <= set(named.values()):
            return None
        sizes = usual_sizes(named.values(), self.config, self.folder)
        axes = {name: {i: a for i, a in names.items() if a not in IMAGE_AXES} for name, names in self.axes.items()}
        return replace(self, example=self.sample(sizes), axes=axes)


def _mixes(config: Any) -> bool:
    """Return whether prompts can contain tokens that represent images or audio, according to the field names of the config."""
    return any(re.match(r"(image|video|audio|vision|speech|media)_.*token", name) for name in config.to_dict())


def _table(model: Any) -> int | None:
    """Return the number of rows of a model's token embedding table.

    Return `None` for a model without such a table. For example, CANINE computes embeddings from characters.
    """
    try:
        rows = rows_of_table(model.get_input_embeddings())
    # The code of a model without a token embedding table may raise any exception.
    except Exception:  # noqa: BLE001
        return None
    declared = getattr(model.config.get_text_config(), "vocab_size", None)
    return rows if rows is not None and isinstance(declared, int) and rows >= declared else None


def _named_table(model: torch.nn.Module, name: str) -> int | None:
    sizes = (rows_of_table(module) for path, module in model.named_modules() if path.split(".")[-1] == name)
    return next((rows for rows in sizes if rows is not None), None)
