"""`accel.prepare_qat`: a PyTorch model made ready to be trained for integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...config import QatConfig, QatPreset, checked_arguments
from .dispatching import prepare

if TYPE_CHECKING:
    import torch


@checked_arguments(calibration=Iterable)
def prepare_qat(
    model: torch.nn.Module,
    *,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
    preset: QatPreset = "int8",
    exclude: Sequence[str] = (),
    block_size: int = 32,
    samples: int = 256,
    distillation: float = 0.0,
    temperature: float = 2.0,
    backend: str | None = None,
) -> torch.nn.Module:
    """Make the linear layers of a PyTorch model round as integers do, so that training makes up for it.

    The model is changed in place and stays one of its class: train it with your own loop or `transformers.Trainer`, save and resume
    its checkpoints as ever, and hand it to `accel.export`, which writes the integers. Takes seconds. A training step takes 1.2 to 2
    times what it took before; with distillation the float model's answers come on top.

    Args:
        model: In float32, already trained.
        calibration: Batches of inputs by name (a `DataLoader` will do; `labels` are left out), which give the ranges that activations
            are rounded in at first. For all presets but `int4`.
        preset: `int8`: unsigned activations, signed weights with a step for each channel, which CPUs multiply fast.
            `int8-symmetric`: both signed around zero, as TensorRT wants it. `int8-per-tensor`: one step for all of a layer's weights.
            `int4-int8`, `int4-per-tensor`: the first and the last with 15 steps for weights, computed in 8 bits. `int4`: weights in 4
            bits in blocks, activations in floating point.
        exclude: Layers that stay in float: names, or `re:` and a regular expression.
        block_size: For `int4`: weights that share a step.
        samples: Rows of the calibration data that are read at most.
        distillation: Share, 0 to 1, that the float model's answers have in the loss which the model computes from `labels`.
        temperature: Of the distillation.
        backend: Who prepares; whoever does this when `None`.

    Raises:
        ConfigError: Settings that do not fit the model.
        PrepareError: The model cannot be prepared; it is as it was.
    """
    config = QatConfig(
        preset=preset,
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        block_size=block_size,
        samples=samples,
        distillation=distillation,
        temperature=temperature,
    )
    return prepare(model, config, backend=backend, calibration=calibration)
