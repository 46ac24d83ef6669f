"""The kinds of requests that models support. The engine, HTTP, `accel batch` and the text form of the Open Inference Protocol use
`Operation` objects. `Task.operations` returns the operations of a task; the operations of every model are at the end of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError, TaskError
from ..interfaces.task_registry import load_task, working_tasks
from ..models.base import ORTModel
from .job import RequestHandler

if TYPE_CHECKING:
    from .http.endpoints import Endpoint

READS_TEXT: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "prompt", "input", "query", "question")
}
"""Value of `Operation.reads` for operations on one text: common names of text columns, the most likely first."""


class Operation:
    """One kind of request. The default methods describe a pipeline without an HTTP path, table columns or text tensors.

    Attributes:
        name: A pipeline task, or another name such as `embed`.
        reads: Names of the inputs that can be read from a table, such as `text` or `query`, each with common names of its column. If empty,
            the operation cannot run on tables. In upper case, they are also the names of the text tensors of a request.
        may_read: Names of optional inputs, which are read from a table only if the caller names a column for them.
        lists: Names of the inputs whose values are lists of texts.
        needs: Options that every request must have.
        takes_lists: Whether a request may contain a list of inputs.
        finite: Whether NaN or infinity in a result is an error of the model.
        tensor_options: Options that are used for a request with text tensors.
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

    # The engine uses the methods below.

    def offered(self, model: ORTModel) -> bool:
        """Return whether a model supports the operation.

        By default, a model supports every operation that overrides `work`. Other operations need a model that supports the pipeline `name`.
        """
        return type(self).work is not Operation.work or self.name in _pipelines(model)

    def work(self, model: ORTModel, tokenizer: Any) -> RequestHandler:
        """Create the `RequestHandler` object that implements the operation in one thread. By default, it runs the pipeline `name`."""
        from ..models.pipelines.pipeline import pipeline
        from .pipeline_handler import PipelineHandler

        return PipelineHandler(pipeline(self.name, model=model, tokenizer=tokenizer))

    def count(self, inputs: Any) -> int:
        """Return the number of inputs in a request."""
        return max(len(inputs), 1) if self.takes_lists and isinstance(inputs, list | tuple) else 1

    # `accel batch` uses the methods below for the rows of a table.

    def inputs(self, values: Mapping[str, Any]) -> Any:
        """Return the engine's inputs for one row of a table.

        Args:
            values: Values of the row by input name, such as `text`.
        """
        return values["text"]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the Arrow types of the result columns by name.

        Raises:
            InputError: An option changes the results so that they do not fit into columns.
        """
        raise TaskError(
            f"The results of the operation {self.name!r} cannot be written to table columns.",
            fix="use another operation, or implement `Operation.columns` in the class of this operation.",
        )

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a result by column name."""
        return dict(answer)

    # The methods below are used for text tensors of the Open Inference Protocol.

    def tensor_outputs(self, model: ORTModel) -> Mapping[str, tuple[str, int]]:
        """Return the output tensors by name, each as (datatype, size). Empty if the operation does not support text tensors.

        The datatype is `BYTES`, `FP32` or `INT64`. The size is the number of values in a row; -1 means any number.
        """
        return {}

    def tensor_values(self, answer: Any, model: ORTModel) -> Mapping[str, Any]:
        """Return the values of one result by output tensor name."""
        return {}

    # The HTTP server uses the method below.

    def endpoint(self) -> Endpoint | None:
        """Return the HTTP endpoint of the operation, or `None`.

        Import HTTP libraries inside this method, because they are optional dependencies.
        """
        return None


class TokenizeOperation(Operation):
    """Return the tokens of texts, without a model call."""

    name = "tokenize"
    reads = READS_TEXT

    def offered(self, model: ORTModel) -> bool:
        """Return whether the model reads token ids."""
        return "input_ids" in model.input_names

    def work(self, model: ORTModel, tokenizer: Any) -> RequestHandler:
        """Create the `RequestHandler` object that tokenizes texts in one thread."""
        from .text_handlers import TokenizationHandler

        return TokenizationHandler(model, tokenizer)

    def inputs(self, values: Mapping[str, Any]) -> Any:
        """Return the text of a table row as a list with one text."""
        return [values["text"]]

    def columns(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the Arrow types of the result columns `ids` and `tokens`."""
        import pyarrow as pa

        return {"ids": pa.list_(pa.int64()), "tokens": pa.list_(pa.string())}

    def values(self, answer: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the token ids and the token texts of a result by column name."""
        (tokens,) = answer
        return {"ids": [token["id"] for token in tokens], "tokens": [token["text"] for token in tokens]}


class TensorOperation(Operation):
    """Run the graph on tensors and return its outputs.

    The outputs may contain infinity; the HTTP protocol checks the outputs that it returns.
    """

    name = "tensors"
    takes_lists = False
    finite = False

    def work(self, model: ORTModel, tokenizer: Any) -> RequestHandler:
        """Create the `RequestHandler` object that runs the graph on tensors in one thread."""
        from .tensor_handler import TensorHandler

        return TensorHandler(model, tokenizer)


_EVERY_MODEL = (TensorOperation(), TokenizeOperation())


def _pipelines(model: ORTModel) -> tuple[str, ...]:
    from ..models.pipelines.pipeline import pipeline_tasks

    return pipeline_tasks(model)


def operations_of(model: ORTModel) -> dict[str, Operation]:
    """Return the operations of a model by name: first its own task, then its other pipelines, then other operations."""
    described = {
        operation.name: operation for operation in (*load_task(model.artifact.task).operations(), *_EVERY_MODEL)
    }
    pipelines = _pipelines(model)
    others = (name for name, operation in described.items() if name not in pipelines and operation.offered(model))
    return {name: described.get(name) or Operation(name) for name in (*pipelines, *others)}


def usual_operation(model: ORTModel, offered: Mapping[str, Operation]) -> Operation:
    """Return the main operation of a model: the first supported operation of its task, or its own pipeline, or `tensors`.

    Args:
        model: The model.
        offered: The operations of the model, from `operations_of`.
    """
    names = (operation.name for operation in load_task(model.artifact.task).operations())
    return next((offered[name] for name in names if name in offered), next(iter(offered.values())))


def all_operations() -> dict[str, Operation]:
    """Return the operations of all tasks and of every model, by name. This imports the module of each task."""
    tasks = (operation for task in working_tasks() for operation in task.operations())
    return {operation.name: operation for operation in (*tasks, *_EVERY_MODEL)}


def refuse_options(options: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Raise if a request has options whose results do not fit into columns.

    Args:
        options: Options of the request.
        remedies: Error message for each refused option. An option with a false value or `None` is accepted.

    Raises:
        InputError: A refused option is set.
    """
    for name, reason in remedies.items():
        if options.get(name):
            raise InputError(reason, fix=f"leave {name} out.")
