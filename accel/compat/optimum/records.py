"""Records of settings that Optimum writes beside its graphs: `ort_config.json`, and what others are made of."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

from ...artifact.reading import read_json
from ...errors import ArtifactNotFoundError


def as_json(value: Any) -> Any:
    """Settings as JSON values: members of an enumeration by their names."""
    if isinstance(value, Enum) or type(value).__name__ in ("QuantType", "QuantFormat", "QuantizationMode"):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, dict):
        return {name: as_json(entry) for name, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, list | tuple) else value


class Record:
    """Settings in a file of a folder."""

    CONFIG_NAME: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the record into a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, default=str) + "\n"
        (folder / self.CONFIG_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Read it from a folder.

        Raises:
            ArtifactNotFoundError: There is none.
        """
        path = Path(folder) / cls.CONFIG_NAME
        if not path.is_file():
            raise ArtifactNotFoundError(f"{folder} has no {cls.CONFIG_NAME}.", fix="check the folder.")
        return cls(**read_json(path))


class ORTConfig(Record):
    """What a graph was made with.

    Attributes:
        opset: ONNX opset.
        use_external_data_format: Whether weights are beside the graph.
        one_external_file: Whether in one file: always.
        optimization: `OptimizationConfig`, or its values.
        quantization: `QuantizationConfig`, or its values.
    """

    CONFIG_NAME: ClassVar[str] = "ort_config.json"

    def __init__(
        self,
        opset: int | None = None,
        use_external_data_format: bool = False,
        one_external_file: bool = True,
        optimization: Any = None,
        quantization: Any = None,
        **kwargs: Any,
    ) -> None:
        self.opset = opset
        self.use_external_data_format = use_external_data_format
        self.one_external_file = one_external_file
        self.optimization = optimization or None
        self.quantization = quantization or None
        self.optimum_version = kwargs.get("optimum_version")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {
            "opset": self.opset,
            "use_external_data_format": self.use_external_data_format,
            "one_external_file": self.one_external_file,
            "optimization": as_json(self.optimization or {}),
            "quantization": as_json(self.quantization or {}),
        }
