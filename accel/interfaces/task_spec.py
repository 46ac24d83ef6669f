"""One task as data; its `Task` class, which `impl` names, does the work and is imported when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Holds = Literal[
    "text", "texts", "words", "label", "tags", "answers", "number", "image", "map", "objects", "audio", "video", "boxes"
]
Needed = Literal["always", "measuring", "known", "named"]
Modality = Literal["text", "image", "audio", "video"]


LABELS = "num_labels"
"""The axis of a model's own labels, by the config's word for their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A use that a column of the data can have.

    Attributes:
        use: What it is for: `text`, `label`, ...
        known: Names that such columns often have, the likeliest first.
        holds: What its values must be.
        needed: `always`; for `measuring` and not for calibration; where a column has a `known` name; or only where it is `named`
            by the caller or by a known pair.
        answer: Whether it is what a model should answer, which calibration never reads.
    """

    use: str
    known: tuple[str, ...]
    holds: Holds
    needed: Needed = "always"
    answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSpec:
    """One task.

    Attributes:
        name: The word of transformers' pipelines, or one of its own where two kinds of models serve one pipeline.
        impl: `package.module:Class` of its `Task`; empty for `Task` itself.
        auto_model: The transformers class that loads a PyTorch model for it; empty where the config's architecture does.
        more_auto_models: Others that do, where the architectures for it are spread over several.
        output: The class of `transformers.modeling_outputs` that it returns; empty for a plain `ModelOutput`.
        outputs: Its tensors by name with their axes, where every model for it returns them alike; a word that the model's
            config knows (`num_labels`) is a size, any other an axis that varies.
        keeps: What a graph returns of what a model returns, as far as it returns it; everything where this is empty. Models for
            these tasks also return what their training reads.
        suffixes: Endings of the names of architectures that do it.
        fields: Fields of a config that such an architecture has, where others' names end alike.
        marks: Fields of which such a config has at least one.
        sentence_kind: The kind of sentence-transformers folders that hold models for it: `embedder`, `cross-encoder`; empty for none.
        any_graph: Whether its models are graphs that nothing is known about.
        listed: Whether all architectures that transformers lists for `auto_models` do it, whatever their names.
        synonyms: Other words for it.
        modalities: What a model for it reads.
        generates: Whether a model for it makes tokens one after another, with a cache.
        encoder_decoder: Whether such a model has an encoder and a decoder, or a decoder alone; `None` where both do it.
        embeds: Whether it needs no head: hidden states and embeddings.
        pooling: For embeddings, what is pooled by where neither the user nor the folder says it; empty for none.
        pipelines: Pipeline tasks that a model for it serves, besides its own.
        own_pipelines: Pipeline tasks in addition that transformers has no pipeline for; the `Task` has their classes.
        usual_models: By such a pipeline, the Hub id and revision of the model that is taken where a caller names none.
        columns: Uses of the columns of its data; none where rows cannot be read for it.
        processor: The transformers class that loads what makes its inputs, where its modalities do not tell.
        adapter: PEFT's word for it.
        loss: Which of transformers' loss functions computes the loss where labels are given; empty for none.
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

    @property
    def auto_models(self) -> tuple[str, ...]:
        """Every transformers class that loads a PyTorch model for it."""
        return (self.auto_model, *self.more_auto_models) if self.auto_model else ()

    @property
    def serves(self) -> tuple[str, ...]:
        """Every pipeline task that a model for it serves."""
        return (self.name, *self.pipelines, *self.own_pipelines)
