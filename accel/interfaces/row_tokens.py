"""Graphs whose head selects tokens by a mask over the whole batch: those of other tools, and of earlier versions of this library."""

from __future__ import annotations

from dataclasses import replace

from ..artifact.manifest import Artifact
from .family_registry import family_of
from .task_registry import read_config


def with_row_tokens(artifact: Artifact) -> Artifact:
    """The artifact, whose `input_ids` must hold the token of such a head equally often in each row of a batch.

    Artifacts of other architectures, and graphs that answer each row by itself, stay as they are.
    """
    config = read_config(artifact.path)
    token = family_of(config).row_token(artifact.manifest.architecture, config)
    if token is None:
        return artifact
    components = tuple(
        component
        if any(spec.required is not None for spec in component.inputs)
        else replace(
            component,
            inputs=tuple(
                replace(spec, required=token, equal_counts=True) if spec.name == "input_ids" else spec
                for spec in component.inputs
            ),
        )
        for component in artifact.components
    )
    return Artifact(artifact.path, replace(artifact.manifest, components=components))
