"""Run the conformance suite on the example backend for an OpenVINO execution provider from a separate library. The
tests are skipped if the library or its device is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import pytest

from accel.backends import registry
from accel.interfaces.entry_points import group_of
from accel.testing.conformance import BackendConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "openvino_ep_plugin"


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[None]:
    """Register the example backend as an installed plugin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        entry = metadata.EntryPoint("openvino-ep", "accel_openvino_ep:SPEC", group_of("backends"))
        real = metadata.entry_points
        patch.setattr(
            metadata,
            "entry_points",
            lambda **params: metadata.EntryPoints(
                [*real(**params), *([entry] if params.get("group") == entry.group else [])]
            ),
        )
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "accel_openvino_ep"]:
        del sys.modules[name]


class TestOpenVinoEp(BackendConformance):
    backend = "openvino-ep"


def test_missing_library_or_device_is_reported() -> None:
    probe = registry.probe(registry.describe("openvino-ep"))
    if probe.available:
        pytest.skip(
            f"this test needs a machine without a device of the provider, but it has {', '.join(map(str, probe.devices))}"
        )
    (reason,) = probe.reasons
    if util.find_spec("onnxruntime_ep_openvino") is None:
        assert "onnxruntime-ep-openvino" in reason.remedy
    else:
        assert "no device of type cpu or gpu or npu" in reason.message


def test_example_is_short() -> None:
    assert len((EXAMPLE / "accel_openvino_ep" / "backend.py").read_text(encoding="utf-8").splitlines()) < 60
