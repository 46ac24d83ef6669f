"""What users and scripts of transformers and Optimum expect of a model by habit, answered plainly."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from ..artifact.manifest import Artifact
    from ..backends.sessions import OpenSessions
    from ..interfaces.protocols import Session


class ModuleInterface:
    """The habits of a `torch.nn.Module`, and the attributes of Optimum's models."""

    artifact: Artifact
    generation_config: Any
    _opened: OpenSessions
    _session: Session

    @abstractmethod
    def to(self, device: str | int | torch.device | torch.dtype) -> Self:
        """Move to a device."""

    def cpu(self) -> Self:
        """`to("cpu")`."""
        return self.to("cpu")

    def eval(self) -> Self:
        """Does nothing: a graph has no training mode."""
        return self

    def cuda(self, device: int | None = None) -> Self:
        """`to("cuda")`, or the GPU of that number."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def train(self, mode: bool = True) -> Self:
        """Does nothing for `mode=False`.

        Raises:
            InputError: A graph has no training mode.
        """
        if mode:
            raise InputError("A graph cannot be trained.", fix="train the original model, and export it again.")
        return self

    def half(self) -> Self:
        """`to(torch.float16)`: warns where the graph is of another type, which is fixed when it is exported."""
        return self.to(torch.float16)

    def float(self) -> Self:
        """`to(torch.float32)`, likewise."""
        return self.to(torch.float32)

    @property
    def _modules(self) -> NoReturn:
        """What `Trainer` looks for in a PyTorch module, with what works instead."""
        raise InputError(
            "A graph is no PyTorch module: it has no parameters, and Trainer cannot take it.",
            fix="train the original model; measure this one with accel.evaluate(model, data), or in a loop of "
            "model(**batch), whose result has the loss where the batch has labels.",
        )

    # What scripts written for Optimum read

    @property
    def providers(self) -> list[str]:
        """ONNX Runtime's words for the backend; none for a backend on another runtime."""
        return [name for name in self._opened.backend.aliases if name.endswith("ExecutionProvider")]

    @property
    def provider(self) -> str | None:
        """The first of them."""
        return next(iter(self.providers), None)

    @property
    def input_names(self) -> dict[str, int]:
        """Inputs of the first graph, with their positions."""
        return {spec.name: place for place, spec in enumerate(self._session.inputs)}

    @property
    def output_names(self) -> dict[str, int]:
        """Outputs of the first graph, with their positions."""
        return {spec.name: place for place, spec in enumerate(self._session.outputs)}

    @property
    def path(self) -> Path:
        """The first graph's file."""
        return self.artifact.path / self.artifact.components[0].file

    @property
    def model_save_dir(self) -> Path:
        """The artifact's folder."""
        return self.artifact.path

    @property
    def can_use_cache(self) -> bool:
        """Whether the graphs keep keys and values between calls."""
        return any(component.stateful for component in self.artifact.components)

    @property
    def use_cache(self) -> bool:
        """Whether `generate` uses them where it is not said."""
        return self.can_use_cache and getattr(self.generation_config, "use_cache", True) is not False
