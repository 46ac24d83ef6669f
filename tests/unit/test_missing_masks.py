"""Tests of the default attention mask for models that compute a mask from padding tokens if the caller passes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from accel.interfaces.family_registry import family_of
from accel.testing.models import rescale

SMALL = {"emb_dim": 36, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 61, "pad_index": 2}
DPR = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "pad_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "XLM": ("XLMModel", SMALL), "Flaubert": ("FlaubertModel", SMALL), "DPR": ("DPRQuestionEncoder", DPR),
}  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("kind", MODELS)
def test_default_mask_equals_the_models_mask(kind: str, side: str) -> None:
    name, sizes = MODELS[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=97, **sizes)
    model = rescale(getattr(transformers, name)(config).eval())
    ids = torch.randint(5, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    ids[1, {"left": slice(3), "right": slice(4, None), "middle": slice(2, 4)}[side]] = 2
    with torch.inference_mode():
        alone = model(input_ids=ids)[0]
        masked = model(input_ids=ids, attention_mask=family_of(config).default_mask(ids, config))[0]
        torch.testing.assert_close(masked, alone)
        assert (model(input_ids=ids, attention_mask=torch.ones_like(ids))[0] - alone).abs().max() > 1e-3
