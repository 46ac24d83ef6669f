"""Small input batches for tiny models, on which tests compare a graph with PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces.task import Task
from ..interfaces.task_registry import load_task

_TOKENS = 10


def tiny_batch(
    task: str, config: Any, *, rows: int = 3, seed: int = 0, size: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return a random batch for a tiny model of a task.

    If the task implements `Task.tiny_batch`, its result is the batch. Otherwise the batch contains texts, sounds or images, depending on
    the task's modality, and each text or sound is shorter than the previous row.

    Args:
        task: The task of the model.
        config: The model's transformers config.
        rows: Number of rows.
        seed: Seed of the random numbers.
        size: Height and width of images; the model's default size when `None`.
    """
    draw = torch.Generator().manual_seed(seed)
    implementation = load_task(task)
    spec = implementation.spec
    overridden = type(implementation).tiny_batch is not Task.tiny_batch
    if spec.modalities == ("image",) and not spec.generates and not overridden:
        edge = getattr(config, "image_size", None)
        size = size or ((edge, edge) if isinstance(edge, int) else (64, 96))
        return {"pixel_values": torch.randn((rows, 3, *size), generator=draw)}
    start = torch.randint(4, 120, (rows, 3), generator=draw)
    # Decoders continue after the last token, so their texts have left padding.
    left = spec.generates and not spec.encoder_decoder

    def texts(count: int, padded: bool = True) -> dict[str, torch.Tensor]:
        ids = torch.randint(6, 100, (count, _TOKENS), generator=draw)
        mask = torch.ones_like(ids)
        for row in range(1, count if padded else 0):
            mask[row, slice(0, row) if left else slice(_TOKENS - 2 * row, _TOKENS)] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}

    if overridden:
        batch = implementation.tiny_batch(config, rows, draw, texts)
    elif spec.modalities == ("audio",):
        batch = _sounds(config, rows, draw, frames=spec.generates)
    elif spec.modalities == ("image",):
        batch = {"pixel_values": torch.randn((rows, 3, 32, 32), generator=draw)}
    else:
        batch = texts(rows)
    if "input_ids" in batch and getattr(config, "type_vocab_size", 1) > 1:
        batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=draw)
    return {**batch, "decoder_input_ids": start} if spec.encoder_decoder else batch


def _sounds(config: Any, rows: int, draw: torch.Generator, *, frames: bool) -> dict[str, torch.Tensor]:
    """Return spectrogram windows (`frames`), or waveforms of different lengths with their mask."""
    if frames:
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=draw)}
    mask = torch.ones((rows, 900), dtype=torch.int64)
    for row in range(1, rows):
        mask[row, -100 * row :] = 0
    return {"input_values": torch.randn(mask.shape, generator=draw) * mask, "attention_mask": mask}
