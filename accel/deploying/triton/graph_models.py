"""A graph as a model of Triton: one row for each of its backends, looked up by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.manifest import Artifact, Component
from ...artifact.tensors import TensorSpec
from ...capture import usual_sizes_in
from ...errors import ConfigError, TaskError
from ...interfaces.shape_profiles import Profile, shapes_text
from ...interfaces.specs import DeviceSpec
from ...interfaces.task_registry import load_task
from .model_config import data_type, kind, model_config
from .profiles import profile_of
from .triton_config import TritonConfig

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """What is to be deployed, and how.

    Attributes:
        artifact: It.
        config: How.
        name: Of its model in the repository.
        length: Tokens of a row at most, for warm-up and profiles; `None` where nothing says it.
    """

    artifact: Artifact
    config: TritonConfig
    name: str
    length: int | None = None

    @property
    def component(self) -> Component:
        """The one graph."""
        return self.artifact.components[0]

    @property
    def device(self) -> DeviceSpec:
        """Where it runs."""
        return DeviceSpec.parse(self.config.device)

    @property
    def batches(self) -> bool:
        """Whether rows may be added to a call: every input and output begins with an axis of the batch."""
        specs = (*self.component.inputs, *self.component.outputs)
        return all(spec.shape[:1] == ("batch",) for spec in specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBackend:
    """One of Triton's backends.

    Attributes:
        formats: Formats of artifacts that it runs.
        file: The name that it looks for.
        devices: Where it runs.
        fields: What is particular to it in a configuration.
        batches: Whether Triton may merge requests for it.
        code: Modules of `served` that it needs, the first as `model.py`.
        accelerators: What it can be told to run on top.
    """

    formats: tuple[str, ...]
    file: str
    devices: tuple[str, ...]
    fields: Callable[[Graph], Fields]
    batches: bool = True
    code: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()


def _onnxruntime(graph: Graph) -> Fields:
    config = graph.config
    found: Fields = {"parameters": _texts({"intra_op_thread_count": config.threads})}
    if config.accelerator is None:
        return found
    side = "gpu" if config.accelerator == "tensorrt" else "cpu"
    options = _ACCELERATORS[config.accelerator](graph)
    chosen = {"name": config.accelerator, "parameters": {**options, **config.accelerator_options}}
    return {**found, "optimization": {"execution_accelerators": {f"{side}_execution_accelerator": [chosen]}}}


def _tensorrt_accelerator(graph: Graph) -> dict[str, str]:
    """Options of ONNX Runtime's TensorRT provider: precision as the graph has it, profiles, and caches on the server."""
    foreign = [domain for domain in graph.artifact.domains or () if domain not in ("", "trt.plugins")]
    if foreign:
        raise ConfigError(
            f"The graph has operators of {', '.join(foreign)}, which TensorRT does not know.",
            fix="deploy the artifact from before it was optimized, or optimize it with --backend tensorrt.",
        )
    if graph.device.type != "cuda":
        raise ConfigError("The accelerator tensorrt runs on a GPU.", fix="deploy it with --device cuda.")
    profile = _profile(graph)
    cache = f"{graph.config.cache}/{graph.name}/{graph.config.version}"
    precision = {"float16": "FP16"}.get(graph.artifact.dtype, "FP32")
    quantized = graph.artifact.manifest.quantization is not None
    return {
        "precision_mode": "INT8" if quantized else precision,
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": cache,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": cache,
        **{
            f"trt_profile_{word}_shapes": shapes_text(graph.component.inputs, profile, word)
            for word in ("min", "opt", "max")
        },
    }


def _openvino_accelerator(graph: Graph) -> dict[str, str]:
    if graph.device.type != "cpu":
        raise ConfigError("The accelerator openvino runs on CPUs.", fix="deploy it with --device cpu.")
    return {}


def _openvino(graph: Graph) -> Fields:
    """The backend fixes the batch at its maximum, so the graph keeps its own free batch axis and merges nothing by itself."""
    return {"parameters": _texts({"INFERENCE_NUM_THREADS": graph.config.threads, "NUM_STREAMS": "1"})}


def _tensorrt(graph: Graph) -> Fields:
    if graph.config.threads is not None:
        raise ConfigError("An engine has no threads to set.", fix="leave threads out.")
    profile = _profile(graph)
    most = profile.get("batch")
    if most is not None and most.most < graph.config.max_batch_size:
        raise ConfigError(
            f"The engine was built for up to {most.most} rows; max_batch_size is {graph.config.max_batch_size}.",
            fix=f"deploy it with --max-batch-size {most.most}, or build it with a larger profile.",
        )
    return {"parameters": _texts({"accel_profile": ",".join(f"{axis}={sizes}" for axis, sizes in profile.items())})}


_ACCELERATORS = {"tensorrt": _tensorrt_accelerator, "openvino": _openvino_accelerator}

BACKENDS: Mapping[str, GraphBackend] = {
    "onnxruntime": GraphBackend(
        formats=("onnx",),
        file="model.onnx",
        devices=("cpu", "cuda"),
        fields=_onnxruntime,
        accelerators=tuple(_ACCELERATORS),
    ),
    "openvino": GraphBackend(
        formats=("openvino_ir",), file="model.xml", devices=("cpu",), fields=_openvino, batches=False
    ),
    "tensorrt": GraphBackend(formats=("tensorrt",), file="model.plan", devices=("cuda",), fields=_tensorrt),
    "python": GraphBackend(formats=("onnx",), file="model.py", devices=("cpu",), fields=lambda _: {}, code=("graph",)),
}
"""Triton's backends that run graphs; the first that runs a format is the one chosen automatically."""


def backend_for(artifact: Artifact, config: TritonConfig) -> str:
    """The name of the backend for an artifact.

    Raises:
        ConfigError: None runs its format, or the one that was named does not, there or with that accelerator.
        TaskError: It has several graphs, or one that keeps something between calls.
    """
    if len(artifact.components) > 1 or artifact.components[0].stateful:
        raise TaskError(
            f"{artifact.path} is a model for {artifact.task}, of {len(artifact.components)} graph(s) with a state, which "
            "Triton's backends do not keep.",
            fix="deploy it with layout='text'."
            if any(front.generates for front in load_task(artifact.task).fronts().values())
            and artifact.format == "onnx"
            and len(artifact.components) == 1
            else "serve it with `accel serve`, or embed it with accel.ORTModel.from_pretrained.",
        )
    fitting = [name for name, backend in BACKENDS.items() if artifact.format in backend.formats]
    name = config.backend if config.backend != "auto" else next(iter(fitting), "")
    if name not in fitting:
        raise ConfigError(
            f"Triton's backend {name!r} does not run artifacts of the format {artifact.format}."
            if name
            else f"No backend of Triton's runs artifacts of the format {artifact.format}.",
            fix=f"use {', '.join(fitting)}." if fitting else "export the model to ONNX: accel export MODEL OUT.",
        )
    backend = BACKENDS[name]
    device = DeviceSpec.parse(config.device)
    if device.type not in backend.devices:
        raise ConfigError(
            f"Triton's backend {name!r} runs on {' and '.join(backend.devices)}, not on {device.type}.",
            fix=f"deploy it with --device {backend.devices[0]}.",
        )
    if config.accelerator is not None and config.accelerator not in backend.accelerators:
        raise ConfigError(
            f"Triton's backend {name!r} has no accelerator {config.accelerator!r}.", fix="use backend='onnxruntime'."
        )
    return name


def graph_config(graph: Graph, backend: str) -> Any:
    """The configuration of a graph's model."""
    chosen, config = BACKENDS[backend], graph.config
    most = config.max_batch_size if chosen.batches and graph.batches else 0
    fields: Fields = {
        "name": graph.name,
        "backend": backend,
        "max_batch_size": most,
        "input": [_described(spec, most) for spec in graph.component.inputs],
        "output": [_described(spec, most) for spec in graph.component.outputs],
        "instance_group": [instances(config.device, config.instances)],
        "version_policy": version_policy(config),
    }
    file = Path(graph.component.file).name
    if not chosen.code and file != chosen.file:
        fields["default_model_filename"] = file
    if most:
        fields["dynamic_batching"] = batching(config)
    if config.warmup:
        fields["model_warmup"] = _warmup(graph, most)
    own = chosen.fields(graph)
    parameters = {**own.pop("parameters", {}), **_texts(config.parameters)}
    return model_config(**fields, **own, parameters=parameters)


def write_graph(graph: Graph, version: Path) -> Mapping[str, Any]:
    """Copy a graph's files into the folder of its version; returns what code beside it must know."""
    base = Path(graph.component.file).parent
    for record in graph.component.files:
        target = version / Path(record.name).relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph.artifact.path / record.name, target)
    return {"graph": Path(graph.component.file).name, "threads": graph.config.threads or 0}


def instances(device: str, count: int) -> Fields:
    """An instance group; on every GPU of the server where no number is named."""
    where = DeviceSpec.parse(device)
    if where.type == "cpu":
        return {"count": count, "kind": kind("KIND_CPU")}
    return {"count": count, "kind": kind("KIND_GPU"), "gpus": [where.index] if ":" in device else []}


def version_policy(config: TritonConfig) -> Fields:
    """Which versions are served."""
    return {"all": {}} if config.versions == "all" else {"latest": {"num_versions": 1}}


def batching(config: TritonConfig) -> Fields:
    """The dynamic batcher's settings; no queue policy that was not asked for."""
    policy: Fields = {}
    if config.queue_timeout_us is not None:
        policy["default_timeout_microseconds"] = config.queue_timeout_us
    if config.queue_size is not None:
        policy["max_queue_size"] = config.queue_size
    found: Fields = {"preferred_batch_size": list(config.preferred_batch_sizes)}
    if config.queue_delay_us:
        found["max_queue_delay_microseconds"] = config.queue_delay_us
    return {**found, "default_queue_policy": policy} if policy else found


def _described(spec: TensorSpec, most: int) -> Fields:
    shape = spec.shape[1:] if most else spec.shape
    return {
        "name": spec.name,
        "data_type": data_type(spec.dtype),
        "dims": [size if isinstance(size, int) else -1 for size in shape],
    }


def _profile(graph: Graph) -> Profile:
    return profile_of(graph.artifact, graph.config.profile, graph.config.max_batch_size, graph.length)


def _warmup(graph: Graph, most: int) -> list[Fields]:
    """Zeros of one row and of as many as there may be, so that the first request finds everything allocated."""
    sizes = usual_sizes_in(graph.artifact.path, graph.component.inputs)
    length = min(64, graph.length or 64)
    made = []
    for rows in (1, most) if most > 1 else (1,):
        inputs = {}
        for spec in graph.component.inputs:
            shape = [size if isinstance(size, int) else sizes.get(size, length) for size in spec.shape]
            if spec.shape[:1] == ("batch",):
                shape = shape[1:] if most else [rows, *shape[1:]]
            inputs[spec.name] = {"data_type": data_type(spec.dtype), "dims": shape, "zero_data": True}
        made.append({"name": f"rows-{rows}", "batch_size": rows if most else 1, "inputs": inputs})
    return made


def _texts(values: Mapping[str, Any]) -> Fields:
    return {name: {"string_value": str(value)} for name, value in values.items() if value is not None}
