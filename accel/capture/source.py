"""What is captured: a PyTorch model, the inputs it is traced with, and the names of the axes that may vary."""

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
from ..interfaces.wrapper import Tensors, Wrapper, unwrapped
from .layer_outputs import TracedPlainly
from .position_limits import position_bounds, rows_of_table, text_rows
from .quantized_linears import record_of
from .samples import IMAGE_AXES, parameters_of, resize, usual_sizes

logger = logging.getLogger(__name__)

# Of 1 for tokens and 0 for padding. Not `global_attention_mask` and the like, whose rows may be 0 everywhere.
_MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A PyTorch model about to be exported.

    Attributes:
        model: In evaluation mode, in the dtype to export.
        task: Its task.
        folder: Where its config and processor files are; `None` for a model made in memory.
        origin: Where it came from, for the manifest.
        example: Inputs it is traced with.
        axes: Names of the axes that may vary, by input and position.
        max_sizes: Largest size of an axis, where the model has a limit.
        unused_inputs: Inputs that its result does not depend on.
        own_defaults: Inputs whose default it computes itself; see `Component`.
        dtype: Element type of its weights.
        name: Of the graph it becomes; the parts of a generating model are sources of their own.
        stateful: Whether its graph reads and writes a cache (inputs `past_…`, outputs `present_…`).
        croppable: See `Component`.
        continues: See `Component`.
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

    @property
    def config(self) -> Any:
        """The transformers config, or `None` for a plain module."""
        return getattr(self.model, "config", None)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        inner = unwrapped(self.model)
        return type(inner).__name__

    @property
    def quantization(self) -> Quantization | None:
        """How the model was quantized, where its layers hold integers."""
        return record_of(self.model)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers."""
        return (*self.model.parameters(), *self.model.buffers())

    @property
    def nbytes(self) -> int:
        """Size of the weights."""
        return sum(tensor.nbytes for tensor in self.weights)

    def sample(self, sizes: Mapping[str, int], *, seed: int = 0) -> Tensors:
        """Inputs like the example with other axis sizes: random values, and padding where there is a mask."""
        return resize(self.example, self.axes, sizes, self.config, seed)

    @property
    def required(self) -> dict[str, int]:
        """Tokens that each row of an input must hold, by input."""
        token = self.model.required_token if isinstance(self.model, Wrapper) else None
        return {} if token is None else {"input_ids": token}

    def bounds(self, *, stateful: bool = False) -> dict[str, tuple[int, int]]:
        """Smallest and largest value of inputs that are looked up in a table, ids of tokens and of token types, positions; and of masks.

        No ids for a model whose prompts hold some of images or sounds, which are in no table.

        Args:
            stateful: Of the graph with the cache, whose tokens are the decoder's.
        """
        model: Any = unwrapped(self.model)
        config = getattr(model, "config", None)
        if config is None:
            return {}
        encodes = bool(getattr(config, "is_encoder_decoder", False))
        positions = {"position_ids": position_bounds(model.get_decoder() if encodes and stateful else model)}
        # Where some tokens see all others (Longformer, LED), a 2 in the mask says so.
        most = 2 if "global_attention_mask" in parameters_of(model) else 1
        others = positions | dict.fromkeys(_MASKS, (0, most))
        generates = task_spec(self.task).generates
        senses = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        # An encoder reads images by itself (Pix2Struct's): none stand in the decoder's prompt.
        if senses and not (generates and encodes):
            rows = None if generates or _mixes(config) else text_rows(model)
            return others if rows is None else others | {"input_ids": (0, rows - 1)}
        types = _named_table(model, "token_type_embeddings")
        # Places on a page: left, top, right, bottom.
        places = _named_table(model, "x_position_embeddings")
        tables = {"input_ids": _table(model), "token_type_ids": types, "bbox": places}
        if encodes:
            tables["decoder_input_ids"] = _table(model.get_decoder())
            if stateful:
                tables["input_ids"] = tables["decoder_input_ids"]
        ids = {name: (0, rows - 1) for name, rows in tables.items() if rows is not None}
        return ids | others

    def with_plain_attention(self) -> Source | None:
        """The same model of sounds, traced with its plain attention; `None` where there is nothing to change."""
        sounds = {"samples", "frames"} & set(self.axes.get("attention_mask", {}).values())
        # Parts of a generating model are traced with attention of ours.
        if not sounds or isinstance(self.model, Wrapper) or task_spec(self.task).generates:
            return None
        return replace(self, model=TracedPlainly(self.model).eval())

    def with_fixed_images(self) -> Source | None:
        """The same with images of the size that the model is made for alone; `None` where their size is fixed already."""
        named = self.axes.get("pixel_values", {})
        if not set(IMAGE_AXES) <= set(named.values()):
            return None
        sizes = usual_sizes(named.values(), self.config, self.folder)
        axes = {name: {i: a for i, a in found.items() if a not in IMAGE_AXES} for name, found in self.axes.items()}
        return replace(self, example=self.sample(sizes), axes=axes)


def _mixes(config: Any) -> bool:
    """Whether prompts hold tokens that stand for images or sounds."""
    return any(re.match(r"(image|video|audio|vision|speech|media)_.*token", name) for name in config.to_dict())


def _table(model: Any) -> int | None:
    """Rows of the table that a model looks its tokens up in; `None` where it computes them, as CANINE does from characters."""
    try:
        rows = rows_of_table(model.get_input_embeddings())
    # Foreign code: models without such a table raise what they like.
    except Exception:  # noqa: BLE001
        return None
    declared = getattr(model.config.get_text_config(), "vocab_size", None)
    return rows if rows is not None and isinstance(declared, int) and rows >= declared else None


def _named_table(model: torch.nn.Module, name: str) -> int | None:
    found = (rows_of_table(module) for path, module in model.named_modules() if path.split(".")[-1] == name)
    return next((rows for rows in found if rows is not None), None)
