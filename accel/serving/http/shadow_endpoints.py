"""Endpoints of a shadow: its comparison with the served model, and the switch by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from ...errors import ConfigError
from ..shadow import Shadow
from .endpoints import Endpoint, HttpCall
from .replies import HttpError, JsonReply


def _shadow(call: HttpCall) -> Shadow:
    shadow = call.engine.shadow
    if shadow is None:
        raise HttpError(404, "The server has no shadow.", kind="not_found", fix="start it with --shadow MODEL.")
    return shadow


async def _state(call: HttpCall, _: Any) -> Response:
    return JsonReply(_shadow(call).to_dict())


async def _switch(call: HttpCall, _: Any) -> Response:
    shadow = _shadow(call)
    try:
        await asyncio.to_thread(shadow.switch, call.engine)
    except ConfigError as error:
        raise HttpError(409, error.message, kind="switched", fix=error.fix or "") from error
    return JsonReply(shadow.to_dict())


ENDPOINTS = (
    Endpoint(path="/shadow", method="GET", answer=_state, summary="Agreement and latency of the shadow", tag="shadow"),
    Endpoint(path="/shadow/switch", answer=_switch, summary="Let the shadow's model answer all requests", tag="shadow"),
)
