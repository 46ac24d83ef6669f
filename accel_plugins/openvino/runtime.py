"""OpenVINO's core object, its devices, and its errors as ours."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import openvino as ov

from accel.artifact import Artifact, Component, accel_home, scratch
from accel.errors import BackendUnavailableError, IntegrityError, SessionError, did_you_mean
from accel.interfaces.forks import at_fork, never_destroyed
from accel.interfaces.specs import DeviceSpec

from .pooled_token import compute_pooled_token
from .state import fold_cache
from .unit_axes import keep_unit_axes

# OpenVINO reads many of ONNX Runtime's own operators, not all: which ones, its reader alone says.
_UNKNOWN_OPERATORS = re.compile(r"No conversion rule found for operations: (.+?)\.?$")
_PRECISIONS = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8", "INT4": "int4"}


@functools.cache
def core() -> ov.Core:
    """The process's one `openvino.Core`: plugins are loaded once."""
    return ov.Core()


def _before_fork() -> None:
    """OpenVINO keeps the threads of models that were closed for those that are compiled next. In a child they would be threads that
    are none, and compiling would wait for them for ever; unloading a plugin lets them go. Open models keep theirs.
    """
    if core.cache_info().currsize:
        with contextlib.suppress(RuntimeError):
            other = ov.Core()
            other.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin
            other.unload_plugin("CPU")


def _after_fork() -> None:
    """Its threads do not survive a fork: the child makes its own, and never tears down the inherited one, which would
    wait for them.
    """
    if core.cache_info().currsize:
        never_destroyed(core())
        core.cache_clear()


at_fork(before=_before_fork, after_in_child=_after_fork)


def device_name(device: DeviceSpec) -> str:
    """OpenVINO's word for a device.

    Raises:
        BackendUnavailableError: OpenVINO does not list it; the message says what it lists.
    """
    have = usable_names()
    if device.type == "auto":
        return "AUTO" if have == core().available_devices else f"AUTO:{','.join(have)}"
    wanted = device.type.upper()
    names = [name for name in have if name.split(".")[0] == wanted]
    numbered = f"{wanted}.{device.index}"
    if numbered in names:
        return numbered
    if device.index == 0 and wanted in names:
        return wanted
    raise BackendUnavailableError(
        f"OpenVINO has no device {device}{did_you_mean(wanted, have)}; it lists {', '.join(have)} and AUTO.",
        fix="use one of these, in lower case, as device=...; a GPU or an NPU needs its driver.",
    )


def usable_names() -> list[str]:
    """What OpenVINO lists, without GPUs of others that it finds through OpenCL: its kernels are for Intel's, and fail there."""
    return [
        name
        for name in core().available_devices
        if not name.startswith("GPU") or "intel" in str(core().get_property(name, "FULL_DEVICE_NAME")).lower()
    ]


def devices() -> tuple[DeviceSpec, ...]:
    """What OpenVINO lists and can use, the host first, and `auto`, which lets OpenVINO choose among them."""
    found = []
    for name in sorted(usable_names(), key=lambda name: (name != "CPU", name)):
        kind, _, index = name.partition(".")
        capabilities = core().get_property(name, "OPTIMIZATION_CAPABILITIES")
        found.append(
            DeviceSpec(
                kind.lower(),
                int(index) if index.isdigit() else 0,
                name=str(core().get_property(name, "FULL_DEVICE_NAME")),
                arch="+".join(_PRECISIONS[word] for word in _PRECISIONS if word in capabilities),
            )
        )
    return (*found, DeviceSpec("auto", name="OpenVINO's choice among the devices above"))


def executing_device(compiled: ov.CompiledModel, asked: DeviceSpec) -> DeviceSpec:
    """The device that a compiled model runs on, as OpenVINO says; `asked` where it does not say."""
    names = [str(name).strip("()") for name in compiled.get_property("EXECUTION_DEVICES")]
    kind, _, index = (names[0] if names else "").partition(".")
    wanted = (kind.lower(), int(index) if index.isdigit() else 0)
    return next((device for device in devices() if (device.type, device.index) == wanted), asked)


READ_ERRORS = (RuntimeError, UnicodeDecodeError)
"""What OpenVINO raises for a graph that it refuses; the latter where its message quotes bytes of the file that are no text."""


def read_model(artifact: Artifact, component: Component) -> ov.Model:
    """A component's graph, with the axes that the manifest fixes fixed; weights stay in the mapped file.

    Raises:
        IntegrityError: The graph, or the file with its weights, is missing or damaged.
        SessionError: It uses operators that OpenVINO does not have.
    """
    path = artifact.path / component.file
    weights = path.with_suffix(".bin")
    if path.suffix == ".xml" and not weights.is_file():
        raise missing_weights(path)
    try:
        with _without_links(artifact, component) as file:
            model = core().read_model(str(file))
        keep_unit_axes(model)
        compute_pooled_token(model)
        pairs = {spec.name: spec.pair for spec in component.inputs if spec.pair is not None}
        if pairs:
            fold_cache(model, pairs, component.inputs)
        reshape(model, component, {})
    except READ_ERRORS as error:
        unknown = _UNKNOWN_OPERATORS.search(one_line(error))
        if unknown is not None:
            raise SessionError(
                f"OpenVINO does not have all operators of {path}: {unknown[1]}.",
                fix="take the artifact as it was exported, before it was optimized or quantized for another backend, or "
                "export the model with --backend openvino.",
            ) from error
        raise IntegrityError(
            f"OpenVINO cannot read {path}: {one_line(error)}", fix="copy or export the model again."
        ) from error
    _check_transforms(model, path)
    return model


@contextlib.contextmanager
def _without_links(artifact: Artifact, component: Component) -> Iterator[Path]:
    """A component's graph as a file that OpenVINO reads with its weights.

    OpenVINO refuses an ONNX graph whose weights are a link that leaves the folder, as every file of a Hub snapshot is. Other names of
    the same files (hard links) take no space; between file systems they are copied.
    """
    path, root = artifact.path / component.file, artifact.path.resolve()
    files = [(artifact.path / record.name).resolve() for record in component.files]
    if path.suffix != ".onnx" or all(file.is_relative_to(root) for file in files):
        yield path
        return
    home = accel_home()
    home.mkdir(parents=True, exist_ok=True)
    with scratch(home) as folder:
        for record, file in zip(component.files, files, strict=True):
            target = folder / record.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, target)
            except OSError:
                shutil.copyfile(file, target)
        yield folder / component.file


def _check_transforms(model: ov.Model, path: Path) -> None:
    """Refuse Fourier transforms read from ONNX: OpenVINO 2026.4 computes others (FNet is as far off as its answer is large).

    Raises:
        SessionError: With the way that works.
    """
    if path.suffix == ".xml" or not any(node.get_type_name().endswith("DFT") for node in model.get_ops()):
        return
    raise SessionError(
        f"OpenVINO computes the Fourier transforms of {path} otherwise than ONNX defines them.",
        fix="export the model with --backend openvino, or run the graph with backend='cpu'.",
    )


def answers_masked_rows(artifact: Artifact, component: Component) -> bool:
    """Whether a row that is masked as a whole is answered as PyTorch does, whose attention gives zeros.

    OpenVINO's own operator for attention averages all tokens there (2026.4: logits of a tiny BERT 0.75 off); graphs from ONNX
    select zeros after each softmax.
    """
    if artifact.manifest.target is not None:
        return False
    path = artifact.path / component.file
    return path.suffix != ".xml" or b'type="ScaledDotProductAttention"' not in path.read_bytes()


def missing_weights(path: Path) -> IntegrityError:
    """The error about an `.xml` without its `.bin`."""
    return IntegrityError(
        f"{path.name} keeps its weights in {path.with_suffix('.bin').name}, which is missing from {path.parent}.",
        fix="copy that file beside the graph, or export the model again.",
    )


def reshape(model: ov.Model, component: Component, sizes: Mapping[str, int]) -> None:
    """Fix the named axes in `sizes`, and those that the manifest gives as numbers; leave the others open."""
    wanted: dict[str, list[int]] = {}
    for spec in component.inputs:
        wanted[spec.name] = [size if isinstance(size, int) else sizes.get(size, -1) for size in spec.shape]
    current = {
        port.any_name: [d.get_length() if d.is_static else -1 for d in port.partial_shape] for port in model.inputs
    }
    if {name: shape for name, shape in wanted.items() if name in current} != current:
        model.reshape({name: ov.PartialShape(shape) for name, shape in wanted.items() if name in current})


def port_order(ports: Sequence[ov.Output], names: Sequence[str], what: str) -> list[int]:
    """Positions of the ports of these names.

    Raises:
        SessionError: The graph has no port of a name that the manifest declares.
    """
    by_name = {name: index for index, port in enumerate(ports) for name in port.get_names()}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SessionError(
            f"The graph has no {what} {missing}, which its manifest declares; it has {sorted(by_name)}.",
            fix="export the model again.",
        )
    return [by_name[name] for name in names]


def one_line(error: Exception) -> str:
    """An OpenVINO error without its C++ source locations and line breaks."""
    lines = [
        line for line in str(error).splitlines() if line.strip() and not line.startswith(("Exception from", "Check '"))
    ]
    return " ".join(" ".join(lines or str(error).splitlines()).split())[:600]
