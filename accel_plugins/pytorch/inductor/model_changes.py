"""Detection of changes to a model after compilation. accel compiles without guards, so compiled code would ignore the
changes.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

# Attributes that every `torch.nn.Module` has. They are not compared as settings; hooks are compared separately.
_STANDARD = vars(torch.nn.Module()).keys() - {"training"}
# Config entries that do not change the outputs of a model, so that a change is allowed.
_NOTES = frozenset(
    ("id2label", "label2id", "architectures", "problem_type", "task_specific_params", "dtype", "torch_dtype", "auto_map",
     "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "custom_pipelines")
)  # fmt: skip
_VERSION = operator.attrgetter("_version")
# Number of values (or rows) of a weight among which `_largest` searches for the sample to compare.
_SAMPLED = 4096


class _DictEntries:
    """List of entries in many dictionaries, whose current values can be read quickly.

    Args:
        places: (dictionary, key, name) of each entry.
    """

    def __init__(self, places: Iterable[tuple[dict[str, Any], str, str]]) -> None:
        entries = list(places)
        self._dicts, self._keys = [container for container, _, _ in entries], [key for _, key, _ in entries]
        self.names = [name for _, _, name in entries]

    def values(self) -> list[Any]:
        """Return the current values of the entries.

        Raises:
            KeyError: An entry was removed.
        """
        return list(map(operator.getitem, self._dicts, self._keys))


class ModelSnapshot:
    """Snapshot of a model's weights, modules, settings and hooks, to detect later changes.

    PyTorch counts the in-place changes of each tensor, but not changes through `.data`. The snapshot therefore also
    contains one value of each weight on the CPU and compares the value.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._parts = _DictEntries(
            (container, key, f"{path}.{key}".lstrip("."))
            for path, module in self._modules.items()
            for container in (module._parameters, module._buffers, module._modules)
            for key in container
        )
        self._objects = self._parts.values()
        self._weights = [value for value in self._objects if isinstance(value, torch.Tensor)]
        self._state = self._written()
        self._samples = [group for group in _samples(self._weights) if group]
        self._sampled = [torch.stack(group) for group in self._samples]
        self._settings = _DictEntries(_settings(self._modules))
        self._values = copy.deepcopy(self._settings.values())
        self._hooks = self._hooked()
        self._last_hook = RemovableHandle.next_id

    def changed(self) -> str:
        """Return a description of the change since the snapshot; an empty string if nothing changed."""
        try:
            objects = self._parts.values()
        except KeyError:
            return "a parameter, buffer or submodule was removed"
        if not all(map(operator.is_, objects, self._objects)):
            places = zip(self._parts.names, objects, self._objects, strict=True)
            return f"{next(name for name, new, old in places if new is not old)} was replaced"
        if self._written() != self._state or not all(
            torch.equal(torch.stack(group), before) for group, before in zip(self._samples, self._sampled, strict=True)
        ):
            return "its weights were changed or moved to another device or data type"
        return self._other_settings() or self._other_hooks()

    def _written(self) -> tuple[object, ...]:
        """Return numbers that change when weights are written to or moved."""
        weights = self._weights
        try:
            versions = sum(map(_VERSION, weights))
        except RuntimeError:
            # PyTorch does not count changes of tensors that were created in inference mode.
            versions = -1
        ends = [(tensor.device, tensor.dtype) for tensor in (*weights[:1], *weights[-1:])]
        try:
            addresses = sum(map(torch.Tensor.data_ptr, weights))
        # Some tensor subclasses (such as quantized weights) store their values in other tensors and have no address.
        except (RuntimeError, NotImplementedError):
            addresses = sum(map(_address, weights))
        return (versions, addresses, *ends)

    def _other_settings(self) -> str:
        try:
            values = self._settings.values()
        except KeyError:
            return "an attribute of a submodule or of a config was removed"
        if values == self._values:
            return ""
        places = zip(self._settings.names, values, self._values, strict=True)
        return next((f"{name} was {old!r} and is now {new!r}" for name, new, old in places if new != old), "")

    def _other_hooks(self) -> str:
        if self._last_hook == RemovableHandle.next_id and not self._hooks:
            return ""
        last, hooks = RemovableHandle.next_id, self._hooked()
        if len(hooks) != len(self._hooks) or not all(map(operator.is_, hooks, self._hooks)):
            return "hooks of its submodules were added or removed"
        self._last_hook = last
        return ""

    def _hooked(self) -> list[Any]:
        """Return the hooks of the submodules.

        Hooks of the model itself are left out, because they run outside of the compiled code. Hooks that transformers
        registered are left out as well, because they act only if a call requests them.
        """
        parts = itertools.islice(self._modules.values(), 1, None)
        hooks = (
            hook
            for part in parts
            for registry in (part._forward_pre_hooks, part._forward_hooks)
            for hook in registry.values()
        )
        return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    # Some tensor subclasses (such as quantized weights) store their values in other tensors and have no address.
    except (RuntimeError, NotImplementedError):
        return 0


def _samples(weights: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views of one value of each weight on the CPU, grouped by data type."""
    plain = [
        weight.detach()
        for weight in weights
        if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.device.type == "cpu"
        and weight.layout is torch.strided and weight.is_floating_point() and weight.numel()
    ]  # fmt: skip
    for dtype in {weight.dtype for weight in plain}:
        yield [_largest(weight) for weight in plain if weight.dtype is dtype]


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the largest value among the first values of a tensor.

    A zero would be a bad sample, because scaling the weights does not change a zero.
    """
    while tensor.ndim:
        first = tensor[:_SAMPLED]
        rows = first if first.ndim == 1 else first.flatten(1)[:, :1].squeeze(1)
        tensor = tensor[int(rows.abs().argmax())]
    return tensor


def _settings(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (dictionary, key, name) for each attribute of a model's modules and configs that is a plain value, such as
    a number or a string.
    """
    visited: set[int] = set()
    for path, module in modules.items():
        attributes = vars(module)
        config = attributes.get("config")
        # Skip private attributes of modules that have a config, because `generate` stores values of its last call in
        # them.
        private = "_" if config is not None else ()
        for word in attributes.keys() - _STANDARD:
            if not word.startswith(private) and _is_plain(attributes[word]):
                yield attributes, word, f"{path}.{word}".lstrip(".")
        if hasattr(config, "to_diff_dict") and id(config) not in visited:
            visited.add(id(config))
            for word, value in vars(config).items():
                if word not in _NOTES and _is_plain(value):
                    yield vars(config), word, f"{path}.config.{word}".lstrip(".")


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, (bool, int, float, str))
