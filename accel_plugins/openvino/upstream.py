"""Private names of OpenVINO, as functions of ours.

Seen in openvino 2026.4; tests/backends/test_openvino_upstream.py calls each of them on the installed version.

| name | reason | public alternative |
|---|---|---|
| `InferRequest.__mro__[2].infer`, `.start_async` | sorting arguments costs 200 microseconds with cold caches | `InferRequest.infer` |
| `_offline_transformations.apply_make_stateful_transformation` | makes variables by names | `passes.MakeStateful`, by nodes |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import openvino as ov
from openvino._offline_transformations import apply_make_stateful_transformation

_NATIVE = ov.InferRequest.__mro__[2]


def native_infer(request: ov.InferRequest) -> Callable[..., Any]:
    """`InferRequest.infer` without its Python layer: `infer({}, share_outputs=..., decode_strings=...)`."""
    return _NATIVE.infer.__get__(request)  # type: ignore[no-any-return]


def native_start(request: ov.InferRequest) -> Callable[[dict[int, Any], object], None]:
    """`InferRequest.start_async` without its Python layer: `start({}, None)`."""
    return _NATIVE.start_async.__get__(request)  # type: ignore[no-any-return]


def make_stateful(model: ov.Model, pairs: Mapping[str, str]) -> None:
    """Make variables of inputs and outputs, given as output names by input name. A variable is named by both names."""
    apply_make_stateful_transformation(model, dict(pairs))
