"""Tests of classifiers that read the last end token of a text, with batches whose rows have different numbers of end
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

import accel
from accel.errors import InputError
from accel.testing.models import rescale
from tests.triton.small_artifacts import graph

SIZES: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "vocab_size": 60, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3,
}  # fmt: skip
T5_SIZES: dict[str, Any] = {
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 60, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0, "num_labels": 3,
}  # fmt: skip
FAMILIES = {
    "Bart": SIZES,
    "MBart": SIZES,
    "Mvp": SIZES,
    "PLBart": SIZES,
    "BigBirdPegasus": {**SIZES, "attention_type": "original_full"},
    "T5": T5_SIZES,
    "MT5": T5_SIZES,
    "UMT5": T5_SIZES,
}
END = 2


def build(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    torch.manual_seed(0)
    return rescale(getattr(transformers, f"{family}ForSequenceClassification")(config)).eval()


def a_batch(pad: int) -> dict[str, torch.Tensor]:
    """Return four rows with one, two, three and one end tokens. The rows have different lengths."""
    ids = torch.tensor(
        [
            [7, 8, 9, 10, 11, 12, END],
            [7, END, 9, 10, END, pad, pad],
            [END, 21, END, 23, 24, 25, END],
            [31, END, pad, pad, pad, pad, pad],
        ]
    )
    return {"input_ids": ids, "attention_mask": (ids != pad).long()}


@pytest.fixture(scope="module")
def bart(shared: Callable[..., Path]) -> Path:
    return shared("end-token-bart", lambda folder: build("Bart").save_pretrained(folder))


def opened(model: Any, tmp_path: Path, backend: str) -> Any:
    artifact = accel.export(model, tmp_path / "out", task="text-classification", backend=backend)
    return accel.ORTModelForSequenceClassification(artifact, backend=backend)


def assert_rows_are_their_own(model: Any, accelerated: Any) -> None:
    """Assert that the result for each row, alone and in a batch, equals PyTorch's result for the row alone."""
    batch = a_batch(model.config.pad_token_id)
    together = accelerated(**batch).logits
    for i, mask in enumerate(batch["attention_mask"]):
        row = {name: tensor[i : i + 1, mask.bool()] for name, tensor in batch.items()}
        with torch.inference_mode():
            expected = model(**row).logits
        # The exported graph adds float32 numbers in a different order, which changes logits of order 1 by about 1e-6.
        torch.testing.assert_close(together[i : i + 1], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(accelerated(**row).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["cpu", "openvino", "pytorch"])
def test_row_uses_its_own_last_end_token(backend: str, tmp_path: Path, bart: Path) -> None:
    model = build("Bart")
    if backend == "pytorch":
        accelerated = accel.ORTModelForSequenceClassification.from_pretrained(bart, backend=backend)
    else:
        accelerated = opened(model, tmp_path, backend)
        # BART's position table has two rows more than the 64 positions, and no position uses these two rows.
        assert accelerated.artifact.component().max_sizes == {"sequence": 64}
    assert_rows_are_their_own(model, accelerated)


def test_row_without_end_token_is_refused(tmp_path: Path, bart: Path) -> None:
    batch = a_batch(pad=1)
    batch["input_ids"][3, 1] = 32
    for backend in ("cpu", "pytorch"):
        if backend == "cpu":
            accelerated = opened(build("Bart"), tmp_path, backend)
        else:
            accelerated = accel.ORTModelForSequenceClassification.from_pretrained(bart, backend=backend)
        with pytest.raises(InputError, match="Row 3 of the input 'input_ids' does not contain the token 2"):
            accelerated(**batch)
        # An end token inside the padding does not count.
        hidden = {**batch, "input_ids": batch["input_ids"].clone()}
        hidden["input_ids"][3, 6] = END
        with pytest.raises(InputError, match="Row 3 of the input 'input_ids' does not contain the token 2"):
            accelerated(**hidden)
        accelerated(**{name: tensor[:3] for name, tensor in batch.items()})


def test_separators_of_one_row_do_not_affect_other_rows(tmp_path: Path) -> None:
    """Longformer's question answering head treats every third separator of the whole batch as the end of a question.
    The exported graph counts the separators of each row.
    """
    config = transformers.LongformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=60, num_labels=2,
        max_position_embeddings=64, attention_window=4, pad_token_id=1, sep_token_id=END, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = rescale(transformers.LongformerForQuestionAnswering(config)).eval()
    artifact = accel.export(model, tmp_path / "out", task="question-answering")
    accelerated = accel.ORTModelForQuestionAnswering(artifact)
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    for row, places in enumerate(((3, 4, 11), (2, 11), (2, 4, 5, 11))):
        ids[row, list(places)] = END
    together = accelerated(input_ids=ids, attention_mask=torch.ones_like(ids)).start_logits
    for row in range(3):
        alone = accelerated(input_ids=ids[row : row + 1], attention_mask=torch.ones_like(ids[:1])).start_logits
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=0)
    with torch.inference_mode():
        expected = model(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1])).start_logits
    torch.testing.assert_close(together[:1], expected, atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="Row 0 of the input 'input_ids' does not contain the token 2"):
        accelerated(input_ids=torch.full((1, 12), 7), attention_mask=torch.ones((1, 12), dtype=torch.int64))


def test_foreign_graph_requires_equal_numbers_of_end_tokens(tmp_path: Path) -> None:
    """Graphs of other tools select end tokens over the whole batch, so rows need equal numbers of end tokens. The graph
    in this test is arbitrary, because the session reads the model class from the config.
    """
    onnx.save(graph("text-classification"), tmp_path / "model.onnx")
    config = {"architectures": ["BartForSequenceClassification"], "model_type": "bart", "is_encoder_decoder": True}
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **labels}), encoding="utf-8")
    model = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path, task="text-classification")
    batch = a_batch(pad=1)
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with pytest.raises(InputError, match="contain the token 2 between 1 and 3 times") as caught:
        model(**batch)
    assert "accel export" in str(caught.value)
    assert model(**{name: tensor[[0, 3]] for name, tensor in batch.items()}).logits.shape == (2, 3)
    for i in range(4):
        model(**{name: tensor[i : i + 1] for name, tensor in batch.items()})


@pytest.mark.parametrize(
    "family", ["T5", *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name not in ("Bart", "T5"))]
)  # fmt: skip
def test_all_end_token_architectures_compute_rows_separately(family: str, tmp_path: Path) -> None:
    model = build(family)
    assert_rows_are_their_own(model, opened(model, tmp_path, "cpu"))
