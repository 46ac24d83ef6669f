"""Requirements on tokens of each row, for graphs (of other tools or old versions of accel) with a head that selects by a batch mask."""

from __future__ import annotations

from dataclasses import replace

from ..artifact.manifest import Artifact
from .family_registry import family_of
from .task_registry import read_config


def with_row_tokens(artifact: Artifact) -> Artifact:
    """Require in an artifact's specs that each row of `input_ids` contains the head's token equally often.

    Artifacts of other architectures are returned unchanged, and so are graphs that compute each row independently.
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
