"""Seeded tiny models that read sounds, with their feature extractors, and sounds for them: made offline, as in `models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from accel.tasks.infer import task_spec

from .models import LABELS, rescale

RATE = 1000
"""Samples a second of the tiny models' sounds: what they stride over is short, and so is a second."""

_LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmno"]
_WAVES: dict[str, Any] = {
    "vocab_size": len(_LETTERS),
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "tdnn_dim": (16, 16, 16, 16, 24),
    "xvector_output_dim": 16,
    "pad_token_id": 0,
    "num_labels": LABELS,
    "num_feat_extract_layers": 2,
}
SOUND_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Group normalisation, whose extractors give no mask; and layer normalisation, whose do.
    "wav2vec2": ("Wav2Vec2", {**_WAVES, "feat_extract_norm": "group"}),
    "wav2vec2-layer": ("Wav2Vec2", {**_WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "hubert": ("Hubert", _WAVES),
    "wavlm": ("WavLM", {**_WAVES, "num_buckets": 16, "max_bucket_distance": 32}),
}
_HEADS = {
    "ctc": "ForCTC",
    "audio-classification": "ForSequenceClassification",
    "audio-frame-classification": "ForAudioFrameClassification",
    "audio-xvector": "ForXVector",
}


def tiny_sound(seconds: float = 1.0, seed: int = 0) -> npt.NDArray[np.float32]:
    """A sound of some tones and noise: `(samples,) float32`, at `RATE`."""
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in draw.uniform(20, 400, 3))
    return np.asarray(0.2 * tones * (1 + time) + 0.05 * draw.standard_normal(len(time)), np.float32)


def save_sound_model(folder: Path, family: str = "wav2vec2", task: str = "ctc", seed: int = 0) -> Path:
    """Write a tiny model of a family of `SOUND_FAMILIES` for a task, with its feature extractor and, for `ctc`, its tokenizer."""
    folder = Path(folder)
    prefix, settings = SOUND_FAMILIES[family]
    name = task_spec(task).name
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + _HEADS[name])(getattr(transformers, f"{prefix}Config")(**settings))
    scaled: Any = rescale(model, seed).eval()
    scaled.save_pretrained(folder)
    masks = settings.get("feat_extract_norm") == "layer"
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=masks).save_pretrained(folder)
    if name == "ctc":
        (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(_LETTERS)}))
        transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    return folder
