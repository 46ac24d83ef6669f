"""Write the probes of a new artifact: inputs, PyTorch's outputs, and the measured difference (ADR 0058)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .. import capture
from ..artifact.manifest import Artifact
from ..artifact.probe_file import PROBES, tokens_of
from ..artifact.processor_loading import open_companion
from ..backends.plan import make_plan
from ..backends.probe_checks import conditions_of
from ..backends.sessions import OpenSessions, open_plan
from ..capture.probes import GraphProbe, Probes, graph_files, make_probes, read_probes, run_probes, write_probes
from ..errors import AccelError

logger = logging.getLogger(__name__)


def probes_for(
    artifact: Artifact, cases: Mapping[str, Sequence[capture.Case]], source: capture.Source
) -> tuple[GraphProbe, ...]:
    """Select probes of an export from its reference cases. The models of several graphs are only needed for images and audio."""
    try:
        parts = capture.split(source) if len(cases) > 1 else (source,)
        return make_probes(artifact.components, cases, parts)
    except AccelError as error:
        logger.debug("no probes for %s: %s", artifact.path, error)
        return ()


def record_probes(artifact: Artifact, probes: Sequence[GraphProbe], opened: OpenSessions | None = None) -> None:
    """Measure the errors of an artifact on its probes, and write both into its folder. The manifest must be written afterwards.

    Args:
        artifact: The new artifact, in its temporary folder.
        probes: The probes. If there are none, or the graph cannot run them, the folder gets none.
        opened: Open sessions of the artifact. When `None`, the artifact is opened as for a user.
    """
    (artifact.path / PROBES).unlink(missing_ok=True)
    if not probes:
        return
    try:
        sessions = opened or open_plan(make_plan(artifact), probes=False)
        try:
            measured = run_probes(sessions.sessions, probes)
        finally:
            if opened is None:
                sessions.close()
        conditions, tokens = conditions_of(sessions.plan), _tokens(artifact)
        write_probes(artifact.path, Probes(tuple(probes), measured, conditions, tokens, graph_files(artifact)))
    except AccelError as error:
        logger.debug("no probes for %s: %s", artifact.path, error)


def _tokens(artifact: Artifact) -> dict[str, Any] | None:
    """Return the token ids of some texts, or `None` if the artifact has no tokenizer."""
    try:
        with capture.quiet():
            return tokens_of(open_companion("AutoTokenizer", artifact.path))
    # Tokenizers of documents and tables need more arguments than a text, and raise any exception without them.
    except Exception as error:  # noqa: BLE001
        logger.debug("no token probes for %s: %s", artifact.path, error)
        return None


def inherit_probes(artifact: Artifact, parent: Artifact) -> Artifact:
    """Give a new artifact the probes of its parent, with its own measured errors, and record the file in the manifest."""
    inherited = read_probes(parent)
    record_probes(artifact, inherited.probes if inherited is not None else ())
    return Artifact.create(artifact.path, artifact.manifest)
