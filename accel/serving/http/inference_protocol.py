"""The Open Inference Protocol, version 2, of KServe and Triton: input and output tensors as JSON or binary data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from starlette.responses import Response

from ..._version import __version__
from ...artifact.tensor_specs import TensorSpec
from ..non_finite import find_non_finite, not_finite_error
from ..operations import Operation
from .bodies import Body, parse
from .endpoints import Endpoint, HttpCall
from .health import ready
from .replies import HttpError, JsonReply, error_text
from .tensor_formats import DATATYPES, check_datatype, from_binary, from_json, to_binary
from .text_tensors import SUFFIX, arrays_of, described, input_sizes, rows_of, text_operation

_HEADER = "inference-header-content-length"
_VERSION = "1"


class InputTensor(Body):
    """One input tensor. Its values are in `data` (flat or nested), or follow the JSON as binary data (`parameters.binary_data_size`)."""

    name: str
    datatype: str
    shape: list[int] = Field(max_length=8)
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class RequestedOutput(Body):
    """One output tensor that the client requests."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferBody(Body):
    """Request body of `infer`."""

    id: str | None = Field(default=None, max_length=256)
    inputs: list[InputTensor] = Field(min_length=1, max_length=64)
    outputs: list[RequestedOutput] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)


async def _server(call: HttpCall, _: Any) -> Response:
    return JsonReply({"name": "accel", "version": __version__, "extensions": ["binary_tensor_data"]})


async def _live(call: HttpCall, _: Any) -> Response:
    return JsonReply({"live": True})


@dataclass(frozen=True, slots=True)
class _Target:
    """The model in a request's path.

    `shown` is its name in the path and `name` its name in the engine. `operation` processes texts if the path has the form `NAME.text`.
    """

    shown: str
    name: str
    operation: Operation | None


def _target(call: HttpCall) -> _Target:
    """Return the model in the path of a request.

    Raises:
        HttpError: There is no such model or version.
    """
    shown, version = call.request.path_params["model"], call.request.path_params.get("version", _VERSION)
    models = call.engine.models
    if version == _VERSION and shown in models:
        return _Target(shown, shown, None)
    name = shown.removesuffix(SUFFIX)
    if version == _VERSION and name != shown and name in models:
        operations = call.server.text_operations
        if name not in operations:
            operations[name] = text_operation(models[name])
        if (operation := operations[name]) is not None:
            return _Target(shown, name, operation)
    raise HttpError(404, f"The server has no model {shown!r} with version {version!r}.", kind="model_not_found")


async def _model_ready(call: HttpCall, _: Any) -> Response:
    return JsonReply({"name": _target(call).shown, "ready": True})


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": shape}


async def _metadata(call: HttpCall, _: Any) -> Response:
    target = _target(call)
    model = call.engine.models[target.name]
    session = model.sessions[model.artifact.components[0].name]
    if target.operation is not None:
        inputs, outputs = described(target.operation, model)
    else:
        inputs, outputs = ([_described(spec) for spec in specs] for specs in (session.inputs, session.outputs))
    return JsonReply(
        {
            "name": target.shown,
            "versions": [_VERSION],
            "platform": f"accel_{model.backend}",
            "inputs": inputs,
            "outputs": outputs,
        }
    )


async def _infer(call: HttpCall, _: Any) -> Response:
    target = _target(call)
    content = await call.read()
    body, binary = _split(content, call.request.headers.get(_HEADER))
    _check_parameters(body.parameters, ("binary_data_output",))
    model = call.engine.models[target.name]
    session = model.sessions[model.artifact.components[0].name]
    outputs = (
        [spec.name for spec in session.outputs]
        if target.operation is None
        else [*target.operation.tensor_outputs(model)]
    )
    requested = {output.name: output for output in body.outputs} or {
        output: RequestedOutput(name=output) for output in outputs
    }
    for output in requested.values():
        _check_parameters(output.parameters, ("binary_data",))
    unknown = sorted(set(requested) - set(outputs))
    if unknown:
        raise HttpError(
            422, f"The model has no output {', '.join(unknown)}.", fix=f"request only {', '.join(outputs)}."
        )
    feeds = _read(body, binary, texts=target.operation is not None)
    if target.operation is not None:
        return _reply(target.shown, body, requested, await _answered(call, target.name, target.operation, feeds))
    batched = [spec.name for spec in session.inputs if spec.shape[:1] == ("batch",)]
    call.check_batch(max((feeds[name].shape[0] for name in batched if name in feeds and feeds[name].ndim), default=1))
    returned = await call.ask(feeds, operation="tensors", model=target.name)
    values = {name: returned[name].cpu() for name in requested}
    place = find_non_finite(values)
    if place is not None:
        error = not_finite_error("this request", place)
        call.server.metrics.failed(target.name, error)
        raise error
    return _reply(target.shown, body, requested, values)


def _read(body: InferBody, binary: bytes, *, texts: bool) -> dict[str, Any]:
    """Return the inputs of a request by name: tensors, or arrays of texts.

    Raises:
        HttpError: Values are invalid, or binary data is missing.
    """
    feeds: dict[str, Any] = {}
    used = 0
    for tensor in body.inputs:
        _check_parameters(tensor.parameters, ("binary_data_size",))
        size = tensor.parameters.get("binary_data_size")
        if tensor.name in feeds:
            raise HttpError(422, f"The request contains the input {tensor.name!r} twice.", fix="send each input once.")
        check_datatype(tensor.name, tensor.datatype, texts=texts)
        if size is None:
            feeds[tensor.name] = from_json(tensor.name, tensor.datatype, tensor.shape, tensor.data)
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - used:
            raise HttpError(
                422,
                f"Input {tensor.name!r} declares binary_data_size {size!r}, but the body has {len(binary) - used} bytes left for it "
                "after the JSON.",
                fix="set binary_data_size to the number of bytes that the input has.",
            )
        feeds[tensor.name] = from_binary(tensor.name, tensor.datatype, tensor.shape, binary[used : used + size])
        used += size
    if used != len(binary):
        raise HttpError(
            422,
            f"The body has {len(binary) - used} bytes after the binary data of the last input.",
            fix="remove these bytes, or set binary_data_size of each input to the number of its bytes.",
        )
    return feeds


async def _answered(call: HttpCall, name: str, operation: Operation, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run an operation on input texts and return the output tensors by name."""
    rows = rows_of(operation, feeds)
    sizes = input_sizes(operation)
    call.check_batch(sum(array.size for array in feeds.values()) // len(sizes))
    call.check_texts(rows)
    # The model reads a query once for each document, so the query's characters are counted once for each document.
    many = max(array.shape[-1] if array.ndim > 1 else 1 for array in feeds.values())
    call.check_texts([list(feeds[name].reshape(-1)) for name, size in sizes.items() if size == 1], times=many)
    how: dict[str, Any] = {"operation": operation.name, "model": name, **operation.tensor_options}
    if len(rows) == 1:
        answers = [await call.ask(rows[0], **how)]
    elif operation.takes_lists:
        answers = list(await call.ask(rows, **how))
    else:
        tasks = [asyncio.ensure_future(call.ask(row, **how)) for row in rows]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return arrays_of(operation, answers, call.engine.models[name])


def _reply(
    name: str, body: InferBody, requested: Mapping[str, RequestedOutput], outputs_by_name: Mapping[str, Any]
) -> Response:
    outputs, parts = [], []
    for output_name, output_request in requested.items():
        values = outputs_by_name[output_name]
        kind = str(values.dtype).removeprefix("torch.")
        entry: dict[str, Any] = {"name": output_name, "datatype": DATATYPES[kind], "shape": list(values.shape)}
        if output_request.parameters.get("binary_data", body.parameters.get("binary_data_output", False)):
            parts.append(to_binary(values))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = values.reshape(-1).tolist()
        outputs.append(entry)
    content: dict[str, Any] = {"model_name": name, "model_version": _VERSION, "outputs": outputs}
    if body.id is not None:
        content["id"] = body.id
    response = JsonReply(content)
    if not parts:
        return response
    head = bytes(response.body)
    return Response(b"".join([head, *parts]), media_type="application/octet-stream", headers={_HEADER: str(len(head))})


def _split(content: bytes, declared: str | None) -> tuple[InferBody, bytes]:
    """Split a request body into its JSON and the binary data after it."""
    if declared is None:
        return parse(InferBody, content), b""
    if not declared.isdecimal() or not declared.isascii() or len(declared) > 12 or int(declared) > len(content):
        raise HttpError(
            400,
            f"The header {_HEADER} is {declared[:20]!r}; expected the length of the JSON, at most {len(content)} bytes.",
            fix="set the header to the number of bytes of the JSON.",
        )
    length = int(declared)
    return parse(InferBody, content[:length]), content[length:]


def _check_parameters(parameters: Mapping[str, Any], supported: tuple[str, ...]) -> None:
    """Raise if a request has parameters that are not supported, such as shared memory."""
    unknown = sorted(set(parameters) - set(supported))
    if unknown:
        raise HttpError(
            422,
            f"The request parameters {', '.join(unknown)} are not supported.",
            fix=f"use only {', '.join(supported)}.",
        )


_MODEL = "/v2/models/{model}"
_OF_VERSION = _MODEL + "/versions/{version}"
_SHAPE = {"tag": "inference protocol", "error": error_text}
_EXAMPLE = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [2, 9, 3]}]}

ENDPOINTS = (
    Endpoint(path="/v2", method="GET", answer=_server, summary="Name, version and extensions of the server", **_SHAPE),  # type: ignore[arg-type]
    Endpoint(path="/v2/health/live", method="GET", answer=_live, summary="Check that the process is alive", open=True, **_SHAPE),  # type: ignore[arg-type]
    Endpoint(path="/v2/health/ready", method="GET", answer=ready, summary="Check that the server accepts requests", open=True, **_SHAPE),  # type: ignore[arg-type]
    *(
        Endpoint(path=base + path, method=method, answer=answer, summary=summary, **more, **_SHAPE)  # type: ignore[arg-type]
        for base in (_MODEL, _OF_VERSION)
        for path, method, answer, summary, more in (
            ("/ready", "GET", _model_ready, "Check that a model accepts requests", {}),
            ("", "GET", _metadata, "Inputs and outputs of a model", {}),
            (
                "/infer", "POST", _infer, "Run a model on tensors",
                {"body": InferBody, "raw": True, "operation": "tensors", "example": _EXAMPLE},
            ),
        )
    ),
)  # fmt: skip
