"""Serve an engine over HTTP with Starlette.

A protocol is a module with a table `ENDPOINTS`, listed in `app.PROTOCOLS`. An `Endpoint` has a path, a body (a pydantic model) and a
function that answers a `Call`. Request ids, API keys, limits, errors, metrics, timing headers and the OpenAPI description are implemented
once, for all endpoints.
"""
