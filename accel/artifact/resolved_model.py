"""The result of resolving a Hub id, a folder, an artifact or a PyTorch module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .atomic_folder_writing import checkpoint_weights
from .gguf_files import gguf_weights
from .hub import HubOptions, Location
from .manifest import Artifact

if TYPE_CHECKING:
    import torch

Kind = Literal["artifact", "foreign", "weights", "adapter", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A resolved model.

    Attributes:
        kind: `artifact`, a folder with a manifest of accel; `foreign`, graphs of another tool; `weights`, a
            transformers folder; `adapter`, a PEFT adapter; `module`, a PyTorch model in memory.
        id: The user's name for the model.
        task: The task of the model.
        folder: The folder of the model; `None` for a module.
        revision: The commit, if the model came from the Hub.
        artifact: The artifact. For graphs of another tool, its manifest is derived from the graphs.
        module: The PyTorch model in memory.
        hub: Options for downloads (revision, token, cache), and whether code from the repository may run. They apply to
            the weights, the config and the tokenizer.
    """

    kind: Kind
    id: str
    task: str
    folder: Path | None = None
    revision: str | None = None
    artifact: Artifact | None = None
    module: torch.nn.Module | None = None
    hub: HubOptions = HubOptions()

    @classmethod
    def of_artifact(cls, artifact: Artifact, hub: HubOptions | None = None) -> ResolvedModel:
        """Return an artifact as a resolved model."""
        return cls(
            kind="artifact", id=str(artifact.path), task=artifact.task, folder=artifact.path, artifact=artifact,
            hub=hub or HubOptions(),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The last part of the id, for tables."""
        return Path(self.id).name

    @property
    def location(self) -> Location:
        """The location of the model's files."""
        assert self.folder is not None, "a module has no folder"
        return Location(self.id, self.folder, self.revision)

    @property
    def has_weights(self) -> bool:
        """Whether the model has PyTorch weights, or the weights of a GGUF file."""
        if self.kind in ("adapter", "module"):
            return True
        assert self.folder is not None
        return bool(checkpoint_weights(self.folder)) or gguf_weights(self.folder) is not None
