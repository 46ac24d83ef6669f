"""The web page for trying the models, and the OpenAPI description."""

from __future__ import annotations

from importlib import resources
from typing import Any

from starlette.responses import Response

from .endpoints import Endpoint, HttpCall
from .openapi import openapi
from .replies import JsonReply

# Content security policy: the page is a single file and sends requests only to this server.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; media-src data:"


async def _docs(call: HttpCall, _: Any) -> Response:
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return Response(text, media_type="text/html; charset=utf-8", headers={"content-security-policy": _POLICY})


async def _openapi(call: HttpCall, _: Any) -> Response:
    return JsonReply(openapi(call.server.endpoints))


ENDPOINTS = (
    Endpoint(path="/docs", method="GET", answer=_docs, summary="Web page to try the models", tag="docs", open=True),
    Endpoint(path="/openapi.json", method="GET", answer=_openapi, summary="OpenAPI description", tag="docs", open=True),
)
