"""Tokenizers, processors and generation configs beside a model, as transformers opens them; what goes wrong is an error of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import AccelError, ArtifactNotFoundError, BackendUnavailableError, ConfigError, IntegrityError
from .reading import read_json
from .unrecorded import KINDS

_TOKENIZER, _PROCESSOR = KINDS["tokenizer"], KINDS["processor"]
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AutoTokenizer": ("tokenizer", _TOKENIZER),
    "AutoImageProcessor": ("image processor", _PROCESSOR),
    "AutoFeatureExtractor": ("feature extractor", _PROCESSOR),
    "AutoProcessor": ("processor", (*_PROCESSOR, *_TOKENIZER)),
    "AutoConfig": ("config", ("config.json",)),
    "GenerationConfig": ("generation config", ("generation_config.json",)),
}
"""What each of transformers' classes is called here, and which files it reads of a folder."""
_OWN_FILES = ("AutoTokenizer", "GenerationConfig")
_AGAIN = "copy the original model's file over it; in an artifact of accel, record that with: accel validate FOLDER --accept-files."
_LONGEST = 300


def open_companion(
    loader: str, folder: str | os.PathLike[str], *, local_files_only: bool = True, **arguments: Any
) -> Any:
    """What transformers' class of that name opens of a folder.

    Args:
        loader: `AutoTokenizer`, `AutoImageProcessor`, `AutoFeatureExtractor`, `AutoProcessor`, `AutoConfig`, `GenerationConfig`, or
            another class with `from_pretrained`.
        folder: The folder; a Hub id where `local_files_only` is `False`.
        local_files_only: Never ask the Hub.
        **arguments: More arguments of `from_pretrained`, as `trust_remote_code`.

    Raises:
        ArtifactNotFoundError: The folder has none.
        IntegrityError: It has one, which is damaged or not understood.
        BackendUnavailableError: It needs a package that is not installed.
        ConfigError: It needs code that comes with the model, which was not trusted.
    """
    import transformers

    kind, patterns = _KINDS.get(loader, (loader, ("*.json",)))
    path = Path(folder)
    # Without any file transformers makes some tokenizers of no vocabulary, which read every word as unknown. Processors of
    # images may stand in a config.json.
    if (
        loader in _OWN_FILES
        and path.is_dir()
        and not any(found for pattern in patterns for found in path.glob(pattern))
    ):
        raise _missing(path, kind)
    if loader != "GenerationConfig":
        # Else transformers asks on standard input.
        arguments.setdefault("trust_remote_code", False)
    try:
        made = getattr(transformers, loader).from_pretrained(folder, local_files_only=local_files_only, **arguments)
    # Whatever libraries and code of the model's raise of files that are none; panics of tokenizers are no `Exception`.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _explain(error, folder, kind, patterns)
    if kind == "tokenizer" and not isinstance(made.model_max_length, int | float):
        raise IntegrityError(
            f"{path / 'tokenizer_config.json'} says {made.model_max_length!r} for model_max_length, which is no number.",
            fix=_AGAIN,
        )
    return made


def _explain(error: BaseException, folder: str | os.PathLike[str], kind: str, patterns: Sequence[str]) -> NoReturn:
    """Raise what happened in our words."""
    if isinstance(error, AccelError):
        raise error
    path, why = Path(folder), " ".join(str(error).split())[:_LONGEST]
    _check_json(path, patterns, error)
    if isinstance(error, ImportError):
        raise BackendUnavailableError(
            f"The {kind} of {folder} needs a package that is not installed: {why}", fix="install that package."
        ) from error
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"The {kind} of {folder} is made by code that comes with the model, which does not run unasked.",
            fix="read that code, then pass trust_remote_code=True.",
        ) from error
    if isinstance(error, OSError) and not isinstance(error, PermissionError):
        raise _missing(path, kind, why) from error
    raise IntegrityError(
        f"The {kind} of {folder} cannot be read: {type(error).__name__}: {why}.", fix=_AGAIN
    ) from error


def _check_json(folder: Path, patterns: Sequence[str], cause: BaseException) -> None:
    """Raise for the first of the files that is not what every such file is, an object; transformers does not name it."""
    for found in sorted({one for pattern in patterns for one in folder.glob(pattern)}):
        if found.suffix == ".json" and found.is_file():
            try:
                read_json(found)
            except IntegrityError as error:
                raise IntegrityError(error.message, fix=_AGAIN) from cause


def _missing(folder: Path, kind: str, why: str = "") -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"{folder} has no {kind} that can be opened{': ' if why else ''}{why.rstrip('.')}.",
        fix=f"copy the files of the original model's {kind} into it, or check the path.",
    )
