"""What was found to be wrong, and a model as its checks see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AGAIN = "deploy again: accel deploy triton ARTIFACT OUT."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a repository.

    Attributes:
        model: The folder that it is about.
        code: A word for its kind.
        message: What is wrong, with the values seen and expected.
        fix: What to do about it.
    """

    model: str
    code: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.model}: {self.message}\n  Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a repository.

    Attributes:
        folder: Its folder.
        config: Its configuration.
        versions: The folders of the versions that are served.
        settings: What the code of its last version is told, where there is such.
    """

    folder: Path
    config: Any
    versions: tuple[Path, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's, which is the one that counts."""
        return self.folder.name

    @property
    def backend(self) -> str:
        """Triton's backend; of older configurations, the platform's."""
        platform = str(self.config.platform)
        return str(self.config.backend) or {"onnxruntime_onnx": "onnxruntime", "tensorrt_plan": "tensorrt"}.get(
            platform, platform
        )

    def found(self, code: str, message: str, fix: str) -> Finding:
        """A finding about it."""
        return Finding(self.name, code, message, fix)
