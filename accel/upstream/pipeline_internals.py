"""Private parts of transformers' pipelines and tokenizers, and of `datasets`.

| name | seen in | public alternative |
|---|---|---|
| `Pipeline._load_tokenizer`, `_load_image_processor`, `_load_feature_extractor`, `_load_processor` | transformers 5.23, 5.24 | none |
| `Pipeline._sanitize_parameters` | transformers 5.23, 5.24 | none: no public API lists the options of a pipeline's calls |
| `tokenizer._build_translation_inputs` | transformers 5.23, 5.24 | `src_lang`, `tgt_lang`: tokenizer settings, shared by all calls |
| `Dataset._fingerprint` | datasets 4 | none |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def loads(pipeline: type[Any], part: str) -> bool | None:
    """Return whether a pipeline loads a `tokenizer`, `image_processor`, `feature_extractor` or `processor`.

    `None` means that the pipeline loads it if the model has one.
    """
    answer: bool | None = getattr(pipeline, f"_load_{part}", False)
    return answer


def reader_of_options(pipeline: type[Any]) -> Callable[..., Any]:
    """Return the method of a pipeline that parses the options of a call."""
    read: Callable[..., Any] = pipeline._sanitize_parameters
    return read


def inputs_for_translation(tokenizer: Any, text: str, **settings: Any) -> dict[str, Any] | None:
    """Tokenize a text for translation. Return `None` for a tokenizer without source and target languages."""
    build = getattr(tokenizer, "_build_translation_inputs", None)
    return None if build is None else dict(build(text, return_tensors="pt", **settings))


def fingerprint_of(data: Any) -> str:
    """Return the fingerprint of a data set's content. Empty for other data."""
    return str(getattr(data, "_fingerprint", None) or "")
