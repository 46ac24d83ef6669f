"""The OpenAPI description, generated from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..._version import __version__
from .endpoints import Endpoint
from .replies import ErrorBody

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_FAILURES = {
    "400": "the body is not valid JSON",
    "401": "the API key is missing or invalid",
    "404": "the server has no such model",
    "408": "the body did not arrive in time",
    "413": "the body or its texts are too large",
    "422": "a field is invalid",
    "429": "the queue is full; try again after Retry-After seconds",
    "503": "the server is starting or shutting down",
}


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the endpoints."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "accel", "version": __version__, "description": "Inference server for transformers models."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _reference(model: Any, schemas: dict[str, Any]) -> dict[str, str]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    failure = {"application/json": {"schema": _reference(ErrorBody, schemas)}}
    description: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": f"{endpoint.method.lower()}_{re.sub('[^a-z0-9]+', '_', endpoint.path.lower()).strip('_')}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(endpoint.path)
        ],
        "responses": {
            "200": {"description": "The result"},
            **{status: {"description": text, "content": failure} for status, text in _FAILURES.items()},
        },
        "security": [] if endpoint.open else [{}, {"key": []}],
    }
    if endpoint.operation:
        description["x-operation"] = endpoint.operation
    if endpoint.body is not None:
        content: dict[str, Any] = {"schema": _reference(endpoint.body, schemas)}
        if endpoint.example:
            content["example"] = dict(endpoint.example)
        description["requestBody"] = {"required": True, "content": {endpoint.media_type: content}}
    return description
