"""Private names of transformers, torch and onnxscript that capture and families touch: they are there, and do what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from accel.upstream import exporter_tables, onnx_exporter
from accel.upstream.attention_choice import attention_of
from accel.upstream.auto_models import architectures, classes_for, model_type_of
from accel.upstream.cache_names import CACHE_NAME, cache_argument
from accel.upstream.symbolic_sizes import DATA_DEPENDENT, formula, hint, is_fake, statically_known_true


def test_architectures_of_an_auto_class() -> None:
    both = architectures(("AutoModelForMaskedLM", "AutoModelForCTC"))
    assert {"BertForMaskedLM", "Wav2Vec2ForCTC"} <= both
    assert "BertModel" not in both


def test_classes_for_a_config() -> None:
    assert classes_for(transformers.AutoModelForCTC, transformers.Wav2Vec2Config()) == {"Wav2Vec2ForCTC"}
    assert not classes_for(transformers.AutoModelForCTC, transformers.BertConfig())


def test_the_choice_of_attention() -> None:
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = transformers.BertModel(config)
    before = model.config._attn_implementation
    with attention_of(model, "eager"):
        assert (before, model.config._attn_implementation) == ("sdpa", "eager")
    assert model.config._attn_implementation == before


def test_the_model_type_of_a_processor() -> None:
    assert model_type_of(object.__new__(transformers.CLIPProcessor)) == "clip"
    assert model_type_of(3) is None


def test_the_name_of_a_cache() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    assert cache_argument(model) == CACHE_NAME
    assert hasattr(model(input_ids=torch.ones((1, 2), dtype=torch.int64), use_cache=True), CACHE_NAME)


def test_rules_of_onnxscript() -> None:
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    onnx_exporter.make_rewrites_exact()
    values = [value for rule in _no_op.rules for node in rule._target_pattern for value in node.inputs]
    assert {value._abs_tol for value in values if hasattr(value, "_abs_tol")} == {0.0}
    onnx_exporter.parse_operators_once()
    onnx_exporter.release_traced_graphs()
    assert all("_graph" not in vars(rule._matcher) for rule in rewriter._DEFAULT_REWRITE_RULES)


def test_tables_of_exporters_are_restored() -> None:
    from torch.fx import config
    from transformers.exporters import exporter_openvino, utils

    before = list(exporter_openvino._OV_CONVERSION_EXTENSIONS), len(utils._FX_PROGRAM_FIXES.get("openvino", []))
    with exporter_tables.with_conversions(["ours"]), exporter_tables.weights_read_by_other_code():
        assert "ours" in exporter_openvino._OV_CONVERSION_EXTENSIONS
        assert len(utils._FX_PROGRAM_FIXES["openvino"]) == before[1] + 1
    assert (list(exporter_openvino._OV_CONVERSION_EXTENSIONS), len(utils._FX_PROGRAM_FIXES["openvino"])) == before
    with exporter_tables.without_stack_traces():
        assert config.do_not_emit_stack_traces


def test_sizes_in_a_trace() -> None:
    seen: list[Any] = []

    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(
                (is_fake(x), hint(x.shape[0] // 2), formula(x.shape[0] // 2), statically_known_true(x.shape[0] > 0))
            )
            return x[: x.shape[0] // 2]

    example = torch.ones(6, 3)
    torch.export.export(Halves(), (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False)
    assert seen[:2] == [True, 3]
    assert seen[2].free_symbols
    assert seen[3] is True
    assert (hint(3), is_fake(example)) == (None, False)


def test_a_branch_on_data_is_told() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(DATA_DEPENDENT):
        torch.export.export(Branches(), (torch.ones(6, 3),), strict=False)
