"""Tests of the attention function that replaces the attention of Longformer and LED during tracing: it computes the
same values for any set of global tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from accel.capture.tracer import replaced
from accel.errors import ExportError
from accel.testing.models import rescale

WINDOW = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "LongformerModel": {
        "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "attention_window": [WINDOW, WINDOW // 2], "max_position_embeddings": 98, "pad_token_id": 1, "sep_token_id": 2,
    },
    "LEDModel": {
        "vocab_size": 120, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_window": [WINDOW, WINDOW // 2],
        "max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 96, "pad_token_id": 1,
    },
}  # fmt: skip
# The float32 tolerance is for sums of about ten to a hundred values of order 1, added in a different order. The float16
# tolerance is for rounding errors of 1e-3 in each of two layers.
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-2}
LENGTHS = (1, 3, WINDOW // 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 29)


def small_model(architecture: str) -> Any:
    family = "LEDModel" if architecture.startswith("LED") else "LongformerModel"
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = rescale(cls(cls.config_class(**SETTINGS[family]))).eval()
    return model.encoder if family == "LEDModel" else model


@pytest.fixture(scope="module", params=list(SETTINGS))
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


def rows(length: int, masks: str) -> dict[str, torch.Tensor]:
    """Return a batch of three texts. If they are long enough, the second text is padded on the right and the third text
    on the left.
    """
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 100, (3, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, (length + 1) // 2 :] = 0
    mask[2, : length // 3] = 0
    if masks == "first":
        mask[:, 0] *= 2
    elif masks == "some":
        mask *= 1 + (torch.rand(mask.shape, generator=draw) < 0.3).long()
    elif masks == "all":
        mask *= 2
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def both(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs with transformers' attention and the outputs with the replacement function."""
    expected = model(**inputs)[0]
    with replaced(model):
        return expected, model(**inputs)[0]


@pytest.mark.parametrize("masks", ["none", "first", "some", "all"])
@pytest.mark.parametrize("length", LENGTHS)
def test_replacement_gives_equal_outputs(model: Any, length: int, masks: str) -> None:
    expected, output = both(model, rows(length, masks))
    assert expected.abs().max() > 0.1
    assert (output - expected).abs().max() <= CLOSE[torch.float32] * expected.abs().max()


@pytest.mark.parametrize("masks", ["none", "some"])
def test_replacement_gives_equal_float16_outputs(masks: str) -> None:
    model = small_model("LongformerModel").half()
    expected, output = both(model, rows(29, masks))
    assert (output - expected).abs().max() <= CLOSE[torch.float16] * expected.abs().max()


def test_global_tokens_change_the_outputs(model: Any) -> None:
    """Global tokens change the outputs. Otherwise the comparisons with global tokens would prove nothing."""
    (few, _), (some, _) = both(model, rows(29, "none")), both(model, rows(29, "some"))
    assert (few - some).abs().max() > 1e-2


def test_layer_returns_zeros_for_padding() -> None:
    layer = small_model("LongformerModel").encoder.layer[0].attention.self
    mask = torch.tensor([[0.0, 1.0, 0.0, -1.0], [-1.0, -1.0, 0.0, 0.0]])
    with replaced(layer), torch.inference_mode():
        output = layer(torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0)), mask, mask < 0, mask > 0)[0]
    assert torch.equal(output.abs().amax(dim=2) == 0, mask < 0)


def test_question_ends_at_the_first_separator() -> None:
    model = small_model("LongformerForQuestionAnswering")
    inputs = rows(29, "none")
    for row, question in enumerate((4, 9, 0)):
        for place in (question, question + 1, 12):
            inputs["input_ids"][row, place] = model.config.sep_token_id
    expected, output = both(model, inputs)
    assert (output - expected).abs().max() <= CLOSE[torch.float32] * expected.abs().max()


def test_attention_outputs_are_refused(model: Any) -> None:
    with replaced(model), pytest.raises(ExportError, match="attentions of Longformer and LED cannot be exported"):
        model(**rows(WINDOW, "none"), output_attentions=True)


def test_original_attention_is_restored(model: Any) -> None:
    inputs = rows(WINDOW, "none")
    before = type(model)._pad_to_window_size, torch.Tensor.item
    with pytest.raises(ExportError), replaced(model):
        model(**inputs, output_attentions=True)
    assert (type(model)._pad_to_window_size, torch.Tensor.item) == before
    assert model(**inputs, output_attentions=True).attentions is not None


def test_models_without_windows_are_unchanged() -> None:
    before = torch.Tensor.item
    with replaced(torch.nn.Linear(2, 2)):
        assert torch.Tensor.item is before
