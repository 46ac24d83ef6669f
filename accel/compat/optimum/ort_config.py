"""Settings file `ort_config.json`, which Optimum writes next to its graphs, and the base class of such settings files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

from ...artifact.json_reading import read_json
from ...errors import ArtifactNotFoundError


def as_json(value: Any) -> Any:
    """Convert settings to values that can be written to JSON. Enum members are replaced by their names."""
    if isinstance(value, Enum) or type(value).__name__ in ("QuantType", "QuantFormat", "QuantizationMode"):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, dict):
        return {name: as_json(entry) for name, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, list | tuple) else value


class SavedSettings:
    """Base class of settings that are saved as a JSON file in a model's folder. `CONFIG_NAME` is the name of the file."""

    CONFIG_NAME: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Save the settings to a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2, default=str) + "\n"
        (folder / self.CONFIG_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Load the settings from a folder.

        Raises:
            ArtifactNotFoundError: The folder does not contain the settings file.
        """
        path = Path(folder) / cls.CONFIG_NAME
        if not path.is_file():
            raise ArtifactNotFoundError(
                f"The folder {folder} contains no file {cls.CONFIG_NAME}.",
                fix=f"pass the folder that contains {cls.CONFIG_NAME}.",
            )
        return cls(**read_json(path))


class ORTConfig(SavedSettings):
    """Settings with which a graph was optimized or quantized. They are saved as `ort_config.json`.

    Attributes:
        opset: ONNX opset.
        use_external_data_format: Whether weights are stored outside the graph file.
        one_external_file: Whether all external weights of a graph are in one file. accel always writes one file.
        optimization: An `OptimizationConfig`, or a dict with the values of one.
        quantization: A `QuantizationConfig`, or a dict with the values of one.
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
        """Return the settings as JSON values."""
        return {
            "opset": self.opset,
            "use_external_data_format": self.use_external_data_format,
            "one_external_file": self.one_external_file,
            "optimization": as_json(self.optimization or {}),
            "quantization": as_json(self.quantization or {}),
        }
