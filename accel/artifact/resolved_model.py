"""A model that was named by an id, a folder, an artifact or a module, and what was found there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .hub import HubOptions, Location
from .manifest import Artifact
from .writing import checkpoint_weights

if TYPE_CHECKING:
    import torch

Kind = Literal["artifact", "foreign", "weights", "adapter", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A model, and how it was named.

    Attributes:
        kind: `artifact`, a folder with our manifest; `foreign`, graphs of another tool; `weights`, a transformers folder;
            `adapter`, a PEFT adapter; `module`, a PyTorch model in memory.
        id: The user's name for the model.
        task: Its task.
        folder: Its folder; `None` for a module.
        revision: Its commit, if it came from the Hub.
        artifact: For an artifact, and for foreign graphs, whose manifest was read from them.
        module: For a module.
        hub: How it is reached, and whether its code may run; for whatever is loaded on its behalf.
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
    def of_artifact(cls, artifact: Artifact, hub: HubOptions | None = None) -> Resolved:
        """An artifact as a model that was found."""
        return cls(
            kind="artifact", id=str(artifact.path), task=artifact.task, folder=artifact.path, artifact=artifact,
            hub=hub or HubOptions(),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The last part of its id, for tables."""
        return Path(self.id).name

    @property
    def location(self) -> Location:
        """Where its files are."""
        assert self.folder is not None, "a module has no folder"
        return Location(self.id, self.folder, self.revision)

    @property
    def has_weights(self) -> bool:
        """Whether PyTorch can load it."""
        if self.kind in ("adapter", "module"):
            return True
        assert self.folder is not None
        return bool(checkpoint_weights(self.folder))
