"""Private and version-dependent APIs of OpenVINO and NNCF, wrapped in functions.

Tested with openvino 2026.4 and nncf 3.4; tests/backends/test_openvino_upstream.py calls each of them on the installed
versions.

| name | reason | public alternative |
|---|---|---|
| `InferRequest.__mro__[2].infer`, `.start_async` | sorting arguments takes 200 microseconds with cold caches | `InferRequest.infer` |
| `_offline_transformations.apply_make_stateful_transformation` | creates variables by input name | `passes.MakeStateful`, by node |
| `NNCF_CI` | importing NNCF sends usage data to its vendor | `openvino_telemetry`'s setting for all users of a machine |
| `openvino_backend.get_const_value_as_ov_tensor`, `..._as_numpy_tensor` | NNCF reads weights from their files | none |
| `openvino_backend.create_ov_const_from_tensor`, `.disable_results_caching`, `clear_ov_model_cache` | see `nncf_compiles_once` | none |
| `nncf.quantization.advanced_parameters`, `.range_estimator` | choose how activation ranges are measured | `nncf` exports only a part |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
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


@contextmanager
def nncf_reads(read: Callable[[ov.Node], np.ndarray | None]) -> Iterator[None]:
    """Let NNCF's weight compression read the values of constants with a function, while the context is open.

    Args:
        read: Returns the values of a constant, or `None` for the values in the graph.
    """
    from nncf.quantization.algorithms.weight_compression import openvino_backend as backend

    of_graph, array_of_graph = backend.get_const_value_as_ov_tensor, backend.get_const_value_as_numpy_tensor

    def tensor(constant: ov.Node) -> ov.Tensor:
        values = read(constant)
        return of_graph(constant) if values is None else ov.Tensor(values, shared_memory=True)

    def array(constant: ov.Node) -> np.ndarray:
        values = read(constant)
        return array_of_graph(constant) if values is None else values

    backend.get_const_value_as_ov_tensor, backend.get_const_value_as_numpy_tensor = tensor, array
    try:
        yield
    finally:
        backend.get_const_value_as_ov_tensor, backend.get_const_value_as_numpy_tensor = of_graph, array_of_graph


@contextmanager
def nncf_compiles_once() -> Iterator[None]:
    """Let NNCF's weight compression compile its model once for all weights of a shape, while the context is open.

    NNCF compiles a small model for each weight, because the new constants share memory with the outputs of the model. Here, the constants
    are copies. For a model of 1 billion parameters, NNCF takes 5 seconds to compile the models.
    """
    from nncf.openvino.optimized_functions import clear_ov_model_cache
    from nncf.quantization.algorithms.weight_compression import openvino_backend as backend

    create, disable = backend.create_ov_const_from_tensor, backend.disable_results_caching

    def create_copy(tensor: Any, dtype: ov.Type, name: str | None = None) -> ov.Node:
        if isinstance(tensor.data, ov.Tensor):
            return ov.opset13.constant(tensor.data, name=name, shared_memory=False)
        node: ov.Node = create(tensor, dtype, name)
        return node

    backend.create_ov_const_from_tensor, backend.disable_results_caching = create_copy, lambda _: nullcontext()
    try:
        yield
    finally:
        backend.create_ov_const_from_tensor, backend.disable_results_caching = create, disable
        clear_ov_model_cache()


def nncf_parameters() -> tuple[ModuleType, ModuleType]:
    """Return NNCF's modules of advanced parameters and of range estimators."""
    from nncf.quantization import advanced_parameters, range_estimator

    return advanced_parameters, range_estimator
