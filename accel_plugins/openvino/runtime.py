"""OpenVINO's core object and devices, reading of graphs, and conversion of errors."""

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
from accel.interfaces.fork_safety import at_fork, never_destroyed
from accel.interfaces.specs import DeviceSpec

from .node_names import count_new_nodes, last_number
from .pooled_token import compute_pooled_token
from .state import fold_cache
from .unit_axes import keep_unit_axes

# OpenVINO can read many operators of ONNX Runtime, but not all. Only OpenVINO's error message names the unsupported
# operators.
_UNKNOWN_OPERATORS = re.compile(r"No conversion rule found for operations: (.+?)\.?$")
_PRECISIONS = ("FP32", "FP16", "BF16", "INT8", "INT4")


@functools.cache
def core() -> ov.Core:
    """Return the single `openvino.Core` of this process, so that plugins are loaded once."""
    return ov.Core()


def _before_fork() -> None:
    """Unload the CPU plugin before a fork, so that OpenVINO releases the threads of closed models.

    OpenVINO keeps the threads of closed models for the next models. The threads do not exist in a child process, and
    compiling a model in the child process would wait for them forever. Open models keep their threads.
    """
    if core.cache_info().currsize:
        with contextlib.suppress(RuntimeError):
            other = ov.Core()
            other.get_property("CPU", "FULL_DEVICE_NAME")  # Reading a property loads the CPU plugin.
            other.unload_plugin("CPU")


def _after_fork() -> None:
    """Make the child process create a new core after a fork. Threads do not survive a fork, so destroying the inherited
    core would wait forever.
    """
    if core.cache_info().currsize:
        never_destroyed(core())
        core.cache_clear()


at_fork(before=_before_fork, after_in_child=_after_fork)


def device_name(device: DeviceSpec) -> str:
    """Return OpenVINO's name of a device.

    Raises:
        BackendUnavailableError: OpenVINO does not list the device; the message names the devices that it lists.
    """
    usable = usable_names()
    if device.type == "auto":
        return "AUTO" if usable == core().available_devices else f"AUTO:{','.join(usable)}"
    kind = device.type.upper()
    names = [name for name in usable if name.split(".")[0] == kind]
    numbered = f"{kind}.{device.index}"
    if numbered in names:
        return numbered
    if device.index == 0 and kind in names:
        return kind
    raise BackendUnavailableError(
        f"OpenVINO has no device {device}. It lists the devices {', '.join(usable)} and AUTO.{did_you_mean(kind, usable)}",
        fix="pass one of the listed devices in lower case: device=... A GPU or an NPU also needs its driver.",
    )


def usable_names() -> list[str]:
    """Return the names of OpenVINO's devices.

    GPUs of other vendors are left out. OpenVINO finds them through OpenCL, but its kernels fail on these GPUs.
    """
    return [
        name
        for name in core().available_devices
        if not name.startswith("GPU") or "intel" in str(core().get_property(name, "FULL_DEVICE_NAME")).lower()
    ]


def devices() -> tuple[DeviceSpec, ...]:
    """Return OpenVINO's usable devices, the CPU first, and the device `auto`, which lets OpenVINO choose."""
    specs = []
    for name in sorted(usable_names(), key=lambda name: (name != "CPU", name)):
        kind, _, index = name.partition(".")
        capabilities = core().get_property(name, "OPTIMIZATION_CAPABILITIES")
        specs.append(
            DeviceSpec(
                kind.lower(),
                int(index) if index.isdigit() else 0,
                name=str(core().get_property(name, "FULL_DEVICE_NAME")),
                arch="+".join(word.lower() for word in _PRECISIONS if word in capabilities),
            )
        )
    return (*specs, DeviceSpec("auto", name="OpenVINO's choice among the devices above"))


def executing_device(compiled: ov.CompiledModel, requested: DeviceSpec) -> DeviceSpec:
    """Return the device on which OpenVINO runs a compiled model; `requested` if OpenVINO reports no device."""
    names = [str(name).strip("()") for name in compiled.get_property("EXECUTION_DEVICES")]
    kind, _, index = (names[0] if names else "").partition(".")
    reported = (kind.lower(), int(index) if index.isdigit() else 0)
    return next((device for device in devices() if (device.type, device.index) == reported), requested)


READ_ERRORS = (RuntimeError, UnicodeDecodeError)
"""Errors that OpenVINO raises for an invalid graph. UnicodeDecodeError occurs if a message quotes bytes that are not
text.
"""


def read_model(artifact: Artifact, component: Component) -> ov.Model:
    """Read a component's graph and fix the axes that are numbers in the manifest. Weights stay in the memory-mapped
    file.

    Raises:
        IntegrityError: The graph or its weight file is missing or damaged.
        SessionError: The graph has operators that OpenVINO does not support.
    """
    path = artifact.path / component.file
    weights = path.with_suffix(".bin")
    if path.suffix == ".xml" and not weights.is_file():
        raise missing_weights(path)
    try:
        with _without_links(artifact, component) as file:
            model = core().read_model(str(file))
        adapt(model, component)
    except READ_ERRORS as error:
        unknown = _UNKNOWN_OPERATORS.search(one_line(error))
        if unknown is not None:
            raise SessionError(
                f"OpenVINO does not support the operators {unknown[1]} of the graph {path}.",
                fix="use the artifact from before it was optimized or quantized for another backend, or export the model with "
                "--backend openvino.",
            ) from error
        raise IntegrityError(
            f"OpenVINO cannot read the graph {path}: {one_line(error)}", fix="copy the model again, or export it again."
        ) from error
    _check_transforms(model, path)
    return model


def adapt(model: ov.Model, component: Component) -> None:
    """Rewrite a graph that was read from a file for OpenVINO's compiler, and fix the axes that are numbers in the manifest."""
    last = last_number()
    keep_unit_axes(model)
    compute_pooled_token(model)
    pairs = {spec.name: spec.pair for spec in component.inputs if spec.pair is not None}
    if pairs:
        fold_cache(model, pairs, component.inputs)
    reshape(model, component, {})
    count_new_nodes(model, last)


@contextlib.contextmanager
def _without_links(artifact: Artifact, component: Component) -> Iterator[Path]:
    """Yield a component's graph file in a form that OpenVINO can read with its weights.

    OpenVINO rejects an ONNX graph if its weight file is a link to a file outside of the folder, as in every Hub
    snapshot. Hard links to these files take no disk space; across file systems the files are copied.
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
    """Raise if a graph from ONNX has Fourier transforms, which OpenVINO 2026.4 computes wrongly (in FNet, with an error
    as large as the largest value).

    Raises:
        SessionError: The graph has a Fourier transform; the message names a backend that works.
    """
    if path.suffix == ".xml" or not any(node.get_type_name().endswith("DFT") for node in model.get_ops()):
        return
    raise SessionError(
        f"OpenVINO computes the Fourier transforms of the ONNX graph {path} incorrectly.",
        fix="export the model with --backend openvino, or run the graph with backend='cpu'.",
    )


def answers_masked_rows(artifact: Artifact, component: Component) -> bool:
    """Return whether attention returns zeros for a fully masked row, as in PyTorch.

    In OpenVINO's attention operator, a fully masked row gets the average of all tokens (OpenVINO 2026.4: logits of a
    tiny BERT differ by 0.75). Graphs from ONNX have no attention operator; they select zeros after each softmax.
    """
    path = artifact.path / component.file
    return path.suffix != ".xml" or b'type="ScaledDotProductAttention"' not in path.read_bytes()


def missing_weights(path: Path) -> IntegrityError:
    """Return the error for an `.xml` file without its `.bin` file."""
    return IntegrityError(
        f"The weights of the graph {path.name} are in the file {path.with_suffix('.bin').name}, which is missing from {path.parent}.",
        fix="copy this file into the folder of the graph, or export the model again.",
    )


def reshape(model: ov.Model, component: Component, sizes: Mapping[str, int]) -> None:
    """Fix the named axes in `sizes` and the axes that are numbers in the manifest. Other axes stay dynamic."""
    shapes: dict[str, list[int]] = {}
    for spec in component.inputs:
        shapes[spec.name] = [size if isinstance(size, int) else sizes.get(size, -1) for size in spec.shape]
    current = {
        port.any_name: [d.get_length() if d.is_static else -1 for d in port.partial_shape] for port in model.inputs
    }
    if {name: shape for name, shape in shapes.items() if name in current} != current:
        model.reshape({name: ov.PartialShape(shape) for name, shape in shapes.items() if name in current})


def port_order(ports: Sequence[ov.Output], names: Sequence[str], kind: str) -> list[int]:
    """Return the indices of the ports with these names.

    Raises:
        SessionError: The graph does not have a port that the manifest declares.
    """
    by_name = {name: index for index, port in enumerate(ports) for name in port.get_names()}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SessionError(
            f"The manifest declares the {kind} {', '.join(missing)}, but the graph has only {', '.join(sorted(by_name))}.",
            fix="export the model again.",
        )
    return [by_name[name] for name in names]


def one_line(error: Exception) -> str:
    """Return an OpenVINO error message on one line, without C++ source locations."""
    lines = [
        line for line in str(error).splitlines() if line.strip() and not line.startswith(("Exception from", "Check '"))
    ]
    return " ".join(" ".join(lines or str(error).splitlines()).split())[:600]
