"""Grammars that restrict the generated text, such as JSON that matches a schema. The library llguidance computes the allowed tokens.

A grammar is a text in a format of llguidance. `json_grammar` writes a grammar for a JSON schema. `GrammarTokenizer` prepares a
tokenizer once for each model, and `GrammarConstraint` restricts the tokens of one generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..errors import ConfigError, InputError

_SETTINGS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,16}"}
"""Whitespace between two JSON tokens. It is bounded, because a model could otherwise generate spaces without an end."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar for JSON that matches a JSON schema.

    Strings, arrays and numbers are as long as the schema permits; a schema without bounds permits texts of any length.

    Raises:
        InputError: The schema is invalid, or it uses a keyword that llguidance does not support.
        ConfigError: llguidance is not installed.
    """
    matcher = _library().LLMatcher
    try:
        grammar: str = matcher.grammar_from_json_schema(json.dumps(schema), defaults=_SETTINGS)
    except ValueError as error:
        raise _invalid(str(error)) from error
    if error_text := matcher.validate_grammar(grammar):
        raise _invalid(error_text)
    return grammar


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return JSON that matches a schema as a part of a rule, for a grammar in llguidance's variant of Lark."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SETTINGS})}"


class GrammarTokenizer:
    """A tokenizer in the form that llguidance needs. Creating it takes 0.3 to 2 seconds, so create it once for each model.

    Args:
        tokenizer: A fast tokenizer of transformers.
        vocabulary: Number of the model's logits, which may be greater than the number of tokens.
        ends: The model's end tokens. They are the only allowed tokens after a complete text.

    Raises:
        ConfigError: llguidance is not installed, the tokenizer is not a fast tokenizer, or there is no end token.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        library = _library()
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"Grammars need a fast tokenizer, but the tokenizer is a {type(tokenizer).__name__}.",
                fix="save the tokenizer as tokenizer.json into the model's folder.",
            )
        if not ends:
            raise ConfigError(
                "Grammars need an end token, but the model's generation_config and its tokenizer have no end token.",
                fix="set eos_token_id in generation_config.json.",
            )
        from llguidance.hf import from_tokenizer

        self.tokens = from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=list(ends))
        self._matcher = library.LLMatcher

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Return the constraint for one generation.

        Raises:
            InputError: The grammar is invalid.
        """
        matcher = self._matcher(self.tokens, grammar)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        return GrammarConstraint(matcher, self.tokens.vocab_size)


class GrammarConstraint(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    """Logits processor that sets the logits of all tokens that the grammar does not allow to minus infinity.

    Args:
        matcher: llguidance's matcher, which contains the position in the grammar.
        vocabulary: Number of tokens.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    @property
    def complete(self) -> bool:
        """Whether the generated text matches the grammar and no token may follow."""
        return bool(self._matcher.is_stopped())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change and return the logits `scores: (1, vocabulary)` on the CPU. The cost is 0.1 to 2 ms for 150,000 tokens."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        allowed = np.unpackbits(self._mask.view(np.uint8), count=scores.shape[1], bitorder="little")
        # NumPy writes without the threads of torch, which would compete with the runtime's threads.
        np.putmask(scores.numpy(), allowed[np.newaxis] == 0, -np.inf)
        return scores

    def accept(self, token: int) -> None:
        """Add a chosen token.

        Raises:
            RuntimeError: The grammar does not allow the token, because another option excludes every token that it allows.
        """
        if not self._matcher.consume_token(token):
            raise RuntimeError("the other options exclude every token that the grammar allows.")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            f"Grammars and JSON schemas need the package llguidance: {error}.",
            fix='install the extra: pip install "accel-transformers[grammar]".',
        ) from error
    return llguidance


def _invalid(reason: str) -> InputError:
    return InputError(
        f"The grammar or JSON schema is invalid: {reason.strip().splitlines()[0]}",
        fix="correct the schema, and use only keywords that llguidance supports.",
    )
