"""Private names of ONNX Runtime, as functions of ours.

Seen in onnxruntime 1.30 to 1.32; tests/backends/test_ort_upstream.py calls each of them on the installed version.

| name | reason | public alternative |
|---|---|---|
| `onnxruntime_pybind11_state.Fail`, ... | the exceptions that sessions raise | `RuntimeError`, which says nothing of the kind |
| `InferenceSession._sess.run` | `run` checks names again: 20 microseconds with cold caches | `InferenceSession.run` |
| `InferenceSession._sess.run_with_iobinding`, `SessionIOBinding` | the public class costs half of a small decoder's step | `IOBinding` |
| `OrtDevice._get_c_device` | what `SessionIOBinding` takes | `IOBinding.bind_output` |
| `OrtValue._ortvalue`, `OrtValue.from_dlpack` | a tensor on a device without a copy | `OrtValue.ortvalue_from_numpy`, on the host only |
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
"""Raised when a file is no graph that ONNX Runtime opens."""
INVALID_OPTION_ERRORS = (native.InvalidArgument, native.NotImplemented, native.RuntimeException, ValueError)
"""Raised when a graph cannot be opened with these options."""
PROVIDER_ERRORS = (native.EPFail,)
"""Raised when a provider fails."""
RUN_ERRORS = (native.InvalidArgument, native.Fail, native.RuntimeException, native.NotImplemented, native.EPFail)
"""Raised when a run fails; with IO binding a plain `RuntimeError`, too."""
# DLPack's tensors of bytes may be declared booleans; from 1.32 on DLPack's own booleans are.
_BOOLS_ARE_BYTES = VERSION < (1, 32)


def native_run(session: ort.InferenceSession) -> Callable[[list[str], dict[str, Any], Any], list[Any]]:
    """The session's run without checks: names of outputs, arrays by input name, and run options or `None`."""
    run: Callable[[list[str], dict[str, Any], Any], list[Any]] = session._sess.run
    return run


def native_binding(session: ort.InferenceSession) -> tuple[Any, Callable[[Any, Any], None]]:
    """A new binding of a session's inputs and outputs, and the function that runs it (with run options or `None`)."""
    return native.SessionIOBinding(session._sess), session._sess.run_with_iobinding


def native_device(device: torch.device) -> Any:
    """The device as bindings take it."""
    return ort.OrtDevice.make(device.type, device.index or 0)._get_c_device()


def native_value(tensor: torch.Tensor) -> Any:
    """The memory of a torch tensor as what `OrtValue` wraps."""
    if not _BOOLS_ARE_BYTES:
        return native.OrtValue.from_dlpack(to_dlpack(tensor))
    is_bool = tensor.dtype is torch.bool
    return native.OrtValue.from_dlpack(to_dlpack(tensor.view(torch.uint8) if is_bool else tensor), is_bool)


def native_as_tensor(value: Any) -> torch.Tensor:
    """The memory of what `OrtValue` wraps as a torch tensor of its shape, on its device."""
    tensor: torch.Tensor = from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def ort_value_as_tensor(value: ort.OrtValue) -> torch.Tensor:
    """The memory of an `OrtValue` as a torch tensor of its shape, on its device."""
    return native_as_tensor(value._ortvalue)


def cuda_of_build() -> str | None:
    """CUDA version that ONNX Runtime was built for; its CPU build has no such entry."""
    if importlib.util.find_spec("onnxruntime.capi.build_and_package_info") is None:
        return None
    from onnxruntime.capi import build_and_package_info

    version = getattr(build_and_package_info, "cuda_version", None)
    return str(version) if version else None
