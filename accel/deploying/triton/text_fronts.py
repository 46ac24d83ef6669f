"""Descriptions of front models: the Triton models that accept texts, tokenize them and call the graph's model.

A description has the tensors of requests and responses, and the settings of the class that runs inside Triton. `Task.fronts` returns the
descriptions of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...artifact.manifest import Artifact
from ...errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTensor:
    """An input or output of a Triton model.

    Attributes:
        name: Name of the tensor.
        dtype: `string`, or a torch data type name.
        dims: Sizes without the batch axis; -1 for dynamic sizes.
        optional: Whether a request may omit the tensor.
        ragged: Whether requests with different sizes of the tensor may be in the same batch.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class TextModelFacts:
    """The artifact, transformers config and tokenizer of a model, from which the settings of its front model are computed."""

    artifact: Artifact
    config: Any
    tokenizer: Any

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the logits."""
        return [str(self.config.id2label[i]) for i in range(self.config.num_labels)]

    def sizes(self, name: str) -> tuple[int | str, ...]:
        """Return the shape of an output of the graph.

        Raises:
            TaskError: The graph has no output of this name.
        """
        for spec in self.artifact.component().outputs:
            if spec.name == name:
                return spec.shape
        raise TaskError(
            f"The graph in {self.artifact.path} has no output {name!r}, which the Triton model for texts needs; its outputs are "
            f"{', '.join(spec.name for spec in self.artifact.component().outputs)}.",
            fix="deploy only the graph with layout='graph' (--layout graph).",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFront:
    """Description of a front model: the Triton model that accepts texts and returns the results of a task.

    Attributes:
        inputs: Tensors of a request.
        outputs: Function that returns the tensors of a response.
        service: `module:Class` of the class that converts requests to rows and outputs of the graph to results. The module is in `served`,
            or is the path of a task's own file without `.py`. Empty if `generates` is true.
        reads: Function that returns the names of the graph's outputs that the service needs.
        makes: Names of graph inputs that the service computes, with one number for each token; the tokenizer returns the other inputs.
        options: Function that returns the settings of the service.
        limit: Function that returns the maximum number of tokens in a text if the task has an additional limit, or `None`. The limits of
            the model and of the tokenizer always apply.
        sample: A sample request to test the server.
        one_row: Whether each text is one row of the graph, so that the task can be deployed as an ensemble.
        labels: Name of the output with a score for each label, for Triton's classification extension; empty for none.
        generates: Whether the model generates text and sends it in pieces.
    """

    inputs: tuple[TritonTensor, ...]
    outputs: Callable[[TextModelFacts], tuple[TritonTensor, ...]]
    service: str = ""
    reads: Callable[[TextModelFacts], tuple[str, ...]] = lambda _: ("logits",)
    makes: tuple[str, ...] = ()
    options: Callable[[TextModelFacts], dict[str, Any]] = lambda _: {}
    limit: Callable[[TextModelFacts], int | None] = lambda _: None
    sample: Mapping[str, list[str]] = field(default_factory=dict)
    one_row: bool = False
    labels: str = ""
    generates: bool = False
