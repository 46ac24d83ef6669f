"""SageMaker's container endpoints: `/ping` and `/invocations`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from .bodies import Body, invalid
from .endpoints import Endpoint, HttpCall
from .health import ready
from .replies import HttpError


class InvocationBody(Body):
    """Request body of `/invocations`: `inputs`, and in `parameters` the other fields of the task's endpoint."""

    inputs: Any
    parameters: dict[str, Any] | None = None


async def _invoke(call: HttpCall, body: InvocationBody) -> Response:
    """Process a request in the same way as the endpoint of the model's task."""
    names = list(call.engine.models)
    parameters = dict(body.parameters or {})
    model = parameters.setdefault("model", names[0] if len(names) == 1 else None)
    done = [operation for name in names if name == model for operation in call.engine.operations(name)]
    tasks = [endpoint for endpoint in call.server.endpoints if endpoint.tag == "tasks" and endpoint.body]
    fitting = [endpoint for operation in done for endpoint in tasks if endpoint.operation == operation]
    if not fitting:
        raise HttpError(
            422,
            f"The field parameters.model is {model!r}. The server has no model with this name, or no endpoint for its task.",
            fix=f"set parameters.model to one of {', '.join(names)}.",
        )
    problems: list[HttpError] = []
    for task in fitting:
        content = _body_of(task, body.inputs, parameters)
        # Try the model's own task first; the body may be for another task that the model supports.
        try:
            parsed = task.body.model_validate(content) if task.body else None
        except ValidationError as error:
            problems.append(invalid(error, task.body or Body, content))
            continue
        return await task.answer(call, parsed)
    raise problems[0]


def _body_of(task: Endpoint, inputs: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the request body for an endpoint. If the endpoint has no field `inputs` and `inputs` is an object, the object is the body."""
    fields = task.body.model_fields if task.body is not None else {}
    is_body = isinstance(inputs, dict) and "inputs" not in fields
    usual = {"stream": False} if "stream" in fields else {}
    return {**usual, **(inputs if is_body else {"inputs": inputs}), **parameters}


ENDPOINTS = (
    Endpoint(
        path="/ping",
        method="GET",
        answer=ready,
        summary="Check that the server accepts requests",
        tag="sagemaker",
        open=True,
    ),
    Endpoint(
        path="/invocations", answer=_invoke, body=InvocationBody, summary="Run the task of a model",
        tag="sagemaker", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
