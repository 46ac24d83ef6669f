"""What a caller passes to a model, as what its graph takes: names, types, what may be left out and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InputError, did_you_mean

# Arguments of a transformers model that choose what it returns; a graph cannot change that.
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")
# What a transformers model assumes when these are left out.
_DEFAULT_FILL = {"attention_mask": 1, "token_type_ids": 0}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Reads the inputs of a graph.

    Attributes:
        names: What the graph takes.
        ignored: What the model takes and its result does not depend on.
        config: The model's transformers config.
    """

    names: frozenset[str]
    ignored: frozenset[str]
    config: Any

    def read(self, given: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
        """Inputs as tensors by the graph's names and of the shapes given, whether NumPy is wanted back, and whether a tuple is."""
        feeds: dict[str, torch.Tensor] = {}
        numpy = False
        for name, value in given.items():
            if name == "return_dict" or value is None:
                continue
            if name not in self.names:
                self._refuse(name, value)
                continue
            numpy = numpy or isinstance(value, np.ndarray)
            feeds[name] = _as_tensor(name, value)
        if len(feeds) != len(self.names):
            self._fill_defaults(feeds)
        return feeds, numpy, given.get("return_dict") is False

    def _refuse(self, name: str, value: Any) -> None:
        """An input that the graph does not take: dropped where that changes nothing, else an error."""
        if name in self.ignored or (name in _OUTPUT_FLAGS and not value):
            return
        if name == "token_type_ids" and not torch.as_tensor(value).any():
            return
        names = sorted(self.names)
        if name in _OUTPUT_FLAGS:
            raise InputError(f"The graph does not return what {name} asks for.", fix=f"leave {name} out.")
        if name == "labels":
            raise InputError(
                "The graph computes no loss.", fix="leave labels out and compute the loss from the logits."
            )
        raise InputError(
            f"The graph takes {names}, not {name!r}.{did_you_mean(name, names)}", fix=f"leave {name!r} out."
        )

    def _fill_defaults(self, feeds: dict[str, torch.Tensor]) -> None:
        """Add what a transformers model assumes when it is left out; name what is missing otherwise."""
        missing = [name for name in self.names if name not in feeds]
        main = next((feeds[name] for name in ("input_ids",) if name in feeds), None)
        for name in missing:
            if main is None or name not in _DEFAULT_FILL:
                raise InputError(
                    f"The graph takes {sorted(self.names)} and was given {sorted(feeds)}; missing: {missing}.",
                    fix="pass the tokenizer's or processor's whole output: model(**inputs).",
                )
            kind = getattr(self.config, "model_type", "")
            if name == "token_type_ids" and kind and not hasattr(self.config, "type_vocab_size"):
                raise InputError(
                    f"{name} are missing, and a {kind} model that is not given them does not take zeros.",
                    fix="pass the tokenizer's whole output: model(**inputs).",
                )
            feeds[name] = torch.full_like(main, _DEFAULT_FILL[name])


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        # torch reads no negative strides.
        return (
            torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray) else torch.as_tensor(value)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Input {name!r} is a {type(value).__name__}, not a tensor.",
            fix="pass what the tokenizer or processor returns, by name: model(**inputs).",
        ) from error
