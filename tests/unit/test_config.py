"""Tests of settings: invalid settings raise an error with a hint, and valid settings are equal after a round trip
through JSON.
"""

from __future__ import annotations

import json
import pickle

import pytest

from accel import errors
from accel.config import ExportConfig, OptimizeConfig, QuantizeConfig, SessionOptions, available_processors, fitted
from accel.errors import AccelError, ConfigError
from accel.interfaces.specs import DeviceSpec

CONFIGS = [
    ExportConfig(pooling="cls"),
    OptimizeConfig(level="O3", disable=("gelu",)),
    QuantizeConfig(exclude=("a",)),
    SessionOptions(threads=2, buckets=(8, 16)),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config: object) -> None:
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ExportConfig, {"dtyp": "float16"}, "Did you mean 'dtype'"),
        (ExportConfig, {"dtype": "fp16"}, "use one of float32, float16, bfloat16"),
        (ExportConfig, {"opset": 5}, "at least 18 and at most 25"),
        (ExportConfig, {"atol": 0.0}, "above 0"),
        (ExportConfig, {"pooling": "average"}, "mean, cls, max, last"),
        (OptimizeConfig, {"level": "O5"}, "O1, O2, O3, O4"),
        (QuantizeConfig, {"percentile": 0.5}, "above 50 and at most 100"),
        (QuantizeConfig, {"samples": 0}, "at least 1"),
        (QuantizeConfig, {"smooth_quant": 2.0}, "at least 0 and at most 1"),
        (QuantizeConfig, {"block_size": 33}, "power of two"),
        (QuantizeConfig, {"ratio": 0.0}, "above 0 and at most 1"),
        (SessionOptions, {"threads": 0}, "at least 1"),
        (SessionOptions, {"threads": "2"}, "use a value of type int or None"),
        (SessionOptions, {"threads": True}, "use a value of type int or None"),
        (SessionOptions, {"buckets": "16"}, "use a value of type tuple of int"),
        (
            SessionOptions,
            {"buckets": (16, 32.5)},
            r"buckets\[1\] is 32.5, which is not a valid value.\nFix: use a value of type int",
        ),
        (SessionOptions, {"spinning": 1}, "use a value of type bool"),
        (SessionOptions, {"buckets": (32, 16)}, "increasing order"),
        (SessionOptions, {"pad_to_multiple_of": 0}, "at least 1"),
        (SessionOptions, {"pad_to_multiple_of": 8, "buckets": (8,)}, "set only one of"),
        (SessionOptions, {"compute_dtype": "int8"}, "float32, float16, bfloat16"),
        (SessionOptions, {"graph_optimization": "most"}, "none, basic, extended, all"),
    ],
)
def test_invalid_values_are_refused(cls: type, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls.from_dict(values)  # type: ignore[attr-defined]


def test_any_sequence_is_accepted() -> None:
    assert SessionOptions(buckets=[16, 32]) == SessionOptions(buckets=(16, 32))  # type: ignore[arg-type]
    assert SessionOptions(buckets=range(8, 33, 8)).buckets == (8, 16, 24, 32)  # type: ignore[arg-type]
    assert QuantizeConfig(exclude=["a"]).exclude == ("a",)  # type: ignore[arg-type]


def test_every_error_is_documented_and_pickled() -> None:
    error_types = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, AccelError)]
    assert len(error_types) > 15
    for error in error_types:
        copy = pickle.loads(pickle.dumps(error("what happened", fix="do this")))
        assert type(copy) is error
        assert str(copy) == "what happened\nFix: do this"
        assert error.__name__ in (errors.__doc__ or ""), "the tree in the module's docstring misses it"


def test_devices() -> None:
    assert str(DeviceSpec.parse("CUDA:1")) == "cuda:1"
    assert str(DeviceSpec.parse("cpu")) == "cpu"
    with pytest.raises(ConfigError, match="'gpu 0' is not the name of a device"):
        DeviceSpec.parse("gpu 0")


def test_available_processors_follow_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5})
    assert available_processors() <= 3


def test_available_processors_follow_the_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    quota = Path(str(tmp_path)) / "cpu.max"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("accel.config._CGROUP_QUOTA", quota)
    quota.write_text("150000 100000\n")
    assert available_processors() == 2
    quota.write_text("max 100000\n")
    assert available_processors() == 64


def test_object_hint_accepts_every_value() -> None:
    values = (True, 3, "text", None, [1])
    assert tuple(fitted("name", value, object) for value in values) == values
