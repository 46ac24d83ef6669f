"""Detect files in an artifact's folder that are not in its manifest, although libraries would read them by name."""

from __future__ import annotations

import fnmatch
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
        "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "router_config.json",
        "[0-9]_*/config.json", "[0-9]_*/router_config.json", "[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin",
        "query_[0-9]_*/config.json", "query_[0-9]_*/model.safetensors", "query_[0-9]_*/pytorch_model.bin",
        "query_[0-9]_*/idf.json",
    ),
}  # fmt: skip
"""Names of the files that transformers and `encode` look for in a folder, by kind."""


def check_nothing_added(folder: Path, recorded: Iterable[str]) -> None:
    """Refuse unrecorded files of a kind that has recorded files, because they could silently change results.

    A tokenizer may be added to an artifact without a tokenizer.

    Raises:
        IntegrityError: There is such a file. The message names the first one.
    """
    recorded_names = set(recorded)
    kinds = {kind for name in recorded_names if (kind := kind_of(name)) is not None}
    for name in files_within(folder):
        if name not in recorded_names and (kind := kind_of(name)) in kinds:
            raise IntegrityError(
                f"{folder / name} is not recorded in the manifest of the artifact. transformers would read it as a part of the "
                f"{kind}, which could change results.",
                fix="remove the file. If you added it on purpose, run `accel validate FOLDER --accept-files`.",
            )


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name relative to the folder; `None` if no library looks for that name."""
    for kind, patterns in KINDS.items():
        if any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


def files_within(folder: Path) -> list[str]:
    """Return the names, relative to the folder, of files in the folder and its direct subfolders."""
    files = (path for path in (*folder.glob("*"), *folder.glob("*/*")) if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files)
