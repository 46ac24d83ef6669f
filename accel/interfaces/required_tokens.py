"""Checks of required tokens for graphs whose head searches for a token in the complete batch, such as BART's end token.

Such graphs come from other tools or from old versions of accel. They give wrong results if the rows contain the token a different
number of times.
"""

from __future__ import annotations

from dataclasses import replace

from ..artifact.manifest import Artifact
from .family_registry import family_of
from .task_registry import read_config


def with_row_tokens(artifact: Artifact) -> Artifact:
    """Return an artifact whose specs require that all rows of `input_ids` contain the head's token the same number of times.

    An artifact is returned unchanged if its head searches for no token, or if its graph computes each row independently.
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
