"""Conversion of a call's inputs to the inputs of a graph: names, types, default values and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.input_defaults import with_defaults
from ..errors import InputError, did_you_mean
from ..interfaces.family_registry import family_of
from .losses import TARGETS
from .outputs import as_tensor

# Arguments of a transformers model that select its outputs; a graph's outputs are fixed.
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class InputConverter:
    """Converter from the inputs of a call to the inputs of a graph.

    Attributes:
        names: Names of the graph's inputs.
        ignored: Names of model inputs that do not change the result.
        own_defaults: Names of inputs for which only the PyTorch model can compute a default value.
        config: The model's transformers config.
        returned: Names of outputs that are tuples, such as `hidden_states`.
    """

    names: frozenset[str]
    ignored: frozenset[str]
    own_defaults: frozenset[str]
    config: Any
    returned: frozenset[str] = frozenset()

    def read(self, arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
        """Return three values: the inputs as tensors by name, whether an input is a NumPy array, and whether `return_dict` is `False`."""
        feeds: dict[str, torch.Tensor] = {}
        numpy = False
        for name, value in arguments.items():
            if name == "return_dict" or value is None:
                continue
            if name not in self.names:
                self._refuse(name, value, arguments)
                continue
            numpy = numpy or isinstance(value, np.ndarray)
            feeds[name] = as_tensor(name, value)
            if name == "bbox":
                _check_boxes(feeds[name], family_of(self.config).largest_box(self.config) or 1023)
        if len(feeds) != len(self.names):
            feeds = self._with_defaults(feeds)
        return feeds, numpy, arguments.get("return_dict") is False

    def _refuse(self, name: str, value: Any, arguments: Mapping[str, Any]) -> None:
        """Ignore an input that the graph does not have if its value changes nothing; raise if it would change the result."""
        if name == "token_type_ids" and self._has_one_type() and torch.as_tensor(value).any():
            raise InputError(
                "token_type_ids has values other than 0, but the model has only the token type 0.",
                fix="leave token_type_ids out; the model's tokenizer does not return this input.",
            )
        if name in self.ignored or (name in _OUTPUT_FLAGS and (not value or self._returns(name))):
            return
        names = sorted(self.names)
        if name in self.own_defaults:
            raise InputError(
                f"The graph has no input {name!r}: it was exported without this input and always uses the model's default value for it.",
                fix=f"leave {name} out, or export the model again with sample={{..., {name!r}: ...}}, which makes it a required input.",
            )
        if name == "token_type_ids" and not torch.as_tensor(value).any():
            return
        # Speech graphs exported by other tools often have no mask input, but transformers' pipelines always pass a mask.
        if name == "attention_mask" and bool(torch.as_tensor(value).all()):
            return
        if name in _OUTPUT_FLAGS:
            raise InputError(
                f"{name}=True was passed, but the graph was exported without the output {name.removeprefix('output_')!r}.",
                fix=f"leave {name} out, or export the model again with {name}=True.",
            )
        if name in TARGETS:
            raise InputError(
                f"The argument {name} was passed, but the model's task has no loss that uses {name}.",
                fix=f"leave {name} out, and compute the loss from the outputs.",
            )
        likely = did_you_mean(name, self.names - arguments.keys())
        raise InputError(
            f"The graph has no input {name!r}; its inputs are {names}.{likely}", fix=f"leave {name!r} out of the call."
        )

    def _returns(self, flag: str) -> bool:
        """Return whether the graph has the outputs of a flag. LXMERT returns `language_hidden_states` instead of `hidden_states`."""
        output = flag.removeprefix("output_")
        return any(name == output or name.endswith(f"_{output}") for name in self.returned)

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
            # Folders without a manifest, and some manifests, do not record `own_defaults`.
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
                f"The input token_type_ids is missing. A {kind} model has no default value for it.",
                fix="pass everything that the tokenizer returns: model(**tokenizer(texts, return_tensors='pt')).",
            )
        if missing:
            raise InputError(
                f"The inputs {missing} are missing. The graph needs {sorted(self.names)}, and the call passed {sorted(feeds)}.",
                fix=required.get(
                    missing[0], "pass everything that the tokenizer or processor returns: model(**inputs)."
                ),
            )
        return complete


def _rotates_by_distance(config: Any) -> bool:
    """Return whether attention depends only on the distances between tokens (RoPE).

    For these models, position ids can be 0, 1, 2, ... from the left, including padding. Optimum's graphs of decoders with RoPE have
    position ids as an input, even for embeddings and classification.
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
            f"{name!r} has {tokens} tokens per row, but the graph supports at most {limit}. The model computes longer texts in blocks, "
            "which the exported graph does not contain.",
            fix=f"run the original model with transformers, or {truncate}.",
        )
    return InputError(
        f"{name!r} has {tokens} tokens per row, but the model has position embeddings for only {limit} tokens.",
        fix=f"{truncate}.",
    )


def _check_boxes(boxes: torch.Tensor, most: float) -> None:
    """Raise for invalid bounding boxes. PyTorch raises for them, but runtimes read negative numbers from the end of the table."""
    if boxes.shape[-1:] != (4,) or not boxes.numel():
        return  # the session raises an error about the invalid shape
    if bool((boxes < 0).any()) or bool((boxes > most).any()) or bool((boxes[..., 2:] < boxes[..., :2]).any()):
        raise InputError(
            f"bbox has coordinates from {boxes.min():g} to {boxes.max():g}. The model accepts 0 to {most:g}, and the right and bottom of "
            "a box must not be less than its left and top.",
            fix=f"pass [left, top, right, bottom] of each token, scaled so that 0 to {min(most, 1000):g} is the whole page.",
        )
