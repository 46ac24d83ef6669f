"""Tiny audio models with fixed seeds and feature extractors, and test sounds.

The models are created from configs like the models in `accel.testing.models`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from accel.interfaces.task_registry import task_spec

from .models import LABELS, check_family, rescale, tiny_tokenizer

RATE = 1000
"""Sampling rate of the tiny models' sounds, in samples per second."""

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
    # Wav2Vec2's feature extractors return a mask for models with layer normalization, but not for group normalization.
    "wav2vec2": ("Wav2Vec2", {**_WAVES, "feat_extract_norm": "group"}),
    "wav2vec2-layer": ("Wav2Vec2", {**_WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "hubert": ("Hubert", _WAVES),
    "wavlm": ("WavLM", {**_WAVES, "num_buckets": 16, "max_bucket_distance": 32}),
}


def tiny_sound(seconds: float = 1.0, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return a sound of three tones and noise: `(samples,) float32`, with sampling rate `RATE`."""
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in draw.uniform(20, 400, 3))
    return np.asarray(0.2 * tones * (1 + time) + 0.05 * draw.standard_normal(len(time)), np.float32)


def save_sound_model(folder: Path, family: str = "wav2vec2", task: str = "ctc", seed: int = 0) -> Path:
    """Save a tiny model of a family of `SOUND_FAMILIES` for a task, with its feature extractor and, for `ctc`, its
    tokenizer.
    """
    folder = Path(folder)
    check_family(family, SOUND_FAMILIES)
    prefix, settings = SOUND_FAMILIES[family]
    spec = task_spec(task)
    torch.manual_seed(seed)
    model = getattr(transformers, spec.auto_model).from_config(getattr(transformers, f"{prefix}Config")(**settings))
    scaled: Any = rescale(model, seed).eval()
    scaled.save_pretrained(folder)
    masks = settings.get("feat_extract_norm") == "layer"
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=masks).save_pretrained(folder)
    if "vocab_size" in spec.outputs["logits"]:
        (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(_LETTERS)}))
        transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    return folder


CLAP = "clap"
"""Family name of the tiny audio-text model."""
_BINS, _SPECTROGRAM = 16, 64


def save_clap(folder: Path, seed: int = 0) -> Path:
    """Save a tiny CLAP model with its feature extractor and tokenizer as a transformers folder."""
    text = {
        "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    audio = {
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "patch_size": 4,
        "patch_stride": [4, 4], "num_hidden_layers": 2, "window_size": 4, "num_mel_bins": _BINS, "spec_size": _SPECTROGRAM,
    }  # fmt: skip
    torch.manual_seed(seed)
    model: Any = transformers.ClapModel(
        transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=16)
    )
    # `rescale` must not change the scale of the logits, which is stored as a logarithm.
    scales = {
        name: value.detach().clone() for name, value in model.named_parameters() if name.startswith("logit_scale")
    }
    rescale(model, seed).eval()
    with torch.no_grad():
        for name, value in scales.items():
            model.get_parameter(name).copy_(value)
    extractor = transformers.ClapFeatureExtractor(
        feature_size=_BINS, sampling_rate=RATE, hop_length=10, max_length_s=2, fft_window_size=64, frequency_max=RATE // 2,
        frequency_min=10, truncation="rand_trunc",
    )  # fmt: skip
    tokenizer = tiny_tokenizer(roberta_like=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    model.save_pretrained(folder)
    transformers.ClapProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


VITS = "vits"
"""Family name of the tiny text-to-speech model."""


def save_vits(folder: Path, seed: int = 0, speakers: int = 1) -> Path:
    """Save a tiny VITS model with a tokenizer of letters as a transformers folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", "<unk>", " ", "'", *"abcdefghijklmnopqrstuvwxyz"]
    config = transformers.VitsConfig(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, flow_size=8,
        spectrogram_bins=9, duration_predictor_num_flows=2, duration_predictor_flow_bins=4, prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1, upsample_initial_channel=16,
        upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]],
        depth_separable_num_layers=1, sampling_rate=RATE, num_speakers=speakers, speaker_embedding_size=8 if speakers > 1 else 0,
    )  # fmt: skip
    torch.manual_seed(seed)
    # Keep the default weights: token durations are exponentials of layer outputs and would be huge with the larger weights of `rescale`.
    model: Any = transformers.VitsModel(config).eval()
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    transformers.VitsTokenizer(str(folder / "vocab.json"), phonemize=False).save_pretrained(folder)
    return folder
