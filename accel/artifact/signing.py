"""Sign the folder of an artifact, together with statements of its origin."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError
from .manifest import Artifact
from .provenance import write_provenance
from .signatures import SIGNATURE, hashed_files, signing_library


def sign(
    folder: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None, password: str | None = None
) -> Path:
    """Write the statements of an artifact's origin into its folder, and sign the folder. Takes about a second per gigabyte.

    Args:
        folder: The folder of an artifact.
        key: A private key of an elliptic curve, in PEM format. Without a key, the folder is signed with the identity of a person or
            a workload through Sigstore, which needs a network.
        password: Password of the key.

    Returns:
        The path of the signature.

    Raises:
        BackendUnavailableError: The package `model-signing` is not installed.
        ConfigError: The key cannot be read.
        IntegrityError: A file of the artifact was changed.
    """
    signing, hashing = signing_library("signing"), signing_library("hashing")
    artifact = Artifact.read_unsigned(folder)
    write_provenance(artifact)
    path = artifact.path / SIGNATURE
    path.unlink(missing_ok=True)
    config = signing.Config().set_hashing_config(hashed_files(hashing, artifact.path))
    try:
        if key is not None:
            config.use_elliptic_key_signer(private_key=Path(key), password=password)
        config.sign(artifact.path, path)
    # The library raises errors of several packages for keys, passwords and networks.
    except Exception as error:
        raise ConfigError(
            f"{artifact.path} cannot be signed: {type(error).__name__}: {error}",
            fix="pass a private key of the curve P-256, P-384 or P-521 in PEM format, for example from "
            "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem`."
            if key is not None
            else "pass a private key (--key), or sign on a machine with a network.",
        ) from error
    return path
