"""The GPU that tests run on: `cuda:0`, or the one that `ACCEL_TEST_DEVICE` names."""

from __future__ import annotations

import os

import torch

GPU = torch.device(os.environ.get("ACCEL_TEST_DEVICE", "cuda:0"))


def placed(device: str) -> str:
    """A device type as a test passes it on: GPUs with the number of the one that tests run on."""
    return str(GPU) if device == GPU.type else device
