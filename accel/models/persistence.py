"""Saving a model to a folder that loads without its source model, and uploading it to the Hub."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..artifact.atomic_folder_writing import check_output, checkpoint_weights, copy_companions, is_companion, merging
from ..artifact.hub import http_errors, hub_reason, hub_timeout_s, is_outage
from ..artifact.manifest import MANIFEST, Artifact, with_files
from ..config import checked_arguments
from ..errors import ArtifactError, OutputFolderError
from .model_card import CARD, is_replaceable, model_card


class Saveable:
    """Methods that save a model to a folder and upload it to the Hub."""

    artifact: Artifact
    config: Any
    generation_config: Any

    @checked_arguments()
    def save_pretrained(
        self, folder: str | os.PathLike[str], *, overwrite: bool = False, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save the model to a folder that loads without the source model: graph, manifest, config, tokenizer or processor.

        The folder also gets a model card, `README.md`, with the numbers of the manifest. A card that somebody else wrote is kept.

        Args:
            folder: The target folder. Other files in it are kept. If it contains a tokenizer or processor, the saved model uses it.
            overwrite: Replace an existing artifact in the folder, and files with the same names.
            push_to_hub: Also upload the model, with the arguments of `push_to_hub`.

        Raises:
            OutputFolderError: The folder is the model's own folder or contains a checkpoint; or `overwrite` is false and files would be
                replaced.
        """
        generation = self.generation_config
        card = self.model_card(Path(folder).name)
        target = save_model(
            self.artifact, self.config, folder, generation_config=generation, overwrite=overwrite, card=card
        )
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", target.name), **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload an accelerated model",
    ) -> str:
        """Upload the files of `save_pretrained` and a model card that describes how the model was made. Return the URL."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        api = HfApi(token=token)
        try:
            _check_reached(api, repo_id)
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                write_model(self.artifact, self.config, folder, generation_config=self.generation_config, public=True)
                (folder / CARD).write_text(self.model_card(repo.repo_id), encoding="utf-8")
                info = api.upload_folder(
                    repo_id=repo.repo_id, folder_path=folder, revision=revision, commit_message=commit_message
                )
        except http_errors(HFValidationError) as error:
            reason, fix = hub_reason(error, name=repo_id, revision=revision)
            raise ArtifactError(
                f"The model could not be uploaded to the Hub repository {repo_id!r}. {reason}", fix=fix
            ) from error
        return str(info)

    def model_card(self, repo_id: str) -> str:
        """Return a model card in Markdown: the source model, each step, its measured difference, and how to load the model."""
        name = type(self).__name__
        code = f'from accel import {name}\n\nmodel = {name}.from_pretrained("{repo_id}")'
        return model_card(self.artifact, repo_id, code=code)


def write_model(
    artifact: Artifact,
    config: Any,
    folder: Path,
    *,
    generation_config: Any = None,
    public: bool = False,
    companions: bool = True,
) -> None:
    """Write all files of a model into a folder.

    Args:
        artifact: The artifact with graphs and companion files.
        config: The model's current transformers config; `None` for a custom graph.
        folder: The target folder; its existing companion files are kept.
        generation_config: The current generation config, for generating models.
        public: Whether to remove local paths from the manifest.
        companions: Whether the manifest records configs and tokenizer files, so that later changes are detected.
    """
    manifest = artifact.manifest
    if public and manifest.source is not None:
        manifest = replace(manifest, source=replace(manifest.source, id=_public_name(manifest.source.id)))
    names = [[record.name for record in component.files] for component in artifact.components]
    places = {Path(name).parent for of_one in names for name in of_one}
    # If all graph files are in one subfolder, such as `onnx`, write the graphs next to config.json and without the subfolder.
    inside = next(iter(places)) if len(places) == 1 else Path()
    for name in {name for of_one in names for name in of_one}:
        target = folder / Path(name).relative_to(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / name, target)
    components = with_files(
        folder,
        [replace(graph, file=Path(graph.file).relative_to(inside).as_posix()) for graph in artifact.components],
        [[Path(name).relative_to(inside).as_posix() for name in of_one] for of_one in names],
    )
    export_manifest = artifact.path / "export.json"
    if export_manifest.is_file():
        shutil.copyfile(export_manifest, folder / export_manifest.name)
    copy_companions(artifact.path, folder)
    if config is not None:
        config.save_pretrained(folder)
    if generation_config is not None:
        # `save_pretrained` rejects settings that many published models have.
        generation_config.to_json_file(folder / "generation_config.json")
    Artifact.create(folder, replace(manifest, components=components), companions=companions)


def save_model(
    artifact: Artifact,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    generation_config: Any,
    overwrite: bool,
    companions: bool = True,
    card: str | None = None,
) -> Path:
    """Write all files of a model into a folder that may contain other files; return the folder.

    If the folder contains a tokenizer or processor, the saved model uses it. The model card `card` is written if the folder has no card, or
    a card that accel wrote.

    Raises:
        OutputFolderError: The folder is the model's own folder or contains a checkpoint; or `overwrite` is false and the folder contains an
            artifact or files with the same names.
    """
    target = Path(folder).expanduser().absolute()
    if not target.is_dir() or not any(target.iterdir()) or target.resolve() == artifact.path.resolve():
        check_output(target, artifact.path)
    elif (target / MANIFEST).exists() and not overwrite:
        raise OutputFolderError(
            f"The folder {target} already contains an artifact.",
            fix="save to another folder, or replace the artifact with overwrite=True.",
        )
    with merging(target, needs=artifact.bytes) as temporary:
        processor_files = (
            () if overwrite or not target.is_dir() else [path for path in target.iterdir() if _is_a_processors(path)]
        )
        for path in processor_files:
            shutil.copyfile(path, temporary / path.name)
        write_model(artifact, config, temporary, generation_config=generation_config, companions=companions)
        if card is not None and is_replaceable(target / CARD):
            (temporary / CARD).write_text(card, encoding="utf-8")
        names = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
        replaced = sorted(str(n) for n in names if n.name != CARD and _differs(temporary / n, target / n))
        if replaced and not overwrite:
            raise OutputFolderError(
                f"Saving the model would replace files in {target} that have other contents: {', '.join(replaced)}.",
                fix="save to another folder, or replace the files with overwrite=True.",
            )
        old = _graphs_of(target) if overwrite else set()
        weights = [path.name for path in checkpoint_weights(target) if path.name not in old.union(map(str, names))]
        if weights:
            raise OutputFolderError(
                f"The folder {target} contains the weights of a PyTorch checkpoint ({', '.join(weights)}). If an artifact were saved in "
                "the same folder, accel would load the artifact instead of the checkpoint, even after the checkpoint was trained again.",
                fix=f"save to another folder, or to a subfolder such as {target / 'onnx'}.",
            )
    for name in old - set(map(str, names)):
        (target / name).unlink(missing_ok=True)
    return target


def _graphs_of(folder: Path) -> set[str]:
    """Return the names of the graph files of the artifact in a folder; empty if it has no complete artifact."""
    try:
        artifact = Artifact.load(folder)
    except ArtifactError:
        return set()
    return {record.name for component in artifact.components for record in component.files}


def _is_a_processors(path: Path) -> bool:
    return is_companion(path) and path.name not in ("config.json", "generation_config.json")


def _differs(new: Path, old: Path) -> bool:
    return old.exists() and (not old.is_file() or not filecmp.cmp(new, old, shallow=False))


def _check_reached(api: Any, repo_id: str) -> None:
    """Raise if the Hub is unreachable, because an upload would retry for a minute; a missing repository is not an error."""
    try:
        api.model_info(repo_id, timeout=hub_timeout_s())
    except http_errors() as error:
        if is_outage(error):
            raise


def _public_name(source: str) -> str:
    """Return a Hub id unchanged, or the last part of an absolute path."""
    return Path(source).name if Path(source).is_absolute() else source
