"""Tests of `accel_plugins.cuda.upstream` and `accel_plugins.pytorch.upstream` on a GPU. These modules call private
functions of PyTorch.
"""

from __future__ import annotations

import pytest
import torch

from accel_plugins.cuda import upstream as cuda
from accel_plugins.pytorch import upstream as pytorch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU"),
]


def test_current_device_and_stream_equal_the_public_api() -> None:
    torch.zeros(1, device="cuda")
    assert cuda.current_device() == torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        expected = torch.cuda.current_stream().cuda_stream
        assert cuda.current_stream_number(cuda.current_device()) == expected
        assert pytorch.current_stream_number(cuda.current_device()) == expected


def test_cublas_workspaces_are_released() -> None:
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pytorch.clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() <= before
