"""Outputs of exported graphs equal PyTorch's outputs for all families, several shapes, padded rows, and unsuitable
sample inputs of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import InputError
from accel.stages.export import export
from accel.testing.models import FAMILIES, tiny_model

# The exported graph adds float32 numbers in a different order, which changes logits of order 1 by about 1e-6.
TOLERANCE = 1e-4
# Megatron-BERT is not tested here, because the mask hardly affects its first token at this model size. Another test
# compares the packed form of its graph token by token.
TEXT_FAMILIES = sorted(set(FAMILIES) - {"vit", "megatron-bert"})


def text_inputs(config: Any, batch: int, sequence: int, *, types: bool) -> dict[str, torch.Tensor]:
    """Return random token ids and a mask. Every second row is padded on the right."""
    generator = torch.Generator().manual_seed(batch * 100 + sequence)
    ids = torch.randint(4, 100, (batch, sequence), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, (sequence + 1) // 2 :] = 0
    ids[mask == 0] = config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    if types:
        inputs["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
    return inputs


def worst_difference(model: Any, original: Any, batches: tuple[int, ...] = (1, 2, 5)) -> float:
    types = "token_type_ids" in {spec.name for spec in model.sessions["model"].inputs}
    worst = 0.0
    for batch in batches:
        for sequence in (1, 3, 17, 64):
            inputs = text_inputs(original.config, batch, sequence, types=types)
            with torch.inference_mode():
                expected = original(**inputs).logits
            worst = max(worst, float((model(**inputs).logits - expected).abs().max()))
    return worst


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.thorough)
        if f in ("deberta-v2", "electra", "modernbert", "xlm-roberta")
        else f
        for f in TEXT_FAMILIES
    ],
)
def test_text_families(family: str, tiny_artifact: Callable[..., Artifact]) -> None:
    original = tiny_model(family)
    model = accel.ORTModelForSequenceClassification(tiny_artifact(family))
    assert worst_difference(model, original) <= TOLERANCE


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_mask_changes_logits_of_the_test_models(family: str) -> None:
    """The logits of the test models are of order 1, and they change if the padding mask is removed. Otherwise the
    parity tests would prove nothing.
    """
    original = tiny_model(family)
    inputs = text_inputs(original.config, 2, 17, types=False)
    with torch.inference_mode():
        logits = original(**inputs).logits
        unmasked = original(**{**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}).logits
    assert logits.abs().max() > 0.1
    assert (logits - unmasked)[1].abs().max() > 100 * TOLERANCE


# accel changes unsuitable example inputs in the same way for all model families. So the usual test run tests only BERT.
CARELESS = [pytest.param(name, marks=() if name == "bert" else pytest.mark.thorough) for name in TEXT_FAMILIES]


@pytest.mark.parametrize("family", CARELESS)
def test_unsuitable_sample_is_repaired(family: str, tmp_path: Path) -> None:
    """A sample with batch size 1 and without padding still gives a correct graph. Without a repair, the trace would fix
    the batch axis and might drop the mask.
    """
    original = tiny_model(family)
    sample = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    export(original, tmp_path / "out", sample=sample)
    model = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert worst_difference(model, original) <= TOLERANCE


@pytest.mark.thorough
def test_texts_with_visual_embeddings(tmp_path: Path) -> None:
    """VisualBERT accepts any number of image regions together with a text of any length. Both inputs may be padded."""
    torch.manual_seed(0)
    config = transformers.VisualBertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        visual_embedding_dim=12,
        initializer_range=0.3,
    )
    original = transformers.VisualBertModel(config).eval()
    export(original, tmp_path / "out", task="feature-extraction")
    model = accel.ORTModelForFeatureExtraction.from_pretrained(tmp_path / "out")
    for batch, sequence, regions in [(1, 7, 5), (3, 4, 9)]:
        inputs = text_inputs(original.config, batch, sequence, types=True)
        inputs["visual_embeds"] = torch.randn(batch, regions, 12)
        inputs["visual_attention_mask"] = torch.ones(batch, regions)
        inputs["visual_attention_mask"][-1, regions // 2 :] = 0
        inputs["visual_token_type_ids"] = torch.ones(batch, regions, dtype=torch.int64)
        with torch.inference_mode():
            expected = original(**inputs)
            blind = original(**{**inputs, "visual_attention_mask": torch.ones(batch, regions)})
        outputs = model(**inputs)
        for name in ("last_hidden_state", "pooler_output"):
            assert (outputs[name] - expected[name]).abs().max() <= TOLERANCE
            assert (blind[name] - expected[name]).abs().max() > 10 * TOLERANCE
    with pytest.raises(InputError, match="missing: .*visual_embeds"):
        model(**text_inputs(original.config, 1, 5, types=True))


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "max"])
@pytest.mark.thorough
def test_pooling_in_the_graph(pooling: str, tmp_path: Path) -> None:
    original = tiny_model("distilbert", "feature-extraction")
    export(original, tmp_path / "out", task="sentence-similarity", pooling=pooling, normalize=True)
    model = accel.ORTModelForFeatureExtraction.from_pretrained(tmp_path / "out")
    inputs = text_inputs(original.config, 4, 9, types=False)
    with torch.inference_mode():
        hidden = original(**inputs).last_hidden_state
    mask = inputs["attention_mask"].bool().unsqueeze(-1)
    rows = {
        "mean": (hidden * mask).sum(1) / mask.sum(1),
        "cls": hidden[:, 0],
        "max": hidden.masked_fill(~mask, float("-inf")).amax(1),
        "last": torch.stack([row[row_mask.squeeze(-1)][-1] for row, row_mask in zip(hidden, mask, strict=True)]),
    }
    expected = torch.nn.functional.normalize(rows[pooling], dim=1)
    outputs = model(**inputs)
    assert (outputs.sentence_embedding - expected).abs().max() <= TOLERANCE
    assert (outputs.last_hidden_state - hidden).abs().max() <= TOLERANCE


class TwoTowers(torch.nn.Module):
    """Module that is not a transformers model. It has two inputs and two outputs with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(4, 3), torch.nn.Linear(6, 3)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.left(query), self.right(item)
        return {"score": a @ b.T, "query_vector": a}


def test_custom_module_keeps_input_and_output_names(tmp_path: Path) -> None:
    original = TwoTowers().eval()
    sample = {"query": torch.randn(1, 4), "item": torch.randn(1, 6)}
    axes = {"query": {0: "queries"}, "item": {0: "items"}}
    artifact = export(original, tmp_path / "out", task="custom", sample=sample, axes=axes)
    assert [spec.shape for spec in artifact.component().inputs] == [("queries", 4), ("items", 6)]
    model = accel.ORTModelForCustomTasks.from_pretrained(tmp_path / "out")
    query, item = torch.randn(5, 4), torch.randn(2, 6)
    with torch.inference_mode():
        expected = original(query, item)
    outputs = model(query=query, item=item)
    assert list(outputs) == ["score", "query_vector"]
    assert (outputs["score"] - expected["score"]).abs().max() <= 1e-5


@pytest.mark.thorough
def test_half_precision_reports_its_compute_dtype(tmp_path: Path) -> None:
    original = tiny_model("bert")
    export(original, tmp_path / "out", dtype="float16")
    model = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.artifact.dtype == "float16"
    assert model.dtype == torch.float16
    assert model.compute_dtype == "float32", "ONNX Runtime's CPU kernels compute half precision in float32"
