"""The GPU that tests use: `cuda:0`, or the GPU that the environment variable `ACCEL_TEST_DEVICE` names."""

from __future__ import annotations

import os

import torch

GPU = torch.device(os.environ.get("ACCEL_TEST_DEVICE", "cuda:0"))


def placed(device: str) -> str:
    """Return a device string for a test. For GPUs, the string includes the number of the GPU that tests use."""
    return str(GPU) if device == GPU.type else device
