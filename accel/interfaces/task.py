"""Base class of tasks. `TaskSpec.impl` contains the path of a task's class.

Every method has a default. If a method returns `None`, accel uses the general behaviour: a row of the data is one text, the model
becomes one graph, and the sample inputs of the trace are texts.
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
        model: Model class of accel for the task. `None` means `accel.ORTModel`.
    """

    model: ClassVar[type[Any] | None] = None

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    # The following methods are used when a PyTorch model is exported.

    def load(self, folder: Path, **options: Any) -> torch.nn.Module | None:
        """Load the PyTorch model of a folder.

        Args:
            folder: Folder with `config.json` and weights.
            **options: `dtype`, `trust_remote_code` and `local_files_only`, as in transformers' `from_pretrained`.

        Returns:
            The module. With `None`, accel loads the model with the class in the task's spec or in the model's config.
        """
        return None

    def sample(self, module: torch.nn.Module, folder: Path | None) -> Sample | None:
        """Make the sample inputs of a trace.

        Args:
            module: The module to trace.
            folder: Folder with the tokenizer or processor; `None` for a model in memory.

        Returns:
            Inputs with at least two rows of different lengths. With `None`, accel makes default inputs for the modalities of the task.
        """
        return None

    def traced(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module that is traced instead of the model.

        Override this method if the model's code cannot be traced, for example because it contains a loop over rows.
        """
        return module

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        """Split a model that is exported as several graphs.

        Args:
            source: The model, an `accel.capture.Source`.
            fusion: The backend's fused attention operators, or `None`.

        Returns:
            A `Source` for each graph. `None` means one graph. For a generating task, `None` means the usual graphs with a KV cache.
        """
        return None

    @property
    def traced_as_is(self) -> bool:
        """Whether accel exports the model's unchanged `forward` as one graph."""
        kind = type(self)
        return kind.traced is Task.traced and kind.parts is Task.parts

    # The following methods are used when a model predicts, is measured or is calibrated.

    def encode(self, rows: Any, processor: Any, max_length: int | None) -> Any | None:
        """Convert rows of the data to model inputs.

        Args:
            rows: `accel.data.rows.DatasetRows` whose columns have the names of the task's columns.
            processor: The model's tokenizer, image processor or other processor.
            max_length: Largest number of tokens. Longer rows are truncated.

        Returns:
            An `accel.data.encoded_rows.EncodedRows`. With `None`, accel encodes each row as one text.
        """
        return None

    def predictor(self, config: Any) -> type[Any] | None:
        """Return the subclass of `accel.measuring.accuracy.predictors.Predictor` that measures the accuracy of a model.

        Args:
            config: Config of the model. With `None`, the usual predictor of the task is returned.

        Returns:
            The class, or `None` if the accuracy of the task cannot be measured.
        """
        return None

    @property
    def measured(self) -> bool:
        """Whether accel can measure the accuracy of models for the task."""
        return type(self).predictor is not Task.predictor

    def pipeline(self, name: str) -> type[Any] | None:
        """Return accel's pipeline class for a pipeline task in `TaskSpec.own_pipelines`, or `None`."""
        return None

    def can_serve(self, pipeline: str, config: Any) -> bool:
        """Return whether a model with this config can be used in a pipeline.

        For example, a pipeline may need a label with a certain name.
        """
        return True

    def tiny_batch(
        self, config: Any, rows: int, draw: torch.Generator, texts: Callable[..., dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return a small random batch, on which tests compare a graph with the PyTorch model.

        Override this method if the inputs of the task are not one text for each row.

        Args:
            config: Config of the tiny model.
            rows: Number of rows.
            draw: Random generator.
            texts: Function that returns `input_ids` and `attention_mask` of the given number of random texts of up to ten tokens. With
                `padded=False`, all texts have the same length.
        """
        return texts(rows)

    # Serving

    def operations(self) -> Sequence[Any]:
        """Return the operations of the server and of `accel batch` for the task, in addition to the pipelines of the task."""
        return ()

    def fronts(self) -> Mapping[str, Any]:
        """Return the classes that serve pipeline tasks with text inputs and outputs in Triton, by pipeline task."""
        return {}
