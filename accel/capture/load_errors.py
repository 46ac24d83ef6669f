"""Error messages for models that transformers cannot load: the cause, and a fix that removes it."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors

from ..artifact.atomic_folder_writing import checkpoint_weights
from ..artifact.json_reading import read_json
from ..errors import AccelError, ExportError
from ..interfaces.task_registry import is_adapter, read_config

_DAMAGED = "delete the damaged file and download it again, or save the model again."


def load_error(folder: Path, error: Exception) -> ExportError:
    """Return the error that `accel` raises if loading the model in `folder` raised `error`."""
    try:
        problem = _config_problem(folder) or _weights_problem(folder, error)
    except (AccelError, OSError):
        problem = None
    fix = "check that config.json and the weights in the folder are complete and belong to the same model."
    if problem is None and (method := _quantization_method(folder)) is not None:
        fix = f"install the package that the message names, or export the model before its quantization by {method}."
    reason, fix = problem or (str(error), fix)
    return ExportError(f"transformers cannot load a model from {folder}: {reason}", fix=fix)


def _quantization_method(folder: Path) -> str | None:
    """Return the name of the tool that quantized the checkpoint, according to `config.json`."""
    try:
        settings = read_config(folder).get("quantization_config")
    except (AccelError, OSError):
        return None
    return str(settings.get("quant_method")) if isinstance(settings, dict) and settings.get("quant_method") else None


def _config_problem(folder: Path) -> tuple[str, str] | None:
    """Return what is wrong with `config.json` and the fix; `None` if it has a model type."""
    import transformers

    if is_adapter(folder) or not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    if config.get("model_type"):
        return None
    names = config.get("architectures") or [""]
    config_class = getattr(getattr(transformers, str(names[0]), None), "config_class", None)
    kind = getattr(config_class, "model_type", None)
    entry = (
        f'"model_type": "{kind}"' if kind else '"model_type" with the model type of the architecture in transformers'
    )
    return "its config.json has no model_type.", f"add {entry} to config.json."


def _weights_problem(folder: Path, error: Exception) -> tuple[str, str] | None:
    """Return what is wrong with the weight files and the fix; `None` if the cause of the error is unknown."""
    errors, text = list(_chain(error)), str(error)
    if absent := _missing_shards(folder):
        listed = f"{', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}"
        return (
            f"{len(absent)} weight files that the index of the weights lists are missing: {listed}"
            if len(absent) > 1
            else f"the index of the weights lists the file {listed}, which is missing.",
            "download the missing weights, or copy them into the folder.",
        )
    if any(isinstance(each, safetensors.SafetensorError) for each in errors):
        return f"{_damaged(folder, '.safetensors')} is damaged ({text}).", _DAMAGED
    if any(isinstance(each, pickle.UnpicklingError) for each in errors):
        objects = re.search(r"(?:GLOBAL|[Cc]lass) ([\w.]+)", " ".join(map(str, errors[1:])) or text)
        if objects is None:
            return f"{_damaged(folder, '.bin')} is damaged or is not a file of torch.save.", _DAMAGED
        return (
            f"{_pickled(folder)} contains a Python object ({objects.group(1)}) that torch does not load, because it could run code.",
            "use a version of the model with safetensors files, or convert the weights to safetensors on a machine where you "
            "may run this code.",
        )
    if "PytorchStreamReader" in text or any(isinstance(each, EOFError) for each in errors):
        return f"{_damaged(folder, '.bin')} is damaged.", _DAMAGED
    if "ignore_mismatched_sizes" in text:
        return (
            "the weights do not have the shapes that config.json requires.",
            "use the config.json that belongs to the weights.",
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _missing_shards(folder: Path) -> list[str]:
    """Return the names of missing weight files that the index of the weights lists. Like transformers, prefer a file with
    all weights over an index.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return []
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards: Any = read_json(index).get("weight_map")
            names = {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
            return sorted(shard for shard in names if not (folder / shard).is_file())
    return []


def _damaged(folder: Path, suffix: str) -> str:
    """Return the name of the first damaged weight file with a suffix, or a description if no file is clearly damaged."""
    is_complete = zipfile.is_zipfile if suffix == ".bin" else _opens_as_safetensors
    files = (path for path in checkpoint_weights(folder) if path.suffix == suffix)
    return next((path.name for path in files if not is_complete(path)), f"a {suffix} file")


def _opens_as_safetensors(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except (safetensors.SafetensorError, OSError):
        return False


def _pickled(folder: Path) -> str:
    names = [path.name for path in checkpoint_weights(folder) if path.suffix == ".bin"]
    return names[0] if len(names) == 1 else "a .bin file"
