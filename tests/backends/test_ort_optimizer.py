"""Tests of the ONNX optimizer: levels, single fusions, and half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers
from onnx_ir.passes import PostconditionError, PreconditionError

from accel.artifact import Artifact
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.config import OptimizeConfig, SessionOptions
from accel.errors import ConfigError, OptimizeError, ValidationError
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.testing.models import LABELS, POSITIONS, VOCABULARY, rescale
from accel_plugins.ortkit.graph.analysis import bounds, shape_value
from accel_plugins.ortkit.graph.editing import add_initializer, load_graph, save_graph
from accel_plugins.ortkit.graph.rewrites import Rewrite, graph_rewrite
from accel_plugins.ortkit.optimization import fusions
from accel_plugins.ortkit.optimization.precision import to_half
from accel_plugins.ortkit.optimization.simplifications import infer_shapes

TASKS = {"vit": "image-classification"}
MODELS = [
    "bert",
    "roberta",
    "vit",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("distilbert", "llama")),
]
Get = Callable[..., Artifact]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return an export of a Llama classifier: RMSNorm, SiLU, rotary position embeddings, and two query heads for each
    key head.
    """
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        num_labels=LABELS,
        use_cache=False,
    )
    torch.manual_seed(0)
    rescale(transformers.LlamaForSequenceClassification(config)).eval().save_pretrained(folder / "model")
    return export(folder / "model", folder / "onnx")


@pytest.fixture
def artifact_of(tiny_artifact: Get, request: pytest.FixtureRequest) -> Get:
    """Return a function that returns a tiny artifact for a family name."""

    def get(name: str) -> Artifact:
        if name == "llama":
            return request.getfixturevalue("llama")
        return tiny_artifact(name, TASKS.get(name, "text-classification"))

    return get


def feeds_of(artifact: Artifact, batch: int = 3, sequence: int = 11) -> dict[str, torch.Tensor]:
    """Return inputs with padding. If the model has an attention mask, one row contains only padding."""
    generator = torch.Generator().manual_seed(5)
    feeds = {}
    for spec in artifact.component().inputs:
        shape = [n if isinstance(n, int) else {"batch": batch, "sequence": sequence}[n] for n in spec.shape]
        if spec.name == "attention_mask":
            feeds[spec.name] = torch.ones(shape, dtype=torch.int64)
            feeds[spec.name][1, 4:] = 0
            feeds[spec.name][2] = 0
        elif spec.name == "token_type_ids":
            feeds[spec.name] = torch.zeros(shape, dtype=torch.int64)
        elif spec.dtype == "int64":
            feeds[spec.name] = torch.randint(5, VOCABULARY, shape, generator=generator)
        else:
            feeds[spec.name] = torch.randn(shape, generator=generator)
    return feeds


def run(artifact: Artifact, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
    # Disable input checks, which would reject a row with only padding. Fused operators must compute such a row like the
    # original graph.
    session = open_plan(make_plan(artifact, RunPreferences(options=SessionOptions(check_inputs=False)))).sessions[
        "model"
    ]
    try:
        return session.run(feeds)["logits"]
    finally:
        session.close()


def fused(artifact: Artifact) -> dict[str, int]:
    return dict(artifact.manifest.steps[-1].report["fused"])


@pytest.mark.parametrize(
    ("level", "limit"), [pytest.param("O1", 1e-4, marks=pytest.mark.thorough), ("O2", 1e-4), ("O3", 1e-2)]
)
@pytest.mark.parametrize("model", MODELS)
def test_levels_keep_outputs(artifact_of: Get, tmp_path: Path, model: str, level: str, limit: float) -> None:
    parent = artifact_of(model)
    optimized = optimize(parent, tmp_path / "out", level=level)
    feeds = feeds_of(parent)
    assert (run(optimized, feeds) - run(parent, feeds)).abs().max() <= limit
    nodes = optimized.manifest.steps[-1].report["nodes"]
    assert nodes["after"] < nodes["before"]
    assert optimized.manifest.steps[-1].validation["max_abs_difference"] <= limit


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("bert", {"attention": 2, "key-transpose": 2, "reshape": 8}),
        ("roberta", {"attention": 2, "key-transpose": 2}),
        pytest.param("distilbert", {"attention": 2, "key-transpose": 2}, marks=pytest.mark.thorough),
        # ViT has no padding. The fusion "certain-masks" removes the mask and the zeroing of masked rows in both layers.
        ("vit", {"attention": 2, "certain-masks": 4}),
        pytest.param("llama", {"rms-norm": 5, "rotary": 4}, marks=pytest.mark.thorough),
    ],
)
def test_reports_what_was_fused(artifact_of: Get, tmp_path: Path, model: str, expected: dict[str, int]) -> None:
    optimized = optimize(artifact_of(model), tmp_path / "out", level="O2")
    counts = fused(optimized)
    assert {name: counts[name] for name in expected} == expected
    operators = {node.op_type for node in load_graph(optimized, optimized.component()).graph}
    assert ("MultiHeadAttention" in operators) == ("attention" in expected)
    assert "SkipLayerNormalization" not in operators


@pytest.mark.parametrize(("family", "rank"), [("llama", 3), pytest.param("gpt-neox", 4, marks=pytest.mark.thorough)])
def test_rotary_positions_that_differ_between_rows(generator: Get, tmp_path: Path, family: str, rank: int) -> None:
    """The optimizer fuses rotary embeddings if each row has its own position ids. GPT-NeoX rotates only a part of each
    head.
    """
    parent = generator(family)
    optimized = optimize(parent, tmp_path / "o2", level="O2")
    assert fused(optimized)["rotary"] == 4
    rotary = [n for n in load_graph(optimized, optimized.component()).graph if n.op_type == "RotaryEmbedding"]
    assert [n.inputs[0].shape.rank() for n in rotary] == [rank] * 4
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    feeds = {
        "input_ids": torch.randint(5, VOCABULARY, (2, 6)),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "logits_to_keep": torch.tensor([3, 5]),
    }
    logits = []
    for artifact in (parent, optimized):
        session = open_plan(make_plan(artifact)).sessions["model"]
        logits.append(session.run(feeds, outputs=("logits",), state=session.new_state(2))["logits"])
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_enable_and_disable_single_fusions(tiny_artifact: Get, tmp_path: Path) -> None:
    without = optimize(tiny_artifact("bert"), tmp_path / "without", level="O2", disable=("attention",))
    assert "attention" not in fused(without)
    added = optimize(tiny_artifact("bert"), tmp_path / "with", level="O1", enable=("fast-gelu",), atol=1e-2)
    assert fused(added)["fast-gelu"] == 2
    assert "attention" not in fused(added)


def test_levels_are_nested() -> None:
    names = [
        {f.name for f in fusions.chosen_fusions(OptimizeConfig(level=level))} for level in ("O1", "O2", "O3", "O4")
    ]
    assert names[0] < names[1] < names[2] < names[3]
    assert "float16" not in names[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disable": ("atention",)}, "Did you mean 'attention'"),
        ({"enable": ("rotary",), "disable": ("rotary",)}, "is in both enable"),
        ({"level": "O4", "enable": ("bfloat16",)}, "are both enabled"),
        ({"enable": ("bfloat16",)}, "no bfloat16 kernels"),
    ],
)
def test_invalid_switches_are_refused(
    tiny_artifact: Get, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        optimize(tiny_artifact("bert"), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_manifest_and_other_files(tiny_artifact: Get, tmp_path: Path) -> None:
    parent = tiny_artifact("bert")
    optimized = Artifact.load(optimize(parent, tmp_path / "out").path)
    step = optimized.manifest.steps[-1]
    assert (step.stage, step.backend, step.parent) == ("optimize", "cpu", parent.digest)
    assert step.versions["onnxruntime"] == ort.__version__
    assert len(optimized.manifest.steps) == len(parent.manifest.steps) + 1
    assert optimized.component().inputs == parent.component().inputs
    assert optimized.component().outputs == parent.component().outputs
    assert optimized.component().max_sizes == parent.component().max_sizes
    assert {record.name for record in optimized.component().files} == {"model.onnx", "model.onnx.data"}
    assert {p.name for p in optimized.path.iterdir()} == {p.name for p in parent.path.iterdir()}


def test_wrong_rewrite_writes_no_artifact(tiny_artifact: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: ir.Model) -> int:
        norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
        norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
        return 1

    monkeypatch.setattr(fusions, "FUSIONS", (fusions.Fusion("spoil", "O1", "", graph_rewrite(spoil)),))
    with pytest.raises(ValidationError, match="Optimization at level O2"):
        optimize(tiny_artifact("bert"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _graph(artifact: Artifact) -> ir.Model:
    return load_graph(artifact, artifact.component())


def _rename_output(model: ir.Model) -> None:
    model.graph.outputs[0].name = "renamed"


def _move_last_node_first(model: ir.Model) -> None:
    last = model.graph[-1]
    model.graph.remove(last)
    model.graph.insert_before(model.graph[0], last)


@pytest.mark.parametrize(
    ("change", "message"),
    [(_rename_output, "changed the inputs or outputs"), (_move_last_node_first, "before another node produces it")],
)
def test_rewrite_checks_its_postconditions(
    tiny_artifact: Get, change: Callable[[ir.Model], None], message: str
) -> None:
    model = _graph(tiny_artifact("bert"))
    with pytest.raises(PostconditionError, match=message):
        Rewrite("broken", lambda model: change(model) or 1)(model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target", [fusions.CPU, fusions.CUDA], ids=["cpu", "cuda"])
def test_second_run_of_a_rewrite_changes_nothing(artifact_of: Get, model: str, target: fusions.FusionTarget) -> None:
    graph = _graph(artifact_of(model))
    for fusion in fusions.chosen_fusions(OptimizeConfig(level="O3"), target):
        assert fusion.rewrite is not None
        fusion.rewrite().apply(graph)
        assert fusion.rewrite().apply(graph) == 0, fusion.name


def test_rewrite_requires_value_names(tiny_artifact: Get) -> None:
    model = _graph(tiny_artifact("bert"))
    model.graph.outputs[0].name = None
    with pytest.raises(PreconditionError, match="has no name"):
        Rewrite("any", lambda model: 0)(model)


@pytest.mark.parametrize("model", MODELS)
def test_float16_optimization(artifact_of: Get, tmp_path: Path, model: str) -> None:
    parent = artifact_of(model)
    optimized = optimize(parent, tmp_path / "out", level="O4")
    assert optimized.dtype == "float16"
    assert optimized.component().outputs == parent.component().outputs
    feeds = feeds_of(parent)
    assert 0 < (run(optimized, feeds) - run(parent, feeds)).abs().max() <= 2e-2
    # The file consists mostly of weights, which need half the memory in float16.
    assert optimized.bytes < 0.75 * parent.bytes
    assert optimized.manifest.steps[-1].report["float16"]["converted"] > 30


def test_float16_keeps_large_values_in_float32(tmp_path: Path) -> None:
    weight = np.full((4, 4), 300.0, np.float32)
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n,4] x, float[4,4] w) => (float[n,4] y) {
            big = MatMul(x, w)
            squared = Mul(big, big)
            root = Sqrt(squared)
            y = Relu(root)
        }""")
    value = model.graph.inputs[1]
    value.replace_all_uses_with(add_initializer(model.graph, "weight", weight))
    model.graph.inputs.remove(value)
    for node in model.graph:
        node.name = node.op_type
    infer_shapes(model)
    report = to_half(model, "float16", frozenset({"squared"}))
    assert report == {"converted": 2, "kept": ["Mul", "Sqrt"]}
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    save_graph(model, tmp_path / "half.onnx")
    session = ort.InferenceSession(str(tmp_path / "half.onnx"))
    output = session.run(None, {"x": np.ones((1, 4), np.float32)})[0]
    # The square would overflow in float16, so a correct result shows that the optimizer kept it in float32.
    assert np.allclose(output, 1200, rtol=1e-2)


@pytest.mark.parametrize(("steepness", "float_nodes"), [(0.5, ["Slice", "Add", "Where", "Softmax"]), (0.01, [])])
def test_float16_keeps_scores_with_large_distances_in_float32(
    tmp_path: Path, steepness: float, float_nodes: list[str]
) -> None:
    """Attention scores stay in float32 if large position distances are added to them, as in MPT, which counts distances
    from the end of the text.

    In float16, adding -128 to a score of 1 rounds the score to multiples of 0.06.
    """
    length = 256
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n,256] scores, bool[n,256] hidden, float[300] table, float fill, int64[1] start, int64[1] end)
            => (float[n,256] weights) {
            distances = Slice(table, start, end)
            biased = Add(scores, distances)
            masked = Where(hidden, fill, biased)
            weights = Softmax(masked)
        }""")
    table = (steepness * np.arange(1 - length, 301 - length)).astype(np.float32)
    constants = {"table": table, "fill": np.float32(-3e38), "start": np.array([0]), "end": np.array([length])}
    for value in list(model.graph.inputs[2:]):
        value.replace_all_uses_with(
            add_initializer(model.graph, f"{value.name}.kept", np.asarray(constants[value.name]))
        )
        model.graph.inputs.remove(value)
    for node in model.graph:
        node.name = node.op_type
    infer_shapes(model)
    save_graph(model, tmp_path / "whole.onnx")
    assert to_half(model, "float16", frozenset())["kept"] == float_nodes
    save_graph(model, tmp_path / "half.onnx")
    hidden = np.arange(length)[None] > np.array([[9], [255]])
    feeds = {"scores": np.random.default_rng(0).standard_normal((2, length), np.float32), "hidden": hidden}
    outputs, expected = (
        ort.InferenceSession(str(tmp_path / f"{name}.onnx")).run(None, feeds)[0] for name in ("half", "whole")
    )
    # Tokens at the start of the text attend only to tokens far from the end, so all distances in their rows are large.
    assert np.abs(outputs - expected).max() < 1e-3


def test_float16_of_constant_of_shape(tmp_path: Path) -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n] x, int64[1] size) => (float[m] y) {
            zeros = ConstantOfShape(size)
            y = Concat<axis = 0>(x, zeros)
        }""")
    for node in model.graph:
        node.name = node.op_type
    infer_shapes(model)
    to_half(model, "float16", frozenset())
    save_graph(model, tmp_path / "half.onnx")
    feeds = {"x": np.ones(2, np.float32), "size": np.array([3])}
    assert ort.InferenceSession(str(tmp_path / "half.onnx")).run(None, feeds)[0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("backend", ["cpu", "cuda", "tensorrt"])
def test_calibration_data_decides_what_stays_float32(artifact_of: Get, tmp_path: Path, backend: str) -> None:
    """Calibration data with large pixel values keeps more operators in float32, because the products of these operators
    would overflow in float16.
    """
    large = [{"pixel_values": 1e6 * torch.randn(2, 3, 32, 32)}]
    reports = []
    for name, calibration in (("random", None), ("given", large)):
        optimized = optimize(artifact_of("vit"), tmp_path / name, level="O4", calibration=calibration, backend=backend)
        reports.append(optimized.manifest.steps[-1].report)
    random, calibrated = (report["float16"] for report in reports)
    assert set(random["kept"]) < set(calibrated["kept"])
    assert (random["watched"], calibrated["watched"]) == ("random inputs", "calibration data")
    assert "calibration" not in reports[0]
    assert reports[1]["calibration"] == {"source": "batches"}


def test_unused_calibration_data_is_refused(tiny_artifact: Get, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no use for calibration data"):
        optimize(tiny_artifact("bert"), tmp_path / "out", level="O2", calibration=[{"text": "lost card"}])


def test_float16_decoders_observe_prompts(generator: Get, tmp_path: Path) -> None:
    """The calibration data of a decoder is text. The optimizer adds position ids and a KV cache to the text, and
    converts the KV cache to float16.
    """
    parent = generator("llama")
    for name, calibration in (("random", None), ("given", [{"text": "lost card"}, {"text": "a new pin please"}])):
        optimized = optimize(parent, tmp_path / name, level="O4", calibration=calibration)
        assert {spec.dtype for spec in optimized.component().inputs if spec.pair is not None} == {"float16"}
        watched = optimized.manifest.steps[-1].report["float16"]["watched"]
        assert watched == ("random inputs" if calibration is None else "calibration data")


def test_float16_of_a_quantized_artifact_is_refused(tiny_artifact: Get, tmp_path: Path) -> None:
    quantized = quantize(tiny_artifact("bert"), tmp_path / "int8")
    with pytest.raises(OptimizeError, match="quantized already|already quantized"):
        optimize(quantized, tmp_path / "out", level="O4")


def test_shape_values_and_bounds() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        graph (float[n,4,m] x) => (int64[k] y, bool[1] c)
            <int64[1] minus = {-1}, int64[1] start = {1}, int64[1] end = {9}, int64 zero = {0}, int64 step = {1}> {
            sizes = Shape(x)
            tail = Slice(sizes, start, end)
            y = Concat(minus, tail)
            count = Squeeze(tail)
            numbers = Range(zero, zero, step)
            c = GreaterOrEqual(numbers, zero)
        }""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert shape_value(values["y"]) == [-1, 4, "m"]
    assert bounds(values["c"]) == (1.0, 1.0)
    assert bounds(values["sizes"])[0] == 0.0
