"""Description of a task. The implementation of the task is a separate class (`TaskSpec.impl`), which accel imports when it is needed."""

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
"""Name of the axis with one entry for each label. The config field with the number of labels has the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the data that a task reads.

    Attributes:
        use: Purpose of the column, such as `text` or `label`.
        known: Usual names of the column in data sets. The most common name comes first.
        holds: Kind of values in the column.
        needed: When the data must have the column. `always`: the column is required. `measuring`: the column is required to measure
            accuracy, but not for calibration. `known`: the column is used if the data has a column with a name in `known`. `named`: the
            column is used only if the caller passes its name, or if the data has a known pair of columns.
        answer: Whether the column contains the expected output. Calibration never reads the expected output.
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
        name: Name of the task's pipeline in transformers. If two kinds of models can be used in one pipeline, one of the two tasks has
            another name.
        impl: `package.module:Class` of the task's implementation. Empty means the base class `Task`.
        auto_model: transformers class that loads the PyTorch models. Empty means the class in the model's config.
        more_auto_models: Further transformers classes that load PyTorch models for the task.
        output: Class of `transformers.modeling_outputs` that models return. Empty means `ModelOutput`.
        outputs: Axes of the output tensors by name, if all models of the task have the same outputs. An axis whose name is a config
            field (`num_labels`) has the size in the config. All other axes vary.
        keeps: Outputs that a graph returns, if the model has them. Empty means all outputs. Some models return further outputs that
            only training needs.
        suffixes: Suffixes of the class names of models for the task.
        fields: Config fields that a model for the task must have, in addition to a suffix in `suffixes`.
        marks: Config fields of which a model for the task must have at least one.
        sentence_kinds: Kinds of sentence-transformers models for the task: `embedder`, `sparse encoder`, `multi-vector encoder`,
            `cross-encoder`.
        any_graph: Whether the task is for graphs with any inputs and outputs.
        listed: Whether all architectures that transformers lists for `auto_models` support the task, independent of their names.
        synonyms: Other names of the task.
        modalities: Modalities of the inputs.
        generates: Whether models for the task generate tokens one after another, with a KV cache.
        encoder_decoder: For generating tasks: True if models have an encoder and a decoder, False if models have only a decoder. `None`
            if the task allows both kinds of models.
        embeds: Whether models for the task have no head, because they return hidden states or embeddings.
        pooling: Pooling mode of embeddings if the user and the model's folder define none. Empty means no pooling.
        pipelines: Further pipelines of transformers in which models for the task can be used.
        own_pipelines: Further pipelines that exist only in accel. `Task.pipeline` returns their classes.
        usual_models: Default model (Hub id and revision) of each pipeline in `own_pipelines`.
        columns: Columns of the task's data. Empty if accel cannot read data for the task.
        processor: transformers class that loads the processor. Empty if the modalities determine the processor.
        adapter: Name of the task in PEFT (`task_type`).
        loss: Name of transformers' loss function for calls with labels. Empty means that there is no loss.
        audit: What `accel verify` compares on servers of the task: `embed`, `classify`, `rerank` or `chat`. Empty if it cannot audit them.
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
    sentence_kinds: tuple[str, ...] = ()
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
    audit: str = ""

    def difference(self, outputs: Mapping[str, Sequence[object]]) -> str:
        """Describe the first difference between a model's outputs and the outputs of the task.

        Args:
            outputs: Shapes of the model's outputs by name. Outputs that the task does not declare are ignored.

        Returns:
            The second part of an error message, which follows the name of the model. Empty if there is no difference.
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
        """Names of all pipelines in which models for the task can be used."""
        return (self.name, *self.pipelines, *self.own_pipelines)
