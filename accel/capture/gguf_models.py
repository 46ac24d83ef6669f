"""Prepare a GGUF file of llama.cpp: write a transformers folder with its config and tokenizer, and link the file as the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..artifact.atomic_folder_writing import discard, staging, tool_versions
from ..artifact.checksums import file_digest
from ..artifact.gguf_files import GGUF_MODELS, GGUF_WEIGHTS
from ..artifact.home_folder import accel_home
from ..errors import ExportError, OutputFolderError
from ..upstream.auto_models import classes_for
from ..upstream.output_silencing import quiet
from .tracer import first_lines

logger = logging.getLogger(__name__)

_PACKAGES = ("gguf", "accelerate")
_LAYOUT = 1
"""Version of the folder's content. A change makes accel write all folders again."""
_ORIGINAL = "use the transformers repository from which the GGUF file was created."
_ROTATION_FACTORS = "rope_freqs.weight"


def gguf_folder(file: Path) -> Path:
    """Return a transformers folder for a GGUF file: `config.json`, the tokenizer, and a link to the file.

    The folder is kept under `ACCEL_HOME`. The weights are not copied: `load_source` reads them from the GGUF file.

    Raises:
        ExportError: A package that transformers needs to read GGUF files is not installed, the file is damaged or split, or
            transformers cannot read models of its architecture.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ExportError(
            f"{file} is a GGUF file. transformers reads GGUF files with the packages {' and '.join(_PACKAGES)}, and "
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed.",
            fix=f"pip install {' '.join(missing)}",
        )
    file = file.absolute()
    key = {
        "file": file_digest(file),
        "layout": _LAYOUT,
        "versions": tool_versions("transformers", "tokenizers", "gguf"),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    folder = accel_home() / GGUF_MODELS / f"{file.stem.replace(' ', '_')[:60]}-{digest}"
    if not (folder / "config.json").is_file():
        discard(folder)
        try:
            with staging(folder) as temporary:
                _write(file, temporary)
        except OutputFolderError:
            # Another process wrote the same folder at the same time.
            if not (folder / "config.json").is_file():
                raise
    _link(file, folder / GGUF_WEIGHTS)
    return folder


def _link(file: Path, link: Path) -> None:
    """Link the GGUF file, or copy it where links are not supported. An existing link to another path is replaced."""
    if link.exists() and link.samefile(file):
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.symlink_to(file.resolve())
    except OSError:
        shutil.copyfile(file, temporary)
    temporary.replace(link)


def _write(file: Path, folder: Path) -> None:
    import transformers

    metadata, tensors = _read_header(file)
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    architecture = metadata.get("general.architecture")
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(file.parent, **source)
    # transformers raises different exceptions for missing metadata and for unsupported architectures.
    except Exception as error:
        raise ExportError(
            f"transformers cannot read the GGUF file {file}, whose architecture is {architecture!r}: {first_lines(error)}",
            fix=_ORIGINAL,
        ) from error
    if not config.architectures:
        # A GGUF file with this architecture contains a text generator. Other files state their class.
        config.architectures = sorted(classes_for(transformers.AutoModelForCausalLM, config))[:1] or None
    _set_rotation(config, file, metadata, tensors)
    config.save_pretrained(folder)
    if "tokenizer.ggml.tokens" not in metadata:
        logger.warning("%s contains no tokenizer. Pass processor=... to save a tokenizer in the artifact.", file)
        return
    try:
        with quiet():
            transformers.AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
    except Exception as error:
        raise ExportError(
            f"transformers cannot read the tokenizer in the GGUF file {file}: {first_lines(error)}", fix=_ORIGINAL
        ) from error
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    # The class of a model family would build the tokenizer again with its own rules. The base class uses tokenizer.json.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the metadata of a GGUF file (for arrays, only their length) and the data of its tensors, which is memory-mapped.

    Raises:
        ExportError: The file is not a GGUF file, is damaged, or is a part of a split file.
    """
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(file)
        metadata = {
            name: len(field.data) if field.types[0] == GGUFValueType.ARRAY else field.contents()
            for name, field in reader.fields.items()
        }
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    # The reader raises different exceptions for damaged files.
    except Exception as error:
        raise ExportError(
            f"{file} is not a GGUF file, or is damaged: {first_lines(error)}", fix="download the file again."
        ) from error
    if metadata.get("split.count", 0) > 1:
        raise ExportError(
            f"{file} is one of {metadata['split.count']} parts of a GGUF file, and transformers cannot read split files.",
            fix="merge the parts with `llama-gguf-split --merge FIRST_PART MERGED_FILE`, and pass the merged file.",
        )
    return metadata, tensors


def _set_rotation(config: Any, file: Path, metadata: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Set the scaling of rotary position embeddings, which transformers does not read from most GGUF files.

    Raises:
        ExportError: The file contains another kind of scaling.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = all(isinstance(value, dict) for value in parameters.values())
    # Sliding attention has no scaling: llama.cpp scales only the layers with full attention.
    scaled: dict[str, Any] = parameters.get("full_attention", {}) if by_layer else parameters
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    factors = [name for name in tensors if name.startswith(("rope_freqs.", "rope_factors_"))]
    if scaled.get("rope_type", "default") != "default" or (kind == "none" and not factors):
        return
    factor = metadata.get(f"{metadata['general.architecture']}.rope.scaling.factor")
    if kind == "linear" and factor and scaled and not factors:
        scaled.update(rope_type="linear", factor=float(factor))
        return
    if kind == "none" and scaled and factors == [_ROTATION_FACTORS]:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values = np.asarray(tensors[_ROTATION_FACTORS], dtype=np.float64).reshape(-1)
        settings = {
            "factor": float(values.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if values.shape == (head // 2,) and np.allclose(
            values, _factors(scaled["rope_theta"], head, settings), rtol=1e-4
        ):
            scaled.update(rope_type="llama3", **settings)
            return
    raise ExportError(
        f"The rotary position embeddings of {file} have a scaling that accel cannot set in the config "
        f"({', '.join([f'rope.scaling.type is {kind}', *factors])}). Without the scaling, the model would give wrong answers.",
        fix=_ORIGINAL,
    )


def _factors(theta: float, head: int, settings: dict[str, float]) -> npt.NDArray[np.float64]:
    """Return the factors of the rotary frequencies that llama.cpp's converter computes from Llama 3's settings."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    position = settings["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((position - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / settings["factor"] + smooth))
