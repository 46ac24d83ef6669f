"""Tests of graph fusions for GPUs. The tests use ONNX Runtime's CPU provider, which has the same fused operators in
float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers

from accel import capture
from accel.artifact import Artifact
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.config import OptimizeConfig, SessionOptions
from accel.interfaces.protocols import Session
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.testing.models import rescale, tiny_model
from accel_plugins.cuda.forms.packing import INDEX, POSITIONS, STARTS, PackingInputs, can_pack
from accel_plugins.cuda.forms.padding_variants import FormName, in_form, mask_content, mask_input, packs
from accel_plugins.ortkit.graph.editing import MICROSOFT, load_graphs
from accel_plugins.ortkit.optimization.fusions import CPU, CUDA, TENSORRT, FusionTarget, chosen_fusions, fusions_for
from accel_plugins.ortkit.optimization.padding_masks import MASK_NAME
from accel_plugins.ortkit.optimization.pooled_token import compute_pooled_token

Fused = Callable[..., Artifact]
LAYERS = 2


@pytest.fixture(scope="module")
def fused(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Fused:
    """Return a function that returns an artifact optimized for CUDA. The function creates each artifact at its first
    use.
    """
    root = tmp_path_factory.mktemp("gpu-fused")
    artifacts: dict[tuple[str, str, str], Artifact] = {}

    def get(family: str = "bert", task: str = "text-classification", level: str = "O2") -> Artifact:
        key = (family, task, level)
        if key not in artifacts:
            artifacts[key] = optimize(tiny_artifact(family, task), root / "-".join(key), backend="cuda", level=level)
        return artifacts[key]

    return get


def session_of(artifact: Artifact) -> Session:
    # Disable input checks, which would reject a row with only padding. Fused operators must compute such a row like the
    # original graph.
    settings = RunPreferences(backend="cpu", options=SessionOptions(check_inputs=False))
    return open_plan(make_plan(artifact, settings)).sessions["model"]


def operators(artifact: Artifact) -> Counter[str]:
    return Counter(node.op_type for node in load_graphs(artifact)["model"].graph)


def feeds_of(artifact: Artifact, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    sizes = {"batch": batch, "sequence": sequence}
    return capture.feeds_for(artifact.components[0].inputs, sizes, seed=batch, folder=artifact.path)


def padded(feeds: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield copies of the inputs with padding on the right, on the left, in the middle of a row, in a whole row, and
    without padding.
    """
    if "attention_mask" not in feeds:
        yield "no mask", dict(feeds)
        return
    right = feeds["attention_mask"]
    hole, empty = torch.ones_like(right), right.clone()
    hole[0, right.shape[1] // 3 : right.shape[1] // 2] = 0
    empty[-1] = 0
    kinds = {"right": right, "left": right.flip(1), "hole": hole, "empty": empty, "full": torch.ones_like(right)}
    for kind, mask in kinds.items():
        yield kind, {**feeds, "attention_mask": mask}


def difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in second)


# Families without the mark `thorough` use exports that other tests also use.
FAMILIES = [
    pytest.param("albert", "text-classification", marks=pytest.mark.thorough),
    pytest.param("bert", "text-classification"),
    pytest.param("bert", "feature-extraction", marks=pytest.mark.thorough),
    pytest.param("bert", "multiple-choice", marks=pytest.mark.thorough),
    pytest.param("bert", "question-answering", marks=pytest.mark.thorough),
    pytest.param("distilbert", "text-classification", marks=pytest.mark.thorough),
    pytest.param("electra", "text-classification", marks=pytest.mark.thorough),
    pytest.param("mpnet", "text-classification", marks=pytest.mark.thorough),
    pytest.param("roberta", "text-classification", marks=pytest.mark.thorough),
    pytest.param("vit", "image-classification", marks=pytest.mark.thorough),
    pytest.param("distilbert", "question-answering", marks=pytest.mark.thorough),
    pytest.param("electra", "token-classification", marks=pytest.mark.thorough),
    pytest.param("xlm-roberta", "fill-mask", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_same_result_for_any_padding(
    fused: Fused, tiny_artifact: Callable[..., Artifact], family: str, task: str
) -> None:
    original, optimized = tiny_artifact(family, task), fused(family, task)
    before, after = session_of(original), session_of(optimized)
    for batch, sequence in [(1, 1), (2, 7), (3, 40)]:
        for kind, feeds in padded(feeds_of(original, batch, sequence)):
            # Fused operators add float32 numbers in a different order, so results differ slightly.
            assert difference(after.run(feeds), before.run(feeds)) < 2e-5, kind


# Multiple-choice models are not fused. Their batch axis is the product of two axes, and the pattern matching cannot
# determine the sizes of the two axes.
@pytest.mark.parametrize(("family", "task"), [param for param in FAMILIES if "multiple-choice" not in param.values])
def test_every_attention_is_fused(fused: Fused, family: str, task: str) -> None:
    counts = operators(fused(family, task))
    assert counts["Attention"] == LAYERS
    assert counts["Softmax"] == 0
    # A pre-norm encoder such as ViT has no residual sum before its first layer norm, so one node fewer is fused.
    assert counts["SkipLayerNormalization"] >= 2 * LAYERS - (family == "vit")
    assert counts["BiasGelu"] + counts["Gelu"] + counts["FastGelu"] + counts["Tanh"] >= LAYERS
    if family != "vit":
        assert counts["EmbedLayerNormalization"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deberta-v2", "modernbert"])
def test_unsupported_attention_gives_correct_results(
    fused: Fused, tiny_artifact: Callable[..., Artifact], family: str
) -> None:
    """Attention that the fused operators do not support is kept, or is fused with an attention bias. The results stay
    correct.
    """
    original = tiny_artifact(family)
    before, after = session_of(original), session_of(fused(family))
    for kind, feeds in padded(feeds_of(original, 3, 24)):
        if kind != "empty":
            assert difference(after.run(feeds), before.run(feeds)) < 2e-5, kind


@pytest.mark.thorough
def test_relative_positions_become_attention_bias(fused: Fused) -> None:
    nodes = [n for n in load_graphs(fused("mpnet"))["model"].graph if n.op_type == "Attention"]
    assert all(node.inputs[5] is not None for node in nodes)
    assert mask_input(fused("mpnet").file()) == "attention_mask"


def test_graph_with_token_vectors_is_not_rewritten_for_padding(fused: Fused, tmp_path: Path) -> None:
    """The vectors of masked tokens are used in multi-vector models, so no form of the graph may skip them."""
    source = fused("bert").file()
    assert mask_input(source) == "attention_mask"
    model = onnx.load(source)
    name = model.graph.output[0].name
    model.graph.output[0].name = "multi_vector_embedding"
    model.graph.node.append(onnx.helper.make_node("Identity", [name], ["multi_vector_embedding"]))
    onnx.save(model, tmp_path / "model.onnx")
    assert mask_input(tmp_path / "model.onnx") is None
    assert not packs(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("roberta", "mpnet"))]
)
def test_graph_forms_agree_on_supported_masks(fused: Fused, family: str) -> None:
    artifact = fused(family)
    path = artifact.file()
    sessions = {}
    forms: tuple[FormName, ...] = ("general", "lengths", "full")
    for form in forms:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        sessions[form] = ort.InferenceSession(in_form(path, form), options, providers=["CPUExecutionProvider"])
    used_forms = set()
    for kind, feeds in padded(feeds_of(artifact, 4, 20)):
        arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
        expected = sessions["general"].run(None, arrays)[0]
        form = mask_content(feeds["attention_mask"]).form
        used_forms.add(form)
        assert np.abs(sessions[form].run(None, arrays)[0] - expected).max() < 1e-5, kind
        if kind in ("left", "hole"):
            assert np.abs(sessions["lengths"].run(None, arrays)[0] - expected).max() > 1e-3, "the test sees the mask"
    assert used_forms == set(forms)


def without_packed_attention(serialized: bytes, lengths: str = "lengths") -> bytes:
    """Return a model in which each `PackedAttention`, which has no CPU kernel, is replaced by equivalent operators.

    The equivalent operators move packed rows back to their positions, run `Attention` with row lengths, and pack the
    result again. Packed rows after the last token become NaN, so that the test detects any read of these rows.
    """
    model = ir.from_proto(onnx.load_from_string(serialized))
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}

    def value(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        if name not in inputs:
            inputs[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            graph.inputs.append(inputs[name])
        return inputs[name]

    positions = value(POSITIONS, ir.DataType.INT64, ["batch", "sequence"])
    lengths_value = value(lengths, ir.DataType.INT32, ["batch"])
    live = value("live", ir.DataType.BOOL, ["tokens", 1])
    flat = ir.node("Constant", [], {"value": ir.tensor(np.array([-1, 32], np.int64))})
    nothing = ir.node("Constant", [], {"value": ir.tensor(np.array(np.nan, np.float32))})
    zero = ir.node("Constant", [], {"value": ir.tensor(np.array(0, np.float32))})
    graph.insert_before(graph[0], [flat, nothing, zero])
    for node in [node for node in graph if node.op_type == "PackedAttention"]:
        x, weight, bias, _, starts = node.inputs
        assert starts is not None
        assert starts.name == STARTS
        # The graph reads padding positions from arbitrary rows, and the CPU operator multiplies these rows by zero.
        # Replace NaN first, because zero times NaN is NaN.
        gone = ir.node("IsNaN", [x])
        clean = ir.node("Where", [gone.outputs[0], zero.outputs[0], x])
        places = ir.node("Gather", [clean.outputs[0], positions])
        padded_attention = ir.node(
            "Attention", [places.outputs[0], weight, bias, lengths_value], dict(node.attributes), domain=MICROSOFT
        )
        rows = ir.node("Reshape", [padded_attention.outputs[0], flat.outputs[0]])
        packed = ir.node("Gather", [rows.outputs[0], inputs[INDEX]])
        result = ir.node("Where", [live, packed.outputs[0], nothing.outputs[0]])
        graph.insert_before(node, [gone, clean, places, padded_attention, rows, packed, result])
        node.outputs[0].replace_all_uses_with(result.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", "text-classification"),
        pytest.param("roberta", "text-classification", marks=pytest.mark.thorough),
        pytest.param("distilbert", "text-classification", marks=pytest.mark.thorough),
        ("bert", "feature-extraction"),
        pytest.param("bert", "question-answering", marks=pytest.mark.thorough),
        pytest.param("distilbert", "token-classification", marks=pytest.mark.thorough),
        pytest.param("xlm-roberta", "fill-mask", marks=pytest.mark.thorough),
        pytest.param("electra", "question-answering", marks=pytest.mark.thorough),
        # ALBERT computes its activation with basic operators, and adds residuals around the layer norms.
        ("albert", "text-classification"),
        pytest.param("megatron-bert", "text-classification", marks=pytest.mark.thorough),
        pytest.param("megatron-bert", "feature-extraction", marks=pytest.mark.thorough),
    ],
)
def test_packed_form_gives_correct_results(fused: Fused, family: str, task: str) -> None:
    artifact = fused(family, task)
    path = artifact.file()
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    general = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    form = in_form(path, "packed")
    attention = Counter(node.op_type for node in ir.from_proto(onnx.load_from_string(form)).graph)
    assert (attention["PackedAttention"], attention["Attention"]) == (LAYERS, 0)
    graph = without_packed_attention(form)
    packed = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    feeds = feeds_of(artifact, 4, 20)
    mask = torch.ones(4, 20, dtype=torch.int64)
    for row, length in enumerate((20, 1, 7, 13)):
        mask[row, length:] = 0
    feeds["attention_mask"] = mask
    arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
    expected = general.run(None, arrays)
    for rows in (41, 64):
        packing = PackingInputs((4, 20), rows, torch.device("cpu"))
        packing.fill(mask)
        packed_feeds = {**arrays, **{name: tensor.numpy() for name, tensor in packing.inputs.items()}}
        packed_feeds |= {"lengths": mask.sum(1).int().numpy(), "live": (np.arange(rows) < 41)[:, None]}
        outputs = packed.run(None, {i.name: packed_feeds[i.name] for i in packed.get_inputs()})
        for output, other in zip(outputs, expected, strict=True):
            assert output.shape == other.shape
            if output.shape[:2] == (4, 20):
                assert not output[mask.numpy() == 0].any(), "padded places are zero"
                output, other = output[mask.numpy() == 1], other[mask.numpy() == 1]
            assert np.isfinite(output).all()
            assert np.abs(output - other).max() < 2e-5


def test_packed_layers_stay_packed_to_the_output(fused: Fused) -> None:
    """In a classifier, all layers compute packed tokens. Only the first token of each row is read at the end of the
    graph.
    """
    graph = ir.from_proto(onnx.load_from_string(in_form(fused("bert").file(), "packed"))).graph
    assert Counter(n.op_type for n in graph)["PackedAttention"] == LAYERS
    assert POSITIONS not in {value.name for value in graph.inputs}
    assert not any(n.op_type == "Attention" for n in graph)


def test_which_graphs_can_be_packed(fused: Fused) -> None:
    assert packs(fused("bert", "text-classification", "O4").file())
    assert not packs(fused("bert").file()), "the kernels for float32 are slow"
    assert not packs(fused("vit", "image-classification", "O4").file()), "it has no padding"
    model = load_graphs(fused("mpnet"))["model"]
    mask = next(value for node in model.graph for value in node.outputs if value.name == MASK_NAME)
    assert not can_pack(model, mask), "its attention has a bias"


def test_graph_without_fused_attention_has_no_forms(tiny_artifact: Callable[..., Artifact]) -> None:
    assert mask_input(tiny_artifact("bert").file()) is None


def test_only_the_pooled_token_is_computed_in_last_layer(fused: Fused, tiny_artifact: Callable[..., Artifact]) -> None:
    report = fused("bert").manifest.steps[-1].report["fused"]
    assert report["one-token"] > 0
    model = load_graphs(fused("bert"))["model"]
    last = [node for node in model.graph if node.op_type == "SkipLayerNormalization"][-1]
    assert len(last.outputs[0].shape or ()) == 2
    assert fused("bert", "feature-extraction").manifest.steps[-1].report["fused"]["one-token"] == 0


@pytest.mark.thorough
def test_attention_without_biases(tmp_path: Path) -> None:
    """Attention without biases is fused correctly. ONNX Runtime's CPU kernel crashed when the bias was missing."""
    model = tiny_model("bert", num_hidden_layers=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention.self" in name and name.endswith("bias"):
                parameter.zero_()
    artifact = export(model, tmp_path / "onnx", task="text-classification")
    optimized = optimize(artifact, tmp_path / "fused", backend="cuda", level="O2")
    assert operators(optimized)["Attention"] == 1
    assert optimized.manifest.steps[-1].validation["max_abs_difference"] < 1e-4


_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 120}


def exported(prefix: str, path: Path, **settings: Any) -> Artifact:
    config = getattr(transformers, f"{prefix}Config")(**_SMALL, **settings)
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    return export(rescale(model).eval(), path, task="text-classification")


@pytest.mark.thorough
def test_mask_subtracted_from_one_is_fused(tmp_path: Path) -> None:
    """LayoutLM's additive mask `(1 - mask) * number` is fused as a padding mask, and not as a general attention bias."""
    artifact = exported("LayoutLM", tmp_path / "onnx", intermediate_size=48, max_position_embeddings=64)
    optimized = optimize(artifact, tmp_path / "fused", backend="cuda", level="O2")
    assert operators(optimized)["Attention"] == LAYERS
    assert mask_input(optimized.file()) == "attention_mask"


@pytest.mark.thorough
def test_position_table_with_offset_is_fused(tmp_path: Path) -> None:
    artifact = exported("Nystromformer", tmp_path / "onnx", intermediate_size=48, max_position_embeddings=64)
    optimized = optimize(artifact, tmp_path / "fused", backend="cuda", level="O2")
    assert operators(optimized)["EmbedLayerNormalization"] == 1


@pytest.mark.thorough
def test_relative_positions_stay_in_float32(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """Relative positions are computed in float32 in a float16 graph. A float16 logarithm selects wrong position
    buckets, which changed hidden states by 0.4.
    """
    original = tiny_artifact("mpnet", "feature-extraction")
    halved = optimize(original, tmp_path / "half", backend="cuda", level="O1", enable=("float16",))
    assert halved.dtype == "float16"
    assert halved.manifest.steps[-1].validation["max_abs_difference"] < 0.02


@pytest.mark.thorough
def test_float16_graph_without_convolutions_opens_on_cpu(tmp_path: Path) -> None:
    """A float16 XLNet opens on the CPU. ONNX Runtime's layout optimizer for convolutions crashed the process on this
    graph.
    """
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=48)
    model = transformers.XLNetForTokenClassification(config).eval()
    artifact = export(model, tmp_path / "exported", task="token-classification")
    assert optimize(artifact, tmp_path / "half", backend="cuda", level="O4").dtype == "float16"


@pytest.mark.thorough
def test_sums_over_experts_stay_in_float32(tmp_path: Path) -> None:
    """Sums over experts are computed in float32. ONNX Runtime's CPU provider, which checks the results of optimization,
    has no float16 kernel for these sums.
    """
    settings = {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4, "pad_token_id": 0}
    artifact = exported("Mixtral", tmp_path / "onnx", **settings)
    assert optimize(artifact, tmp_path / "half", backend="cuda", level="O4").dtype == "float16"


@pytest.mark.parametrize("family", ["bert", "roberta", "vit"])
def test_float16_gives_correct_results(fused: Fused, tiny_artifact: Callable[..., Artifact], family: str) -> None:
    task = "image-classification" if family == "vit" else "text-classification"
    original, optimized = tiny_artifact(family, task), fused(family, task, "O4")
    assert optimized.dtype == "float16"
    assert [spec.dtype for spec in optimized.components[0].outputs] == ["float32"]
    assert optimized.bytes < 0.7 * original.bytes
    before, after = session_of(original), session_of(optimized)
    for kind, feeds in padded(feeds_of(original, 3, 24)):
        assert difference(after.run(feeds), before.run(feeds)) < 2e-2, kind


def test_bfloat16_can_be_enabled(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    from accel_plugins.ortkit.optimization.optimizer import OrtOptimizer

    config = OptimizeConfig(level="O2", enable=("bfloat16",))
    # Call the optimizer class directly. The function `optimize` compares results on the CPU provider, which has no
    # bfloat16 operators.
    converted = OrtOptimizer("cuda", CUDA).optimize(tiny_artifact("bert"), config=config, out=tmp_path)
    assert converted.dtype == "bfloat16"
    kinds = {v.dtype.name for v in load_graphs(converted)["model"].graph.initializers.values() if v.dtype is not None}
    assert "BFLOAT16" in kinds
    assert "FLOAT" not in kinds
    assert operators(converted)["EmbedLayerNormalization"] == 0, "it has no bfloat16 kernel"


def test_shared_layers_share_packed_weights(fused: Fused) -> None:
    nodes = [node for node in load_graphs(fused("albert"))["model"].graph if node.op_type == "Attention"]
    assert len({node.inputs[1] for node in nodes}) == 1


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", pytest.param("relu", marks=pytest.mark.thorough)])
def test_other_activations_are_kept(tmp_path: Path, activation: str) -> None:
    original = export(tiny_model("bert", num_hidden_layers=1, hidden_act=activation), tmp_path / "a")
    optimized = optimize(original, tmp_path / "b", backend="cuda", level="O2")
    feeds = feeds_of(original, 2, 9)
    assert difference(session_of(optimized).run(feeds), session_of(original).run(feeds)) < 2e-5
    assert operators(optimized)["BiasGelu"] == 0


def test_levels_and_switches_choose_fusions_for_cuda() -> None:
    def names(**settings: Any) -> list[str]:
        return [fusion.name for fusion in chosen_fusions(OptimizeConfig(**settings), CUDA)]

    assert "attention" not in names(level="O1")
    assert "attention" in names(level="O2")
    assert "float16" not in names(level="O3")
    assert "float16" in names(level="O4")
    assert "fast-gelu" in names(level="O2", enable=("fast-gelu",))
    assert "attention" not in names(level="O2", disable=("attention",))


@pytest.mark.parametrize("target", [CPU, CUDA, TENSORRT], ids=["cpu", "cuda", "tensorrt"])
def test_every_fusion_has_summary_and_unique_name(target: FusionTarget) -> None:
    fusions = fusions_for(target)
    assert all(fusion.summary for fusion in fusions)
    assert len({fusion.name for fusion in fusions}) == len(fusions)


@pytest.mark.parametrize("shape_known", [True, False])
def test_all_tokens_are_computed_if_a_size_is_unknown(shape_known: bool) -> None:
    hidden, other = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("h", "o"))
    index = ir.Value(name="i", const_value=ir.tensor(0, ir.DataType.INT64), shape=ir.Shape([]))
    hidden.shape, other.shape = ir.Shape(["batch", "sequence", 4]), ir.Shape(["batch", "sequence", 4])
    relu = ir.node("Relu", [other])
    add = ir.node("Add", [hidden, relu.outputs[0]])
    add.outputs[0].shape = ir.Shape(["batch", "sequence", 4])
    relu.outputs[0].shape = ir.Shape(["batch", "sequence", 4]) if shape_known else None
    gather = ir.node("Gather", [add.outputs[0], index], {"axis": 1})
    graph = ir.Graph(
        [hidden, other], gather.outputs, nodes=[relu, add, gather], initializers=[index], opset_imports={"": 21}
    )
    assert (compute_pooled_token().apply(ir.Model(graph, ir_version=10)) > 0) == shape_known
