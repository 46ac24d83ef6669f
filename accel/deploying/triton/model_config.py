"""Triton's model configurations as its own protocol buffers: what is written cannot have an unknown field or value."""

from __future__ import annotations

import functools
import re
import warnings
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
"""Triton's names of element types, by torch's; texts are `string`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


@functools.cache
def _library() -> tuple[Any, Any]:
    """The module of the messages, and the one that writes and reads them as text.

    Raises:
        BackendUnavailableError: They are not installed.
    """
    try:
        with warnings.catch_warnings():
            # Of protobuf, where it is one version ahead of the code that it generated.
            warnings.simplefilter("ignore", UserWarning)
            from google.protobuf import text_format
            from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"Triton's configurations are written with its own client library, which is not here: {error}.",
            fix='pip install "accel-transformers[triton]", or "tritonclient[grpc]".',
        ) from error
    return model_config_pb2, text_format


def model_config(**fields: Any) -> Any:
    """A `ModelConfig`; nested messages as dictionaries and lists.

    Raises:
        ConfigError: A field or value that Triton does not have.
    """
    messages, _ = _library()
    try:
        return messages.ModelConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"Triton has no such configuration: {error}.", fix="check the values of the settings."
        ) from error


def data_type(word: str) -> int:
    """The number of an element type, by torch's name."""
    messages, _ = _library()
    return int(messages.DataType.Value(TYPES[word]))


def type_name(number: int) -> str:
    """Triton's name of an element type."""
    messages, _ = _library()
    return str(messages.DataType.Name(number))


def kind(word: str) -> int:
    """The number of a kind of instances: `KIND_CPU`, `KIND_GPU`, ..."""
    messages, _ = _library()
    return int(messages.ModelInstanceGroup.Kind.Value(word))


def write(config: Any, folder: Path) -> None:
    """Put a configuration into the folder of its model."""
    _, text_format = _library()
    (folder / CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")


def read(path: Path) -> Any:
    """A configuration from its file.

    Raises:
        ConfigError: It is no such text, or has a field or value that Triton does not have.
    """
    messages, text_format = _library()
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), messages.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.", fix="write it as in Triton's model_config.proto."
        ) from error


def check_name(name: str) -> None:
    """Whether it can be a model's name, in a folder and in an address.

    Raises:
        ConfigError: It cannot.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a model.",
            fix="use letters, digits, '_', '-' and '.', beginning with a letter or a digit.",
        )
