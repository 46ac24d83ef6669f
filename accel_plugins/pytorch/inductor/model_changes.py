"""What compiled code has taken from a model, and whether the model still has it: the guards that the code itself is made without."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

# What every module has; hooks among it are looked at by themselves.
_STANDARD = vars(torch.nn.Module()).keys() - {"training"}
_NOTES = frozenset(
    ("id2label", "label2id", "architectures", "problem_type", "task_specific_params", "dtype", "torch_dtype", "auto_map",
     "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "custom_pipelines")
)  # fmt: skip
_VERSION = operator.attrgetter("_version")
_SAMPLED = 4096


class Watch:
    """A model's weights, parts, settings and hooks as they were.

    Weights count their changes, but not those through `.data`: on the host one value of each is compared, too.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(model.named_modules())
        places: list[tuple[dict[str, Any], str, str]] = [
            (held, key, f"{path}.{key}".lstrip("."))
            for path, module in self._modules.items()
            for held in (module._parameters, module._buffers, module._modules)
            for key in held
        ]
        self._held: list[dict[str, Any]] = [held for held, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._names = [name for _, _, name in places]
        self._objects = list(map(operator.getitem, self._held, self._keys))
        self._weights = [one for one in self._objects if isinstance(one, torch.Tensor)]
        self._state = self._written()
        self._samples = [group for group in _samples(self._weights) if group]
        self._sampled = [torch.stack(group) for group in self._samples]
        settings = list(_settings(self._modules))
        self._vars: list[dict[str, Any]] = [held for held, _, _ in settings]
        self._words = [word for _, word, _ in settings]
        self._labels = [name for _, _, name in settings]
        self._values = copy.deepcopy(list(map(operator.getitem, self._vars, self._words)))
        self._hooks = self._hooked()
        self._last_hook = RemovableHandle.next_id

    def changed(self) -> str:
        """What is other than it was, in words; empty where nothing is."""
        try:
            found = list(map(operator.getitem, self._held, self._keys))
            same = all(map(operator.is_, found, self._objects))
        except KeyError:
            return "parts of it were taken away"
        if not same:
            places = zip(self._names, found, self._objects, strict=True)
            return f"{next(name for name, new, old in places if new is not old)} was replaced"
        if self._written() != self._state or not all(
            torch.equal(torch.stack(group), before) for group, before in zip(self._samples, self._sampled, strict=True)
        ):
            return "its weights were changed or moved"
        return self._other_settings() or self._other_hooks()

    def _written(self) -> tuple[object, ...]:
        """What changes when weights are written to or moved."""
        weights = self._weights
        try:
            versions = sum(map(_VERSION, weights))
        except RuntimeError:
            # Made inside `inference_mode`, where PyTorch counts no changes.
            versions = -1
        ends = [(tensor.device, tensor.dtype) for tensor in (*weights[:1], *weights[-1:])]
        try:
            addresses = sum(map(torch.Tensor.data_ptr, weights))
        # Kinds of tensors that keep their values elsewhere.
        except (RuntimeError, NotImplementedError):
            addresses = sum(map(_address, weights))
        return (versions, addresses, *ends)

    def _other_settings(self) -> str:
        try:
            found = list(map(operator.getitem, self._vars, self._words))
        except KeyError:
            return "settings of its parts were taken away"
        if found == self._values:
            return ""
        places = zip(self._labels, found, self._values, strict=True)
        return next((f"{name} was {old!r} and is {new!r}" for name, new, old in places if new != old), "")

    def _other_hooks(self) -> str:
        if self._last_hook == RemovableHandle.next_id and not self._hooks:
            return ""
        last, found = RemovableHandle.next_id, self._hooked()
        if len(found) != len(self._hooks) or not all(map(operator.is_, found, self._hooks)):
            return "hooks of its parts were added or removed"
        self._last_hook = last
        return ""

    def _hooked(self) -> list[Any]:
        """Hooks of the model's parts; its own run outside of what is compiled, and transformers' own only when they are asked to."""
        parts = itertools.islice(self._modules.values(), 1, None)
        hooks = (
            hook for one in parts for held in (one._forward_pre_hooks, one._forward_hooks) for hook in held.values()
        )
        return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    # Kinds of tensors that keep their values elsewhere.
    except (RuntimeError, NotImplementedError):
        return 0


def _samples(weights: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """One value of each weight, by type, as views."""
    plain = [
        one.detach()
        for one in weights
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"
        and one.layout is torch.strided and one.is_floating_point() and one.numel()
    ]  # fmt: skip
    for dtype in {one.dtype for one in plain}:
        yield [_largest(one) for one in plain if one.dtype is dtype]


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest of a tensor's first values: zero is what most changes leave as it is."""
    while tensor.ndim:
        first = tensor[:_SAMPLED]
        rows = first if first.ndim == 1 else first.flatten(1)[:, :1].squeeze(1)
        tensor = tensor[int(rows.abs().argmax())]
    return tensor


def _settings(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Plain values of a model's modules and configs: where each is held, under which word, and its name."""
    seen: set[int] = set()
    for path, module in modules.items():
        own = vars(module)
        config = own.get("config")
        # What `generate` remembers of its last call, for one.
        private = "_" if config is not None else ()
        for word in own.keys() - _STANDARD:
            if not word.startswith(private) and _is_plain(own[word]):
                yield own, word, f"{path}.{word}".lstrip(".")
        if hasattr(config, "to_diff_dict") and id(config) not in seen:
            seen.add(id(config))
            for word, value in vars(config).items():
                if word not in _NOTES and _is_plain(value):
                    yield vars(config), word, f"{path}.config.{word}".lstrip(".")


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return value is None or isinstance(value, (bool, int, float, str))
