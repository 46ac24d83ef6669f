"""The interface of a reader of folders that other tools wrote, in a format that a backend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from ..artifact.manifest import Artifact

Part = Literal["encoder", "merged", "first", "following", "model"]
"""What a graph of a generating model holds: the encoder; both decoders; the decoder that reads the prompt; the one that reads a KV
cache; or the whole model.
"""


@runtime_checkable
class FolderReader(Protocol):
    """Reads folders without our manifest. `BackendSpec.folder_reader` names the class; it is made without arguments.

    Reading needs neither a device nor what `BackendSpec.requires` lists, unless the reader imports it.
    """

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """Return the graphs of a repository that `adopt` will read, so that only these are downloaded.

        Args:
            name: The repository, for errors.
            files: All files of the model's folder.
            file_name: The graph that the user named.
            variant: The ending of the names that the user asked for: `quantized`, `q4`, `fp16`, ...

        Raises:
            ArtifactNotFoundError: There is no such file or variant; lists the files that exist.
        """

    def parts(
        self, folder: Path, *, file_name: str | None = None, variant: str | None = None, encoder: bool = False
    ) -> Mapping[Part, str]:
        """Return the graphs of a generating model by the part that each holds.

        Args:
            folder: The folder.
            file_name: One of them, which says the subfolder and the variant.
            variant: The ending of their names.
            encoder: Whether the model has an encoder.

        Raises:
            ArtifactNotFoundError: A graph is missing, or several could be meant.
        """

    def adopt(
        self,
        folder: Path,
        *,
        task: str | None = None,
        subfolder: str = "",
        file_name: str | None = None,
        variant: str | None = None,
    ) -> Artifact:
        """Return an artifact for the graphs of a folder. The folder is not changed.

        Args:
            folder: The folder with the model's config.
            task: The name of its task; inferred from the config when `None`.
            subfolder: The subfolder with the graphs, where one is meant.
            file_name: The graph to take, relative to the folder and subfolder; of several that belong together, any of them.
            variant: The ending of the graphs' names.

        Raises:
            ArtifactNotFoundError: There is no such graph, or several could be meant; lists the graphs that exist.
            IntegrityError: A graph cannot be read, or does not fit its config.
            TaskError: The graphs are not those of a model for the task.
        """
