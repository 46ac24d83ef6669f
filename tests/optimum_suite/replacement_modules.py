"""Replacements for the modules that Optimum's tests import: `accel.compat.optimum` replaces `optimum.onnxruntime`, and
small functions replace parts of other modules.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import os
import shutil
import sys
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache

from accel.interfaces.task_registry import all_tasks

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
# Tests import names directly from these submodules of `optimum.onnxruntime`.
_RUNTIME = ("configuration", "modeling_decoder", "modeling_seq2seq", "utils")


def install() -> None:
    """Install all replacement modules in `sys.modules`."""
    import accel.compat.optimum as ours

    _module("optimum")
    for name in ("optimum.onnxruntime", *(f"optimum.onnxruntime.{module}" for module in _RUNTIME)):
        sys.modules[name] = ours
    for name in ("optimum.exporters", "optimum.exporters.onnx", "optimum.onnx", "transformers.onnx"):
        _module(name)
    _module("optimum.exporters.tasks", TasksManager=TasksManager)
    for name in ("config", "model_configs"):
        _module(f"optimum.exporters.onnx.{name}", __getattr__=_export_config)
    _module("optimum.exporters.onnx.utils", MODEL_TYPES_REQUIRING_POSITION_IDS=())
    _module("optimum.onnx.utils", has_onnx_input=_has_input)
    logs = _module("optimum.utils.logging", get_logger=logging.getLogger)
    versions = {"is_transformers_version": _is_transformers_version}
    _module("optimum.utils", CONFIG_NAME="config.json", logging=logs, **versions)
    _module("optimum.utils.import_utils", **versions)
    _module("optimum.utils.save_utils", maybe_load_preprocessors=_preprocessors)
    _module(
        "optimum.utils.testing_utils", grid_parameters=_grid, remove_directory=_remove,
        require_hf_token=unittest.skipUnless(os.environ.get("HF_AUTH_TOKEN"), "needs an access token of the Hub"),
        require_ort_rocm=unittest.skip("this test needs an AMD GPU with ROCm"),
    )  # fmt: skip
    _module("transformers.onnx.utils", get_preprocessor=lambda name: _preprocessors(name, first=True)[0])
    _as_in_transformers_4()


def _module(name: str, **values: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(values)
    return module


class TasksManager:
    """Replacement for Optimum's class of the same name. It reports that every model supports every task."""

    @staticmethod
    def get_supported_tasks_for_model_type(*_: Any, **__: Any) -> list[str]:
        """Return the names of all tasks, with and without a KV cache."""
        return [name + past for name in (spec.name for spec in all_tasks()) for past in ("", "-with-past")]


def _export_config(name: str) -> Any:
    """Return an exporter config, from which tests read only the minimum version of transformers."""
    if name.startswith("__"):
        raise AttributeError(name)
    return types.SimpleNamespace(MIN_TRANSFORMERS_VERSION="0")


def _has_input(path: str, name: str) -> bool:
    model = onnx.load(path, load_external_data=False)
    return any(value.name == name for value in model.graph.input)


def _is_transformers_version(comparison: str, version: str) -> bool:
    return bool(_COMPARE[comparison](Version(transformers.__version__), Version(version)))


def _preprocessors(name: str, first: bool = False) -> list[Any]:
    """Return all tokenizers and processors of a model, with the combined processor first."""
    preprocessors = []
    for auto in ("AutoProcessor", "AutoTokenizer", "AutoFeatureExtractor", "AutoImageProcessor"):
        try:
            preprocessors.append(getattr(transformers, auto).from_pretrained(name))
        except (OSError, ValueError, KeyError):
            continue
        if first:
            break
    return preprocessors


def _grid(values: Mapping[str, Sequence[Any]], add_test_name: bool = True) -> list[list[Any]]:
    """Return every combination of the values. With `add_test_name`, each combination begins with a unique name."""
    rows = [list(row) for row in itertools.product(*values.values())]
    return [["_".join(map(str, row)), *row] for row in rows] if add_test_name else rows


def _remove(path: str | os.PathLike[str]) -> None:
    if Path(path).exists():
        shutil.rmtree(path)


def _as_in_transformers_4() -> None:
    """Patch the models of PyTorch and of accel to have features of transformers 4: KV caches as tuples, and an argument
    of `generate`.
    """

    def layers(cache: Any) -> tuple[tuple[torch.Tensor, ...], ...]:
        parts = [
            getattr(cache, name).layers
            for name in ("self_attention_cache", "cross_attention_cache")
            if hasattr(cache, name)
        ]
        parts = [part for part in parts if part] or [cache.layers]
        return tuple(
            tuple(tensor for layer in row for tensor in (layer.keys, layer.values)) for row in zip(*parts, strict=True)
        )

    Cache.to_legacy_cache = layers
    Cache.__getitem__ = lambda cache, index: layers(cache)[index]
    mixin = transformers.GenerationMixin
    mixin.generate = _without(mixin.generate, "use_model_defaults")


def _without(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*values: Any, **named: Any) -> Any:
        named.pop(argument, None)
        return function(*values, **named)

    return wrapped
