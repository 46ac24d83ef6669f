"""Interface of readers of model folders that other tools wrote, in a format that a backend can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from ..artifact.manifest import Artifact

Part = Literal["encoder", "merged", "first", "following", "model"]
"""Content of a graph of a generating model: the encoder; both decoders merged; the first decoder, which reads the prompt; the
following decoder, which reads a KV cache; or the whole model.
"""


@runtime_checkable
class FolderReader(Protocol):
    """Reader of folders without accel's manifest. `BackendSpec.folder_reader` names the class, which has no arguments.

    Reading needs no device. It does not need the packages in `BackendSpec.requires`, unless the reader imports them.
    """

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """Return the graphs of a repository that `adopt` will read, so that only these are downloaded.

        Args:
            name: Name of the repository, for error messages.
            files: All files of the model's folder.
            file_name: File name of the graph that the user requested.
            variant: Ending of the file names that the user requested: `quantized`, `q4`, `fp16`, ...

        Raises:
            ArtifactNotFoundError: There is no such file or variant. The message lists the existing files.
        """

    def parts(
        self, folder: Path, *, file_name: str | None = None, variant: str | None = None, encoder: bool = False
    ) -> Mapping[Part, str]:
        """Return the graphs of a generating model by their content.

        Args:
            folder: Folder of the model.
            file_name: File name of one of the graphs, which determines the subfolder and the variant.
            variant: Ending of the file names.
            encoder: Whether the model has an encoder.

        Raises:
            ArtifactNotFoundError: A graph is missing, or several graphs match.
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
            folder: Folder with the model's config.
            task: Name of the task; inferred from the config if `None`.
            subfolder: Subfolder with the graphs. Empty if the graphs are in any folder.
            file_name: Graph to use, relative to the folder and subfolder. If several graphs belong together, any of them.
            variant: Ending of the graphs' file names.

        Raises:
            ArtifactNotFoundError: There is no such graph, or several graphs match. The message lists the existing graphs.
            IntegrityError: A graph cannot be read, or does not match its config.
            TaskError: The graphs do not belong to a model for the task.
        """
