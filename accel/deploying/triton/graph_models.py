"""Write the Triton model of a graph, for each of Triton's backends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifact.checksums import STAMP
from ...artifact.manifest import Artifact, Component
from ...artifact.tensor_specs import TensorSpec
from ...capture import usual_sizes_in
from ...errors import ConfigError, TaskError
from ...interfaces.shape_profiles import Profile, shapes_text
from ...interfaces.specs import DeviceSpec
from ...interfaces.task_registry import load_task
from .model_config import TYPES, model_config, tensor
from .tensorrt_profiles import profile_of
from .triton_config import TritonConfig

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph to deploy to Triton, with the deployment settings.

    Attributes:
        artifact: The artifact that contains the graph.
        config: The deployment settings.
        name: Name of the graph's model in the repository.
        length: Greatest number of tokens in a row, for warm-up and profiles; `None` if unknown.
    """

    artifact: Artifact
    config: TritonConfig
    name: str
    length: int | None = None

    @property
    def component(self) -> Component:
        """The artifact's component that contains the graph."""
        return self.artifact.components[0]

    @property
    def device(self) -> DeviceSpec:
        """The device that runs the graph."""
        return DeviceSpec.parse(self.config.device)

    @property
    def batches(self) -> bool:
        """Whether every input and output has `batch` as its first axis, so that Triton can merge rows into one call."""
        specs = (*self.component.inputs, *self.component.outputs)
        return all(spec.shape[:1] == ("batch",) for spec in specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBackend:
    """One of Triton's backends that run graphs.

    Attributes:
        formats: Artifact formats that the backend supports.
        file: File name of the graph in the repository.
        devices: Device types that the backend supports.
        fields: Function that returns the backend's fields of the model configuration.
        batches: Whether Triton may merge requests into batches for this backend.
        code: Module of `served` that is copied as `model.py`; empty if the backend needs no code.
        accelerators: Execution accelerators of the backend.
    """

    formats: tuple[str, ...]
    file: str
    devices: tuple[str, ...]
    fields: Callable[[Graph], Fields]
    batches: bool = True
    code: str = ""
    accelerators: tuple[str, ...] = ()


def _onnxruntime(graph: Graph) -> Fields:
    config = graph.config
    fields: Fields = {"parameters": _texts({"intra_op_thread_count": config.threads})}
    if config.accelerator is None:
        return fields
    side = "gpu" if config.accelerator == "tensorrt" else "cpu"
    options = _ACCELERATORS[config.accelerator](graph)
    chosen = {"name": config.accelerator, "parameters": {**options, **config.accelerator_options}}
    return {**fields, "optimization": {"execution_accelerators": {f"{side}_execution_accelerator": [chosen]}}}


def _tensorrt_accelerator(graph: Graph) -> dict[str, str]:
    """Return the options of ONNX Runtime's TensorRT execution provider: precision, shape profiles, and cache folders on the server."""
    foreign = [domain for domain in graph.artifact.domains or () if domain not in ("", "trt.plugins")]
    if foreign:
        raise ConfigError(
            f"The graph has operators of the domains {', '.join(foreign)}, which TensorRT does not support.",
            fix="deploy the artifact that `accel export` wrote, before it was optimized, or optimize it with `accel optimize --backend "
            "tensorrt`.",
        )
    if graph.device.type != "cuda":
        raise ConfigError(
            f"The accelerator 'tensorrt' needs a GPU, but the device is {graph.config.device!r}.",
            fix="deploy with --device cuda, or leave the accelerator out.",
        )
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
        raise ConfigError(
            f"The accelerator 'openvino' runs on the CPU, but the device is {graph.config.device!r}.",
            fix="deploy with --device cpu, or leave the accelerator out.",
        )
    return {}


def _openvino(graph: Graph) -> Fields:
    """Return the fields of the OpenVINO backend.

    Batching is disabled for this backend, because it would pad every call to the maximum batch size.
    """
    return {"parameters": _texts({"INFERENCE_NUM_THREADS": graph.config.threads, "NUM_STREAMS": "1"})}


def _tensorrt(graph: Graph) -> Fields:
    if graph.config.threads is not None:
        raise ConfigError(
            f"threads={graph.config.threads} is not supported: a TensorRT engine runs on a GPU and has no CPU threads.",
            fix="leave threads out.",
        )
    profile = _profile(graph)
    most = profile.get("batch")
    if most is not None and most.most < graph.config.max_batch_size:
        raise ConfigError(
            f"max_batch_size is {graph.config.max_batch_size}, but the TensorRT engine was built for at most {most.most} rows.",
            fix=f"deploy with --max-batch-size {most.most}, or build the engine again with a profile for more rows.",
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
    "python": GraphBackend(formats=("onnx",), file="model.py", devices=("cpu",), fields=lambda _: {}, code="graph"),
}
"""Triton's backends that run graphs, by name. The first backend that supports an artifact's format is its default."""


def backend_for(artifact: Artifact, config: TritonConfig) -> str:
    """Return the name of Triton's backend for an artifact.

    Raises:
        ConfigError: No backend supports the format, or the configured backend does not support the format, the device or the accelerator.
        TaskError: The artifact has several graphs, or a graph with state.
    """
    if len(artifact.components) > 1 or artifact.components[0].stateful:
        raise TaskError(
            f"Triton's backends cannot run the artifact {artifact.path} (task {artifact.task!r}): it has {len(artifact.components)} "
            "graph(s), and they can run only a single graph without a state such as a KV cache.",
            fix="deploy it with layout='text' (--layout text)."
            if any(front.generates for front in load_task(artifact.task).fronts().values())
            and artifact.format == "onnx"
            and len(artifact.components) == 1
            else "serve it with `accel serve`, or embed it with accel.ORTModel.from_pretrained.",
        )
    fitting = [name for name, backend in BACKENDS.items() if artifact.format in backend.formats]
    name = config.backend if config.backend != "auto" else next(iter(fitting), "")
    if name not in fitting:
        raise ConfigError(
            f"Triton's backend {name!r} cannot run artifacts of the format {artifact.format!r}."
            if name
            else f"Triton has no backend that can run artifacts of the format {artifact.format!r}.",
            fix=f"use the backend {' or '.join(fitting)}, or leave backend out."
            if fitting
            else "export the model to ONNX with `accel export MODEL OUT`, and deploy the folder OUT.",
        )
    backend = BACKENDS[name]
    device = DeviceSpec.parse(config.device)
    if device.type not in backend.devices:
        raise ConfigError(
            f"Triton's backend {name!r} runs on {' and '.join(backend.devices)}, but the device is {config.device!r}.",
            fix=f"deploy with --device {backend.devices[0]}.",
        )
    if config.accelerator is not None and config.accelerator not in backend.accelerators:
        raise ConfigError(
            f"The accelerator {config.accelerator!r} is not available for Triton's backend {name!r}, only for 'onnxruntime'.",
            fix="leave the accelerator out, or deploy an ONNX artifact with backend='onnxruntime'.",
        )
    return name


def graph_config(graph: Graph, backend: str) -> Any:
    """Return the Triton model configuration of a graph."""
    chosen, config = BACKENDS[backend], graph.config
    most = config.max_batch_size if chosen.batches and graph.batches else 0
    fields: Fields = {
        "name": graph.name,
        "backend": backend,
        "max_batch_size": most,
        "input": tensors(graph.component.inputs, 1 if most else 0),
        "output": tensors(graph.component.outputs, 1 if most else 0),
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
    backend_fields = chosen.fields(graph)
    parameters = {**backend_fields.pop("parameters", {}), **_texts(config.parameters)}
    return model_config(**fields, **backend_fields, parameters=parameters)


def tensors(specs: Sequence[TensorSpec], start: int = 0) -> list[Fields]:
    """Return tensors as fields of a model configuration; `start=1` omits the batch axis."""
    return [tensor(spec.name, spec.dtype, spec.shape[start:]) for spec in specs]


def write_graph(graph: Graph, version: Path) -> Fields:
    """Copy the files of a graph into the folder of a model version.

    Returns:
        Entries for `settings.json`: the file name of the graph, its number of threads, its tensors, and the checksums of the copied files
        that the manifest records.
    """
    base, checksums = Path(graph.component.file).parent, {}
    for record in graph.component.files:
        target = version / Path(record.name).relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(graph.artifact.path / record.name, target)
        if not record.sha256.startswith(STAMP):
            checksums[target.relative_to(version).as_posix()] = record.sha256
    sides = {"input": tensors(graph.component.inputs), "output": tensors(graph.component.outputs)}
    return {
        "graph": Path(graph.component.file).name, "threads": graph.config.threads or 0, "tensors": sides, "files": checksums
    }  # fmt: skip


def instances(device: str, count: int) -> Fields:
    """Return an instance group of the model configuration. A device without an index means every GPU of the server."""
    where = DeviceSpec.parse(device)
    if where.type == "cpu":
        return {"count": count, "kind": "KIND_CPU"}
    return {"count": count, "kind": "KIND_GPU", "gpus": [where.index] if ":" in device else []}


def version_policy(config: TritonConfig) -> Fields:
    """Return the version policy of the model configuration: which versions Triton serves."""
    return {"all": {}} if config.versions == "all" else {"latest": {"num_versions": 1}}


def batching(config: TritonConfig) -> Fields:
    """Return the settings of Triton's dynamic batcher. They contain a queue policy only if it was configured."""
    policy: Fields = {}
    if config.queue_timeout_us is not None:
        policy["default_timeout_microseconds"] = config.queue_timeout_us
    if config.queue_size is not None:
        policy["max_queue_size"] = config.queue_size
    fields: Fields = {"preferred_batch_size": list(config.preferred_batch_sizes)}
    if config.queue_delay_us:
        fields["max_queue_delay_microseconds"] = config.queue_delay_us
    return {**fields, "default_queue_policy": policy} if policy else fields


def _profile(graph: Graph) -> Profile:
    return profile_of(graph.artifact, graph.config.profile, graph.config.max_batch_size, graph.length)


def _warmup(graph: Graph, most: int) -> list[Fields]:
    """Return warm-up requests with zeros: one row, and the largest batch. Memory is then allocated before the first real request."""
    sizes = usual_sizes_in(graph.artifact.path, graph.component.inputs)
    length = min(64, graph.length or 64)
    requests = []
    for rows in (1, most) if most > 1 else (1,):
        inputs = {}
        for spec in graph.component.inputs:
            shape = [size if isinstance(size, int) else sizes.get(size, length) for size in spec.shape]
            if spec.shape[:1] == ("batch",):
                shape = shape[1:] if most else [rows, *shape[1:]]
            inputs[spec.name] = {"data_type": TYPES[spec.dtype], "dims": shape, "zero_data": True}
        requests.append({"name": f"rows-{rows}", "batch_size": rows if most else 1, "inputs": inputs})
    return requests


def _texts(values: Mapping[str, Any]) -> Fields:
    return {name: {"string_value": str(value)} for name, value in values.items() if value is not None}
