"""Tests that every public function rejects arguments of wrong types with an error of accel, before it does any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import accel
from accel import Artifact, ORTModel, ORTModelForSequenceClassification
from accel.config import checked_arguments
from accel.errors import AccelError, ConfigError, InputError


@checked_arguments(path=(str, os.PathLike), names=Sequence, table=Mapping)
def some(
    path: str | os.PathLike[str],
    *,
    count: int = 1,
    share: float = 0.0,
    flag: bool = False,
    level: Literal["low", "high"] = "low",
    names: Sequence[str] | None = None,
    table: Mapping[str, int] | None = None,
    anything: Any = None,
    tensor: torch.Tensor | None = None,
    **rest: Any,
) -> str:
    return "done"


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a"},
        {"path": Path("a"), "count": np.int64(3), "share": np.float32(0.5), "flag": True},
        {"path": "a", "share": 1, "names": ["a"], "table": {}, "anything": 5, "tensor": torch.zeros(1), "other": 5},
        {"path": "a", "level": "middle", "names": None, "table": None},
    ],
)
def test_allowed_arguments_are_accepted(arguments: dict[str, Any]) -> None:
    assert some(**arguments) == "done"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"path": 5}, "path"),
        ({"path": b"a"}, "path"),
        ({"path": None}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"path": "a", "anything": "a\0b"}, "anything"),
        ({"path": "a", "count": True}, "count"),
        ({"path": "a", "count": 1.5}, "count"),
        ({"path": "a", "count": None}, "count"),
        ({"path": "a", "share": "0.5"}, "share"),
        ({"path": "a", "flag": "false"}, "flag"),
        ({"path": "a", "level": 5}, "level"),
        ({"path": "a", "names": 5}, "names"),
        ({"path": "a", "table": ["a"]}, "table"),
    ],
)
def test_arguments_of_wrong_type_are_refused(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"argument {name} of|{name} is ") as caught:
        some(**arguments)
    assert caught.value.fix


def test_missing_argument_raises_type_error() -> None:
    with pytest.raises(TypeError, match="required positional argument"):
        some()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        some("a", "b")  # type: ignore[call-arg, misc]


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "Artifact.load": lambda value, folder: Artifact.load(value),
    "Artifact.accept_files": lambda value, folder: Artifact.accept_files(value),
    "export": lambda value, folder: accel.export("model", folder, config=value),
    "optimize": accel.optimize,
    "quantize": accel.quantize,
    "validate": lambda value, folder: accel.validate(value),
    "evaluate": lambda value, folder: accel.evaluate("model", [], batch_size=value),
    "benchmark": lambda value, folder: accel.benchmark("model", threads=value),
    "tune": lambda value, folder: accel.tune(value, folder, data=[]),
    "pipeline": lambda value, folder: accel.pipeline(value),
    "from_pretrained": lambda value, folder: ORTModelForSequenceClassification.from_pretrained(value),
    "from_pretrained of any task": lambda value, folder: ORTModel.from_pretrained(folder, revision=value),
    "accelerate": lambda value, folder: accel.accelerate(torch.nn.Linear(1, 1), backend=value),
    "prepare_qat": lambda value, folder: accel.prepare_qat(torch.nn.Linear(1, 1), samples=value),
}


@pytest.mark.parametrize(
    "value", [3.5, object(), [5], {"a": 5}, "a\0b"], ids=["float", "object", "list", "dict", "NUL"]
)
@pytest.mark.parametrize("name", CALLS)
def test_public_functions_refuse_wrong_types(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(AccelError) as caught:
        CALLS[name](value, tmp_path / "out")
    assert caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sample", "axes"),
    [
        ({"input_ids": 5}, None),
        ({5: torch.zeros(2, 4, dtype=torch.int64)}, None),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, {"input_ids": 5}),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, {"input_ids": {7: "batch"}}),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, {"ids": {0: "batch"}}),
    ],
)
def test_invalid_samples_are_refused(sample: Any, axes: Any, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        accel.export(tiny_folder(), tmp_path / "out", sample=sample, axes=axes)
    assert caught.value.fix
