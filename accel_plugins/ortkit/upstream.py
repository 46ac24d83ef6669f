"""Functions that wrap private names of ONNX Runtime.

The names exist in onnxruntime 1.30 to 1.32; tests/backends/test_ort_upstream.py calls each function on the installed
version.

| name | reason | public alternative |
|---|---|---|
| `onnxruntime_pybind11_state.Fail`, ... | exceptions that sessions raise | `RuntimeError`, which does not tell the kind of error |
| `InferenceSession._sess.run` | the public `run` checks names again: 20 microseconds with cold caches | `InferenceSession.run` |
| `InferenceSession._sess.run_with_iobinding`, `SessionIOBinding` | the public class takes half of a small decoder's step | `IOBinding` |
| `OrtDevice._get_c_device` | argument type of `SessionIOBinding` | `IOBinding.bind_output` |
| `OrtValue._ortvalue`, `OrtValue.from_dlpack` | a tensor on a device without a copy | `OrtValue.ortvalue_from_numpy`, on the CPU only |
| `build_and_package_info.cuda_version` | the CUDA version of the build | none |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as native
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
"""Major and minor version of ONNX Runtime."""
INVALID_GRAPH_ERRORS = (native.InvalidProtobuf, native.InvalidGraph, native.Fail, native.NoSuchFile)
"""Exceptions that ONNX Runtime raises when a file is not a valid graph."""
INVALID_OPTION_ERRORS = (native.InvalidArgument, native.NotImplemented, native.RuntimeException, ValueError)
"""Exceptions that ONNX Runtime raises when it cannot open a graph with the given options."""
PROVIDER_ERRORS = (native.EPFail,)
"""Exceptions that ONNX Runtime raises when an execution provider fails."""
RUN_ERRORS = (native.InvalidArgument, native.Fail, native.RuntimeException, native.NotImplemented, native.EPFail)
"""Exceptions that ONNX Runtime raises when a run fails; runs with IO binding also raise a plain `RuntimeError`."""
# Before 1.32, ONNX Runtime imports booleans from DLPack as bytes with a flag. Since 1.32, it accepts DLPack's own
# booleans.
_BOOLS_ARE_BYTES = VERSION < (1, 32)


def native_run(session: ort.InferenceSession) -> Callable[[list[str], dict[str, Any], Any], list[Any]]:
    """Return the session's run function that does not check its arguments.

    The arguments are the output names, the arrays by input name, and run options or `None`.
    """
    run: Callable[[list[str], dict[str, Any], Any], list[Any]] = session._sess.run
    return run


def native_binding(session: ort.InferenceSession) -> tuple[Any, Callable[[Any, Any], None]]:
    """Return a new IO binding of the session, and a function that runs the session with a binding and run options or `None`."""
    return native.SessionIOBinding(session._sess), session._sess.run_with_iobinding


def native_device(device: torch.device) -> Any:
    """Return ONNX Runtime's device object for use in IO bindings."""
    return ort.OrtDevice.make(device.type, device.index or 0)._get_c_device()


def native_value(tensor: torch.Tensor) -> Any:
    """Return ONNX Runtime's native value (the object inside an `OrtValue`) that shares memory with a torch tensor."""
    if not _BOOLS_ARE_BYTES:
        return native.OrtValue.from_dlpack(to_dlpack(tensor))
    is_bool = tensor.dtype is torch.bool
    return native.OrtValue.from_dlpack(to_dlpack(tensor.view(torch.uint8) if is_bool else tensor), is_bool)


def native_as_tensor(value: Any) -> torch.Tensor:
    """Return a torch tensor that shares memory with ONNX Runtime's native value, on the same device."""
    tensor: torch.Tensor = from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def ort_value_as_tensor(value: ort.OrtValue) -> torch.Tensor:
    """Return a torch tensor that shares memory with an `OrtValue`, on the same device."""
    return native_as_tensor(value._ortvalue)


def cuda_of_build() -> str | None:
    """Return the CUDA version that ONNX Runtime was built for; `None` for its CPU build."""
    if importlib.util.find_spec("onnxruntime.capi.build_and_package_info") is None:
        return None
    from onnxruntime.capi import build_and_package_info

    version = getattr(build_and_package_info, "cuda_version", None)
    return str(version) if version else None
