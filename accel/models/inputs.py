"""What a caller passes to a model, as what its graph takes: names, types, what may be left out and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.defaults import with_defaults
from ..errors import InputError, did_you_mean
from ..interfaces.family_registry import family_of
from .losses import TARGETS

# Arguments of a transformers model that choose what it returns; a graph cannot change that.
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Reads the inputs of a graph.

    Attributes:
        names: What the graph takes.
        ignored: What the model takes and its result does not depend on.
        own_defaults: Whose default the model computes itself.
        config: The model's transformers config.
        returned: Tuples among its outputs, such as `hidden_states`.
    """

    names: frozenset[str]
    ignored: frozenset[str]
    own_defaults: frozenset[str]
    config: Any
    returned: frozenset[str] = frozenset()

    def read(self, given: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
        """Inputs as tensors by the graph's names and of the shapes given, whether NumPy is wanted back, and whether a tuple is."""
        feeds: dict[str, torch.Tensor] = {}
        numpy = False
        for name, value in given.items():
            if name == "return_dict" or value is None:
                continue
            if name not in self.names:
                self._refuse(name, value, given)
                continue
            numpy = numpy or isinstance(value, np.ndarray)
            feeds[name] = _as_tensor(name, value)
            if name == "bbox":
                _check_boxes(feeds[name], self.config)
        if len(feeds) != len(self.names):
            feeds = self._with_defaults(feeds)
        return feeds, numpy, given.get("return_dict") is False

    def _refuse(self, name: str, value: Any, given: Mapping[str, Any]) -> None:
        """An input that the graph does not take: dropped where that changes nothing, else an error."""
        if name == "token_type_ids" and self._has_one_type() and torch.as_tensor(value).any():
            raise InputError(
                "The model has one type of tokens, 0, and token_type_ids hold others.",
                fix="leave token_type_ids out, as the model's own tokenizer does.",
            )
        if name in self.ignored or (
            name in _OUTPUT_FLAGS and (not value or name.removeprefix("output_") in self.returned)
        ):
            return
        names = sorted(self.names)
        if name in self.own_defaults:
            raise InputError(
                f"The graph was exported without {name}: it answers as the model does where they are left out.",
                fix=f"leave {name} out, or export with sample={{..., {name!r}: ...}} for a graph that is always given them.",
            )
        if name == "token_type_ids" and not torch.as_tensor(value).any():
            return
        # Graphs of other tools for models of sounds often take none, and the stock pipeline always gives one.
        if name == "attention_mask" and bool(torch.as_tensor(value).all()):
            return
        if name in _OUTPUT_FLAGS:
            raise InputError(f"The graph does not return what {name} asks for.", fix=f"export it with {name}=True.")
        if name in TARGETS:
            raise InputError(
                f"There is no loss for {name} here.", fix=f"leave {name} out and compute the loss from the outputs."
            )
        likely = did_you_mean(name, self.names - given.keys())
        raise InputError(
            f"The graph takes {names}, not {name!r}.{likely}",
            fix=f"leave {name!r} out; the answer is the model's without it.",
        )

    def _has_one_type(self) -> bool:
        text = self.config.get_text_config() if getattr(self.config, "model_type", "") else None
        return getattr(text, "type_vocab_size", None) == 1

    def _with_defaults(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With what a transformers model assumes when it is left out; names what is missing otherwise."""
        kind = getattr(self.config, "model_type", "")
        own = set(self.own_defaults)
        # Of a model of images and texts, the texts' config says it.
        text = self.config.get_text_config() if kind else None
        if kind and not hasattr(text, "type_vocab_size"):
            # Known by this alone where there is no manifest, or one from before it said so.
            own.add("token_type_ids")
        if not hasattr(text, "max_2d_position_embeddings"):
            # BROS, which has no such table, refuses texts without places.
            own.add("bbox")
        if "attention_mask" in self.names - feeds.keys() and "input_ids" in feeds:
            mask = family_of(self.config).default_mask(feeds["input_ids"], self.config)
            feeds = feeds if mask is None else {**feeds, "attention_mask": mask}
        if "position_ids" in self.names - feeds.keys() and "input_ids" in feeds and _rotates_by_distance(text):
            ids = feeds["input_ids"]
            feeds = {**feeds, "position_ids": torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)}
        made = with_defaults(feeds, self.names, own)
        missing = [name for name in self.names if name not in made]
        if missing == ["token_type_ids"] and "input_ids" in feeds:
            raise InputError(
                f"token_type_ids are missing, and a {kind} model that is not given them does not take zeros.",
                fix="pass the tokenizer's whole output: model(**inputs).",
            )
        if missing:
            raise InputError(
                f"The graph takes {sorted(self.names)} and was given {sorted(feeds)}; missing: {missing}.",
                fix="pass the tokenizer's or processor's whole output: model(**inputs).",
            )
        return made


def _rotates_by_distance(config: Any) -> bool:
    """Whether attention reads the distance of tokens alone (RoPE): positions are then counted from the left, padding or not.

    Optimum's graphs of such decoders take positions, even for embeddings and classification.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return bool(rope) and "mrope_section" not in rope


def too_long(name: str, tokens: int, limit: int, config: Any) -> InputError:
    """The error for more tokens than the graph reads, and why it does not."""
    from ..capture.position_limits import longest_at_once  # a process that only runs graphs traces none

    truncate = f"truncate: tokenizer(..., truncation=True, max_length={limit})"
    if longest_at_once(config) == limit:
        return InputError(
            f"{name!r} has {tokens} tokens; the graph reads {limit}: the model computes longer texts in blocks, which would be another "
            "graph.",
            fix=f"run the model with transformers, or {truncate}.",
        )
    return InputError(f"{name!r} has {tokens} tokens; the model has {limit} positions.", fix=f"{truncate}.")


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        # torch reads no negative strides.
        return (
            torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray) else torch.as_tensor(value)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise InputError(
            f"Input {name!r} is {what}, not a tensor.",
            fix="pass what the tokenizer or processor returns, by name: model(**inputs).",
        ) from error


def _check_boxes(boxes: torch.Tensor, config: Any) -> None:
    """Runtimes look up what PyTorch refuses: numbers below 0, such as a negative width, count from a table's end."""
    most = int(getattr(config, "max_2d_position_embeddings", 1024)) - 1
    if boxes.shape[-1:] != (4,) or not boxes.numel():
        return  # the session says what shape it takes
    if bool((boxes < 0).any()) or bool((boxes > most).any()) or bool((boxes[..., 2:] < boxes[..., :2]).any()):
        raise InputError(
            f"Boxes with corners from {int(boxes.min())} to {int(boxes.max())} came, or some that end before they begin.",
            fix=f"give [left, top, right, bottom] in shares of the page from 0 to 1000; the model has {most + 1} places.",
        )
