"""Asks a real server: loads a repository and sends each model a request."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BackendUnavailableError, SessionError
from ....interfaces.task_registry import all_tasks
from ....interfaces.task_spec import load
from ..messages import type_name
from ..server import VARIABLE, Installation, TritonServer, find_server
from ..shadow import shadow
from .findings import Model
from .models import read_models

_ARRAYS = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "uint8", "TYPE_INT8": "int8", "TYPE_INT32": "int32", "TYPE_INT64": "int64",
    "TYPE_FP16": "float16", "TYPE_FP32": "float32", "TYPE_FP64": "float64",
}  # fmt: skip
_LENGTH = 8
"""Size of axes that vary, in requests with tensors."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a model answered to one request.

    Attributes:
        model: Its name.
        passed: Whether it answered, with what its configuration says.
        message: The outputs and their shapes, or what was wrong.
        milliseconds: How long that took, over HTTP; the first request, so with whatever a first request costs.
    """

    model: str
    passed: bool
    message: str
    milliseconds: float


def run(
    repository: str | os.PathLike[str], *, tritonserver: str | os.PathLike[str] | None = None, timeout_s: float = 120.0
) -> tuple[Trial, ...]:
    """Start a server on a repository and ask every model in it.

    A server without the backends that the repository needs, such as the one in the package `nvidia-pytriton`, gets its
    shadow: ONNX graphs run by Python on the CPU, everything else as it is.

    Args:
        repository: The folder.
        tritonserver: A `tritonserver`, or a Python that has `nvidia-pytriton`; found when `None`.
        timeout_s: How long the server may take to be ready, in seconds.

    Raises:
        BackendUnavailableError: There is no server here.
        SessionError: The server does not load the repository.
    """
    root = Path(repository).expanduser().absolute()
    installation = find_server(tritonserver)
    if installation is None:
        raise BackendUnavailableError(
            "There is no tritonserver on the path or in /opt/tritonserver, and no package nvidia-pytriton.",
            fix=f"set {VARIABLE} to a tritonserver, or to a Python that has nvidia-pytriton; or check inside Triton's container.",
        )
    models, _ = read_models(root)
    if all(installation.has(model.backend) for model in models.values()):
        return _ask(root, models, installation, timeout_s, ())
    with tempfile.TemporaryDirectory(prefix="accel-triton-") as folder:
        left_out = shadow(root, Path(folder) / "shadow")
        shadows, _ = read_models(Path(folder) / "shadow")
        return _ask(Path(folder) / "shadow", shadows, installation, timeout_s, left_out)


def _ask(
    root: Path, models: Mapping[str, Model], installation: Installation, timeout_s: float, left_out: Any
) -> tuple[Trial, ...]:
    trials = [
        Trial(name, False, "this server has no backend for it, and Python cannot run it", 0.0) for name in left_out
    ]
    with TritonServer(root, installation, timeout_s=timeout_s) as server:
        trials += [_trial(server, model) for model in models.values()]
    return tuple(sorted(trials, key=lambda one: one.model))


def _trial(server: TritonServer, model: Model) -> Trial:
    started = time.perf_counter()
    try:
        if model.config.model_transaction_policy.decoupled:
            said = _stream(server, model)
        else:
            said = _judged(model, server.infer(model.name, _request(model)))
    except SessionError as error:
        return Trial(model.name, False, error.message, (time.perf_counter() - started) * 1e3)
    return Trial(model.name, not said.startswith("wrong"), said, (time.perf_counter() - started) * 1e3)


def samples() -> dict[str, list[str]]:
    """Texts for every input that a service of ours has, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted({path for spec in all_tasks() for path in spec.fronts.values()}):
        found.update(load(path).sample)
    return found


def _request(model: Model) -> dict[str, tuple[str, Any]]:
    """One row for every input that must be given: a text, or zeros."""
    texts, made = samples(), {}
    for one in model.config.input:
        if one.optional:
            continue
        kind = type_name(one.data_type)
        dims = [size if size > 0 else _LENGTH for size in one.dims]
        if model.config.max_batch_size:
            dims = [1, *dims]
        elif one.dims and one.dims[0] == -1:
            dims[0] = 1
        if kind == "TYPE_STRING":
            given = texts.get(one.name, ["a text"])
            varies = bool(one.dims) and one.dims[-1] == -1
            values = np.array(given if varies else given[:1], dtype=object)
            made[one.name] = ("BYTES", values.reshape([1, -1] if model.config.max_batch_size else [-1]))
        else:
            made[one.name] = (kind.removeprefix("TYPE_"), np.zeros(dims, dtype=_ARRAYS.get(kind, "float32")))
    return made


def _judged(model: Model, outputs: Mapping[str, Any]) -> str:
    """What came back, or `wrong` and why it is not what the configuration says."""
    most = model.config.max_batch_size
    for one in model.config.output:
        if one.name not in outputs:
            return f"wrong: there is no output {one.name!r} in the answer"
        shape, values = outputs[one.name]
        own = shape[1:] if most else shape
        if len(own) != len(one.dims) or any(b not in (-1, a) for a, b in zip(own, one.dims, strict=True)):
            return f"wrong: {one.name!r} has the shape {shape}, and its dims are {list(one.dims)}"
        if any(isinstance(value, float) and not np.isfinite(value) for value in values):
            return f"wrong: {one.name!r} holds values that are not finite"
    return ", ".join(f"{name} {shape}" for name, (shape, _) in outputs.items())


def _stream(server: TritonServer, model: Model) -> str:
    given = {name: values.ravel().tolist()[0] for name, (_, values) in _request(model).items()}
    pieces = server.stream(model.name, {**given, "parameters": {"max_new_tokens": 4}})
    return f"{len(pieces)} pieces: {json.dumps(pieces[:1])}" if pieces else "wrong: it answered nothing"
