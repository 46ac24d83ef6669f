"""Static embedding models of sentence-transformers and model2vec: the vector of a text is the mean of one vector per token.

These folders contain no transformer, only a table of vectors and a tokenizer. `static_folder` writes a folder in which a transformers model
with one lookup takes the place of the transformer, so all other parts of accel handle it as an embedding model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from ..artifact.atomic_folder_writing import discard, staging, tool_versions
from ..artifact.checksums import folder_digest
from ..artifact.home_folder import accel_home
from ..artifact.json_reading import read_json, read_json_list
from ..artifact.sentence_fields import MODULES, STATIC_PADDING
from ..errors import IntegrityError, OutputFolderError
from ..interfaces.tracing_wrapper import Tensors
from .sentence_embeddings import module_weights

_FOLDERS = "static-embeddings"
_LAYOUT = 1
"""Version of the folder's content. A change makes accel write all folders again."""
_WEIGHTS = "model.safetensors"


class StaticEmbeddingConfig(transformers.PretrainedConfig):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Config of a model that has only one vector per token.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Number of dimensions of a vector.
        **settings: Fields of every config of transformers.
    """

    model_type = "accel-static-embedding"

    def __init__(self, vocab_size: int = 1, hidden_size: int = 1, **settings: Any) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**settings)


transformers.AutoConfig.register(StaticEmbeddingConfig.model_type, StaticEmbeddingConfig, exist_ok=True)


class StaticEmbedding(torch.nn.Module):
    """Look up one vector per token.

    Args:
        config: The sizes of the table.
        weight: The table, `(vocab_size, hidden_size)`.
    """

    main_input_name = "input_ids"

    def __init__(self, config: StaticEmbeddingConfig, weight: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        rows, size = weight.shape
        self.embedding = torch.nn.Embedding(rows, size, _weight=weight, _freeze=True)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the table."""
        return self.embedding

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Tensors:
        """Return `last_hidden_state: (batch, sequence, hidden_size)`, the vectors of the tokens."""
        return {"last_hidden_state": self.embedding(input_ids)}


def load_static(folder: Path, dtype: torch.dtype) -> StaticEmbedding | None:
    """Load the model of a folder that `static_folder` wrote; `None` for other folders."""
    if not is_static_folder(folder):
        return None
    config = StaticEmbeddingConfig(**read_json(folder / "config.json"))
    return StaticEmbedding(config, module_weights(folder)["embedding.weight"].to(dtype)).eval()


def is_static_folder(folder: Path) -> bool:
    """Return whether `static_folder` wrote the folder."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == StaticEmbeddingConfig.model_type


def static_folder(folder: Path) -> Path:
    """Return a folder with a transformers config for a static embedding model. It is kept under `ACCEL_HOME`.

    Raises:
        ExportError, IntegrityError: The weights or the tokenizer are missing or damaged.
    """
    versions = tool_versions("transformers", "tokenizers")
    key = json.dumps({"model": folder_digest(folder), "layout": _LAYOUT, "versions": versions}, sort_keys=True)
    target = accel_home() / _FOLDERS / f"{folder.name[:60]}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if not (target / "config.json").is_file():
        discard(target)
        try:
            with staging(target) as temporary:
                _write(folder, temporary)
        except OutputFolderError:
            # Another process wrote the same folder at the same time.
            if not (target / "config.json").is_file():
                raise
    return target


def _write(folder: Path, target: Path) -> None:
    from safetensors.torch import save_file

    first, *others = read_json_list(folder / MODULES)
    place = folder / str(first["path"])
    table, padding = _table(place), _write_tokenizer(place / "tokenizer.json", target)
    missing = max(padding + 1 - len(table), 0)
    table = torch.nn.functional.pad(table, (0, 0, 0, missing))
    table[padding] = 0
    save_file({"embedding.weight": table}, target / _WEIGHTS)
    config = StaticEmbeddingConfig(*table.shape, architectures=[StaticEmbedding.__name__])
    config.save_pretrained(target)
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "static_1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (target / "static_1_Pooling").mkdir()
    (target / "static_1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    for entry in others:
        module = folder / str(entry["path"])
        if entry["path"] and module.is_dir():
            shutil.copytree(module, target / str(entry["path"]))
        entries.append(entry)
    (target / MODULES).write_text(json.dumps(entries, indent=1))
    general = folder / "config_sentence_transformers.json"
    if general.is_file():
        shutil.copyfile(general, target / general.name)


def _table(place: Path) -> torch.Tensor:
    """Return one vector per token. model2vec can share vectors of several tokens (`mapping`) and scale them (`weights`)."""
    weights = module_weights(place)
    table = weights.get("embedding.weight", weights.get("embeddings"))
    if table is None or table.dim() != 2:
        raise IntegrityError(
            f"{place} does not contain one vector per token: it contains {sorted(weights)}.",
            fix="download the model's files again.",
        )
    table = table.float()
    if "embedding.weight" in weights:
        return table
    if (rows := weights.get("mapping")) is not None:
        table = table[rows.long()]
    if (scales := weights.get("weights")) is not None:
        table = table * scales.float()[:, None]
    return table.contiguous()


def _write_tokenizer(file: Path, target: Path) -> int:
    """Write a tokenizer that adds no special tokens to texts, and return the id of its padding token. A truncation in the file is kept."""
    from tokenizers import Tokenizer

    values = read_json(file)
    truncation = values.get("truncation") or {}
    try:
        tokenizer = Tokenizer.from_str(
            json.dumps({**values, "truncation": None, "padding": None, "post_processor": None})
        )
    # tokenizers raises a plain Exception for an invalid file.
    except Exception as error:
        raise IntegrityError(f"{file} cannot be read: {error}", fix="download the model's files again.") from error
    limit = {"model_max_length": truncation["max_length"]} if truncation.get("max_length") else {}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], pad_token=STATIC_PADDING, **limit
    )
    fast.save_pretrained(target)
    return int(fast.pad_token_id)
