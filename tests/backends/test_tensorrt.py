"""Tests of the `tensorrt` backend on a GPU. Some tests require TensorRT; other tests require only the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accel import capture
from accel.artifact import Artifact
from accel.backends import registry
from accel.config import SessionOptions
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.testing.conformance import BackendConformance
from tests.devices import GPU


def unavailable() -> str:
    probe = registry.probe(registry.describe("tensorrt"))
    return "" if probe.available else "; ".join(reason.message for reason in probe.reasons)


@pytest.mark.gpu
@pytest.mark.skipif(bool(unavailable()), reason=f"TensorRT cannot be used: {unavailable()}")
class TestTensorrt(BackendConformance):
    backend = "tensorrt"
    device = str(GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_device_session_with_the_cuda_provider(tiny_artifact: Callable[..., Artifact], task: str) -> None:
    """Test the session class of the TensorRT provider with the CUDA provider, which uses the same interface."""
    from accel_plugins.ortkit.runtime.device_session import DeviceSession
    from accel_plugins.ortkit.runtime.nvidia import CUDA
    from accel_plugins.ortkit.runtime.session import open_runtime

    artifact = tiny_artifact("bert", task)
    component = artifact.components[0]
    runtime = open_runtime(
        artifact.file(),
        component,
        provider=CUDA,
        provider_options={"use_tf32": "0", "device_id": str(GPU.index)},
        options=SessionOptions(),
    )
    session = DeviceSession(runtime, component, DeviceSpec.parse(str(GPU)), "float32")
    cpu = registry.load(registry.describe("cpu"))
    expected_by = cpu.open(artifact, OpenRequest(device=DeviceSpec("cpu")))["model"]
    results = []
    for seed, (batch, sequence) in enumerate([(1, 5), (3, 17), (3, 17)]):
        sizes = {"batch": batch, "sequence": sequence}
        feeds = capture.feeds_for(component.inputs, sizes, seed=seed, folder=artifact.path)
        outputs = session.run({name: tensor.to(GPU) for name, tensor in feeds.items()})
        results.append((outputs, expected_by.run(feeds)))
    for outputs, expected in results:
        for name, value in expected.items():
            assert outputs[name].is_cuda
            assert (outputs[name].cpu() - value).abs().max() < 1e-4
    name = component.outputs[0].name
    buffer = torch.empty_like(results[-1][0][name])
    session.run(feeds, out={name: buffer})
    assert torch.equal(buffer, results[-1][0][name])
    session.close()
