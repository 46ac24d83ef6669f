"""Tests of encoders that skip padding tokens ("packing"). Outputs are compared with the original model; replacement
functions take the place of the GPU's attention kernels.
"""

from __future__ import annotations

import itertools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from accel.config import AccelerateConfig
from accel.testing.models import tiny_model
from accel_plugins.pytorch.inductor import compiled_model, packing
from accel_plugins.pytorch.inductor.packing import Tokens, attending, packable, token_counter
from accel_plugins.pytorch.inductor.sizes import CallSizes

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
BATCH, LENGTH = 6, 32


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, other: torch.Tensor, longest: int, _: int,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        assert ends.dtype == torch.int32
        assert torch.equal(ends, other)
        assert ends[-1] == len(q), "every token is a row's"
        outputs = torch.full_like(q, torch.nan)
        bounds = ends.tolist()
        for start, end in itertools.pairwise(bounds):
            assert end - start <= longest
            row = [tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v)]
            outputs[start:end] = torch.nn.functional.scaled_dot_product_attention(*row, scale=scale)[0].transpose(0, 1)
        return outputs

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        visible = None if mask is None else (mask != 0)[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scale).transpose(1, 2)

    monkeypatch.setattr(packing, "_varlen", lambda: varlen)
    monkeypatch.setitem(sys.modules, f"{packing.__package__}.kernels", SimpleNamespace(attention=masked))


def computed(call: dict[str, torch.Tensor], have: CallSizes, want: CallSizes) -> Tokens:
    """Return the number of tokens that the encoder layers compute for the inputs `call`, or `None` if the call is not
    packed.
    """
    count_tokens = token_counter(call, have, want)
    return None if count_tokens is None else count_tokens(False)


def ragged(*, holes: bool = False) -> dict[str, torch.Tensor]:
    """Return inputs with rows that are padded on the right or on the left, a full row, and a row of one token."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (BATCH, LENGTH), generator=generator)
    mask = torch.zeros_like(ids)
    for row, count in enumerate((LENGTH, 1, 7, 20, 31, 12)):
        mask[row, slice(-count, None) if row % 2 else slice(0, count)] = 1
    if holes:
        mask[0, 5:9] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("spare", ["none", "some", "all"])
@pytest.mark.parametrize(
    ("model", "config"),
    [
        (transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL)),
        (transformers.BertForTokenClassification, transformers.BertConfig(**{**SMALL, "num_hidden_layers": 1})),
        (transformers.RobertaForTokenClassification, transformers.RobertaConfig(**SMALL)),
        (transformers.DistilBertForSequenceClassification, transformers.DistilBertConfig(**DISTILBERT)),
        (transformers.ElectraModel, transformers.ElectraConfig(**SMALL)),
    ],
    ids=["bert", "one-layer", "roberta", "distilbert", "electra"],
)
def test_packed_outputs_of_real_tokens_are_unchanged(model: Any, config: Any, spare: str) -> None:
    torch.manual_seed(0)
    encoder = model(config).eval()
    inputs = ragged(holes=True)
    mask = inputs["attention_mask"]
    real = int(mask.sum())
    assert packable(encoder, torch.float16)
    with torch.no_grad():
        expected = encoder(**inputs)[0]
        hidden = attending(encoder, {"none": real, "some": real + 11, "all": mask.numel()}[spare])(**inputs)[0]
        assert hidden.isfinite().all()
        read = mask != 0 if expected.shape[:2] == mask.shape else mask[:, 0] != 0
        torch.testing.assert_close(hidden[read], expected[read], atol=2e-6, rtol=0)
        assert torch.equal(encoder(**inputs)[0], expected), "the model itself is as it was"


@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "no-mask"])
def test_short_batches_are_computed_with_padding(with_mask: bool) -> None:
    torch.manual_seed(0)
    encoder = transformers.ElectraModel(transformers.ElectraConfig(**SMALL)).eval()
    inputs = ragged(holes=True)
    inputs = inputs if with_mask else {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(attending(encoder, None)(**inputs)[0], encoder(**inputs)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (transformers.MPNetModel, transformers.MPNetConfig(**SMALL)),
        (transformers.ModernBertModel, transformers.ModernBertConfig(**SMALL)),
        (transformers.DebertaV2Model, transformers.DebertaV2Config(**SMALL)),
        (transformers.LayoutLMModel, transformers.LayoutLMConfig(**SMALL)),
        (transformers.AlbertModel, transformers.AlbertConfig(**SMALL)),
        (transformers.BertLMHeadModel, transformers.BertConfig(**SMALL, is_decoder=True)),
    ],
    ids=["relative", "rotary", "disentangled", "own-mask", "shared-layers", "decoder"],
)
def test_models_with_other_layer_inputs_are_not_packed(model: Any, config: Any) -> None:
    assert not packable(model(config).eval(), torch.float16)


def test_float32_is_not_packed() -> None:
    assert not packable(tiny_model("bert"), torch.float32)


@pytest.mark.parametrize(
    ("real", "tokens"), [(2048, 2048), (2049, 2304), (16, 256), (3841, 4096), (4095, 4096), (4096, "all")], ids=str
)
def test_number_of_computed_tokens(real: int, tokens: int | str) -> None:
    mask = torch.zeros(4096, dtype=torch.int64)
    mask[:real] = 1
    sizes = CallSizes(16, 256)
    assert computed({"attention_mask": mask.view(256, 16).t()}, sizes, sizes) == tokens


def test_left_padded_rows_are_computed_with_padding() -> None:
    sizes = CallSizes(16, 256)
    mask = torch.ones(16, 256, dtype=torch.int64)
    mask[3, :100] = 0
    assert computed({"attention_mask": mask}, sizes, sizes) is None
    assert computed({"attention_mask": mask.flip(1)}, sizes, sizes) == 4096


def test_small_calls_are_not_packed() -> None:
    sizes = CallSizes(1, 128)
    assert computed({"attention_mask": torch.zeros(1, 128)}, sizes, sizes) is None
    assert computed({"input_ids": torch.zeros(1, 128)}, sizes, sizes) is None
    pairs = {"attention_mask": torch.ones(16, 1, 256, 256)}
    assert computed(pairs, CallSizes(16, 256), CallSizes(16, 256)) is None


@pytest.mark.parametrize(
    ("have", "tokens"), [(CallSizes(16, 256), "all"), (CallSizes(16, 200), 3328), (CallSizes(12, 256), "all")], ids=str
)
def test_calls_without_mask_count_only_added_rows_as_padding(have: CallSizes, tokens: int | str) -> None:
    assert computed({"input_ids": torch.zeros(have.batch, have.length)}, have, CallSizes(16, 256)) == tokens


def test_rows_added_to_fill_a_batch_are_counted() -> None:
    mask = torch.zeros(24, 128, dtype=torch.int64)
    mask[:, :10] = 1
    assert computed({"attention_mask": mask}, CallSizes(24, 128), CallSizes(32, 128)) == 1280


@pytest.mark.parametrize(
    "model",
    [
        transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
        transformers.RobertaForTokenClassification(transformers.RobertaConfig(**SMALL)),
        transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**DISTILBERT)),
    ],
    ids=["bert", "roberta", "distilbert"],
)
def test_full_batches_without_mask_are_unchanged(model: Any) -> None:
    model = model.eval()
    inputs = {name: tensor[:, :20] for name, tensor in ragged().items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        torch.testing.assert_close(attending(model, "all")(**inputs)[0], model(**inputs)[0], atol=2e-6, rtol=0)
        inputs["attention_mask"][0, 3:] = 0
        assert not torch.allclose(attending(model, "all")(**inputs)[0][0], model(**inputs)[0][0]), "no mask is read"


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "short"])
@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_wrong_attention_kernel_falls_back_to_the_models_attention(
    fault: str, packs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("no kernel image is available")
        return torch.ones(*((1, BATCH * LENGTH) if packs else (BATCH, LENGTH)), 4, 8), None

    monkeypatch.setattr(compiled_model, "compiled", lambda function, **_: function)
    monkeypatch.setattr(compiled_model, "_ROUNDS", 1)
    monkeypatch.setattr(compiled_model, "token_counter", lambda *_: (lambda _: BATCH * LENGTH) if packs else None)
    monkeypatch.setattr(packing, "_attend" if packs else "_attend_masked", broken)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    wrapped = compiled_model.CompiledModel(model, model.forward, AccelerateConfig(keep_slower=True))
    wrapped._encoder = packing.sharing_copy(model)
    inputs = ragged()
    with caplog.at_level(logging.WARNING, "accel_plugins"), torch.no_grad():
        torch.testing.assert_close(wrapped(**inputs).logits, model(**inputs).logits)
    assert "is compiled without packed attention" in caplog.text
    assert wrapped._encoder is None


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_wrong_joined_products_fall_back_to_separate_products(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(function: Any, *, options: Any = None, **_: Any) -> Any:
        def broken(**inputs: Any) -> Any:
            if fault == "fails":
                raise ValueError("Cannot view a tensor with shape [2, 5, 32]")
            outputs = function(**inputs)
            outputs["logits"] = outputs.logits + 1
            return outputs

        return broken if options else function

    monkeypatch.setattr(compiled_model, "compiled", compiled)
    monkeypatch.setattr(compiled_model, "_ROUNDS", 1)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    wrapped = compiled_model.CompiledModel(model, model.forward, AccelerateConfig(keep_slower=True))
    wrapped._fuses = True
    with caplog.at_level(logging.WARNING, "accel_plugins"), torch.no_grad():
        torch.testing.assert_close(wrapped(**ragged()).logits, model(**ragged()).logits)
    assert "is compiled without joined matrix products" in caplog.text
    assert not wrapped._fuses
