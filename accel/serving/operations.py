"""What can be asked of a model. An `Operation` describes one kind of request once; the engine, HTTP, `accel batch` and the text form of the
Open Inference Protocol read it. A task returns its operations (`Task.operations`); those of every model are at the end of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError, TaskError
from ..interfaces.task_registry import load_task, working_tasks
from ..models.base import ORTModel
from .job import Work

if TYPE_CHECKING:
    from .http.endpoints import Endpoint

READS_TEXT: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "prompt", "input", "query", "question")
}
"""`Operation.reads` of one text, with the names that such columns often have, the likeliest first."""


class Operation:
    """One kind of request. The defaults are those of a pipeline that no table, path or text tensor stands for.

    Attributes:
        name: Of a pipeline task, or a word of its own.
        reads: What is read of a row of a table, with the names that such columns often have. Empty: no table is read. In upper case these
            are also the text tensors that a request brings.
        may_read: What is read in addition where the caller names a column for it.
        lists: What of these is a list of texts.
        needs: Options without which nothing is answered.
        takes_lists: Whether a list of inputs is one request.
        finite: Whether answers with NaN or infinity are errors of the model.
        tensor_options: Options of a request of text tensors.
    """

    name: str = ""
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    may_read: ClassVar[tuple[str, ...]] = ()
    lists: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    takes_lists: ClassVar[bool] = True
    finite: ClassVar[bool] = True
    tensor_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name

    # Engine

    def offered(self, model: ORTModel) -> bool:
        """Return whether a model does it; models serve the pipelines of their task in addition."""
        return False

    def work(self, model: ORTModel, tokenizer: Any) -> Work:
        """Make what turns inputs into rows, rows into outputs and outputs into answers, for one thread."""
        from ..models.pipelines.pipeline import pipeline
        from .pipeline_work import PipelineWork

        return PipelineWork(pipeline(self.name, model=model, tokenizer=tokenizer))

    def count(self, inputs: Any) -> int:
        """Count the inputs of a request."""
        return max(len(inputs), 1) if self.takes_lists and isinstance(inputs, list | tuple) else 1

    # Rows of a table

    def inputs(self, values: Mapping[str, Any]) -> Any:
        """Return the engine's inputs for the values of a row by use."""
        return values["text"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of the answers: Arrow types by name.

        Raises:
            InputError: An option changes the answers to something that has no column.
        """
        raise TaskError(f"The answers of {self.name} have no columns.", fix="ask for another operation.")

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of an answer by column."""
        return dict(answer)

    # Text tensors

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        """Return datatype and size (-1: any) of the text protocol's outputs by name; empty where there is no such form."""
        return {}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        """Return the values of a row by output."""
        return {}

    # HTTP

    def endpoint(self) -> Endpoint | None:
        """Make its endpoint, where it has a path of its own. HTTP's libraries are an extra: import them here."""
        return None


class Tokenize(Operation):
    """The tokens of texts, without a call of the model."""

    name = "tokenize"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        """See `Operation`."""
        return "input_ids" in model.input_names

    def work(self, model: ORTModel, tokenizer: Any) -> Work:
        """See `Operation`."""
        from .text_work import Tokenization

        return Tokenization(model, tokenizer)

    def inputs(self, values: Mapping[str, Any]) -> Any:
        """See `Operation`."""
        return [values["text"]]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation`."""
        import pyarrow as pa

        return {"ids": pa.list_(pa.int64()), "tokens": pa.list_(pa.string())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation`."""
        (tokens,) = answer
        return {"ids": [one["id"] for one in tokens], "tokens": [one["text"] for one in tokens]}


class RunTensors(Operation):
    """The graph's inputs in, its outputs out. They may hold infinity; the protocol that writes them checks those that were asked for."""

    name = "tensors"
    takes_lists = False
    finite = False

    def offered(self, model: ORTModel) -> bool:
        """See `Operation`."""
        return True

    def work(self, model: ORTModel, tokenizer: Any) -> Work:
        """See `Operation`."""
        from .tensor_work import Tensors

        return Tensors(model, tokenizer)


_EVERY_MODEL = (Tokenize(), RunTensors())


def operations_of(model: ORTModel) -> dict[str, Operation]:
    """What can be asked of a model, by name: the pipelines that it serves, its own task first, and its other operations."""
    from ..models.pipelines.pipeline import pipeline_tasks

    described = {one.name: one for one in (*load_task(model.artifact.task).operations(), *_EVERY_MODEL)}
    found = {name: described.get(name) or Operation(name) for name in pipeline_tasks(model)}
    return {**found, **{name: one for name, one in described.items() if name not in found and one.offered(model)}}


def usual_operation(model: ORTModel) -> Operation:
    """What a model is for: the first operation of its task that it does, else its own pipeline."""
    offered = operations_of(model)
    own = load_task(model.artifact.task).operations()
    return next((one for one in own if one.name in offered), next(iter(offered.values())))


def all_operations() -> dict[str, Operation]:
    """Every operation that is described, by name; imports the module of each task."""
    tasks = (one for task in working_tasks() for one in task.operations())
    return {one.name: one for one in (*tasks, *_EVERY_MODEL)}


def refuse_options(options: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Refuse options whose answers have no column.

    Args:
        options: Of the operation.
        remedies: Why not, by option that is refused unless it is false or `None`.

    Raises:
        InputError: There is one.
    """
    for name, reason in remedies.items():
        if options.get(name):
            raise InputError(reason, fix=f"leave {name} out.")
