"""Private and version-dependent APIs of OpenVINO and NNCF, wrapped in functions.

Tested with openvino 2026.4 and nncf 3.4; tests/backends/test_openvino_upstream.py calls each of them on the installed
versions.

| name | reason | public alternative |
|---|---|---|
| `InferRequest.__mro__[2].infer`, `.start_async` | sorting arguments takes 200 microseconds with cold caches | `InferRequest.infer` |
| `_offline_transformations.apply_make_stateful_transformation` | creates variables by input name | `passes.MakeStateful`, by node |
| `NNCF_CI` | importing NNCF sends usage data to its vendor | `openvino_telemetry`'s setting for all users of a machine |
| `nncf.quantization.advanced_parameters`, `.range_estimator` | choose how activation ranges are measured | `nncf` exports only a part |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import openvino as ov
from openvino._offline_transformations import apply_make_stateful_transformation

from accel.capture import quiet
from accel.errors import QuantizeError

_NATIVE = ov.InferRequest.__mro__[2]


def native_infer(request: ov.InferRequest) -> Callable[..., Any]:
    """Return `InferRequest.infer` without its Python wrapper: `infer({}, share_outputs=..., decode_strings=...)`."""
    return _NATIVE.infer.__get__(request)  # type: ignore[no-any-return]


def native_start(request: ov.InferRequest) -> Callable[[dict[int, Any], object], None]:
    """Return `InferRequest.start_async` without its Python wrapper: `start({}, None)`."""
    return _NATIVE.start_async.__get__(request)  # type: ignore[no-any-return]


def make_stateful(model: ov.Model, pairs: Mapping[str, str]) -> None:
    """Turn pairs of inputs and outputs into variables. `pairs` maps input names to output names; a variable's name is
    both names joined.
    """
    apply_make_stateful_transformation(model, dict(pairs))


def nncf_library() -> ModuleType:
    """Import and return NNCF, without sending usage data to its vendor.

    Raises:
        QuantizeError: NNCF is not installed.
    """
    os.environ.setdefault("NNCF_CI", "1")
    try:
        with quiet():
            import nncf
    except ImportError as error:
        raise QuantizeError(
            f"The package nncf, which quantizes models for OpenVINO, cannot be imported: {error}.",
            fix='pip install "accel-transformers[openvino]"',
        ) from error
    module: ModuleType = nncf
    return module


def nncf_parameters() -> tuple[ModuleType, ModuleType]:
    """Return NNCF's modules of advanced parameters and of range estimators."""
    from nncf.quantization import advanced_parameters, range_estimator

    return advanced_parameters, range_estimator
