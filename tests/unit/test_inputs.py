"""Tests of missing inputs: calls, calibration and evaluation use the same default value. If the model computes its own
value, there is no default.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from accel.data.batches import for_graph
from accel.data.input_defaults import with_defaults
from accel.errors import InputError
from accel.models.inputs import InputConverter

NAMES = frozenset(("input_ids", "attention_mask", "token_type_ids"))
IDS = {"input_ids": torch.tensor([[5, 6, 7]])}
BERT = transformers.BertConfig()


def inputs(*, names: frozenset[str] = NAMES, model_inputs: tuple[str, ...] = (), config: Any = BERT) -> InputConverter:
    return InputConverter(names, frozenset(), frozenset(model_inputs), config)


def test_calls_and_calibration_use_the_same_defaults() -> None:
    called, _, _ = inputs().read(IDS)
    calibrated = with_defaults(IDS, NAMES)
    assert called.keys() == calibrated.keys() == NAMES
    assert all(torch.equal(called[name], calibrated[name]) for name in NAMES)
    assert calibrated["attention_mask"].tolist() == [[1, 1, 1]]
    assert calibrated["token_type_ids"].tolist() == [[0, 0, 0]]


def test_no_defaults_without_any_input() -> None:
    assert not with_defaults({}, NAMES)
    with pytest.raises(InputError, match="missing"):
        inputs().read({"attention_mask": torch.ones(1, 3)})


def test_inputs_that_the_model_computes_have_no_default() -> None:
    with pytest.raises(InputError, match="token_type_ids is missing. A bert model"):
        inputs(model_inputs=("token_type_ids",)).read(IDS)
    assert "token_type_ids" not in with_defaults(IDS, NAMES, ("token_type_ids",))
    with pytest.raises(InputError, match="token_type_ids"):
        for_graph(IDS, [SimpleNamespace(name="token_type_ids")], ("token_type_ids",))  # type: ignore[list-item]


def test_text_config_decides_about_token_types() -> None:
    called, _, _ = inputs(config=transformers.ChineseCLIPConfig()).read(IDS)
    assert called["token_type_ids"].tolist() == [[0, 0, 0]]
    with pytest.raises(InputError, match="has no default value"):
        inputs(config=transformers.CLIPConfig()).read(IDS)


def test_zero_token_types_are_refused_if_the_model_computes_others() -> None:
    graph = frozenset(("input_ids",))
    zeros = {**IDS, "token_type_ids": torch.zeros(1, 3, dtype=torch.int64)}
    assert inputs(names=graph).read(zeros)[0].keys() == {"input_ids"}
    with pytest.raises(InputError, match="exported without this input"):
        inputs(names=graph, model_inputs=("token_type_ids",)).read(zeros)


@pytest.mark.parametrize("returned", ["hidden_states", "language_hidden_states", "encoder_hidden_states"])
def test_output_flag_accepts_each_name_of_the_output(returned: str) -> None:
    model = InputConverter(frozenset(("input_ids",)), frozenset(), frozenset(), BERT, frozenset((returned,)))
    assert model.read({**IDS, "output_hidden_states": True})[0].keys() == {"input_ids"}
    with pytest.raises(InputError, match="exported without the output 'attentions'"):
        model.read({**IDS, "output_attentions": True})
