"""Description of a task. Its implementation, the `Task` class in `impl`, is imported at its first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Holds = Literal[
    "text", "texts", "words", "label", "tags", "answers", "number", "image", "map", "objects", "audio", "video", "boxes"
]
Needed = Literal["always", "measuring", "known", "named"]
Modality = Literal["text", "image", "audio", "video"]


LABELS = "num_labels"
"""Name of the axis of the model's labels, equal to the config field with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Meaning that a column of the data can have.

    Attributes:
        use: Purpose of the column: `text`, `label`, ...
        known: Usual names of such columns, the likeliest first.
        holds: Kind of values in the column.
        needed: `always`: required. `measuring`: required to measure, but not for calibration. `known`: used if a column has a
            known name. `named`: used only if the caller or a known pair of columns names it.
        answer: Whether the column contains the expected output, which calibration never reads.
    """

    use: str
    known: tuple[str, ...]
    holds: Holds
    needed: Needed = "always"
    answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSpec:
    """Description of a task.

    Attributes:
        name: Name of transformers' pipeline, or another name if two kinds of models serve one pipeline.
        impl: `package.module:Class` of its `Task`; empty for the base class `Task`.
        auto_model: transformers class that loads its PyTorch models; empty to use the architecture in the config.
        more_auto_models: Further auto classes, if architectures for the task belong to several.
        output: Class of `transformers.modeling_outputs` that models return; empty for a plain `ModelOutput`.
        outputs: Output tensors by name with their axes, if all models of the task return the same. An axis name that is a
            config field (`num_labels`) is a fixed size; any other axis varies.
        keeps: Outputs that a graph returns, as far as the model has them; empty for all. Some models also return tensors that
            only training needs.
        suffixes: Suffixes of the names of architectures for the task.
        fields: Config fields that such an architecture requires, to exclude others with the same suffix.
        marks: Config fields of which such an architecture has at least one.
        sentence_kind: Kind of sentence-transformers folders for the task: `embedder`, `cross-encoder`; empty for none.
        any_graph: Whether the task is for arbitrary graphs.
        listed: Whether all architectures that transformers lists for `auto_models` support the task, whatever their names.
        synonyms: Other names of the task.
        modalities: Modalities of the inputs.
        generates: Whether its models generate tokens one after another, with a cache.
        encoder_decoder: For generating models: True for an encoder and a decoder, False for only a decoder, `None` for both.
        embeds: Whether its models need no head, because they return hidden states or embeddings.
        pooling: Default pooling mode for embeddings if neither the user nor the folder gives one; empty for none.
        pipelines: Pipeline tasks that its models serve in addition to the task's name.
        own_pipelines: Further pipeline tasks, which transformers does not have. The `Task` provides their classes.
        usual_models: Default model (Hub id and revision) of each pipeline in `own_pipelines`.
        columns: Columns of its data; empty if rows of data cannot be read for the task.
        processor: transformers class that loads the processor, if the modalities do not determine it.
        adapter: PEFT's name of the task.
        loss: Name of transformers' loss function for calls with labels; empty for none.
    """

    name: str
    impl: str = ""
    auto_model: str = ""
    more_auto_models: tuple[str, ...] = ()
    output: str = ""
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    sentence_kind: str = ""
    any_graph: bool = False
    listed: bool = False
    synonyms: tuple[str, ...] = ()
    modalities: tuple[Modality, ...] = ("text",)
    generates: bool = False
    encoder_decoder: bool | None = None
    embeds: bool = False
    pooling: str = ""
    pipelines: tuple[str, ...] = ()
    own_pipelines: tuple[str, ...] = ()
    usual_models: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    processor: str = ""
    adapter: str = ""
    loss: str = ""

    def difference(self, outputs: Mapping[str, Sequence[object]]) -> str:
        """Describe the first difference between a model's outputs and the declared outputs, or return an empty string.

        The text follows the model's name in an error message.

        Args:
            outputs: Shapes of the outputs by name. Additional outputs are ignored.
        """
        for name, axes in self.outputs.items():
            shape = outputs.get(name)
            if shape is None or len(shape) != len(axes):
                returned = (
                    f"{sorted(outputs)} and no output {name!r}" if shape is None else f"{name!r} with {len(shape)} axes"
                )
                return (
                    f"returns {returned}, but a model for the task {self.name!r} returns {name!r} with {len(axes)} axes"
                )
        return ""

    @property
    def auto_models(self) -> tuple[str, ...]:
        """All transformers classes that load PyTorch models for the task."""
        return (self.auto_model, *self.more_auto_models) if self.auto_model else ()

    @property
    def serves(self) -> tuple[str, ...]:
        """All pipeline tasks that models for the task serve."""
        return (self.name, *self.pipelines, *self.own_pipelines)
