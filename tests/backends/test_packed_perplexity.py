"""Tests of 4-bit quantization with a small trained model: algorithms that use calibration data (GPTQ, AWQ) lose less
accuracy than rounding without data.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("neural_compressor", reason="the extra neural-compressor is not installed")
pytest.importorskip("accelerate", reason="the extra neural-compressor is not installed")

import accel
from accel.demo import MODEL, read_test_set
from accel.stages.quantize import quantize

pytestmark = pytest.mark.thorough
HELD_OUT = 400
STEPS, ROWS = 400, 32


@pytest.fixture(autouse=True)
def _quiet_torchao(recwarn: pytest.WarningsRecorder) -> None:
    """Ignore the warnings that importing torchao raises."""


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    token_ids = [torch.tensor(tokenizer(text)["input_ids"][:48]) for text in read_test_set()[0]]
    order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(0)).tolist()
    return [token_ids[i] for i in order]


def batch_of(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def trained(texts: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a causal language model with two layers that was trained on the queries for about a minute."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=transformers.AutoTokenizer.from_pretrained(MODEL).vocab_size, hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rows = texts[HELD_OUT:]
    for step in range(STEPS):
        start = step * ROWS % (len(rows) - ROWS)
        batch = batch_of(rows[start : start + ROWS])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("trained")
    model.eval().save_pretrained(folder)
    return folder


def perplexity(model: accel.ORTModelForCausalLM, rows: list[torch.Tensor]) -> float:
    """Return the perplexity of the model on held-out texts, with one text in each call."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(input_ids=row[None]).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        count += len(row) - 1
    return math.exp(total / count)


def test_gptq_or_awq_loses_less_than_rounding(trained: Path, texts: list[torch.Tensor], tmp_path: Path) -> None:
    perplexities = {}
    for algorithm in ("rtn", "gptq", "awq"):
        packed = quantize(
            trained, tmp_path / algorithm, backend="neural-compressor", scheme="weight-int4", algorithm=algorithm,
            block_size=128, calibration=[batch_of([row]) for row in texts[HELD_OUT : HELD_OUT + 128]],
        )  # fmt: skip
        graph = accel.export(packed.path, tmp_path / f"{algorithm}-onnx")
        perplexities[algorithm] = perplexity(accel.ORTModelForCausalLM.from_pretrained(graph.path), texts[:HELD_OUT])
    exact = accel.ORTModelForCausalLM.from_pretrained(trained, export=True)
    perplexities["float"] = perplexity(exact, texts[:HELD_OUT])
    assert perplexities["float"] < 60, "a model that has learned nothing proves nothing"
    assert perplexities["float"] < perplexities["rtn"]
    assert min(perplexities["gptq"], perplexities["awq"]) < perplexities["rtn"], perplexities
