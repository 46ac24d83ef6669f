"""Base class of tasks, which `TaskSpec.impl` names. Every method has a default.

A method that returns `None` selects the default of the core: one text for each row, one graph, a trace on texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .family import Sample as Sample  # what `Task.sample` returns
from .task_spec import TaskSpec

if TYPE_CHECKING:
    import torch


class Task:
    """Base class of the tasks.

    Attributes:
        spec: Description of the task.
        model: Model class of accel that runs the task's models; `accel.ORTModel` if `None`.
    """

    model: ClassVar[type[Any] | None] = None

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    # From a PyTorch model to a graph

    def load(self, folder: Path, **options: Any) -> torch.nn.Module | None:
        """Load the PyTorch model of a folder.

        Args:
            folder: Folder with `config.json` and weights.
            **options: `dtype`, `trust_remote_code` and `local_files_only`, as in transformers' `from_pretrained`.

        Returns:
            The module. `None` loads it with the class that the spec or the config names.
        """
        return None

    def sample(self, module: torch.nn.Module, folder: Path | None) -> Sample | None:
        """Make the sample inputs of a trace.

        Args:
            module: The module to trace.
            folder: Folder with the tokenizer or processor; `None` for a model in memory.

        Returns:
            Inputs with at least two rows of different lengths. `None` uses the default inputs for the task's modalities.
        """
        return None

    def traced(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module to trace instead of the model, if its own code cannot be traced (such as a loop over rows)."""
        return module

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        """Split a model that becomes several graphs.

        Args:
            source: The model, an `accel.capture.Source`.
            fusion: The backend's fused attention operators, or `None`.

        Returns:
            A source for each graph. `None` means one graph, or the usual graphs with a cache if the task generates.
        """
        return None

    @property
    def traced_as_is(self) -> bool:
        """Whether the model's own `forward` becomes the only graph."""
        kind = type(self)
        return kind.traced is Task.traced and kind.parts is Task.parts

    # From rows of the data to predictions

    def encode(self, rows: Any, processor: Any, max_length: int | None) -> Any | None:
        """Convert rows of the data to model inputs.

        Args:
            rows: `accel.data.rows.DatasetRows` with mapped columns.
            processor: The model's tokenizer, image processor, ...
            max_length: Largest number of tokens; longer rows are truncated.

        Returns:
            `accel.data.encoded_rows.EncodedRows`. `None` uses the default encoding of one text for each row.
        """
        return None

    def predictor(self, config: Any) -> type[Any] | None:
        """Return the subclass of `accel.measuring.accuracy.predictors.Predictor` that measures a model, if there is one.

        Args:
            config: Config of the model. `None` selects the task's usual predictor.
        """
        return None

    @property
    def measured(self) -> bool:
        """Whether the accuracy of the task's models can be measured."""
        return type(self).predictor is not Task.predictor

    def pipeline(self, name: str) -> type[Any] | None:
        """Return the pipeline class for a name in `TaskSpec.own_pipelines`."""
        return None

    def can_serve(self, pipeline: str, config: Any) -> bool:
        """Return whether a model with this config meets the needs of a pipeline, such as a label with a certain name."""
        return True

    def tiny_batch(
        self, config: Any, rows: int, draw: torch.Generator, texts: Callable[..., dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Draw a small random batch, on which tests compare a graph with PyTorch. Override it for inputs other than one text for each row.

        Args:
            config: Config of the tiny model.
            rows: Number of rows.
            draw: Random generator.
            texts: Function that draws the given number of texts with ten tokens as `input_ids` and `attention_mask`. With
                `padded=False`, all texts have the same length.
        """
        return texts(rows)

    # Serving

    def operations(self) -> Sequence[Any]:
        """Return the operations that a server and `accel batch` offer for the task's models in addition to its pipelines."""
        return ()

    def fronts(self) -> Mapping[str, Any]:
        """Return the classes that serve pipeline tasks with text inputs and outputs in Triton, by pipeline task."""
        return {}
