"""Tests of a graph rewrite for classification heads that read one token: the rewrite selects the token before the
matrix products of the last layer. Outputs are equal, with fewer operations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as operators
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import SessionError
from accel.testing.models import tiny_model
from accel_plugins.openvino.pooled_token import compute_pooled_token
from accel_plugins.openvino.runtime import core, read_model

HEADS = [
    ("bert", "text-classification"),
    *(
        pytest.param(family, task, marks=pytest.mark.thorough)
        for family, task in (
            ("distilbert", "text-classification"),
            ("roberta", "text-classification"),
            ("deberta-v2", "text-classification"),
            ("vit", "image-classification"),
        )
    ),
]


def inputs_of(model: ov.Model, size: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    for value in model.inputs:
        name = value.get_any_name()
        if name == "pixel_values":
            inputs[name] = generator.standard_normal((2, 3, size, size), np.float32)
            continue
        inputs[name] = generator.integers(3, 90, (3, 12)) if name == "input_ids" else np.zeros((3, 12), np.int64)
        if name == "attention_mask":
            inputs[name] = (np.arange(12) < np.array([[12], [7], [1]])).astype(np.int64)
    return inputs


def answers(model: ov.Model, feeds: dict[str, Any]) -> Any:
    # Request float32, because OpenVINO would compute in bfloat16 on processors that support it.
    return core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]


def rows_of_products(model: ov.Model) -> int:
    """Return the number of matrix products whose input has three axes and a token axis of size 1."""
    kinds = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    shapes = [node.input_value(0).get_partial_shape() for node in kinds]
    return sum(len(shape) == 3 and shape[1] == 1 for shape in shapes)


@pytest.mark.parametrize("format", ["openvino", "onnx"])
@pytest.mark.parametrize(("family", "task"), HEADS)
def test_early_token_selection_keeps_outputs(
    family: str, task: str, format: str, tiny_artifact: Callable[..., Artifact], shared: Callable[..., Path]
) -> None:
    if format == "onnx":
        artifact = tiny_artifact(family, task)
    else:
        path = shared(
            f"one-token-{family}",
            lambda folder: accel.export(tiny_model(family, task), folder, backend="openvino", task=task),
        )
        artifact = Artifact.load(path)
    component = artifact.components[0]
    plain = core().read_model(str(artifact.path / component.file))
    model = read_model(artifact, component)
    feeds = inputs_of(model, getattr(tiny_model(family, task).config, "image_size", 0))
    assert rows_of_products(plain) == 0
    # The three products are the product after attention and the two products of the feed-forward layers.
    assert rows_of_products(model) == 3
    np.testing.assert_allclose(answers(model, feeds), answers(plain, feeds), atol=1e-6)


@pytest.mark.parametrize(
    "task", ["feature-extraction", pytest.param("token-classification", marks=pytest.mark.thorough)]
)
def test_models_that_read_all_tokens_are_unchanged(task: str, tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact("bert", task)
    assert rows_of_products(read_model(artifact, artifact.components[0])) == 0


def graph(build: Callable[[Any, Any], Any], *, tokens: int = -1, index: int = 0, more: bool = False) -> ov.Model:
    """Return a graph that selects one token from the result of `build(hidden, weight)`, where `hidden` is `(rows,
    tokens, 4)`. With `more`, the graph has all tokens as a second output.
    """
    hidden = operators.parameter([-1, tokens, 4], np.float32, name="hidden")
    weight = operators.constant(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32))
    result = build(hidden, weight)
    token = operators.gather(result, operators.constant(index), operators.constant(1))
    return ov.Model([token, result] if more else [token], [hidden], "graph")


def product(hidden: Any, weight: Any) -> Any:
    return operators.matmul(hidden, weight, False, False)


def norm(hidden: Any, axis: int) -> Any:
    return operators.mvn(hidden, operators.constant([axis]), True, 1e-5, "inside_sqrt")


MOVED = {
    "product": product,
    "residual": lambda h, w: operators.add(product(operators.gelu(h, "ERF"), w), h),
    "norm": lambda h, w: product(norm(h, -1), w),
    "rounded": lambda h, w: product(operators.fake_quantize(h, *(np.float32(v) for v in (-2, 2, -2, 2)), 256), w),
    "bias": lambda h, w: operators.add(product(h, w), operators.constant(np.ones((1, 1, 4), np.float32))),
}
KEPT = {
    "norm-of-tokens": lambda h, w: product(norm(h, 1), w),
    "position": lambda h, w: operators.add(product(h, w), operators.constant(np.ones((5, 4), np.float32))),
    "tokens-among-themselves": lambda h, _: operators.matmul(h, h, False, True),
    "softmax": lambda h, w: operators.softmax(product(h, w), 1),
    "mean": lambda h, w: operators.add(product(h, w), operators.reduce_mean(h, operators.constant([1]), True)),
}


@pytest.mark.parametrize("index", [0, 2, -1])
@pytest.mark.parametrize("name", [*MOVED, *KEPT])
def test_selection_moves_before_tokenwise_operations(name: str, index: int) -> None:
    build = {**MOVED, **KEPT}[name]
    plain, model = graph(build, index=index), graph(build, index=index)
    compute_pooled_token(model)
    moved = sum(node.get_type_name() == "Gather" for node in model.get_ops()) > 1
    # The selection also moves in two of the other graphs. In "norm-of-tokens", it moves between the norm and the
    # product. In "mean", it moves because every token has the same mean.
    assert moved == (name in MOVED or name in {"mean", "norm-of-tokens"})
    feeds = {"hidden": np.random.default_rng(1).standard_normal((2, 5, 4)).astype(np.float32)}
    np.testing.assert_allclose(answers(model, feeds), answers(plain, feeds), atol=1e-6)


def test_operations_read_by_another_output_are_unchanged() -> None:
    model = graph(product, more=True)
    compute_pooled_token(model)
    assert sum(node.get_type_name() == "Gather" for node in model.get_ops()) == 1


def test_exported_model_equals_pytorch(shared: Callable[..., Path]) -> None:
    model = tiny_model("bert")
    path = shared(
        "one-token-bert", lambda folder: accel.export(model, folder, backend="openvino", task="text-classification")
    )
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    logits = accel.ORTModelForSequenceClassification.from_pretrained(path, backend="openvino")(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_fourier_transforms_in_onnx_are_refused(tmp_path: Path) -> None:
    config = transformers.FNetConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    model = transformers.FNetForSequenceClassification(config).eval()
    accel.export(model, tmp_path / "onnx", task="text-classification")
    with pytest.raises(SessionError, match="Fourier"):
        accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "onnx", backend="openvino")
