"""An engine behind HTTP: Starlette's routes, what they have in common, and the protocols.

A protocol is a module with `ENDPOINTS`, a table of `Endpoint`s, and a line in `app.PROTOCOLS`: its path, its body as a pydantic
model, and a function that answers a `Call`. Request ids, keys, limits, errors, metrics, timing headers and the OpenAPI page
come from the table.
"""
