"""Tests of rotary embeddings that are fused into the attention operator: the results equal those of separate rotary
operators.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers

from accel import export, optimize
from accel.artifact import Artifact
from accel.testing.models import VOCABULARY
from accel_plugins.ortkit.optimization.attention_rotary import fuse_inner_rotary
from accel_plugins.ortkit.optimization.maskless_decoder import LENGTHS, TOTAL, causal_form

LAYERS = 2
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
# Each entry has the model architecture, its config settings, and whether the fused graph splits the joint query, key
# and value projection inside the attention operator.
FAMILIES = {
    "biases": ("Qwen2", {}, True),
    "norms of queries and keys": ("Qwen3", {"head_dim": 16}, False),
    "no biases": ("Mistral", {"sliding_window": None, "head_dim": 16}, True),
    "scaled positions": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    artifacts: dict[str, Artifact] = {}

    def get(family: str) -> Artifact:
        if family not in artifacts:
            architecture, settings, _ = FAMILIES[family]
            torch.manual_seed(0)
            config = getattr(transformers, f"{architecture}Config")(**SMALL, **settings)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.3)
            artifacts[family] = export(model, tmp_path_factory.mktemp("inner") / "exported", task="text-generation")
        return artifacts[family]

    return get


class Form:
    """Decoder graph that takes row lengths instead of a mask, in float32 on the CPU, with its own KV cache.

    The CPU kernel supports given position ids only if the cache already contains tokens. Prompts in these tests
    therefore have one row, and their positions count from zero.
    """

    def __init__(self, artifact: Artifact, *, rotary_inside: bool = True) -> None:
        component = artifact.component("model")
        path = artifact.path / component.file
        form = causal_form(path, rotary_inside=rotary_inside)
        model, self.rotary_inside = form.model, form.rotary_inside
        self.graph = ir.from_proto(onnx.load_from_string(model)).graph
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        disabled = ["GroupQueryAttentionFusion"]
        self._session = ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
        self._specs = [spec for spec in component.inputs if spec.pair is not None]
        self._cache: dict[str, np.ndarray] = {}

    def start(self, rows: int) -> None:
        self._cache = {
            spec.name: np.zeros((rows, spec.shape[1], 32, spec.shape[3]), np.float32) for spec in self._specs
        }

    def repeat(self, rows: int) -> None:
        self._cache = {name: buffer.repeat(rows, 0) for name, buffer in self._cache.items()}

    def step(self, ids: np.ndarray, positions: list[list[int]], lengths: list[int]) -> np.ndarray:
        feeds = {
            "input_ids": ids, "position_ids": np.array(positions), "logits_to_keep": np.arange(ids.shape[1]),
            LENGTHS: np.array(lengths, np.int32) - 1, TOTAL: np.array([max(lengths)], np.int32), **self._cache,
        }  # fmt: skip
        names = ["logits", *(str(spec.pair) for spec in self._specs)]
        logits, *cache_values = self._session.run(names, feeds)
        self._cache = dict(zip(self._cache, cache_values, strict=True))
        values: np.ndarray = logits
        return values


def operators(form: Form) -> list[str]:
    return [node.op_type for node in form.graph]


def answers(form: Form) -> list[np.ndarray]:
    """Return the logits of a prompt, of a token after the prompt with chosen position ids, and of the next tokens of
    three rows.
    """
    draw = np.random.default_rng(3)
    form.start(1)
    logits = [form.step(draw.integers(4, VOCABULARY, (1, 5)), [[0, 1, 2, 3, 4]], [5])]
    logits.append(form.step(draw.integers(4, VOCABULARY, (1, 3)), [[9, 5, 7]], [8]))
    form.repeat(3)
    logits.append(form.step(draw.integers(4, VOCABULARY, (3, 1)), [[7], [2], [40]], [9, 9, 9]))
    return [*logits, form.step(draw.integers(4, VOCABULARY, (3, 1)), [[11], [3], [12]], [10, 10, 10])]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "biases" else pytest.mark.thorough) for name in FAMILIES]
)
def test_fused_rotary_gives_equal_logits(exported: Callable[[str], Artifact], tmp_path: Path, family: str) -> None:
    optimized = optimize(exported(family), tmp_path / "made", backend="cuda", level="O3")
    inside, outside = Form(optimized), Form(optimized, rotary_inside=False)
    assert (inside.rotary_inside, outside.rotary_inside) == (True, False)
    assert "RotaryEmbedding" not in operators(inside)
    assert operators(outside).count("RotaryEmbedding") == 2 * LAYERS
    # In the gate and up projections of the MLP, the number of `Split` nodes does not change.
    assert operators(inside).count("Split") == (LAYERS if FAMILIES[family][2] else 2 * LAYERS)
    for logits, other in zip(answers(inside), answers(outside), strict=True):
        assert np.abs(logits - other).max() < 1e-4


@pytest.mark.parametrize("family", ["biases", pytest.param("norms of queries and keys", marks=pytest.mark.thorough)])
def test_rotary_tables_have_the_dtype_of_the_cache(
    exported: Callable[[str], Artifact], tmp_path: Path, family: str
) -> None:
    """The sine and cosine tables have the cache's data type, but the angles are computed in float32."""
    halved = optimize(exported(family), tmp_path / "halved", backend="cuda", level="O4")
    graph = Form(halved).graph
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    longer = [node.inputs[7].producer() for node in attentions if node.inputs[7] is not None]
    assert [node.op_type for node in longer if node is not None] == ["Pad"] * LAYERS
    assert {node.outputs[0].dtype for node in longer if node is not None} == {ir.DataType.FLOAT16}
    angles = {node.inputs[0].dtype for node in graph if node.op_type in ("Sin", "Cos") and node.inputs[0] is not None}
    assert angles == {ir.DataType.FLOAT}


def attention(
    size: int = 16, *, elsewhere: bool = False, positions: tuple[Any, ...] = ("batch", "sequence"), **attributes: float
) -> ir.Model:
    """Return a model with one attention layer that has two query heads and one head for keys and values."""
    sizes = ["batch", "sequence", 4 * size]
    cache = ["batch", 1, "capacity", size]
    graph_inputs: dict[str, tuple[ir.DataType, list[Any]]] = {
        "x": (ir.DataType.FLOAT, sizes), "past_key": (ir.DataType.FLOAT, cache), "past_value": (ir.DataType.FLOAT, cache),
        "lengths": (ir.DataType.INT32, ["batch"]), "total": (ir.DataType.INT32, [1]),
        "cos": (ir.DataType.FLOAT, ["rows", size // 2]), "sin": (ir.DataType.FLOAT, ["rows", size // 2]),
        "positions": (ir.DataType.INT64, list(positions)),
    }  # fmt: skip
    values = {
        name: ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
        for name, (kind, shape) in graph_inputs.items()
    }
    widths = ir.Value(name="widths", const_value=ir.tensor(np.array([2 * size, size, size], np.int64), name="widths"))
    split = ir.node("Split", [values["x"], widths], {"axis": -1}, num_outputs=3)
    for part, width in zip(split.outputs, (2 * size, size, size), strict=True):
        part.type, part.shape = values["x"].type, ir.Shape(["batch", "sequence", width])
    turned = [
        ir.node("RotaryEmbedding", [part, values["positions"], values["cos"], values["sin"]], domain="com.microsoft")
        for part in split.outputs[:2]
    ]
    inputs = [turned[0].outputs[0], turned[1].outputs[0], split.outputs[2], *list(values.values())[1:5]]
    attention_node = ir.node(
        "GroupQueryAttention",
        inputs,
        {"num_heads": 2, "kv_num_heads": 1, **attributes},
        domain="com.microsoft",
        num_outputs=3,
    )
    outputs = [*attention_node.outputs, *([turned[1].outputs[0]] if elsewhere else [])]
    graph = ir.Graph(
        list(values.values()), outputs, nodes=[split, *turned, attention_node], initializers=[widths],
        opset_imports={"": 18, "com.microsoft": 1}
    )  # fmt: skip
    return ir.Model(graph, ir_version=10)


def test_unsupported_attention_keeps_rotary_outside() -> None:
    assert fuse_inner_rotary().apply(attention()) == 1
    # The fusion must skip a head size that the operator does not support, keys that another node reads, and position
    # ids that all rows share.
    assert fuse_inner_rotary().apply(attention(size=8)) == 0
    assert fuse_inner_rotary().apply(attention(elsewhere=True)) == 0
    assert fuse_inner_rotary().apply(attention(positions=(1,))) == 0
    # The fusion must also skip settings that select flash attention, because flash attention counts positions itself.
    assert fuse_inner_rotary().apply(attention(local_window_size=4)) == 0
    assert fuse_inner_rotary().apply(attention(softcap=5.0)) == 0
