"""Tests that the private names of transformers, torch and onnxscript that the export uses still exist and behave as
expected.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import datasets
import pytest
import torch
import transformers

from accel.testing.models import tiny_tokenizer
from accel.upstream import exporter_tables, model_internals, onnx_decomposition, onnx_exporter, pipeline_internals
from accel.upstream.attention_choice import attention_of
from accel.upstream.auto_models import architectures, classes_for, model_type_of
from accel.upstream.cache_names import CACHE_NAME, cache_argument
from accel.upstream.replaced_attributes import replaced_attributes
from accel.upstream.symbolic_sizes import DATA_DEPENDENT, formula, hint, is_fake, statically_known_true


def test_architectures_of_an_auto_class() -> None:
    both = architectures(("AutoModelForMaskedLM", "AutoModelForCTC"))
    assert {"BertForMaskedLM", "Wav2Vec2ForCTC"} <= both
    assert "BertModel" not in both


def test_classes_for_a_config() -> None:
    assert classes_for(transformers.AutoModelForCTC, transformers.Wav2Vec2Config()) == {"Wav2Vec2ForCTC"}
    assert not classes_for(transformers.AutoModelForCTC, transformers.BertConfig())


def test_attention_implementation_is_replaced_and_restored() -> None:
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = transformers.BertModel(config)
    before = model.config._attn_implementation
    with attention_of(model, "eager"):
        assert (before, model.config._attn_implementation) == ("sdpa", "eager")
    assert model.config._attn_implementation == before


def test_model_type_of_a_processor() -> None:
    assert model_type_of(object.__new__(transformers.CLIPProcessor)) == "clip"
    assert model_type_of(3) is None


def test_name_of_the_cache_argument() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    assert cache_argument(model) == CACHE_NAME
    assert hasattr(model(input_ids=torch.ones((1, 2), dtype=torch.int64), use_cache=True), CACHE_NAME)


class Owner:
    shared = 1

    def __init__(self) -> None:
        self.attribute = 2


def test_attributes_are_replaced_and_restored() -> None:
    owner = Owner()
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before, names = layer[0], set(vars(torch.Tensor))
    replacements = [
        (owner, "shared", 10), (owner, "attribute", 20), (Owner, "shared", 11), (layer, "0", torch.nn.ReLU()),
        (torch.Tensor, "item", lambda tensor: 7),
    ]  # fmt: skip
    with pytest.raises(KeyError), replaced_attributes(replacements):
        assert (owner.shared, owner.attribute, Owner.shared, torch.ones(1).item()) == (10, 20, 11, 7)
        assert isinstance(layer[0], torch.nn.ReLU)
        raise KeyError
    assert (vars(owner), Owner.shared, torch.ones(1).item(), layer[0]) == ({"attribute": 2}, 1, 1.0, before)
    assert set(vars(torch.Tensor)) == names


def test_masks_of_audio_encoders() -> None:
    config = transformers.Speech2TextConfig(
        vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1,
        encoder_ffn_dim=8, decoder_ffn_dim=8, conv_channels=8, input_feat_per_channel=4,
    )  # fmt: skip
    model = transformers.Speech2TextForConditionalGeneration(config)
    mask = torch.tensor([[1] * 8, [1] * 4 + [0] * 4])
    short = model_internals.shortened_by(model.get_encoder(), 2, mask)
    assert short is not None
    assert short.tolist() == [[1, 1], [1, 0]]
    with model_internals.masks_not_shortened(model):
        assert model_internals.shortened_by(model.model, 2, mask) is mask
    assert model_internals.shortened_by(torch.nn.Identity(), 2, mask) is None


def test_shifted_decoder_inputs() -> None:
    config = transformers.T5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0
    )
    ids = torch.tensor([[5, 6, 1]])
    shifted = model_internals.shifted_right(transformers.T5ForSequenceClassification(config), ids)
    assert shifted is not None
    assert shifted.tolist() == [[0, 5, 6]]
    assert model_internals.shifted_right(torch.nn.Identity(), ids) is None


def test_layer_lengths_of_an_xvector_model() -> None:
    config = transformers.Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, conv_dim=(8,), conv_kernel=(4,),
        conv_stride=(2,), num_feat_extract_layers=1, tdnn_dim=(8, 8), tdnn_kernel=(3, 1), tdnn_dilation=(1, 1),
        num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=1,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForXVector(config)
    assert model_internals.lengths_of_tdnn(model, torch.tensor([20, 12])).tolist() == [7, 3]


def test_forward_without_mixed_precision() -> None:
    model = torch.nn.Linear(2, 2)
    assert model_internals.without_mixed_precision(model) is model
    model._original_forward = model.forward  # type: ignore[assignment]
    model.forward = lambda x: x  # type: ignore[method-assign]
    plain = model_internals.without_mixed_precision(model)
    assert torch.equal(plain(torch.ones(1, 2)), torch.nn.functional.linear(torch.ones(1, 2), model.weight, model.bias))
    assert torch.equal(model(torch.ones(1, 2)), torch.ones(1, 2))


def test_companion_files_that_pipelines_load() -> None:
    text, image = transformers.TextClassificationPipeline, transformers.ImageClassificationPipeline
    assert (pipeline_internals.loads(text, "tokenizer"), pipeline_internals.loads(text, "image_processor")) == (
        True,
        False,
    )
    assert pipeline_internals.loads(image, "image_processor")
    assert "top_k" in inspect.signature(pipeline_internals.reader_of_options(text)).parameters


def test_tokenizers_with_languages() -> None:
    assert hasattr(transformers.NllbTokenizer, "_build_translation_inputs")
    assert pipeline_internals.inputs_for_translation(tiny_tokenizer(), "hello") is None


def test_data_set_fingerprint() -> None:
    rows = {"text": ["one", "two"]}
    first, other = (
        pipeline_internals.fingerprint_of(datasets.Dataset.from_dict(columns)) for columns in (rows, {"text": ["one"]})
    )
    assert first != other
    assert pipeline_internals.fingerprint_of(rows) == ""


# Each entry is a function or class in a model's own module of transformers that accel's model families replace or call.
OF_MODELS = (
    ("superpoint", "SuperPointInterestPointDecoder._get_pixel_scores"),
    ("superpoint", "SuperPointDescriptorDecoder._sample_descriptors"),
    ("superglue", "SuperGlueForKeypointMatching._match_image_pair"),
    ("efficientloftr", "mask_border"),
    ("efficientloftr", "EfficientLoFTRForKeypointMatching._get_matches_from_scores"),
    ("efficientloftr", "EfficientLoFTRForKeypointMatching._get_second_stage_fine_matching"),
    ("lightglue", "LightGlueForKeypointMatching._keypoint_processing"),
    ("lightglue", "LightGlueForKeypointMatching._get_keypoint_matching"),
    ("lightglue", "LightGlueForKeypointMatching._get_early_stopped_image_pairs"),
    ("lightglue", "LightGlueForKeypointMatching._get_pruning_mask"),
    ("longformer", "_get_question_end_index"),
    ("longformer", "LongformerModel._pad_to_window_size"),
    ("led", "LEDEncoder._pad_to_window_size"),
    ("moonshine", "MoonshineEncoder._get_feat_extract_output_lengths"),
    ("speech_to_text", "Speech2TextEncoder._get_feature_vector_attention_mask"),
    ("vits", "_rational_quadratic_spline"),
    ("vits", "_unconstrained_rational_quadratic_spline"),
)


@pytest.mark.parametrize(("model_type", "name"), OF_MODELS)
def test_private_names_of_model_modules_exist(model_type: str, name: str) -> None:
    assert callable(pkgutil.resolve_name(f"transformers.models.{model_type}.modeling_{model_type}:{name}"))


def test_rewrite_rules_of_onnxscript() -> None:
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    onnx_exporter.prepare_rewriter()
    values = [value for rule in _no_op.rules for node in rule._target_pattern for value in node.inputs]
    assert {value._abs_tol for value in values if hasattr(value, "_abs_tol")} == {0.0}
    onnx_exporter.parse_operators_once()
    onnx_exporter.release_traced_graphs()
    assert all("_graph" not in vars(rule._matcher) for rule in rewriter._DEFAULT_REWRITE_RULES)


class Conversions(torch.nn.Module):
    """Model whose operators are all decomposed in place."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        values = torch.nn.functional.dropout(ids.to(torch.float32).contiguous().to(torch.float32), training=False)
        both = mask.to(torch.bool) & (ids > 1).type(torch.bool) | (ids < 0)
        return values.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6) + both.to(values)


class InPlace(torch.nn.Module):
    """Model with an operator that must be decomposed in a second trace."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids.to(torch.float32).add_(1) * mask


class SkippedOutput(torch.nn.Module):
    """Model whose output is a conversion to the data type that the tensor already has."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a sum in int64."""
        return (x + mask).to(torch.int64)


class SameShape(torch.nn.Module):
    """Model that reshapes a tensor to its own shape."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a product of sums."""
        return (x + mask).reshape(x.shape) * 2


class Constants(torch.nn.Module):
    """Model that creates a constant."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a sum with a constant."""
        return x + mask + torch.tensor([1, 2, 3, 4, 5, 6])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("model", "in_place"),
    [(Conversions(), True), (InPlace(), False), (SkippedOutput(), False), (SameShape(), True), (Constants(), False)],
)
def test_operators_are_decomposed_in_place(
    model: torch.nn.Module, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.onnx._internal.exporter import _fx_passes

    original, calls = _fx_passes.decompose_with_registry, []

    def decompose(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", decompose)
    example = torch.arange(12).view(2, 6) - 2, torch.ones(2, 6, dtype=torch.int64)
    axes = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model.eval(), example, dynamic_shapes=(axes, axes), strict=False)
    with onnx_decomposition.decomposed_in_place():
        graph = torch.onnx.export(program, verbose=False)
    assert bool(calls) is not in_place
    assert _fx_passes.decompose_with_registry is decompose
    longer = torch.arange(18).view(3, 6) - 2, torch.tensor([0, 1, 1, 0, 1, 2]).expand(3, 6).contiguous()
    assert torch.equal(graph(*longer)[0], model(*longer))


def test_exporter_tables_are_restored() -> None:
    from torch.fx import config
    from transformers.exporters import exporter_openvino, utils

    before = list(exporter_openvino._OV_CONVERSION_EXTENSIONS), len(utils._FX_PROGRAM_FIXES.get("openvino", []))
    with exporter_tables.with_conversions(["ours"]), exporter_tables.weights_read_by_other_code():
        assert "ours" in exporter_openvino._OV_CONVERSION_EXTENSIONS
        assert len(utils._FX_PROGRAM_FIXES["openvino"]) == before[1] + 1
    assert (list(exporter_openvino._OV_CONVERSION_EXTENSIONS), len(utils._FX_PROGRAM_FIXES["openvino"])) == before
    with exporter_tables.without_stack_traces():
        assert config.do_not_emit_stack_traces


def test_symbolic_sizes_in_a_trace() -> None:
    sizes: list[Any] = []

    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.extend(
                (is_fake(x), hint(x.shape[0] // 2), formula(x.shape[0] // 2), statically_known_true(x.shape[0] > 0))
            )
            return x[: x.shape[0] // 2]

    example = torch.ones(6, 3)
    torch.export.export(Halves(), (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False)
    assert sizes[:2] == [True, 3]
    assert sizes[2].free_symbols
    assert sizes[3] is True
    assert (hint(3), is_fake(example)) == (None, False)


def test_branch_on_data_raises_the_expected_error() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(DATA_DEPENDENT):
        torch.export.export(Branches(), (torch.ones(6, 3),), strict=False)
