"""The steps of a search that run in a process of their own: building an artifact, measuring accuracy; and the store that
remembers what they found.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifact import Artifact, accel_home, sha256, tool_versions
from ..config import ExportConfig, OptimizeConfig, QuantizeConfig, SessionOptions

TOOLS = ("torch", "transformers", "onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino", "nncf")


class Store:
    """What earlier searches measured, under `ACCEL_HOME/tune`, by everything that it depends on.

    Args:
        fresh: Forget what was there before.
    """

    def __init__(self, *, fresh: bool = False) -> None:
        self._root = accel_home() / "tune"
        self._fresh = fresh
        self._written: set[Path] = set()
        self.hits = 0

    def get(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was found for a key, or `None`."""
        file = self._file(kind, key)
        if self._fresh and file not in self._written:
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # What was built is looked up again and again; what was measured, once.
        self.hits += kind != "builds"
        return found if isinstance(found, dict) else None

    def put(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Remember it, at once: an interrupted search keeps what it measured."""
        file = self._file(kind, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(file)
        self._written.add(file)

    def artifact(self, key: Mapping[str, Any]) -> Path:
        """The folder of the artifact that a key stands for."""
        return self._root / "artifacts" / digest(key)

    def _file(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self._root / kind / f"{digest(key)}.json"


def digest(key: Any) -> str:
    """A short name for JSON values."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def data_digest(data: Any) -> str:
    """Identifies data: the content of a file, the rows of a list, the fingerprint of a data set, the name of another."""
    if data is None:
        return ""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        return sha256(path) if path.is_file() else os.fspath(data)
    return str(getattr(data, "_fingerprint", None) or digest(list(data)))


def versions() -> dict[str, str]:
    """Of everything that makes or runs an artifact."""
    return tool_versions(*TOOLS)


def build(
    step: Mapping[str, Any], parent: Path | None, out: Path, source: str, task: str, calibration: Mapping[str, Any] | None,
    hub: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Make an artifact: one step of a recipe.

    Args:
        step: The recipe's JSON form.
        parent: Artifact that it starts from.
        out: Folder to make.
        source: Model to export.
        task: Its task.
        calibration: Arguments of `calibration_batches`.
        hub: Arguments of `export` about the Hub.

    Returns:
        What a search needs to know about it.
    """
    from .. import steps
    from ..calibration import calibration_batches
    from ..exporting import export

    started = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    if step["stage"] == "export":
        config = ExportConfig(dtype=step["setting"])
        artifact = export(source, out, task=task, backend=step["backend"], format=step["format"], config=config, **hub)
    else:
        assert parent is not None
        made_from = Artifact.load(parent)
        if step["stage"] == "optimize":
            level = OptimizeConfig.from_dict({"level": step["setting"], **step["settings"]})
            artifact = steps.optimize(made_from, out, backend=step["backend"], config=level)
        else:
            scheme = QuantizeConfig.from_dict({"scheme": step["setting"], **step["settings"]})
            batches = None
            if calibration is not None:
                batches = calibration_batches(made_from, config=scheme, **calibration)
            artifact = steps.quantize(made_from, out, calibration=batches, backend=step["backend"], config=scheme)
    component = artifact.components[0]
    return {
        "digest": artifact.digest,
        "bytes": artifact.bytes,
        "dtype": artifact.dtype,
        "limits": dict(component.max_sizes),
        "masked": any(spec.role == "mask" for spec in component.inputs),
        "seconds": round(time.perf_counter() - started, 2),
    }


def opens(path: Path, backend: str, device: str, options: Mapping[str, Any]) -> None:
    """Open an artifact and close it again.

    Raises:
        AccelError: The backend refuses.
    """
    from ..sessions import open_artifact

    how = SessionOptions.from_dict(options)
    opened = open_artifact(Artifact.load(path), backend=backend, device=device, options=how)
    for session in opened.sessions.values():
        session.close()


def accuracy(model: Mapping[str, Any], data: Mapping[str, Any], reference: list[Any] | None) -> dict[str, Any]:
    """Measure a model on labelled data.

    Args:
        model: `pytorch` (a folder) or `path`, `backend`, `device` and `options`; and `task`, `trust_remote_code`.
        data: Arguments of `EvaluationSet`.
        reference: Predictions of PyTorch float32 on the same rows, to compare with.

    Returns:
        Value, predictions and, with a reference, what was lost.
    """
    from .. import capture
    from ..calibration import load_processor
    from ..evaluation import EvaluationSet, close, open_model
    from ..hub import HubOptions, Location
    from ..intervals import difference_interval

    trust = bool(model.get("trust_remote_code"))
    opened: Any
    if "pytorch" in model:
        folder = Path(model["pytorch"])
        hub = HubOptions(local_files_only=True, trust_remote_code=trust)
        source = capture.load_source(Location(str(folder), folder), task=model["task"], config=ExportConfig(), hub=hub)
        opened, limits = source.model, source.max_sizes
    else:
        folder = Path(model["path"])
        artifact = Artifact.load(folder)
        options = SessionOptions.from_dict(model["options"])
        opened = open_model(artifact, backend=model["backend"], device=model["device"], session_options=options)
        limits = artifact.components[0].max_sizes
    try:
        prepared = EvaluationSet(
            task=model["task"],
            config=opened.config,
            processor=load_processor(folder, model["task"], trust_remote_code=trust),
            limit=limits.get("sequence"),
            trust_remote_code=trust,
            **data,
        )
        measured = prepared.measure(opened)
    finally:
        close(opened)
    found: dict[str, Any] = {
        "metric": prepared.metric.name,
        "value": measured.value,
        "predictions": list(measured.predictions),
        "rows": len(prepared.rows),
        "data": prepared.rows.sample.to_dict(),
        "points": prepared.metric.points,
        "higher_is_better": prepared.metric.higher_is_better,
        "seconds": round(measured.seconds, 2),
    }
    if reference is not None:
        metric = prepared.metric
        before = metric.compute(reference, prepared.references)[metric.key]
        interval = difference_interval(metric, reference, measured.predictions, prepared.references)
        ends = sorted(metric.drop(0.0, end) for end in (interval.low, interval.high))
        same = sum(bool(a == b) for a, b in zip(reference, measured.predictions, strict=True))
        found |= {
            "drop": metric.drop(before, measured.value),
            "drop_interval": ends,
            "agreement": same / len(reference),
        }
    return found
