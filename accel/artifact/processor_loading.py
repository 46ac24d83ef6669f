"""Open tokenizers, processors and generation configs with transformers, and convert failures to errors of accel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config import WrongTypeError, fitted
from ..errors import AccelError, ArtifactNotFoundError, BackendUnavailableError, ConfigError, IntegrityError
from .json_reading import read_json
from .probe_file import check_tokens
from .unrecorded_files import KINDS

_TOKENIZER, _PROCESSOR = KINDS["tokenizer"], KINDS["processor"]
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AutoTokenizer": ("tokenizer", _TOKENIZER),
    "AutoImageProcessor": ("image processor", _PROCESSOR),
    "AutoFeatureExtractor": ("feature extractor", _PROCESSOR),
    "AutoProcessor": ("processor", (*_PROCESSOR, *_TOKENIZER)),
    "AutoConfig": ("config", ("config.json",)),
    "GenerationConfig": ("generation config", ("generation_config.json",)),
}
"""For each class of transformers: its name in error messages, and the files that it reads."""
_OWN_FILES = ("AutoTokenizer", "GenerationConfig")
_SEVERAL = (
    "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
_INTEGERS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pad_token_id", "forced_bos_token_id",
)  # fmt: skip
_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time", "guidance_scale",
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
)  # fmt: skip
_BOOLEANS = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values")
_GENERATION: Mapping[str, Any] = {
    **dict.fromkeys(_INTEGERS, int | None),
    **dict.fromkeys(_SEVERAL, int | tuple[int, ...] | None),
    **dict.fromkeys(_NUMBERS, float | None),
    **dict.fromkeys(_BOOLEANS, bool | None),
}
"""Types of the fields of a generation config."""
_AGAIN = (
    "replace the file with the file of the original model. In an artifact of accel, then run "
    "`accel validate FOLDER --accept-files`."
)
_LONGEST = 300


def open_companion(
    loader: str, folder: str | os.PathLike[str], *, local_files_only: bool = True, **arguments: Any
) -> Any:
    """Open a tokenizer, processor or config of a folder with a class of transformers.

    Args:
        loader: `AutoTokenizer`, `AutoImageProcessor`, `AutoFeatureExtractor`, `AutoProcessor`, `AutoConfig`,
            `GenerationConfig`, or another class with `from_pretrained`.
        folder: The folder, or a Hub id if `local_files_only` is `False`.
        local_files_only: Whether only local files are used, without requests to the Hub.
        **arguments: Further arguments of `from_pretrained`, such as `trust_remote_code`.

    Raises:
        ArtifactNotFoundError: The folder does not contain the required files.
        IntegrityError: A file is damaged or has an unknown format.
        ProbeError: A tokenizer splits texts differently from where the artifact was made.
        BackendUnavailableError: A required package is not installed.
        ConfigError: The class is Python code of the model repository, and `trust_remote_code` is not set.
    """
    import transformers

    kind, patterns = _KINDS.get(loader, (loader, ("*.json",)))
    path = Path(folder)
    # Check for the files first: without them, transformers creates some tokenizers with an empty vocabulary, which map
    # every word to the unknown token. Image processors are not checked, because config.json may describe them.
    if loader in _OWN_FILES and path.is_dir() and not any(file for pattern in patterns for file in path.glob(pattern)):
        raise _missing(path, kind)
    if loader != "GenerationConfig":
        # If the argument is missing, transformers asks the user on standard input whether code may run.
        arguments.setdefault("trust_remote_code", False)
    try:
        loaded = getattr(transformers, loader).from_pretrained(folder, local_files_only=local_files_only, **arguments)
        if kind == "tokenizer":
            check_tokens(path, loaded)
    # Libraries and the model's code may raise any error for damaged files. A Rust panic in `tokenizers` is not an
    # `Exception`.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _explain(error, folder, kind, patterns)
    if kind == "tokenizer" and not isinstance(loaded.model_max_length, int | float):
        raise IntegrityError(
            f"model_max_length is {loaded.model_max_length!r} in {path / 'tokenizer_config.json'}, but it must be a number.",
            fix=_AGAIN,
        )
    if loader == "GenerationConfig":
        _check_generation(path / "generation_config.json", loaded)
    return loaded


def open_generation_config(folder: str | os.PathLike[str], config: Any) -> Any:
    """Open the generation config of a folder: from `generation_config.json`, or from `config.json` if that file is
    missing.

    Checkpoints made before transformers 4.26 keep these settings in `config.json`. transformers 5 removes them from an
    opened config, so the file is read again.

    Args:
        folder: The folder.
        config: The opened config. Its token ids are used if the folder has neither file.

    Raises:
        IntegrityError: The file is damaged or has an unknown format.
    """
    import transformers

    path = Path(folder)
    if (path / "generation_config.json").exists():
        return open_companion("GenerationConfig", path)
    if not (path / "config.json").exists():
        return transformers.GenerationConfig.from_model_config(config)
    try:
        loaded = transformers.GenerationConfig.from_model_config(read_json(path / "config.json"))
    except (AttributeError, TypeError, ValueError) as error:
        _explain(error, path, "generation config", ("config.json",))
    _check_generation(path / "config.json", loaded)
    return loaded


def _check_generation(file: Path, loaded: Any) -> None:
    """Check the types of a generation config's fields, because transformers checks only a few.

    Raises:
        IntegrityError: A field has the wrong type.
    """
    for name, hint in _GENERATION.items():
        try:
            fitted(name, getattr(loaded, name, None), hint)
        except WrongTypeError as error:
            raise IntegrityError(
                f"{error.subject} is {error.value} in {file}, but it must be {error.expected}.", fix=_AGAIN
            ) from None


def _explain(error: BaseException, folder: str | os.PathLike[str], kind: str, patterns: Sequence[str]) -> NoReturn:
    """Raise the error class of accel that matches an error of transformers."""
    if isinstance(error, AccelError):
        raise error
    path, why = Path(folder), " ".join(str(error).split())[:_LONGEST]
    _check_json(path, patterns, error)
    if isinstance(error, ImportError):
        raise BackendUnavailableError(
            f"The {kind} of {folder} needs a Python package that is not installed: {why}",
            fix="install the package named in the message.",
        ) from error
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"The {kind} of {folder} is defined by Python code in the model repository. accel runs this code only if you "
            "allow it.",
            fix="read the code. If you trust it, pass trust_remote_code=True.",
        ) from error
    if isinstance(error, OSError) and not isinstance(error, PermissionError):
        raise _missing(path, kind, why) from error
    raise IntegrityError(
        f"The {kind} of {folder} cannot be read: {type(error).__name__}: {why}.", fix=_AGAIN
    ) from error


def _check_json(folder: Path, patterns: Sequence[str], cause: BaseException) -> None:
    """Raise for the first file that is not a JSON object. The errors of transformers do not name the file."""
    for path in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        if path.suffix == ".json" and path.is_file():
            try:
                read_json(path)
            except IntegrityError as error:
                raise IntegrityError(error.message, fix=_AGAIN) from cause


def _missing(folder: Path, kind: str, why: str = "") -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"{folder} contains no {kind} that transformers can open{': ' if why else ''}{why.rstrip('.')}.",
        fix=f"copy the {kind} files of the original model into the folder, or check the path.",
    )
