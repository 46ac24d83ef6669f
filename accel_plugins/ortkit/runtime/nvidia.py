"""Diagnosis of why ONNX Runtime's providers for NVIDIA GPUs cannot run on this machine.

The checks load the provider's libraries and the driver's management library (NVML). The checks create no CUDA context,
so the process can still fork afterwards.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from accel.errors import ConfigError, did_you_mean
from accel.interfaces.specs import DeviceSpec, Probe, Reason

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
_INSTALL = 'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "accel-transformers[cuda]"'
_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaFacts:
    """Facts about the GPUs, the driver and the software of this machine.

    Attributes:
        provider: The requested execution provider.
        providers: The providers of the imported ONNX Runtime.
        distributions: The versions of the installed ONNX Runtime distributions by name.
        build_cuda: CUDA version of the ONNX Runtime build (`13.0`), or `None`.
        driver: The driver's version, or `None` without a driver.
        driver_cuda: Newest CUDA version (major, minor) that the driver supports.
        gpus: Visible GPUs in the order of `torch.device("cuda", index)`.
        torch_cuda: CUDA version of the PyTorch build, or `None` for a CPU build.
        load_error: The error from loading the provider's library, or `None`.
    """

    provider: str = CUDA
    providers: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    build_cuda: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[DeviceSpec, ...] = ()
    torch_cuda: str | None = None
    load_error: str | None = None


def judge(facts: NvidiaFacts) -> Probe:
    """Return the GPUs, or all reasons why the provider cannot use the GPUs; each reason has a fix."""
    reasons = [
        reason
        for check in (_build, _driver, _torch, _library)
        for reason in [check(facts)]
        if reason is not None
    ]  # fmt: skip
    details = {"driver": facts.driver, "cuda": facts.build_cuda, "torch-cuda": facts.torch_cuda}
    versions = {**facts.distributions, **{name: value for name, value in details.items() if value is not None}}
    return Probe(devices=() if reasons else facts.gpus, reasons=tuple(reasons), versions=versions)


def _build(facts: NvidiaFacts) -> Reason | None:
    if facts.provider in facts.providers:
        return None
    if {"onnxruntime", "onnxruntime-gpu"} <= set(facts.distributions):
        return Reason(
            "cpu-build-hides-gpu-build",
            "onnxruntime and onnxruntime-gpu are both installed, and the CPU build overwrote the GPU build",
            _INSTALL,
        )
    installed = (
        ", ".join(f"{name} {version}" for name, version in facts.distributions.items()) or "a build without CUDA"
    )
    return Reason("no-gpu-build", f"{installed} is installed, which has no {facts.provider}", _INSTALL)


def _driver(facts: NvidiaFacts) -> Reason | None:
    if facts.driver is None:
        return Reason(
            "no-driver",
            "there is no NVIDIA driver",
            "install the NVIDIA driver; in a container, start it with --gpus all (NVIDIA Container Toolkit)",
        )
    if not facts.gpus:
        return Reason(
            "no-gpu",
            f"the NVIDIA driver {facts.driver} finds no GPU",
            "check that `nvidia-smi` lists the GPU and CUDA_VISIBLE_DEVICES includes it; start a container with --gpus all",
        )
    for name, build in (("ONNX Runtime", facts.build_cuda), ("PyTorch", facts.torch_cuda)):
        if build is None or facts.driver_cuda is None:
            continue
        # Compare only major versions, because a driver supports every CUDA release of its major version.
        major = int(build.partition(".")[0])
        if facts.driver_cuda[0] < major:
            newest = ".".join(map(str, facts.driver_cuda))
            return Reason(
                "driver-too-old",
                f"the installed {name} needs CUDA {build}, but the NVIDIA driver {facts.driver} supports only versions up to CUDA {newest}",
                f"install an NVIDIA driver that supports CUDA {major}, or a build of {name} for CUDA {facts.driver_cuda[0]}",
            )
    return None


def _torch(facts: NvidiaFacts) -> Reason | None:
    if facts.torch_cuda is not None:
        return None
    return Reason(
        "torch-without-cuda",
        "this build of PyTorch has no CUDA support, so it cannot store tensors on the GPU",
        "pip install torch --index-url https://download.pytorch.org/whl/cu130",
    )


def _library(facts: NvidiaFacts) -> Reason | None:
    if facts.load_error is None or facts.provider not in facts.providers:
        return None
    missing = _MISSING_LIBRARY.search(facts.load_error)
    problem = f"{missing[1]} is missing" if missing else facts.load_error
    tensorrt = re.search(r"libnv(?:infer|onnx)\w*\.so\.(\d+)", problem)
    if tensorrt is not None:
        tensorrt_major = int(tensorrt[1])
        return Reason(
            "library",
            f"ONNX Runtime cannot load the library of {facts.provider}: {problem} (TensorRT {tensorrt_major})",
            f'pip install "tensorrt>={tensorrt_major},<{tensorrt_major + 1}"',
        )
    major = (facts.build_cuda or "").partition(".")[0]
    return Reason(
        "library",
        f"ONNX Runtime cannot load the library of {facts.provider}: {problem}",
        f'pip install "onnxruntime-gpu[cuda,cudnn]", or a PyTorch built for CUDA {major or "of the same major version"}',
    )


def unusable_gpus(facts: NvidiaFacts, library: str, supported: Sequence[str]) -> tuple[Reason, ...]:
    """Return the reasons why a library cannot use any GPU of this machine; an empty tuple if it can use one of them.

    Args:
        facts: Facts about the machine, from `survey_gpus`.
        library: The name of the library.
        supported: The compute capabilities that the library supports, such as `8.9`.
    """
    reason = _driver(facts)
    if reason is not None:
        return (reason,)
    unsupported = {
        gpu: capability for gpu in facts.gpus if (capability := compute_capability(gpu)) not in (*supported, "")
    }
    if len(unsupported) < len(facts.gpus):
        return ()
    names = ", ".join(f"{gpu.name or gpu} with the compute capability {level}" for gpu, level in unsupported.items())
    return (
        Reason(
            "compute-capability",
            f"{library} does not support this GPU: {names}. It supports {', '.join(supported)}",
            "use backend='cuda' or backend='tensorrt' on this GPU, or run the model on a GPU that the library supports",
        ),
    )


def compute_capability(gpu: DeviceSpec) -> str:
    """Return the compute capability of a GPU, such as `8.9`; an empty string if it is unknown."""
    digits = gpu.arch.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}" if len(digits) > 1 and digits.isdigit() else ""


def device_index(options: Mapping[str, object], device: DeviceSpec) -> int:
    """Return the index of the GPU; the provider option `device_id`, if the user passes it, must have the same value.

    Raises:
        ConfigError: `device_id` is not a number, or is the index of another GPU.
    """
    device_id = str(options.get("device_id", device.index))
    if not device_id.isdigit():
        raise ConfigError(
            f"The provider option device_id is {device_id!r}, which is not the index of a GPU.",
            fix="use a whole number, 0 or larger.",
        )
    if int(device_id) != device.index:
        raise ConfigError(
            f"The provider option device_id={device_id} contradicts the device {device} of the call.",
            fix=f"pass device='cuda:{device_id}' instead.",
        )
    return int(device_id)


def check_option_names(
    options: Iterable[str], supported: Sequence[str], reserved: Mapping[str, str], provider: str
) -> None:
    """Check the names of provider options.

    Args:
        options: The names to check.
        supported: All option names of the provider.
        reserved: The option names that accel sets itself, each with the fix for the error message.
        provider: ONNX Runtime's name of the provider that takes the options.

    Raises:
        ConfigError: An option does not exist, or is an option that accel sets.
    """
    for name in options:
        if name in reserved:
            raise ConfigError(
                f"The option {name!r} of {provider} is set by accel and cannot be passed.", fix=reserved[name]
            )
        if name not in supported:
            raise ConfigError(
                f"{provider} has no option {name!r}.{did_you_mean(name, supported)}",
                fix=f"use one of {', '.join(supported)}.",
            )


def on_gpu(index: int) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread in a `with` block, and restore the previous device afterwards.

    Without a GPU, the block does nothing. The restoration is necessary because ONNX Runtime makes the session's GPU the
    current device when it opens, runs or closes a session, and does not restore the previous device.
    """
    import torch

    return torch.cuda.device(index) if torch.cuda.is_available() else nullcontext()


def survey(provider: str = CUDA) -> NvidiaFacts:
    """Collect facts about this machine. Never raises: a fact that cannot be read is `None` or empty."""
    import onnxruntime as ort
    import torch

    from ..upstream import cuda_of_build

    driver, driver_cuda, gpus = _nvml()
    build_cuda = cuda_of_build()
    providers = tuple(ort.get_available_providers())
    distributions = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            distributions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    folder = Path(ort.__file__).parent / "capi"
    return NvidiaFacts(
        provider=provider,
        providers=providers,
        distributions=distributions,
        build_cuda=build_cuda,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        torch_cuda=torch.version.cuda,
        load_error=_load_error(folder, _LIBRARIES[provider]) if provider in providers and driver else None,
    )


def survey_gpus(provider: str, build_cuda: str) -> NvidiaFacts:
    """Collect facts about the driver and the GPUs, for a provider in a separate library. Imports no library. Never raises.

    Args:
        provider: ONNX Runtime's name of the provider.
        build_cuda: The CUDA version of the provider's library.
    """
    driver, driver_cuda, gpus = _nvml()
    return NvidiaFacts(provider=provider, build_cuda=build_cuda, driver=driver, driver_cuda=driver_cuda, gpus=gpus)


def _load_error(folder: Path, library: str) -> str | None:
    """Return the dynamic linker's error about a missing library of the provider; `None` if all libraries are found.

    PyTorch has already loaded the CUDA libraries that its wheel depends on. ONNX Runtime can use the same libraries if
    PyTorch and ONNX Runtime are built for the same major version of CUDA. If not, ONNX Runtime loads the libraries of
    NVIDIA's wheels, if they are installed.
    """
    error = _link_error(folder, library)
    if error is not None:
        import onnxruntime as ort

        with redirect_stdout(io.StringIO()):
            ort.preload_dlls()
        error = _link_error(folder, library)
    return error


def _link_error(folder: Path, library: str) -> str | None:
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / library))
    except OSError as error:
        # Ignore errors about missing symbols: ONNX Runtime provides the symbols later, when it loads the provider.
        return str(error) if _MISSING_LIBRARY.search(str(error)) else None
    return None


def _nvml() -> tuple[str | None, tuple[int, int] | None, tuple[DeviceSpec, ...]]:
    """Return the driver version, the CUDA version that the driver supports, and the visible GPUs."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, None, ()
    if nvml.nvmlInit_v2() != 0:
        return None, None, ()
    try:
        text = ctypes.create_string_buffer(96)
        driver = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, 96) == 0 else "of unknown version"
        number = ctypes.c_int()
        served = None
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0:
            served = (number.value // 1000, number.value % 1000 // 10)
        count = ctypes.c_uint()
        gpus = count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
        describe: Callable[[int, int], DeviceSpec] = lambda index, physical: _gpu(nvml, index, physical)  # noqa: E731
        return driver, served, tuple(describe(i, p) for i, p in enumerate(visible(gpus, os.environ)))
    finally:
        nvml.nvmlShutdown()


def visible(count: int, environment: Mapping[str, str]) -> list[int]:
    """Return the physical indices of the GPUs in `CUDA_VISIBLE_DEVICES`, in this order; -1 for a UUID instead of an index.

    Without the variable, return the indices of all GPUs.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(count))
    indices: list[int] = []
    for item in (part.strip() for part in listed.split(",")):
        if item.isdigit() and int(item) < count and int(item) not in indices:
            indices.append(int(item))
        elif item.startswith(("GPU-", "MIG-")):
            indices.append(-1)
        else:
            # CUDA ignores the first invalid entry of the list and all entries after it.
            break
    return indices


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu(nvml: ctypes.CDLL, index: int, physical: int) -> DeviceSpec:
    handle = ctypes.c_void_p()
    if physical < 0 or nvml.nvmlDeviceGetHandleByIndex_v2(physical, ctypes.byref(handle)) != 0:
        return DeviceSpec("cuda", index)
    name = ctypes.create_string_buffer(96)
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    has_name = nvml.nvmlDeviceGetName(handle, name, 96) == 0
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    has_arch = nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    return DeviceSpec(
        "cuda",
        index,
        name=name.value.decode() if has_name else "",
        arch=f"sm_{major.value}{minor.value}" if has_arch else "",
        memory_bytes=memory.total if has_memory else None,
    )
