"""Read and write Triton's model configurations with its protocol buffers, which reject unknown fields and values."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailableError, ConfigError

CONFIG = "config.pbtxt"

TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
}
"""Triton's data type names by torch data type; `string` means texts."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


@functools.cache
def _library() -> tuple[Any, Any]:
    """Return the module with the protocol buffer messages, and the module that converts messages from and to text.

    Raises:
        BackendUnavailableError: The modules are not installed.
    """
    try:
        with warnings.catch_warnings():
            # protobuf warns if its version is one major version newer than the version that generated the client's code; both work
            # together.
            warnings.simplefilter("ignore", UserWarning)
            from google.protobuf import text_format
            from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"Triton's client library, with which accel reads and writes Triton's model configurations, cannot be imported: {error}.",
            fix='install it with `pip install "accel-transformers[triton]"`.',
        ) from error
    return model_config_pb2, text_format


def model_config(**fields: Any) -> Any:
    """Return a `ModelConfig` message; nested messages are dictionaries and lists.

    Raises:
        ConfigError: Triton has no such field or value.
    """
    messages, _ = _library()
    try:
        return messages.ModelConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"The settings give an invalid Triton model configuration: {error}.",
            fix="correct the setting that this message names, for example in parameters or accelerator_options.",
        ) from error


def tensor(name: str, dtype: str, shape: Sequence[int | str], **fields: Any) -> dict[str, Any]:
    """Return the fields of a tensor in a model configuration; the size of dynamic axes is -1.

    Args:
        name: Name of the tensor.
        dtype: Data type, a key of `TYPES`.
        shape: Sizes of fixed axes and names of dynamic axes.
        **fields: Further fields.
    """
    dims = [size if isinstance(size, int) else -1 for size in shape]
    return {"name": name, "data_type": TYPES[dtype], "dims": dims, **fields}


def type_name(number: int) -> str:
    """Return Triton's name of a data type, given its number."""
    messages, _ = _library()
    return str(messages.DataType.Name(number))


def write(config: Any, folder: Path) -> None:
    """Write a model configuration into the model's folder."""
    _, text_format = _library()
    (folder / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")


def read(path: Path) -> Any:
    """Read a model configuration.

    Raises:
        ConfigError: The file is not a valid text message, or has an unknown field or value.
    """
    messages, text_format = _library()
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), messages.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a valid Triton model configuration: {error}.",
            fix="correct the file (its fields are documented in Triton's model_config.proto), or run `accel deploy triton` again.",
        ) from error


def check_name(name: str) -> None:
    """Raise if a model name cannot be used as a folder name and as part of a URL.

    Raises:
        ConfigError: The name is invalid.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"The model name {name!r} is invalid, because Triton uses the name as a folder name and in URLs.",
            fix="use letters, digits, '_', '-' and '.', and begin the name with a letter or a digit.",
        )
