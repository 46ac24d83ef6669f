"""Texts with their token ids, stored in `probes.safetensors`, to check that a tokenizer still splits texts as where the artifact was made.

The checksums of an artifact detect changed tokenizer files. These texts detect versions of transformers or tokenizers that read the same
files differently, and folders of other tools whose tokenizer was replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import ProbeError

PROBES = "probes.safetensors"
"""File in an artifact's folder with a few inputs and PyTorch's outputs, to check the artifact on each machine that runs it."""
TEXTS = ("Is my card (n° 12,345.67) not HERE?", "Zürich  naïve 東京 مرحبا 🙂\tend\n", "")
METADATA = "accel_tokens"
SWITCH = "ACCEL_PROBES"
"""Environment variable that turns all checks with probes off, with the value 0."""
_MOST = 1 << 20


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Return the token ids of the texts, and the versions of the libraries."""
    ids = {text: list(map(int, tokenizer(text)["input_ids"])) for text in TEXTS}
    return {"ids": ids, "versions": {name: version(name) for name in ("tokenizers", "transformers")}}


def check_tokens(folder: Path, tokenizer: Any) -> None:
    """Compare a tokenizer with the token ids in its folder. Takes less than a millisecond.

    Raises:
        ProbeError: A text has other token ids.
    """
    recorded = _metadata(folder / PROBES).get(METADATA)
    if recorded is None or os.environ.get(SWITCH) == "0":
        return
    try:
        values = json.loads(recorded)
        expected: Mapping[str, list[int]] = values["ids"]
        versions: Mapping[str, str] = values["versions"]
    except (ValueError, KeyError, TypeError):
        return
    actual = tokens_of(tokenizer)
    for text, ids in expected.items():
        if text in actual["ids"] and actual["ids"][text] != ids:
            changed = [
                f"{n}: {versions.get(n, 'none')} -> {v}" for n, v in actual["versions"].items() if versions.get(n) != v
            ]
            since = (
                f"Changed since then: {'; '.join(changed)}."
                if changed
                else "The versions of transformers are the same."
            )
            raise ProbeError(
                f"The tokenizer of {folder} splits texts differently from where the artifact was made: {text!r} becomes the tokens "
                f"{actual['ids'][text][:20]}, and was {ids[:20]}. {since}",
                fix="copy the tokenizer files of the original model into the folder, or install the earlier version. If you changed the "
                "tokenizer on purpose, run `accel validate FOLDER --accept-files`.",
            )


def without_tokens(folder: Path) -> None:
    """Remove the token ids from a folder's probes, because its tokenizer was changed on purpose."""
    path = folder / PROBES
    if METADATA not in _metadata(path):
        return
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    del header["__metadata__"][METADATA]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            values = json.loads(file.read(size)) if size <= _MOST else {}
    except (OSError, ValueError):
        return {}
    metadata = values.get("__metadata__", {}) if isinstance(values, dict) else {}
    return metadata if isinstance(metadata, dict) else {}
