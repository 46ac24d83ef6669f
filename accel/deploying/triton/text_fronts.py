"""What serves a task as text in Triton: the tensors that a client sends and gets, and what the module inside Triton must know.

A task has its fronts (`Task.fronts`); the module of that name in `served` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...artifact.manifest import Artifact
from ...errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a model's interface.

    Attributes:
        name: Its name.
        dtype: `string`, or torch's name of a type.
        dims: Sizes without the batch; -1 for one that varies.
        optional: Whether a request may leave it out.
        ragged: Whether requests of one batch may have several sizes of it.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a model that a service needs: the artifact, its transformers config, its tokenizer and its graph's outputs."""

    artifact: Artifact
    config: Any
    tokenizer: Any

    @property
    def labels(self) -> list[str]:
        """In the order of the outputs."""
        return [str(self.config.id2label[i]) for i in range(self.config.num_labels)]

    def sizes(self, name: str) -> tuple[int | str, ...]:
        """The shape of one of the graph's outputs.

        Raises:
            TaskError: It has no such output.
        """
        for spec in self.artifact.component().outputs:
            if spec.name == name:
                return spec.shape
        raise TaskError(
            f"The graph of {self.artifact.path} has no output {name!r}.", fix="deploy it with layout='graph'."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFront:
    """One way to serve a model as text.

    Attributes:
        module: In `served`; a task of another distribution gives the path of its own, without `.py`.
        inputs: What a request brings.
        outputs: What a response holds.
        reads: Outputs of the graph that it needs.
        makes: Inputs of the graph that it makes itself, one number a token; the others are the tokenizer's.
        options: What the module is told.
        limit: Tokens of a text at most, where something besides the model and its tokenizer says it.
        sample: A request, by which the server is tried out.
        one_row: Whether each text is one row of the graph, so that it can be a step of an ensemble.
        labels: The output whose places are the model's labels, for Triton's classification extension; empty for none.
        generates: Whether it answers in pieces, by a loop of its own around the graph.
    """

    module: str
    inputs: tuple[Tensor, ...]
    outputs: Callable[[Facts], tuple[Tensor, ...]]
    reads: Callable[[Facts], tuple[str, ...]] = lambda _: ("logits",)
    makes: tuple[str, ...] = ()
    options: Callable[[Facts], dict[str, Any]] = lambda _: {}
    limit: Callable[[Facts], int | None] = lambda _: None
    sample: Mapping[str, list[str]] = field(default_factory=dict)
    one_row: bool = False
    labels: str = ""
    generates: bool = False
