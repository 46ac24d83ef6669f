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
_SEVERAL = (
    "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
_INTEGERS = (
    *_SEVERAL, "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pad_token_id", "forced_bos_token_id",
)  # fmt: skip
_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time", "guidance_scale",
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
)  # fmt: skip
_BOOLEANS = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values")
_GENERATION: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (int, "integer", _INTEGERS),
    (int | float, "number", _NUMBERS),
    (bool, "boolean", _BOOLEANS),
)
"""What values of a generation config are, and which of them may be several in a list."""
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
    if loader == "GenerationConfig":
        _check_generation(path / "generation_config.json", made)
    return made


def open_generation_config(folder: str | os.PathLike[str], config: Any) -> Any:
    """The settings of `generate`, from where transformers reads them.

    Checkpoints of transformers before 4.26 keep them in `config.json`; transformers 5 drops them from a config that it opens.

    Args:
        folder: The folder.
        config: The opened config, whose token ids are the settings of a folder with none of these files.

    Raises:
        IntegrityError: The file is damaged or not understood.
    """
    import transformers

    path = Path(folder)
    if (path / "generation_config.json").exists():
        return open_companion("GenerationConfig", path)
    if not (path / "config.json").exists():
        return transformers.GenerationConfig.from_model_config(config)
    try:
        made = transformers.GenerationConfig.from_model_config(read_json(path / "config.json"))
    except (AttributeError, TypeError, ValueError) as error:
        _explain(error, path, "generation config", ("config.json",))
    _check_generation(path / "config.json", made)
    return made


def _check_generation(file: Path, made: Any) -> None:
    """Hold a generation config against the kinds of values that transformers has; it looks at few of them itself.

    Raises:
        IntegrityError: A value of another kind.
    """
    for kind, word, names in _GENERATION:
        for name in names:
            value: Any = getattr(made, name, None)
            if value is None:
                continue
            items: list[Any] = value if name in _SEVERAL and isinstance(value, list) else [value]
            for one in items:
                if not isinstance(one, kind) or (isinstance(one, bool) and kind is not bool):
                    raise IntegrityError(f"{file} says {one!r:.100} for {name}, which is no {word}.", fix=_AGAIN)


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
