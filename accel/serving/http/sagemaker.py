"""What SageMaker asks of a container: `/ping` and `/invocations`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from .bodies import Body, invalid
from .endpoints import Call, Endpoint
from .health import ready
from .replies import HttpError


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
    tasks = [one for one in call.server.endpoints if one.tag == "tasks" and one.body]
    fitting = [one for operation in done for one in tasks if one.operation == operation]
    if not fitting:
        raise HttpError(
            422,
            f"parameters.model is {model!r}: no such model, or no endpoint for its task.",
            fix=f"set it to one of {', '.join(names)}.",
        )
    problems: list[HttpError] = []
    for task in fitting:
        given = _given(task, body.inputs, parameters)
        # The model's own task comes first; what was sent may belong to another one that it does.
        try:
            found = task.body.model_validate(given) if task.body else None
        except ValidationError as error:
            problems.append(invalid(error, task.body or Body, given))
            continue
        return await task.answer(call, found)
    raise problems[0]


def _given(task: Endpoint, inputs: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The body for an endpoint. A question with its context, or a query with its documents, is itself what that takes."""
    fields = task.body.model_fields if task.body is not None else {}
    whole = isinstance(inputs, dict) and "inputs" not in fields
    usual = {"stream": False} if "stream" in fields else {}
    return {**usual, **(inputs if whole else {"inputs": inputs}), **parameters}


ENDPOINTS = (
    Endpoint(path="/ping", method="GET", answer=ready, summary="As /ready", tag="sagemaker", open=True),
    Endpoint(
        path="/invocations", answer=_invoke, body=InvocationBody, summary="As the endpoint of the model's task",
        tag="sagemaker", example={"inputs": "I lost my card"},
    ),
)  # fmt: skip
