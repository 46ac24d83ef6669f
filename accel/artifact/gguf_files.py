"""Find GGUF files of llama.cpp in folders."""

from __future__ import annotations

from pathlib import Path

GGUF = ".gguf"
GGUF_MODELS = "gguf"
"""Name of the folder in `ACCEL_HOME` with the configs and tokenizers of GGUF files."""
GGUF_WEIGHTS = "gguf-weights.gguf"
"""Name of the link to the GGUF file in a folder under `GGUF_MODELS`."""


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder."""
    return sorted(path for path in folder.glob(f"*{GGUF}") if path.is_file())


def gguf_weights(folder: Path) -> Path | None:
    """Return the link to a GGUF file in a folder that accel wrote for the file, or `None` for other folders."""
    path = folder / GGUF_WEIGHTS
    return path if path.is_file() else None
