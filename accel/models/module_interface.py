"""Methods and attributes that scripts for transformers and Optimum expect from a model."""

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
    """Methods of `torch.nn.Module` and attributes of Optimum's models."""

    artifact: Artifact
    generation_config: Any
    _opened: OpenSessions
    _session: Session

    @abstractmethod
    def to(self, device: str | int | torch.device | torch.dtype) -> Self:
        """Move the model to a device."""

    def cpu(self) -> Self:
        """Move the model to the CPU; same as `to("cpu")`."""
        return self.to("cpu")

    def eval(self) -> Self:
        """Return the model unchanged: a graph has no training mode."""
        return self

    def cuda(self, device: int | None = None) -> Self:
        """Move the model to a GPU: `to("cuda")`, or `to("cuda:<device>")` if an index is given."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def train(self, mode: bool = True) -> Self:
        """Return the model unchanged for `mode=False`.

        Raises:
            InputError: `mode` is true, but a graph has no training mode.
        """
        if mode:
            raise InputError(
                "model.train() was called, but an exported graph cannot be trained.",
                fix="train the original model with transformers, and export the trained model with `accel export`.",
            )
        return self

    def half(self) -> Self:
        """Call `to(torch.float16)`, which logs a warning if the graph has another dtype, because the dtype is fixed at export."""
        return self.to(torch.float16)

    def float(self) -> Self:
        """Call `to(torch.float32)`, which logs a warning if the graph has another dtype, because the dtype is fixed at export."""
        return self.to(torch.float32)

    @property
    def _modules(self) -> NoReturn:
        """Raise an error for transformers' `Trainer`, which reads this attribute; the message explains how to evaluate instead."""
        raise InputError(
            "This model is an exported graph and not a PyTorch module: it has no parameters, so transformers' Trainer cannot train or "
            "evaluate it.",
            fix="train the original model with Trainer. To evaluate the exported model, use accel.evaluate(model, data), or call "
            "model(**batch) for each batch; its output contains the loss if the batch contains labels.",
        )

    # Attributes that scripts for Optimum read

    @property
    def providers(self) -> list[str]:
        """ONNX Runtime's execution provider names of the backend; empty for backends of other runtimes."""
        return [name for name in self._opened.backend.aliases if name.endswith("ExecutionProvider")]

    @property
    def provider(self) -> str | None:
        """The first name in `providers`, or `None`."""
        return next(iter(self.providers), None)

    @property
    def input_names(self) -> dict[str, int]:
        """Position of each input of the first graph, by name."""
        return {spec.name: index for index, spec in enumerate(self._session.inputs)}

    @property
    def output_names(self) -> dict[str, int]:
        """Position of each output of the first graph, by name."""
        return {spec.name: index for index, spec in enumerate(self._session.outputs)}

    @property
    def path(self) -> Path:
        """File of the first graph."""
        return self.artifact.path / self.artifact.components[0].file

    @property
    def model_save_dir(self) -> Path:
        """Folder of the artifact."""
        return self.artifact.path

    @property
    def can_use_cache(self) -> bool:
        """Whether a graph of the model has a KV cache (or another state) between calls."""
        return any(component.stateful for component in self.artifact.components)

    @property
    def use_cache(self) -> bool:
        """Whether `generate` uses the KV cache by default."""
        return self.can_use_cache and getattr(self.generation_config, "use_cache", True) is not False
