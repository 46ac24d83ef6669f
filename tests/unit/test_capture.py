"""Tests of the properties that an export reads from a PyTorch model before tracing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.reference
import onnx_ir
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accel.artifact.hub import HubOptions
from accel.artifact.manifest import OWN_ROUNDING, Origin
from accel.artifact.tensor_specs import TensorSpec
from accel.capture import CACHE_NAME, Case, Source, split
from accel.capture.cached_attention import CacheLayer, _attend_plainly, _Trace
from accel.capture.cached_layers import TOKENS, CachedTensorSpec, described
from accel.capture.graph_repairs import divide_sizes, keep_padding
from accel.capture.position_limits import has_position_table, max_sizes_of, position_bounds, text_rows
from accel.capture.reference_cases import own_defaults_of, reference_cases
from accel.capture.samples import resize
from accel.capture.source_loader import load_source
from accel.capture.tracer import _SizeFormulaCheck, _without_cache
from accel.config import ExportConfig
from accel.errors import ExportError, ValidationError
from accel.stages.graph_comparison import _without_padding, compare, compare_with_model, differences, merged
from accel.stages.resolution import resolve
from accel.testing.audio_models import save_sound_model

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
TEXT = {"input_ids": {0: "batch", 1: "sequence"}}


class Tower(torch.nn.Module):
    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.position_embedding = torch.nn.Embedding(4, 8)
        self.register_buffer("table", torch.zeros(64))


class Reader(torch.nn.Module):
    """Text model with rotary position embeddings and an image encoder with four patches."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Tower()
        self.embed_tokens = torch.nn.Embedding(40, 8)


def test_sample_inputs_are_equal_at_every_export(tmp_path: Path) -> None:
    """The sample inputs are equal at every export, and the random state is unchanged. The model of this test draws
    random numbers while it is loaded.
    """
    model = resolve(save_sound_model(tmp_path / "model"), task="ctc")
    samples = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        source = load_source(model, task="ctc", config=ExportConfig(), hub=HubOptions())
        samples.append(source.example["input_values"])
        assert torch.equal(torch.get_rng_state(), before), "the caller's generator is not touched"
    assert torch.equal(*samples)


def test_image_positions_do_not_limit_text_length() -> None:
    model = Reader()
    assert max_sizes_of(model, TEXT) == {}
    assert not has_position_table(model, 64)
    model.position_embedding = torch.nn.Embedding(64, 8)
    assert max_sizes_of(model, TEXT) == {"sequence": 64}
    assert has_position_table(model, 64)


def test_text_model_is_found_by_its_config() -> None:
    """The export finds the text model by its config, because image encoders have no common names or attributes (Ovis2,
    Qwen3-VL, GLM-4V).
    """
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.Ovis2Config(
        text_config={"model_type": "qwen2", **TINY, "num_key_value_heads": 2},
        vision_config={**vision, "intermediate_size": 16, "vocab_size": 20},
        visual_indicator_token_ids=[30, 31], image_token_id=32,
    )  # fmt: skip
    model = transformers.Ovis2ForConditionalGeneration(config)
    assert max_sizes_of(model, TEXT) == {}
    assert position_bounds(model)[1] > 10**9
    assert text_rows(model) == model.get_input_embeddings().num_embeddings


def test_precomputed_tables_limit_text_length() -> None:
    """Precomputed tables limit the text length, for example TIPSv2's position embeddings, which its top-level config
    does not mention, and MiniMax's blocks.
    """
    model = Reader()
    model.text_model = torch.nn.ModuleDict({"position_embedding": torch.nn.Module()})
    model.text_model.position_embedding.weights = torch.zeros(48, 8)
    assert max_sizes_of(model, TEXT) == {"sequence": 48}
    model.config = transformers.MiniMaxConfig(block_size=32, num_hidden_layers=2, max_position_embeddings=40)
    assert max_sizes_of(model, TEXT) == {"sequence": 32}


def test_custom_embedding_classes_have_bounds() -> None:
    """The inputs of I-BERT's own embedding class get value ranges. For ids outside of the table, OpenVINO would read
    other memory, and ONNX Runtime would count from the end of the table.
    """
    model = transformers.IBertForSequenceClassification(
        transformers.IBertConfig(**{**TINY, "max_position_embeddings": 34})
    )
    source = load_source(model, task="text-classification", config=ExportConfig(), hub=HubOptions())
    bounds = source.bounds()
    assert [bounds[name] for name in ("input_ids", "token_type_ids", "position_ids")] == [(0, 39), (0, 1), (0, 33)]
    assert max_sizes_of(model, TEXT) == {"sequence": 32}
    assert has_position_table(model, 34)


def test_positions_of_lxmert_start_at_zero() -> None:
    """LXMERT's position table has a padding index, but unlike in RoBERTa, positions do not start after it."""
    config = transformers.LxmertConfig(
        **TINY, l_layers=1, x_layers=1, r_layers=1, num_qa_labels=2, num_object_labels=2, num_attr_labels=2
    )
    assert max_sizes_of(transformers.LxmertModel(config), TEXT) == {"sequence": config.max_position_embeddings}
    roberta = transformers.RobertaModel(transformers.RobertaConfig(**{**TINY, "max_position_embeddings": 34}))
    assert max_sizes_of(roberta, TEXT) == {"sequence": 32}


def test_bigbird_computes_its_own_token_types() -> None:
    """BigBird's question answering head computes token types from the separator token; its other heads do not."""
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(**TINY, attention_type="original_full", sep_token_id=7)
    ids = torch.tensor([[5, 6, 7, 8, 9], [8, 7, 6, 5, 7]])
    example = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    assert own_defaults_of(transformers.BigBirdForQuestionAnswering(config).eval(), example) == ("token_type_ids",)
    assert own_defaults_of(transformers.BigBirdForTokenClassification(config).eval(), example) == ()


def test_values_derived_from_the_cache_are_not_cache_values() -> None:
    """DiffLlama pairs attention heads, so the values that it attends to differ from the values in the KV cache."""
    past = torch.zeros(1, 2, 0, 4)
    layer = CacheLayer(past, past, 3, 3, roomy=False)
    key, value = layer.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    trace = _Trace(None, [layer], 1, 3)
    assert trace.layer_of(key, value) is layer
    assert trace.layer_of(key, value.repeat(1, 1, 1, 2)) is None


def test_encoder_decoder_cache_is_read_without_encoder() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    cache.self_attention_cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5), 0)
    assert described(cache, "Model") == [
        {"key": CachedTensorSpec((2, TOKENS, 4)), "value": CachedTensorSpec((2, TOKENS, 5))}
    ]


def test_unknown_cache_contents_are_refused() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    cache.layers[0].compressed = torch.zeros(1, 2)
    with pytest.raises(ExportError, match=r"Model cannot be exported for text generation.*KV cache \(DynamicLayer\)"):
        described(cache, "Model")


def test_sliding_window_cache_has_keys_and_values() -> None:
    cache = DynamicCache(config=transformers.MistralConfig(**{**TINY, "num_key_value_heads": 2}, sliding_window=4))
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    assert described(cache, "Model") == [
        {"key": CachedTensorSpec((2, TOKENS, 8)), "value": CachedTensorSpec((2, TOKENS, 8))}
    ]


@pytest.mark.parametrize(
    ("task", "encoder", "reads", "message"),
    [
        (
            "text2text-generation",
            False,
            "input_ids",
            "requires an encoder and a decoder. The model has a decoder without",
        ),
        (
            "automatic-speech-recognition",
            False,
            "input_ids",
            "a decoder without an encoder. Its inputs are .'input_ids'.",
        ),
        ("automatic-speech-recognition", True, "input_ids", "and audio as input"),
        (
            "image-text-to-text",
            True,
            "input_ids",
            "requires a decoder without an encoder.* The model has an encoder and a decoder",
        ),
    ],
)
def test_part_of_a_model_is_refused(task: str, encoder: bool, reads: str, message: str) -> None:
    model: Any = torch.nn.Identity()
    model.config = SimpleNamespace(is_encoder_decoder=encoder)
    source = Source(
        model=model, task=task, folder=None, origin=Origin(id="x"), example={reads: torch.ones(2, 5)}, axes={}
    )
    with pytest.raises(ExportError, match=message):
        split(source)
    assert replace(source, task="text-classification") in split(replace(source, task="text-classification"))


class Windows(torch.nn.Module):
    """Model that pads images to whole windows before each of three downsampling steps, as Swin does."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            height = pixel_values.shape[2]
            pixel_values = torch.nn.functional.pad(pixel_values, (0, 0, 0, (7 - height % 7) % 7))[:, :, ::2]
        return pixel_values


def test_trace_with_long_size_formulas_is_stopped() -> None:
    height = torch.export.Dim.DYNAMIC
    pixels = torch.ones(2, 1, 40, 8)
    with (
        pytest.raises(ExportError, match="Windows with a variable image size was stopped"),
        _SizeFormulaCheck("Windows"),
    ):
        torch.export.export(Windows(), (pixels,), dynamic_shapes={"pixel_values": {2: height}})


def test_outputs_at_padding_are_not_compared() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    specs = [TensorSpec("logits", "float32", ("batch", "sequence", 4)), TensorSpec("pooled", "float32", ("batch", 3))]
    values = {"logits": torch.randn(2, 3, 4), "pooled": torch.randn(2, 3)}
    unpadded = _without_padding(values, specs, {"attention_mask": mask})
    assert torch.equal(unpadded["logits"], values["logits"][[0, 0, 1], [0, 1, 0]])
    assert unpadded["pooled"] is values["pooled"]
    assert _without_padding(values, specs, {}) == values


def _answers(**values: torch.Tensor) -> Any:
    """Return a session that has no inputs and always returns the given values."""
    words = {torch.int64: "int64", torch.float32: "float32"}
    outputs = tuple(TensorSpec(name, words[value.dtype], tuple(value.shape)) for name, value in values.items())
    return SimpleNamespace(inputs=(), outputs=outputs, run=lambda feeds, state: values)


def test_each_output_has_its_own_tolerance() -> None:
    """A float16 error in logits of several hundred is accepted, but an error of the same size in an embedding is not."""
    expected = {"logits": torch.full((1, 4), 100.0), "embedding": torch.full((1, 4), 0.5)}
    case = Case({"batch": 1}, {}, expected)
    near = _answers(logits=expected["logits"] + 0.5, embedding=expected["embedding"])
    assert compare(near, [case], None, "float16")["output"] == "logits"
    wrong = _answers(logits=expected["logits"] + 0.5, embedding=expected["embedding"] - 0.4)
    with pytest.raises(ValidationError, match=r"'embedding' .* by 0.4 .*{'batch': 1}. At most 0.01"):
        compare(wrong, [case], None, "float16")
    assert compare(wrong, [case], None, "float32", rounding=0.5)["tolerance"] == 0.5
    assert compare(wrong, [case], 0.6, "float32")["max_abs_difference"] == 0.5
    exact = differences(_answers(**expected), [case], 0.0, "float32")
    assert merged({"one": exact, "other": differences(near, [case], 0.0, "float32")})["max_abs_difference"] == 0.5


def test_validation_includes_incomplete_patches() -> None:
    """The validation cases include odd image sizes. The padding of MobileNet depends on the remainder of the size
    divided by its strides, and a graph that was compared only at even sizes was wrong at other sizes.
    """
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    source = Source(
        model=transformers.ResNetForImageClassification(config).eval(),
        task="image-classification",
        folder=None,
        origin=Origin(id="x"),
        example={"pixel_values": torch.randn(2, 3, 64, 96)},
        axes={"pixel_values": {0: "batch", 2: "height", 3: "width"}},
    )
    sizes = [(case.sizes["height"], case.sizes["width"]) for case in reference_cases(source)]
    assert any(height % 2 and width % 2 for height, width in sizes)
    assert any(height == width for height, width in sizes)


class _MuchOfLittle(torch.nn.Module):
    """Model that returns `x` with a rounding error, because it adds and subtracts a large number in float32."""

    def __init__(self, number: Any = 1e4) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.tensor(number))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": (x + self.large) - self.large}


@torch.no_grad()
def test_graph_error_up_to_pytorchs_own_error_is_accepted() -> None:
    model = _MuchOfLittle()
    x = torch.linspace(-1, 1, 40)[None]
    case = Case({"batch": 1}, {"x": x}, model(x))
    rounding_error = float((case.expected["logits"] - x).abs().max())
    assert 1e-4 < rounding_error < 1e-3
    comparison = compare_with_model(
        {"model": _answers(logits=case.expected["logits"] + 2 * rounding_error)},
        {"model": [case]},
        None,
        "float32",
        model,
    )
    assert comparison["own_rounding"] == pytest.approx(rounding_error)
    assert comparison["tolerance"] == pytest.approx(3 * rounding_error)
    assert OWN_ROUNDING not in compare_with_model(
        {"model": _answers(**case.expected)}, {"model": [case]}, None, "float32", model
    )
    far = _answers(logits=case.expected["logits"] + 4 * rounding_error)
    for atol, dtype in ((None, "float32"), (rounding_error, "float32")):
        with pytest.raises(ValidationError, match="'logits'"):
            compare_with_model({"model": far}, {"model": [case]}, atol, dtype, model)
    coarse = _MuchOfLittle(1e6)
    case = Case({"batch": 1}, {"x": x}, coarse(x))
    with pytest.raises(ValidationError, match="At most 0.01 is accepted"):
        compare_with_model(
            {"model": _answers(logits=case.expected["logits"] + 0.02)}, {"model": [case]}, None, "float32", coarse
        )


def test_index_outputs_must_be_equal() -> None:
    """An output of indices, such as the matching point among 2,000 points, has no tolerance, because the next index is
    a different point.
    """
    expected = {"matches": torch.arange(2000)[None]}
    case = Case({"batch": 1}, {}, expected)
    assert compare(_answers(**expected), [case], None, "float16")["max_abs_difference"] == 0
    with pytest.raises(ValidationError, match="'matches'.*\n.*use float32"):
        compare(_answers(matches=expected["matches"].roll(1)), [case], None, "float16")
    with pytest.raises(ValidationError, match="'matches'"):
        compare(_answers(matches=expected["matches"] + 1), [case], None, "float32")


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_without_a_fused_operator(softcap: float | None, with_sinks: bool) -> None:
    """The exporter traces OpenVINO graphs with this attention function. The function supports Gemma 2's capped scores
    and GPT-OSS's attention sinks.
    """
    draw = torch.Generator().manual_seed(0)
    query = torch.randn((2, 4, 5, 8), generator=draw)
    key, value = (torch.randn((2, 2, 5, 8), generator=draw) for _ in range(2))
    bias = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    sinks = torch.randn(4, generator=draw) if with_sinks else None

    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + bias
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    expected = (weights / total @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(_attend_plainly(query, key, value, bias, 0.5, softcap, sinks), expected)


SIZES = """<ir_version: 10, opset_import: ["" : 18]>
divided (float[a, b] x, int64 n) => (int64 half, int64 third)
<int64 two = {{2}}, int64 three = {{3}}, int64 zero = {{0}}, int64 axis = {{0}}, int64 other_axis = {{1}}, int64 minus = {{-1}}>
{{
  sizes = Shape(x)
  size = Gather(sizes, axis)
  other = Gather(sizes, other_axis)
  number = {}
  quotient = Div(number, two)
  left = Mod(number, two)
  is_left = Cast<to = 9>(left)
  sign = Sign(number)
  is_below = Less(sign, zero)
  is_wrong = And(is_below, is_left)
  correction = Cast<to = 7>(is_wrong)
  floor = Sub(quotient, correction)
  half = Add(floor, zero)
  of_data = Div(n, three)
  third = Sub(of_data, correction)
}}"""


@pytest.mark.parametrize(
    ("number", "expected", "operators"),
    [
        ("Add(size, three)", lambda a, b: (a + 3) // 2, ["Div"]),
        ("Mul(size, minus)", lambda a, b: -a // 2, ["Mul", "Div", "Add", "Mul"]),
        ("Sub(size, three)", lambda a, b: (a - 3) // 2, ["Sub", "Div", "Add"]),
        ("Sub(size, other)", lambda a, b: (a - b) // 2, ["Sub", "Div"]),
    ],
)
def test_size_division_without_sign_correction(number: str, expected: Any, operators: list[str]) -> None:
    """Sizes are divided without the correction for negative numbers. With the correction, ONNX Runtime's CUDA provider
    sometimes read sizes of 0 in graphs of Wav2Vec2.

    OpenVINO divides integers in float32, so BEiT's graph gave wrong results when the exporter added a large number to
    the sizes.
    """
    openvino = pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    model = onnx_ir.from_onnx_text(SIZES.format(number))
    divide_sizes(model)
    half, third = (value.producer() for value in model.graph.outputs)
    assert third is not None
    assert third.inputs[0] is not None
    assert third.inputs[0].name == "of_data", "a number that is no size is divided as before"
    op_types, node = [], half
    while node is not None and node.inputs[0] is not None and node.inputs[0].name != "number":
        node = node.inputs[0].producer()
        op_types.append(node.op_type if node is not None else "")
    assert op_types == operators, "a number of any sign is corrected as before"
    reference = onnx.reference.ReferenceEvaluator(onnx_ir.to_proto(model))
    compiled = openvino.compile_model(openvino.Core().read_model(onnx_ir.to_proto(model).SerializeToString()), "CPU")
    for a, b in itertools.product(range(1, 6), (1, 4)):
        feeds = {"x": np.zeros((a, b), np.float32), "n": np.array(7)}
        assert reference.run(["half"], feeds) == [expected(a, b)]
        assert int(compiled(feeds)["half"]) == expected(a, b)


PADDED = """
<ir_version: 10, opset_import: ["" : 20]>
padded (float[1, 2, height, width] x) => (float[1, 2, tall, wide] largest)
<int64[8] widths = {0, 0, 1, 1, 0, 0, 0, 2}>
{
    longer = Pad(x, widths)
    largest = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(longer)
}"""


def test_zero_padding_takes_part_in_max_pooling() -> None:
    """BiT pads images with zeros before max pooling. ONNX Runtime would fuse the padding into the pooling, and the
    fused pooling ignores the zeros.
    """
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnxruntime` is not installed")
    model = onnx_ir.from_onnx_text(PADDED)
    keep_padding(model)
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto)
    feeds = {"x": -1 - np.random.default_rng(0).random((1, 2, 8, 9), np.float32)}
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    assert (expected == 0).any()
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_decoder_classifier_returns_no_cache() -> None:
    """A decoder with a classification head returns no KV cache. In an encoder-decoder, the config of the decoder is a
    copy with its own cache setting, which must also be changed.
    """
    config = transformers.MT5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, num_decoder_layers=1, num_labels=2
    )
    model = transformers.MT5ForSequenceClassification(config).eval()
    ids = torch.tensor([[5, 6, 1]])
    source = Source(
        model=model,
        task="text-classification",
        folder=None,
        origin=Origin(id="x"),
        example={"input_ids": ids},
        axes=TEXT,
    )
    assert CACHE_NAME in model(input_ids=ids)
    with _without_cache(source):
        assert CACHE_NAME not in model(input_ids=ids)
    assert CACHE_NAME in model(input_ids=ids)


def test_sample_tokens_are_in_both_vocabularies() -> None:
    config = SimpleNamespace(encoder=SimpleNamespace(vocab_size=40), decoder=SimpleNamespace(vocab_size=30))
    example = {"input_ids": torch.ones((2, 4), dtype=torch.int64)}
    drawn = resize(example, {"input_ids": {0: "batch", 1: "sequence"}}, {"batch": 20, "sequence": 50}, config, seed=1)
    assert drawn["input_ids"].shape == (20, 50)
    assert drawn["input_ids"].max() == 29


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.int64, 8)])
def test_sample_boxes_keep_dtype_and_width(dtype: torch.dtype, width: int) -> None:
    """Bounding boxes may be fractions of the page, or four corner points. The export takes their data type and width
    from the caller's sample.
    """
    example = {"bbox": torch.ones(2, 5, width, dtype=dtype)}
    resized = resize(
        example, {"bbox": {0: "batch", 1: "sequence"}}, {"batch": 3, "sequence": 7}, transformers.BertConfig(), seed=1
    )
    assert resized["bbox"].dtype == dtype
    assert resized["bbox"].shape == (3, 7, width)
    assert resized["bbox"].max() < 2
