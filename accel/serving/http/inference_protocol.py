"""The Open Inference Protocol, version 2, as KServe and Triton speak it: tensors in, tensors out, as JSON or binary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from starlette.responses import Response

from ..._version import __version__
from ...artifact.tensors import TensorSpec
from ..non_finite import find_non_finite, not_finite_error
from ..operations import Operation
from .bodies import Body, parse
from .endpoints import Call, Endpoint
from .health import ready
from .replies import HttpError, Json, error_text
from .tensor_formats import (
    DATATYPES,
    array_to_binary,
    from_binary,
    from_json,
    texts_from_binary,
    texts_from_json,
    to_binary,
    to_json_data,
)
from .text_tensors import SUFFIX, arrays_of, described, input_sizes, rows_of, text_operation

_HEADER = "inference-header-content-length"
_VERSION = "1"


class InputTensor(Body):
    """One input: its values in `data`, flat or nested, or behind the JSON (`parameters.binary_data_size`)."""

    name: str
    datatype: str
    shape: list[int] = Field(max_length=8)
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class WantedOutput(Body):
    """One output that is wanted."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferBody(Body):
    """What `infer` takes."""

    id: str | None = Field(default=None, max_length=256)
    inputs: list[InputTensor] = Field(min_length=1, max_length=64)
    outputs: list[WantedOutput] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)


async def _server(call: Call, _: Any) -> Response:
    return Json({"name": "accel", "version": __version__, "extensions": ["binary_tensor_data"]})


async def _live(call: Call, _: Any) -> Response:
    return Json({"live": True})


@dataclass(frozen=True, slots=True)
class _Target:
    """A model of the path: its name there and in the engine, and the operation that answers texts, if that is what the name says."""

    shown: str
    name: str
    operation: Operation | None


def _target(call: Call) -> _Target:
    """The model of the path.

    Raises:
        HttpError: There is none, or not in that version.
    """
    shown, version = call.request.path_params["model"], call.request.path_params.get("version", _VERSION)
    models = call.engine.models
    if version == _VERSION and shown in models:
        return _Target(shown, shown, None)
    name = shown.removesuffix(SUFFIX)
    if version == _VERSION and name != shown and name in models:
        operation = text_operation(models[name])
        if operation is not None:
            return _Target(shown, name, operation)
    raise HttpError(404, f"There is no model {shown!r} of version {version!r}.", kind="model_not_found")


async def _model_ready(call: Call, _: Any) -> Response:
    return Json({"name": _target(call).shown, "ready": True})


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": shape}


async def _metadata(call: Call, _: Any) -> Response:
    target = _target(call)
    model = call.engine.models[target.name]
    session = model.sessions[model.artifact.components[0].name]
    if target.operation is not None:
        inputs, outputs = described(target.operation, model)
    else:
        inputs, outputs = ([_described(spec) for spec in specs] for specs in (session.inputs, session.outputs))
    return Json(
        {
            "name": target.shown,
            "versions": [_VERSION],
            "platform": f"accel_{model.backend}",
            "inputs": inputs,
            "outputs": outputs,
        }
    )


async def _infer(call: Call, _: Any) -> Response:
    target = _target(call)
    whole = await call.read()
    body, binary = _split(whole, call.request.headers.get(_HEADER))
    _known(body.parameters, ("binary_data_output",))
    model = call.engine.models[target.name]
    session = model.sessions[model.artifact.components[0].name]
    outputs = (
        [spec.name for spec in session.outputs]
        if target.operation is None
        else [*target.operation.tensor_outputs(model)]
    )
    wanted = {one.name: one for one in body.outputs} or {one: WantedOutput(name=one) for one in outputs}
    for one in wanted.values():
        _known(one.parameters, ("binary_data",))
    unknown = sorted(set(wanted) - set(outputs))
    if unknown:
        raise HttpError(422, f"There is no output {unknown}.", fix=f"use {', '.join(outputs)}.")
    feeds = _read(body, binary, texts=target.operation is not None)
    if target.operation is not None:
        return _reply(target.shown, body, wanted, await _answered(call, target.name, target.operation, feeds))
    batched = [spec.name for spec in session.inputs if spec.shape[:1] == ("batch",)]
    call.check_batch(max((feeds[name].shape[0] for name in batched if name in feeds and feeds[name].ndim), default=1))
    found = await call.ask(feeds, operation="tensors", model=target.name)
    values = {name: found[name].cpu() for name in wanted}
    place = find_non_finite(values)
    if place is not None:
        error = not_finite_error("this request", place)
        call.server.metrics.failed(target.name, error)
        raise error
    return _reply(target.shown, body, wanted, values)


def _read(body: InferBody, binary: bytes, *, texts: bool) -> dict[str, Any]:
    """The inputs by name: tensors, or arrays of texts.

    Raises:
        HttpError: They are something else, or their bytes are not there.
    """
    feeds: dict[str, Any] = {}
    used = 0
    for one in body.inputs:
        _known(one.parameters, ("binary_data_size",))
        size = one.parameters.get("binary_data_size")
        if one.name in feeds:
            raise HttpError(422, f"Input {one.name!r} came twice.", fix="send it once.")
        if texts and one.datatype != "BYTES":
            raise HttpError(
                422, f"Input {one.name!r} has the datatype {one.datatype[:20]!r}.", fix="send texts: BYTES."
            )
        if size is None:
            given = one.name, one.shape, one.data
            feeds[one.name] = (
                texts_from_json(*given) if texts else from_json(one.name, one.datatype, one.shape, one.data)
            )
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - used:
            raise HttpError(422, f"Input {one.name!r} has no {size} bytes behind the JSON.", fix="send all of them.")
        part = binary[used : used + size]
        feeds[one.name] = (
            texts_from_binary(one.name, one.shape, part)
            if texts
            else from_binary(one.name, one.datatype, one.shape, part)
        )
        used += size
    if used != len(binary):
        raise HttpError(422, f"{len(binary) - used} bytes behind the JSON belong to no input.", fix="leave them out.")
    return feeds


async def _answered(call: Call, name: str, operation: Operation, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs of texts."""
    rows = rows_of(operation, feeds)
    sizes = input_sizes(operation)
    call.check_batch(sum(array.size for array in feeds.values()) // len(sizes))
    call.check_texts(rows)
    # A query is read with each of its documents.
    many = max(array.shape[-1] if array.ndim > 1 else 1 for array in feeds.values())
    call.check_texts([list(feeds[name].reshape(-1)) for name, size in sizes.items() if size == 1], times=many)
    how: dict[str, Any] = {"operation": operation.name, "model": name, **operation.tensor_options}
    if len(rows) == 1:
        found = [await call.ask(rows[0], **how)]
    elif operation.takes_lists:
        found = list(await call.ask(rows, **how))
    else:
        asked = [asyncio.ensure_future(call.ask(row, **how)) for row in rows]
        try:
            found = await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()
    return arrays_of(operation, found, call.engine.models[name])


def _reply(name: str, body: InferBody, wanted: Mapping[str, WantedOutput], found: Mapping[str, Any]) -> Response:
    outputs, parts = [], []
    for one, asked in wanted.items():
        values = found[one]
        kind = str(values.dtype).removeprefix("torch.")
        entry: dict[str, Any] = {"name": one, "datatype": DATATYPES[kind], "shape": list(values.shape)}
        if asked.parameters.get("binary_data", body.parameters.get("binary_data_output", False)):
            parts.append(to_binary(values) if isinstance(values, torch.Tensor) else array_to_binary(values))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = to_json_data(values)
        outputs.append(entry)
    made: dict[str, Any] = {"model_name": name, "model_version": _VERSION, "outputs": outputs}
    if body.id is not None:
        made["id"] = body.id
    response = Json(made)
    if not parts:
        return response
    head = bytes(response.body)
    return Response(b"".join([head, *parts]), media_type="application/octet-stream", headers={_HEADER: str(len(head))})


def _split(whole: bytes, declared: str | None) -> tuple[InferBody, bytes]:
    """The JSON of a body, and the bytes behind it."""
    if declared is None:
        return parse(InferBody, whole), b""
    if not declared.isdecimal() or not declared.isascii() or len(declared) > 12 or int(declared) > len(whole):
        raise HttpError(
            400, f"{_HEADER} is {declared[:20]!r} and the body has {len(whole)} bytes.", fix="send its length."
        )
    length = int(declared)
    return parse(InferBody, whole[:length]), whole[length:]


def _known(parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse what is asked for and would not be done, such as shared memory."""
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise HttpError(422, f"The parameters {unknown} are not supported.", fix=f"use {', '.join(known)}.")


_MODEL = "/v2/models/{model}"
_OF_VERSION = _MODEL + "/versions/{version}"
_SHAPE = {"tag": "inference protocol", "error": error_text}
_EXAMPLE = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [2, 9, 3]}]}

ENDPOINTS = (
    Endpoint(path="/v2", method="GET", answer=_server, summary="Name, version, extensions", **_SHAPE),  # type: ignore[arg-type]
    Endpoint(path="/v2/health/live", method="GET", answer=_live, summary="As /health", open=True, **_SHAPE),  # type: ignore[arg-type]
    Endpoint(path="/v2/health/ready", method="GET", answer=ready, summary="As /ready", open=True, **_SHAPE),  # type: ignore[arg-type]
    *(
        Endpoint(path=base + path, method=method, answer=answer, summary=summary, **more, **_SHAPE)  # type: ignore[arg-type]
        for base in (_MODEL, _OF_VERSION)
        for path, method, answer, summary, more in (
            ("/ready", "GET", _model_ready, "Whether a model takes requests", {}),
            ("", "GET", _metadata, "A model's inputs and outputs", {}),
            (
                "/infer", "POST", _infer, "Tensors through a model",
                {"body": InferBody, "raw": True, "operation": "tensors", "example": _EXAMPLE},
            ),
        )
    ),
)  # fmt: skip
