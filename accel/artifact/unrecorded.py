"""Files that lie beside an artifact's own, and would be read with them by their names."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import IntegrityError

KINDS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": (
        "tokenizer.json", "tokenizer.*.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "chat_template.json", "additional_chat_templates/*", "vocab.txt", "vocab*.json", "merges.txt",
        "bpe.codes", "*.model", "*.spm", "*.vocab", "*.tokenizer", "*.tiktoken", "tekken.json", "byte_maps.json", "emoji.json",
        "entity_vocab.json", "normalizer.json", "word_*.json",
    ),
    "processor": (
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    ),
    "generation config": ("generation_config.json",),
    "sentence-transformers module": (
        "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json",
        "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin",
    ),
}  # fmt: skip
"""Names by which transformers and `encode` read files of a folder, whether or not anything names them."""


def check_nothing_added(folder: Path, recorded: Iterable[str]) -> None:
    """Refuse files that were not recorded, of a kind whose others were: they would change answers unseen.

    An artifact without a tokenizer may be given one.

    Raises:
        IntegrityError: There is one; it is named.
    """
    own = set(recorded)
    kinds = {kind for name in own if (kind := kind_of(name)) is not None}
    for name in _files(folder):
        if name not in own and (kind := kind_of(name)) in kinds:
            raise IntegrityError(
                f"{folder / name} is no file of this artifact, and its {kind} would be read with it.",
                fix="remove it; where it was added on purpose: `accel validate FOLDER --accept-files`.",
            )


def kind_of(name: str) -> str | None:
    """What a file is a part of, by its name relative to the folder; `None`: nothing reads it by its name."""
    for kind, patterns in KINDS.items():
        if any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


def _files(folder: Path) -> Iterable[str]:
    """Names of files in a folder and in its subfolders, one level deep."""
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if not entry.is_dir():
                yield entry.name
                continue
            try:
                with os.scandir(entry.path) as inner:
                    yield from (f"{entry.name}/{one.name}" for one in inner)
            except OSError:
                # What cannot be looked into cannot be read.
                continue
