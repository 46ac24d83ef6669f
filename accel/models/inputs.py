"""Conversion of a call's inputs to the inputs of a graph: names, types, default values and errors."""

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
from .outputs import as_tensor

# Arguments of a transformers model that select its outputs; a graph's outputs are fixed.
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Converts the inputs of a call to the inputs of a graph.

    Attributes:
        names: Names of the graph's inputs.
        ignored: Names of model inputs that do not change the result.
        own_defaults: Names of inputs whose default only the PyTorch model can compute.
        config: The model's transformers config.
        returned: Names of outputs that are tuples, such as `hidden_states`.
    """

    names: frozenset[str]
    ignored: frozenset[str]
    own_defaults: frozenset[str]
    config: Any
    returned: frozenset[str] = frozenset()

    def read(self, given: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
        """Return the inputs as tensors by name, whether the caller passed NumPy arrays, and whether the caller wants a tuple."""
        feeds: dict[str, torch.Tensor] = {}
        numpy = False
        for name, value in given.items():
            if name == "return_dict" or value is None:
                continue
            if name not in self.names:
                self._refuse(name, value, given)
                continue
            numpy = numpy or isinstance(value, np.ndarray)
            feeds[name] = as_tensor(name, value)
            if name == "bbox":
                _check_boxes(feeds[name], family_of(self.config).largest_box(self.config) or 1023)
        if len(feeds) != len(self.names):
            feeds = self._with_defaults(feeds)
        return feeds, numpy, given.get("return_dict") is False

    def _refuse(self, name: str, value: Any, given: Mapping[str, Any]) -> None:
        """Ignore an input that the graph does not have if its value changes nothing; raise if it would change the result."""
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
        # Speech graphs exported by other tools often have no mask input, but transformers' pipelines always pass a mask.
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
        """Add a transformers model's defaults for missing inputs; raise if an input has no default."""
        kind = getattr(self.config, "model_type", "")
        own_defaults = set(self.own_defaults)
        # In models of images and texts, `type_vocab_size` is in the text config.
        text = self.config.get_text_config() if kind else None
        if kind and not hasattr(text, "type_vocab_size"):
            # For folders without a manifest, and manifests that do not record `own_defaults`.
            own_defaults.add("token_type_ids")
        required = family_of(self.config).required_inputs
        own_defaults.update(required)
        if "attention_mask" in self.names - feeds.keys() and "input_ids" in feeds:
            mask = family_of(self.config).default_mask(feeds["input_ids"], self.config)
            feeds = feeds if mask is None else {**feeds, "attention_mask": mask}
        if "position_ids" in self.names - feeds.keys() and "input_ids" in feeds and _rotates_by_distance(text):
            ids = feeds["input_ids"]
            feeds = {**feeds, "position_ids": torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)}
        complete = with_defaults(feeds, self.names, own_defaults)
        missing = [name for name in self.names if name not in complete]
        if missing == ["token_type_ids"] and "input_ids" in feeds:
            raise InputError(
                f"token_type_ids are missing, and a {kind} model that is not given them does not take zeros.",
                fix="pass the tokenizer's whole output: model(**inputs).",
            )
        if missing:
            raise InputError(
                f"The graph takes {sorted(self.names)} and was given {sorted(feeds)}; missing: {missing}.",
                fix=required.get(missing[0], "pass the tokenizer's or processor's whole output: model(**inputs)."),
            )
        return complete


def _rotates_by_distance(config: Any) -> bool:
    """Return whether attention depends only on token distances (RoPE); position ids can then count from the left, including padding.

    Optimum's graphs of such decoders have position ids as an input, even for embeddings and classification.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return bool(rope) and "mrope_section" not in rope


def too_long(name: str, tokens: int, limit: int, config: Any) -> InputError:
    """Return the error for a text with more tokens than the graph accepts; the message explains the limit."""
    from ..capture.position_limits import (
        longest_at_once,
    )  # imported late: a process that only runs graphs does not need tracing code

    truncate = f"truncate: tokenizer(..., truncation=True, max_length={limit})"
    if longest_at_once(config) == limit:
        return InputError(
            f"{name!r} has {tokens} tokens; the graph reads {limit}: the model computes longer texts in blocks, which would be another "
            "graph.",
            fix=f"run the model with transformers, or {truncate}.",
        )
    return InputError(f"{name!r} has {tokens} tokens; the model has {limit} positions.", fix=f"{truncate}.")


def _check_boxes(boxes: torch.Tensor, most: float) -> None:
    """Raise for invalid bounding boxes. PyTorch raises for them, but runtimes read negative numbers from the end of the table."""
    if boxes.shape[-1:] != (4,) or not boxes.numel():
        return  # the session raises an error about the shape
    if bool((boxes < 0).any()) or bool((boxes > most).any()) or bool((boxes[..., 2:] < boxes[..., :2]).any()):
        raise InputError(
            f"Boxes have corners from {boxes.min():g} to {boxes.max():g}, or end before they begin; the model has 0 to {most:g}.",
            fix=f"give [left, top, right, bottom] in shares of the page, from 0 to {min(most, 1000):g}.",
        )
