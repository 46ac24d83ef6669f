"""A resolved model behind the class of its task, and its PyTorch original likewise."""

from __future__ import annotations

from typing import Any

import torch

from ..artifact.manifest import Artifact
from ..backends.sessions import RunSettings
from ..config import ExportConfig
from ..stages.export import opened_for, weights_of
from ..stages.resolution import Resolved, original, recorded_export, resolve
from .base import ORTModel, model_class


def open_model(
    model: Resolved | Artifact, settings: RunSettings | None = None, config: ExportConfig | None = None
) -> ORTModel:
    """The class of a model's task, opened; what is no artifact yet is exported and kept.

    Raises:
        BackendUnavailableError: Nothing here runs it.
    """
    settings = settings or RunSettings()
    resolved = resolve(model)

    def opened(artifact: Artifact) -> ORTModel:
        return model_class(artifact.task)(
            artifact,
            backend=settings.backend,
            device=settings.device,
            provider_options=settings.provider_options,
            session_options=settings.options,
            trust_remote_code=resolved.hub.trust_remote_code,
        )

    return opened_for(resolved, settings, config, opened)


def open_original(resolved: Resolved) -> tuple[ORTModel, str]:
    """The PyTorch model in float32 that a model was made from, or is, run by PyTorch; and its name.

    Raises:
        ArtifactNotFoundError: The artifact does not say what it was made from, or it is gone.
    """
    source = original(resolved)
    config = recorded_export(resolved.artifact) if resolved.artifact is not None else None
    weights = Resolved(
        kind="artifact", id=source.id, task=source.task, folder=source.folder, artifact=weights_of(source, config),
        hub=source.hub,
    )  # fmt: skip
    return open_model(weights), f"{source.name} (PyTorch, float32)"


def close(model: Any) -> None:
    """Give the runtime's memory back; of a PyTorch module, nothing."""
    if isinstance(model, ORTModel):
        model.close()
    else:
        assert isinstance(model, torch.nn.Module)
