"""Compare the graph of a sentence-transformers folder with sentence-transformers itself, where that library is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import capture
from ..artifact.hub import HubOptions
from ..artifact.manifest import Artifact
from ..artifact.sentence_fields import TOKEN_VECTORS, VECTORS, output_of_side
from ..artifact.sentence_settings import DOCUMENT, QUERY, Kind, SentenceSettings, sentence_settings
from ..config import ExportConfig
from ..errors import AccelError, ValidationError
from ..interfaces.protocols import Session
from ..interfaces.task_registry import task_spec
from .graph_comparison import compare

logger = logging.getLogger(__name__)

RECORD = "sentence_transformers"
"""Key of the comparison in a step's validation: the version of sentence-transformers and the largest difference."""
_FIRST_MAJOR_VERSION = 6
_CLASSES: Mapping[Kind, str] = {
    "embedder": "SentenceTransformer",
    "sparse encoder": "SparseEncoder",
    "multi-vector encoder": "MultiVectorEncoder",
    "cross-encoder": "CrossEncoder",
}
_MOST_BYTES = 4 << 30
"""Largest size of the weights. sentence-transformers loads the weights a second time."""
_TEXTS = (
    "card",
    "Where is my new card?",
    "The payment in London was declined, and the money left my account twice. Can you please return one of the two amounts?",
)


def compare_with_sentence_transformers(
    artifact: Artifact, session: Session, source: capture.Source, config: ExportConfig, hub: HubOptions
) -> dict[str, Any]:
    """Compare a graph with the modules of sentence-transformers on the token ids that sentence-transformers makes.

    The comparison with PyTorch uses accel's own modules. This comparison detects modules and settings that accel reads wrong. It loads
    the model again and takes a few seconds.

    Args:
        artifact: The new artifact.
        session: The session of its graph.
        source: The model.
        config: Export settings.
        hub: Hub options of the model.

    Returns:
        The record for the manifest under the key `sentence_transformers`. Empty if the folder is not of
        sentence-transformers, the export replaces its pooling, the model is a static embedding or larger than 4 GB, or
        sentence-transformers 6 or newer is not installed.

    Raises:
        ValidationError: An output differs by more than the tolerance.
    """
    installed = _installed_version()
    spec = task_spec(source.task)
    if (
        installed is None
        or source.folder is None
        or not spec.sentence_kinds
        or config.pooling
        or config.normalize is not None
    ):
        return {}
    settings = sentence_settings(source.folder)
    if settings.kind not in spec.sentence_kinds or not (settings.kind in _CLASSES and _is_saved(settings)):
        return {}
    if source.nbytes > _MOST_BYTES:
        logger.info(
            "%s is not compared with sentence-transformers, because its weights are over 4 GB", source.origin.id
        )
        return {}
    try:
        cases = _cases(source.folder, settings, {spec.name for spec in session.inputs}, hub)
    # The library, and custom code of a model, may raise any exception. The graph was compared with PyTorch before.
    except Exception as error:
        if isinstance(error, AccelError):
            raise
        logger.warning(
            "sentence-transformers %s cannot load %s, so its results were not compared: %s",
            installed,
            source.origin.id,
            capture.first_lines(error),
        )
        return {}
    dtype = artifact.dtype if artifact.manifest.quantization is None else capture.INTEGERS
    try:
        comparison = compare(session, cases, config.atol, dtype)
    except ValidationError as error:
        raise ValidationError(
            f"The graph differs from sentence-transformers {installed}. {error.message}",
            fix="report the wrong result as an issue, or pass a larger atol=... if this precision is enough for you.",
        ) from error
    return {RECORD: {"version": installed, "max_abs_difference": comparison["max_abs_difference"]}}


def _installed_version() -> str | None:
    try:
        installed = version("sentence-transformers")
    except PackageNotFoundError:
        return None
    return installed if int(installed.partition(".")[0]) >= _FIRST_MAJOR_VERSION else None


def _is_saved(settings: SentenceSettings) -> bool:
    """Return whether sentence-transformers loads the folder: it does not read the heads of BGE-M3, or folders of `static_folder`."""
    if settings.sparse_head is not None or settings.multi_vector_head is not None:
        return False
    return settings.transformer is None or not capture.is_static_folder(settings.transformer)


def _cases(folder: Path, settings: SentenceSettings, inputs: set[str], hub: HubOptions) -> list[capture.Case]:
    """Return token ids as inputs, and the outputs of sentence-transformers. Each text is alone, so there is no padding."""
    import sentence_transformers

    with capture.quiet(), torch.inference_mode():
        reader: Any = getattr(sentence_transformers, _CLASSES[settings.kind])
        model = reader(
            str(folder),
            device="cpu",
            trust_remote_code=hub.trust_remote_code,
            local_files_only=True,
            model_kwargs={"dtype": "float32"},
        )
        cases = []
        for side, name in _outputs(settings):
            for text in _TEXTS:
                item: Any = (_TEXTS[0], text) if settings.kind == "cross-encoder" else text
                words = {"task": side} if side else {}
                features = model.preprocess([item], **words)
                feeds = {key: value.clone() for key, value in features.items() if key in inputs}
                result = model(features, **words)
                cases.append(
                    capture.Case(
                        sizes={"batch": 1, "sequence": feeds["input_ids"].shape[1]},
                        feeds=feeds,
                        expected={name: result[_FEATURES.get(name, VECTORS)].float()},
                    )
                )
    return cases


_FEATURES = {TOKEN_VECTORS: "token_embeddings", "logits": "scores"}
"""Names of the features of sentence-transformers, by the name of the graph's output, where they differ from `sentence_embedding`."""


def _outputs(settings: SentenceSettings) -> Iterator[tuple[str, str]]:
    """Yield each side that the graph computes, and the output for it. The side is empty for models without a router."""
    if settings.kind == "cross-encoder":
        yield "", "logits"
    elif settings.kind == "multi-vector encoder":
        yield DOCUMENT, TOKEN_VECTORS
    else:
        sides: Sequence[str] = (settings.side,) if settings.side in (QUERY, DOCUMENT) else ("",)
        for side in sides:
            yield side, VECTORS
        if settings.other_layers:
            yield settings.other_side, output_of_side(settings.other_side)
