"""Interface of readers of model folders without accel's manifest, such as folders that Optimum wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from ..artifact.manifest import Artifact

Part = Literal["encoder", "merged", "first", "following", "model"]
"""Part of a generating model that a graph contains.

`encoder` is the encoder. `first` is a decoder for the prompt, without a KV cache as input. `following` is a decoder that reads a KV
cache. `merged` is a decoder graph that contains `first` and `following`. `model` is the complete model.
"""


@runtime_checkable
class FolderReader(Protocol):
    """Reader of model folders without accel's manifest.

    `BackendSpec.folder_reader` contains the path of the class. The class is created without arguments. A reader needs no device, and it
    needs a package in `BackendSpec.requires` only if it imports this package itself.
    """

    def choose(
        self, name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
    ) -> list[str]:
        """Return the graph files of a repository that `adopt` will read, so that only these files are downloaded.

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
        """Return the graph files of a generating model, by the part of the model that they contain.

        Args:
            folder: Folder of the model.
            file_name: File name of one of the graphs. It determines the subfolder and the variant of all graphs.
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
            subfolder: Subfolder with the graphs. If empty, the reader searches all folders.
            file_name: File name of the graph, relative to the folder and the subfolder. If the model has several graphs, the name of any
                of these graphs.
            variant: Ending of the graphs' file names.

        Raises:
            ArtifactNotFoundError: There is no such graph, or several graphs match. The message lists the existing graphs.
            IntegrityError: A graph cannot be read, or does not match its config.
            TaskError: The graphs do not belong to a model for the task.
        """
