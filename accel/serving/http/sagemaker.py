"""What SageMaker asks of a container: `/ping` and `/invocations`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .endpoints import Body, Call, Endpoint
from .health import ready
from .replies import HttpError
from .tasks import ENDPOINTS as TASKS


class InvocationBody(Body):
    """What `/invocations` takes: `inputs`, and as `parameters` the other fields of the task's own endpoint."""

    inputs: Any
    parameters: dict[str, Any] | None = None


async def _invoke(call: Call, body: InvocationBody) -> Response:
    """The answer of the endpoint for the model's task."""
    names = list(call.engine.models)
    parameters = dict(body.parameters or {})
    model = parameters.setdefault("model", names[0] if len(names) == 1 else None)
    done = [operation for name in names if name == model for operation in call.engine.operations(name)]
    task = next((one for operation in done for one in TASKS if one.operation == operation), None)
    if task is None or task.body is None:
        raise HttpError(
            422,
            f"parameters.model is {model!r}: no such model, or no endpoint for its task.",
            fix=f"set it to one of {', '.join(names)}.",
        )
    # A question with its context, or a query with its documents, is itself what the endpoint takes.
    whole = isinstance(body.inputs, dict) and "inputs" not in task.body.model_fields
    given = body.inputs if whole else {"inputs": body.inputs}
    return await task.answer(call, task.body.model_validate({**given, **parameters}))


ENDPOINTS = (
    Endpoint(path="/ping", method="GET", answer=ready, summary="As /ready", tag="sagemaker", open=True),
    Endpoint(
        path="/invocations", answer=_invoke, body=InvocationBody, summary="As the endpoint of the model's task",
        tag="sagemaker", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
