"""Tests of models that split each image into several tiles, such as SmolVLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from accel import ORTModelForImageTextToText, export
from accel.errors import InputError
from accel.testing.models import VOCABULARY

pytestmark = pytest.mark.thorough

_TILE = 32
_TOKENS = 4
_IMAGE = 40


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small SmolVLM with four tokens for each tile."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": _TILE,
        "patch_size": 8,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.SmolVLMConfig(vision_config=vision, text_config=text, image_token_id=_IMAGE, scale_factor=2)
    tiny_model = transformers.SmolVLMForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tiny_model.generation_config.eos_token_id = None
    return tiny_model


def _processed(*, splits: bool = True) -> Any:
    """Return a batch of two prompts: one with two images that are split into tiles, and one with one image. The second
    row is padded to the same number of tiles.
    """
    images = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 3 * _TILE}, max_image_size={"longest_edge": _TILE}, do_image_splitting=splits
    )
    draw = np.random.default_rng(0)
    shapes = ((20, 70), (40, 30), (50, 50))
    pictures = [Image.fromarray(draw.integers(1, 255, (*shape, 3), dtype=np.uint8)) for shape in shapes]
    processed = images([pictures[:2], pictures[2:]], return_tensors="pt")
    rows = []
    for tiles in processed["pixel_values"]:
        count = int((tiles != 0).flatten(1).any(1).sum())
        rows.append([5, *[_IMAGE] * (_TOKENS * count), 7, 8])
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        **{name: processed[name] for name in ("pixel_values", "pixel_attention_mask")},
    }


@pytest.fixture(scope="module", params=["cpu", "openvino"])
def opened(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiles") / request.param
    return ORTModelForImageTextToText.from_pretrained(export(model, folder, backend=request.param).path)


@pytest.mark.parametrize("splits", [True, False])
def test_batches_of_images_in_tiles(opened: Any, model: Any, splits: bool) -> None:
    feeds = _processed(splits=splits)
    real = feeds["attention_mask"].bool()
    with torch.inference_mode():
        expected = model(**feeds).logits
    assert float((opened(**feeds).logits - expected)[real].abs().max()) < 1e-4 * float(expected.abs().max())
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        tokens = model.generate(**feeds, max_new_tokens=6, do_sample=False, **options)
        assert torch.equal(opened.generate(**feeds, max_new_tokens=6, do_sample=False, **options), tokens)


def test_incomplete_tiles_are_refused(opened: Any) -> None:
    feeds = _processed()
    padded = feeds["pixel_attention_mask"].clone()
    padded[0, 0, :, _TILE // 2 :] = 0
    with pytest.raises(InputError, match="partly padded"):
        opened(**{**feeds, "pixel_attention_mask": padded})
    with pytest.raises(InputError, match="pixel_attention_mask has the shape .* pixel_values of shape"):
        opened(**{**feeds, "pixel_attention_mask": padded[:, :1]})
    with pytest.raises(InputError, match="a smolvlm model needs 5"):
        opened(**{**feeds, "pixel_values": feeds["pixel_values"][0]})
    with pytest.raises(InputError, match="image tokens"):
        opened(**{**feeds, "pixel_values": torch.zeros_like(feeds["pixel_values"])})


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_image_sizes_given_as_pairs(backend: str, tmp_path: Path) -> None:
    """InternVL's config gives image sizes as pairs of height and width. Its tiles are passed as separate images, one
    after another.
    """
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": [_TILE, _TILE],
        "patch_size": [8, 8],
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    }  # fmt: skip
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=_IMAGE, downsample_ratio=0.5, image_seq_length=_TOKENS
    )
    original = transformers.InternVLForConditionalGeneration(config).eval()
    original.generation_config.eos_token_id = None
    opened = ORTModelForImageTextToText.from_pretrained(export(original, tmp_path / "out", backend=backend).path)
    ids = torch.tensor([[5, *[_IMAGE] * (2 * _TOKENS), 7, 8], [9, 6, 6, 6, 6, *[_IMAGE] * _TOKENS, 7, 8]])
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(3, 3, _TILE, _TILE)}
    with torch.inference_mode():
        expected = original(**feeds).logits
    assert float((opened(**feeds).logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    tokens = original.generate(**feeds, max_new_tokens=6, do_sample=False)
    assert torch.equal(opened.generate(**feeds, max_new_tokens=6, do_sample=False), tokens)
