"""What a task does: the base class of the classes that `TaskSpec.impl` names. Everything has a default.

A method that answers `None` leaves the work to the engine, which does it for any model: one text a row, one graph, a trace on texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .family import Sample as Sample  # what `Task.sample` returns
from .task_spec import TaskSpec

if TYPE_CHECKING:
    import torch


class Task:
    """Base of the tasks.

    Attributes:
        spec: The task as data.
        model: Our class that runs its models; `accel.ORTModel` when `None`.
    """

    model: ClassVar[type[Any] | None] = None

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    # PyTorch model to graph

    def load(self, folder: Path, **options: Any) -> torch.nn.Module | None:
        """Load the PyTorch model of a folder.

        Args:
            folder: Holds `config.json` and weights.
            **options: `dtype`, `trust_remote_code` and `local_files_only`, as `from_pretrained` of transformers takes them.

        Returns:
            The module; `None` to load it with the class that the spec or the config names.
        """
        return None

    def sample(self, module: torch.nn.Module, folder: Path | None) -> Sample | None:
        """Make the inputs for a trace.

        Args:
            module: What is traced.
            folder: Holds its tokenizer or processor, where there is one.

        Returns:
            The inputs, at least two rows of unequal length; `None` for those of a model of its modalities.
        """
        return None

    def traced(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replace the model in a trace, where its own code cannot be followed: where it goes through the rows one by one, say."""
        return module

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        """Take a model apart that becomes several graphs.

        Args:
            source: An `accel.capture.Source`.
            fusion: The backend's attention operators, or `None`.

        Returns:
            A source for each graph; `None` for one graph, or for those of a decoder with a cache where the task generates.
        """
        return None

    @property
    def traced_as_is(self) -> bool:
        """Whether the model's own `forward` is the one graph."""
        kind = type(self)
        return kind.traced is Task.traced and kind.parts is Task.parts

    # Rows to answers

    def encode(self, rows: Any, processor: Any, max_length: int | None) -> Any | None:
        """Turn rows into inputs.

        Args:
            rows: `accel.data.rows.Rows` whose columns are mapped.
            processor: The model's tokenizer, image processor, ...
            max_length: Tokens that longer rows are cut to.

        Returns:
            `accel.data.batches.Encoded`; `None` for one text a row.
        """
        return None

    def predictor(self, config: Any) -> type[Any] | None:
        """Return the subclass of `accel.measuring.accuracy.predictors.Predictor` that measures a model, if any.

        Args:
            config: The model's; `None` asks for the usual one.
        """
        return None

    @property
    def measured(self) -> bool:
        """Whether its models can be measured."""
        return type(self).predictor is not Task.predictor

    def pipeline(self, name: str) -> type[Any] | None:
        """Return the pipeline class of one of `TaskSpec.own_pipelines`."""
        return None

    def can_serve(self, pipeline: str, config: Any) -> bool:
        """Whether a model with this config has what one of the task's pipelines looks for, such as a label of a certain name."""
        return True

    # Serving

    def operations(self) -> Sequence[Any]:
        """Return what a server and `accel batch` offer for its models in addition to its pipelines."""
        return ()

    def fronts(self) -> Mapping[str, Any]:
        """Return by pipeline task what serves it as text in Triton: texts in, answers out."""
        return {}
