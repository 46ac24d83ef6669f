"""Weights of a checkpoint that stay in their files: a weight is read when it is needed, and released afterwards.

A model with streamed weights has float32 parameters without values: their memory contains only NaN, and all parameters share a few
megabytes. A trace needs only shapes, strides and addresses. An exporter recognizes a parameter by its address, and reads the values with
`StreamedWeight.read`. `weights_loaded` runs the PyTorch model: it reads the weights of each module for the time of its call. If other code
uses a parameter, its result is NaN. So a weight that was not read cannot stay unnoticed.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import logging
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..artifact.json_reading import read_json
from ..errors import ExportError

logger = logging.getLogger(__name__)


class StreamingError(ExportError):
    """Raised when a model needs values of streamed weights for something other than a product of its own."""


WeightReader = Callable[[], torch.Tensor]
"""Function that returns a weight in float32, in the shape of its parameter."""

# Smallest size of a streamed weight, as float32. Smaller weights are loaded at once.
_STREAMED_BYTES = 1 << 16
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Number of bytes that are read and converted together; they fit into the processor's cache.
_PART_BYTES = 1 << 21
# Size of the memory that contains NaN.
_SHARED_BYTES = 16 << 20
_PAGE_BYTES = 1 << 12
# Constants of Linux. Python's module mmap has no MAP_FIXED and no MAP_NORESERVE. On Windows, mmap has no PROT_READ and no PROT_WRITE.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_READ, _PROT_WRITE = 0x1, 0x2
_READ_AND_WRITE = _PROT_READ | _PROT_WRITE


@dataclass(frozen=True, slots=True)
class StreamedWeight:
    """A weight in half precision in a safetensors file.

    Attributes:
        name: Name of the weight in the checkpoint.
        file: The file.
        offset: Position of the first byte in the file.
        dtype: Data type in the file.
        shape: Shape of the weight.
        address: Address of the parameter's memory, which contains NaN.
    """

    name: str
    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int

    @property
    def nbytes(self) -> int:
        """Size of the parameter in float32, in bytes."""
        return math.prod(self.shape) * 4

    def read(self) -> torch.Tensor:
        """Read the weight from its file into new memory, and convert it to float32.

        The file is not memory-mapped, so its pages do not count as memory of this process. Takes about 0.4 ns for each value if the file is
        in the cache of the operating system.
        """
        values = empty_weight(math.prod(self.shape))
        raw = bytearray(min(_PART_BYTES, self.nbytes // 2))
        halves = torch.frombuffer(raw, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for begin in range(0, len(values), len(halves)):
                count = min(len(halves), len(values) - begin)
                _fill(file, memoryview(raw)[: 2 * count], self.file)
                values[begin : begin + count] = halves[:count]
        return values.view(self.shape)


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """A weight whose values are in the model's memory, with the same attributes as a streamed weight."""

    name: str
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.values.shape)

    @property
    def address(self) -> int:
        """Address of the parameter's memory."""
        return self.values.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size of the parameter in bytes."""
        return self.values.nbytes

    def read(self) -> torch.Tensor:
        """Return the values, which must not be changed."""
        return self.values


ModelWeight = StreamedWeight | LoadedWeight


def empty_weight(count: int) -> torch.Tensor:
    """Return memory for `count` float32 values that the operating system gets back as soon as the tensor is deleted.

    Memory from `malloc` stays in the process after weights of different sizes were read one after another. With huge pages, the first write
    to 256 MB takes 50 ms instead of 300 ms.
    """
    # Python's mmap has no flags on Windows. On other systems, memory without these flags is shared with child processes.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(4 * count, 1), **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without huge pages refuse this.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.float32, count))


def _fill(file: Any, buffer: memoryview, path: Path) -> None:
    """Read bytes until the buffer is full."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise OSError(f"{path} is shorter than its header says")
        buffer = buffer[count:]


class StreamedWeights:
    """The weights of one checkpoint, of which the large ones in half precision are streamed.

    Attributes:
        state_dict: Tensors by name, for `from_pretrained(None, state_dict=...)`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self.state_dict: dict[str, torch.Tensor] = {}
        large: list[tuple[str, Path, int, torch.dtype, tuple[int, ...]]] = []
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name, (kind, shape, offset) in safetensors_header(path).items():
                    if kind in _HALVES and math.prod(shape) * 4 >= _STREAMED_BYTES:
                        large.append((name, path, offset, _HALVES[kind], shape))
                    else:
                        # A copy, because the file is closed.
                        self.state_dict[name] = file.get_tensor(name).clone()
        sizes = [-(-math.prod(shape) * 4 // _PAGE_BYTES) * _PAGE_BYTES for *_, shape in large]
        memory = self._memory = _not_a_number(sum(sizes)) if sizes else mmap.mmap(-1, 1)
        self._weights: list[ModelWeight] = []
        position = 0
        for (name, path, offset, dtype, shape), size in zip(large, sizes, strict=True):
            values = np.frombuffer(memory, np.float32, math.prod(shape), position).reshape(shape)
            tensor = self.state_dict[name] = torch.from_numpy(values)
            self._weights.append(StreamedWeight(name, path, offset, dtype, shape, tensor.data_ptr()))
            position += size
        self._addresses = [weight.address for weight in self._weights]

    def __len__(self) -> int:
        return len(self._weights)

    def at(self, address: int) -> ModelWeight | None:
        """Return the weight whose memory contains an address, or `None`."""
        weight = self._weights[bisect.bisect_right(self._addresses, address) - 1] if self._weights else None
        return weight if weight is not None and 0 <= address - weight.address < weight.nbytes else None

    def of(self, model: torch.nn.Module) -> dict[str, ModelWeight]:
        """Return the weights of a model by parameter name; a shared parameter is listed under each of its names."""
        weights = {name: self.at(p.data_ptr()) for name, p in model.named_parameters(remove_duplicate=False)}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @contextmanager
    def loaded(self, model: torch.nn.Module) -> Iterator[None]:
        """Read the weights of each module of a model for the time of its call, while the context is open."""
        with weights_loaded(model, {name: weight.read for name, weight in self.of(model).items()}):
            yield

    @contextmanager
    def without_values(self, model: torch.nn.Module) -> Iterator[None]:
        """Let a model run without weights, to get the sizes of its outputs, while the context is open. All outputs are NaN.

        If a model ran with its parameters of NaN, each of their pages would count as memory of this process. Linear layers do not compute
        their products.
        """
        nothing = torch.full((), torch.nan)
        streamed = {name: weight for name, weight in self.of(model).items() if isinstance(weight, StreamedWeight)}
        readers = {name: partial(nothing.expand, weight.shape) for name, weight in streamed.items()}
        with weights_loaded(model, readers), _WithoutProducts():
            yield

    @contextmanager
    def zeros(self) -> Iterator[None]:
        """Let streamed weights contain zeros instead of NaN while the context is open, for libraries that read all weights of a graph, for
        example to merge equal ones.

        The first value is different in each weight. Pages of zeros that are only read do not count as memory of this process.
        """
        _map_fixed(self._memory, 0, len(self._memory), -1)
        try:
            for number, weight in enumerate(self._weights, start=1):
                if isinstance(weight, StreamedWeight):
                    self._values(weight)[0] = number
            yield
        finally:
            _fill_with_nan(self._memory)

    def fill(self, weight: StreamedWeight) -> None:
        """Write the values of a weight into its memory, until the context of `zeros` is closed."""
        self._values(weight)[:] = weight.read().flatten().numpy()

    def _values(self, weight: StreamedWeight) -> np.ndarray:
        offset = weight.address - _address(self._memory)
        return np.frombuffer(self._memory, np.float32, math.prod(weight.shape), offset)

    def add_loaded(self, model: torch.nn.Module) -> None:
        """Add the parameters of a model that are not streamed, in float32.

        Raises:
            StreamingError: A parameter was computed from streamed weights, which have no values.
        """
        for name, parameter in model.named_parameters():
            if self.at(parameter.data_ptr()) is not None or parameter.dtype is not torch.float32:
                continue
            if parameter.isnan().any():
                raise StreamingError(
                    f"The weight {name} cannot be streamed, because loading the model computes it from other weights.",
                    fix="export, optimize and quantize the model with three commands.",
                )
            if parameter.is_contiguous():
                self._weights.append(LoadedWeight(name, parameter.data))
        self._weights.sort(key=lambda weight: weight.address)
        self._addresses = [weight.address for weight in self._weights]


def streamed_weights(folder: Path) -> StreamedWeights | None:
    """Return the weights of a transformers folder for streaming.

    Return `None` if weights cannot be streamed or nothing is gained: on systems other than Linux, for checkpoints that are not in
    safetensors files, and for checkpoints without large weights in half precision.
    """
    files = safetensors_files(folder)
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not files:
        return None
    try:
        weights = StreamedWeights(files)
    except OSError as error:
        # Systems that reserve memory for each mapping may refuse that of the parameters. Other errors are raised again by transformers.
        logger.info("The weights of %s cannot be streamed: %s", folder, error)
        return None
    return weights if len(weights) else None


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a transformers folder in the format safetensors; an empty list if there are none or some are missing."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    names = sorted(set(read_json(index).get("weight_map", {}).values())) if index.is_file() else []
    files = [folder / name for name in names]
    # transformers reports missing files with its own error.
    return files if all(file.is_file() for file in files) else []


def safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return the data type, the shape and the position of each weight in a safetensors file, by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {n: (e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0]) for n, e in entries.items()}


def _not_a_number(size: int) -> mmap.mmap:
    """Return writable memory of any size in which every float32 value is NaN. It uses 16 MB.

    The same 16 MB are mapped again and again. A write changes only a private copy of a page.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, prot=_READ_AND_WRITE)
    _fill_with_nan(memory)
    return memory


def _fill_with_nan(memory: mmap.mmap) -> None:
    descriptor = os.memfd_create("accel-not-a-number")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(np.full(min(_SHARED_BYTES, len(memory)) // 4, np.nan, np.float32).tobytes())
        for begin in range(0, len(memory), _SHARED_BYTES):
            _map_fixed(memory, begin, min(_SHARED_BYTES, len(memory) - begin), descriptor)
    finally:
        os.close(descriptor)


def _map_fixed(memory: mmap.mmap, begin: int, length: int, descriptor: int) -> None:
    """Replace a range of memory by a private copy of a file, or by zeros if the descriptor is -1."""
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    address = _address(memory) + begin
    if map_memory(address, length, _READ_AND_WRITE, flags, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), "The memory for streamed weights cannot be reserved")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _WithoutProducts(TorchFunctionMode):
    """Return NaN from linear layers whose weights have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if func is torch.nn.functional.linear and not kwargs:
            values, weight, *_ = args
            if not any(weight.stride()):
                return values.new_full((*values.shape[:-1], weight.shape[0]), torch.nan)
        return func(*args, **(kwargs or {}))


@contextmanager
def weights_loaded(model: torch.nn.Module, readers: Mapping[str, WeightReader]) -> Iterator[None]:
    """Read the weights of each module for the time of its call, while the context is open.

    Args:
        model: The model.
        readers: Readers of weights by parameter name. Other parameters keep their values. If modules share a parameter, each module uses
            the reader of its own name.
    """
    loaded: dict[int, torch.Tensor] = {}

    def load(names: Mapping[str, WeightReader], module: torch.nn.Module, *_: Any) -> None:
        for name, read in names.items():
            parameter = getattr(module, name)
            if id(parameter) not in loaded:
                loaded[id(parameter)] = parameter.data
                parameter.data = read()

    def release(names: Mapping[str, WeightReader], module: torch.nn.Module, *_: Any) -> None:
        for name in names:
            parameter = getattr(module, name)
            if id(parameter) in loaded:
                parameter.data = loaded.pop(id(parameter))

    with ExitStack() as hooks:
        for prefix, module in model.named_modules():
            names = (name for name, _ in module.named_parameters(recurse=False))
            paths = {name: f"{prefix}.{name}" if prefix else name for name in names}
            of_module = {name: readers[path] for name, path in paths.items() if path in readers}
            if of_module:
                before = module.register_forward_pre_hook(partial(load, of_module))
                after = module.register_forward_hook(partial(release, of_module), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
