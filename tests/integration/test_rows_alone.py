"""Tests of a check that `export` makes: the outputs for a row do not depend on the other rows of its batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel import capture
from accel.artifact.manifest import ROW_DIFFERENCE, Artifact
from accel.errors import ValidationError
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_model


class LessTheMean(transformers.BertForSequenceClassification):
    """Classifier whose logits are relative to the mean of the batch."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits - logits.mean(0, keepdim=True))


class EndsOfTheBatch(transformers.BertForSequenceClassification):
    """Classifier that selects separator tokens with a mask over the whole batch. Its outputs are correct only if all
    rows have one separator.
    """

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        places = torch.arange(input_ids.numel(), 0, -1, device=input_ids.device)
        first = ((input_ids == 3).flatten() * input_ids.numel() + places).topk(input_ids.shape[0]).indices
        chosen = hidden.flatten(0, 1)[first]
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.classifier(chosen))


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_export_with_dependent_rows_is_refused(backend: str, tmp_path: Path) -> None:
    plain = tiny_model("bert")
    model = LessTheMean(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    with pytest.raises(
        ValidationError, match="depends on the other rows of its batch: the output 'logits' of a row changes by"
    ):
        accel.export(model, tmp_path / "out", task="text-classification", backend=backend)
    assert not (tmp_path / "out").exists()


def test_special_tokens_reveal_dependent_rows(tmp_path: Path) -> None:
    """PyTorch and the graph return equal outputs for each batch, although a row reads a token of another row. The check
    detects this error because it also computes each row alone.
    """
    plain = tiny_model("bert", sep_token_id=3, eos_token_id=3)
    model = EndsOfTheBatch(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    with pytest.raises(ValidationError, match="depends on the other rows of its batch"):
        accel.export(model, tmp_path / "out", task="text-classification")


def test_decoder_rows_are_checked_with_their_cache(generator: Callable[..., Artifact]) -> None:
    validation = generator("llama").manifest.steps[0].validation
    # Batched and single rows add float32 numbers in a different order, so a small difference remains.
    assert 0 <= validation[ROW_DIFFERENCE] < 1e-4


def test_special_tokens_are_inserted_between_other_tokens() -> None:
    config = transformers.BartConfig(vocab_size=60)
    ids = torch.arange(10, 40).reshape(3, 10)
    ids[1, 5:] = config.pad_token_id
    mask = (ids != config.pad_token_id).long()
    sequence = capture.with_special_tokens({"input_ids": ids, "attention_mask": mask}, config)["input_ids"]
    changed = sequence != ids
    assert changed.sum(1).tolist() == [0, 1, 2]
    assert not changed[:, 0].any()
    assert not changed[1, 4:].any(), "neither the last token nor padding"
    assert set(sequence[changed].tolist()) <= {config.eos_token_id, config.bos_token_id, config.pad_token_id}


def test_config_with_several_end_tokens(tmp_path: Path) -> None:
    """A model with several end tokens can be exported. Old checkpoints list them in `config.json`, and Llama 3 and Qwen
    list them in `generation_config.json`.
    """
    config = transformers.LlamaConfig(vocab_size=50, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    ids = torch.arange(10, 34).reshape(2, 12)
    changed = capture.with_special_tokens({"input_ids": ids}, config)["input_ids"]
    assert torch.equal(changed[0], ids[0])
    assert changed[1].ne(ids[1]).sum() == 1
    assert int(changed[1][changed[1] != ids[1]]) in (0, 1, 2, 3)

    folder = save_generator(tmp_path / "model", "llama")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": [3, 5]}))
    (folder / "generation_config.json").unlink()
    artifact = accel.export(folder, tmp_path / "out")
    assert artifact.manifest.steps[0].validation
