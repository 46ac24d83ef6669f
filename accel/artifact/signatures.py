"""Checks of the signatures of model folders with OpenSSF's package `model-signing`. `signing` writes signatures.

The signature `model.sig` covers every file of the folder: graphs, configs, tokenizers, the manifest with its numbers, and the statements
of `provenance`. `model_signing verify` accepts it.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, ConfigError, IntegrityError

SIGNATURE = "model.sig"
STATEMENT = "accel.intoto.json"
"""In-toto statement about the origin of an artifact, which is signed together with the other files."""
MATERIALS = "accel.cdx.json"
"""CycloneDX bill of materials of an artifact."""
REQUIREMENT = "ACCEL_REQUIRE_SIGNATURE"
"""Environment variable with the path of a public key. Every opened folder must have a signature of this key."""


def verify_signature(folder: Path, public_key: str | os.PathLike[str]) -> None:
    """Check that a folder has a signature of a key, and that no file was changed, added, renamed or removed.

    Args:
        folder: The folder.
        public_key: The public key in PEM format.

    Raises:
        BackendUnavailableError: The package `model-signing` is not installed.
        ConfigError: The public key cannot be read.
        IntegrityError: The folder is not signed, or differs from what was signed.
    """
    verifying, hashing = signing_library("verifying"), signing_library("hashing")
    signature = folder / SIGNATURE
    if not Path(public_key).is_file():
        raise ConfigError(
            f"The public key {public_key} does not exist.", fix=f"correct --require-signature or {REQUIREMENT}."
        )
    if not signature.is_file():
        raise IntegrityError(
            f"{folder} is not signed: it has no {SIGNATURE}, and a signature of {public_key} is required.",
            fix="use a signed copy, or sign the folder with `accel sign FOLDER --key PRIVATE_KEY`.",
        )
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=Path(public_key))
        config.set_hashing_config(hashed_files(hashing, folder)).verify(folder, signature)
    # The library raises errors of several packages for keys and signatures.
    except Exception as error:
        raise IntegrityError(
            f"The signature of {folder} is not valid: {' '.join(str(error).split()) or type(error).__name__}.",
            fix="copy the folder again from its source. If you changed it on purpose, sign it again.",
        ) from error


def check_required(folder: Path) -> None:
    """Check the signature of a folder if the environment variable `ACCEL_REQUIRE_SIGNATURE` names a public key.

    Raises:
        IntegrityError: The folder is not signed, or differs from what was signed.
    """
    if key := os.environ.get(REQUIREMENT):
        verify_signature(folder, key)


def hashed_files(hashing: Any, folder: Path) -> Any:
    """Return the settings of the library: all files except for the signature and git's files, each with SHA-256."""
    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256")
    return config.set_ignored_paths(paths=[folder / SIGNATURE], ignore_git_paths=True)


def signing_library(name: str) -> Any:
    """Import a module of `model_signing`.

    Raises:
        BackendUnavailableError: The package is not installed.
    """
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        raise BackendUnavailableError(
            f"Signatures need the package model-signing: {error}.", fix='pip install "accel-transformers[sign]".'
        ) from error
