"""Tests of joined matrix products, activations fused into products, and float8 products. All results are compared with
the original model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from accel.testing.models import tiny_model
from accel_plugins.pytorch.inductor import float8, matmul_fusion
from accel_plugins.pytorch.inductor.float8 import Float8Linear, activate_before_rounding, round_layers, rows_in_float8
from accel_plugins.pytorch.inductor.matmul_fusion import activate_in_products, join_products, join_projections

LINEAR = nn.functional.linear
ALL = [join_products, lambda graph: activate_in_products(graph, "cpu"), activate_before_rounding]


def functions(model: Any, inputs: dict[str, torch.Tensor], how: Any) -> tuple[list[Any], Any]:
    """Apply the graph passes `how` to the compiled model. Return the functions that the compiled graph calls, and the
    output of the model.
    """
    called: list[Any] = []

    def backend(graph: GraphModule, _: Any) -> Any:
        for rewrite in how:
            rewrite(graph.graph)
        graph.graph.lint()
        graph.recompile()
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        outputs = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**inputs)
    return called, outputs


def texts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "family",
    ["bert", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("roberta", "distilbert", "vit"))],
)
def test_projections_with_same_input_are_joined(family: str) -> None:
    model = tiny_model(family, "image-classification" if family == "vit" else "text-classification")
    size = getattr(model.config, "image_size", 0)
    inputs = {"pixel_values": torch.rand(2, 3, size, size)} if family == "vit" else texts()
    with torch.no_grad():
        expected = model(**inputs)
    before, _ = functions(copy.deepcopy(model), inputs, [])
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    join_projections(model)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected[0], atol=1e-6, rtol=0)
    after, outputs = functions(model, inputs, [join_products])
    layers = model.config.num_hidden_layers
    assert before.count(LINEAR) - after.count(LINEAR) == 2 * layers
    torch.testing.assert_close(outputs[0], expected[0], atol=2e-6, rtol=0)


class Gated(nn.Module):
    """Module with two linear layers on the same input, and a third linear layer on another input of the same size."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8, bias=bias), nn.Linear(8, 12, bias=bias), nn.Linear(8, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x)).sum() + self.b(x)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_projections_with_other_inputs_stay_separate(bias: bool) -> None:
    model, inputs = Gated(bias=bias), {"x": torch.rand(2, 5, 8)}
    expected = model(**inputs).detach()
    join_projections(model)
    called, outputs = functions(model, inputs, [join_products])
    assert called.count(LINEAR) == 2
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)


def test_shared_or_unusual_weights_are_unchanged() -> None:
    model = Gated()
    model.b.weight = nn.Parameter(torch.rand(8, 8))
    model.b.bias = nn.Parameter(torch.rand(8))
    model.c.weight = model.b.weight
    model.a.forward = lambda x: x  # type: ignore[method-assign]
    weights = [layer.weight for layer in (model.a, model.b, model.c)]
    join_projections(model)
    assert all(weight is layer.weight for weight, layer in zip(weights, (model.a, model.b, model.c), strict=True))


class Block(nn.Module):
    """Module with one linear layer followed by the function `after`."""

    def __init__(self, after: Any, *, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(8, 16, bias=bias), after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.linear(x))


def two_readers(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x) + x


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 2, 3, 8)], ids=str)
@pytest.mark.parametrize(
    "after",
    [nn.functional.gelu, nn.GELU("tanh"), nn.functional.relu, torch.relu, nn.ReLU()],
    ids=["gelu", "tanh", "relu", "torch.relu", "ReLU"],
)
def test_activations_are_fused_into_products(after: Any, shape: tuple[int, ...]) -> None:
    model, inputs = Block(after).to(torch.bfloat16), {"x": torch.rand(shape, dtype=torch.bfloat16)}
    called, outputs = functions(model, inputs, [lambda graph: activate_in_products(graph, "cpu")])
    assert called.count(torch._addmm_activation) == 1
    assert LINEAR not in called
    torch.testing.assert_close(outputs, model(**inputs).detach(), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("model", "dtype", "device"),
    [
        (Block(nn.functional.gelu), torch.float32, "cpu"),
        (Block(nn.functional.gelu), torch.bfloat16, "cuda"),
        (Block(nn.functional.gelu, bias=False), torch.bfloat16, "cpu"),
        (Block(two_readers), torch.bfloat16, "cpu"),
        (Block(nn.functional.silu), torch.bfloat16, "cpu"),
    ],
    ids=["float32", "other-device", "no-bias", "two-readers", "silu"],
)
def test_unsupported_activations_are_not_fused(model: nn.Module, dtype: torch.dtype, device: str) -> None:
    inputs = {"x": torch.rand(2, 3, 8, dtype=dtype)}
    called, _ = functions(model.to(dtype), inputs, [lambda graph: activate_in_products(graph, device)])
    assert torch._addmm_activation not in called
    assert called.count(LINEAR) == 1


def test_products_of_quantized_weights_are_not_fused() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="int8 is torchao's")
    model, inputs = Block(nn.functional.gelu).to(torch.bfloat16), {"x": torch.rand(2, 3, 8, dtype=torch.bfloat16)}
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    join_projections(model)
    called, outputs = functions(model, inputs, [lambda graph: activate_in_products(graph, "cpu")])
    assert torch._addmm_activation not in called
    torch.testing.assert_close(outputs, model(**inputs).detach(), atol=1e-2, rtol=2e-2)


def test_graph_pass_has_stable_uuid_for_the_compiler_cache() -> None:
    assert matmul_fusion.MatmulFusionPass().uuid() == matmul_fusion.MatmulFusionPass().uuid() is not None


def rounded_product(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Return the output of a linear layer whose inputs and weights are rounded to float8; the sums are computed in
    float32.
    """
    (a, scale), (b, scales) = rows_in_float8(x), rows_in_float8(layer.weight.detach())
    return (a.float() * scale) @ (b.float() * scales).T + layer.bias.detach()


def test_float8_rows_keep_three_mantissa_bits() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    x[7] = 0
    values, scale = rows_in_float8(x)
    back = values.float() * scale
    assert values.float().abs().amax() == 448
    assert ((back - x).abs() <= x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 512).all()
    assert torch.equal(back[7], x[7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 32)], ids=str)
def test_float8_layers_compute_products_of_rounded_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(32, 16), "b": nn.Linear(32, 48)}
    model = nn.ModuleDict(parts).to(dtype)
    x = torch.randn(shape).to(dtype)
    assert round_layers(model) == 2
    for name, layer in parts.items():
        product = model[name](x)
        assert (product.shape, product.dtype) == ((*shape[:-1], layer.out_features), dtype)
        expected = rounded_product(x.float().flatten(0, -2), layer.float()).view(product.shape)
        torch.testing.assert_close(product.float(), expected, atol=2e-2 if dtype is torch.bfloat16 else 2e-3, rtol=1e-2)


def test_unsuitable_layers_stay_in_float() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Sequential(nn.Linear(64, 64))
            self.wide = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.odd = nn.Sequential(nn.Linear(64, 3))
            self.pairs = nn.ModuleDict({"one": nn.Linear(64, 64), "two": nn.Linear(64, 64), "three": nn.Linear(64, 7)})

    model = Model()
    assert round_layers(model) == 4
    kinds = {name: type(module) for name, module in model.named_modules() if not list(module.children())}
    assert {name for name, kind in kinds.items() if kind is Float8Linear} == {
        "wide.0",
        "wide.2",
        "pairs.one",
        "pairs.two",
    }


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_models_have_one_product_per_group_and_fused_gelu(family: str) -> None:
    sizes = {"bert": {"hidden_size": 32, "intermediate_size": 64}, "distilbert": {"dim": 32, "hidden_dim": 64}}
    model: Any = tiny_model(family, **sizes[family])
    with torch.no_grad():
        expected = model(**texts())[0]
        round_layers(model)
        rounded = model(**texts())[0]
    called, outputs = functions(model, texts(), [join_products, activate_before_rounding])
    layers = model.config.num_hidden_layers
    # In DistilBERT, the output layer of attention is in the same module as query, key and value, so `round_layers`
    # rounds this layer to float8. In BERT, this layer is not rounded.
    assert called.count(float8.LINEAR) == layers * (3 if family == "distilbert" else 2)
    assert called.count(float8.GELU_LINEAR) == layers
    assert nn.functional.gelu not in called
    torch.testing.assert_close(outputs[0], rounded, atol=1e-5, rtol=0)
    assert 0 < (rounded - expected).abs().max() <= 0.25 * expected.abs().max()


class Rounded(nn.Module):
    """Module with an activation followed by a linear layer. With `twice`, a second operation reads the activation's
    output.
    """

    def __init__(self, activation: Any, *, twice: bool = False) -> None:
        super().__init__()
        self.activation, self.twice, self.linear = activation, twice, nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.activation(x)
        return self.linear(value) + (value.sum() if self.twice else 0)


@pytest.mark.parametrize(
    "block",
    [Rounded(nn.GELU("tanh")), Rounded(nn.ReLU()), Rounded(nn.GELU(), twice=True)],
    ids=["tanh", "relu", "two-readers"],
)
def test_unsupported_activations_are_not_fused_with_rounding(block: nn.Module) -> None:
    assert round_layers(block) == 1
    called, _ = functions(block, {"x": torch.rand(2, 3, 32)}, [activate_before_rounding])
    assert float8.LINEAR in called
    assert float8.GELU_LINEAR not in called


class Changing(nn.Module):
    """Module with linear layers and activations. A given function changes the inputs in place between the layers."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.q, self.k, self.wide, self.change = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first = self.q(x)
        self.change(x)
        hidden = first + self.k(x)
        value, late = nn.functional.gelu(hidden), self.q(hidden)
        self.change(hidden)
        return self.wide(value).sum(-1, keepdim=True) + nn.functional.gelu(late)


def _times(x: torch.Tensor) -> None:
    x *= 3


@pytest.mark.parametrize("rounds", [False, True], ids=["joined", "float8"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(3), lambda x: x.__setitem__((..., 0), 0.0), _times, lambda x: x[..., :8].zero_(),
        lambda x: torch.mul(x, 3, out=x), lambda x: nn.functional.relu(x, True), torch.relu_,
    ],
    ids=["method", "item", "operator", "view", "out", "inplace", "function"],
)  # fmt: skip
def test_products_do_not_move_across_in_place_changes(change: Any, rounds: bool) -> None:
    torch.manual_seed(0)
    # Activations are fused only into products in float16 or bfloat16.
    dtype = torch.float32 if rounds else torch.bfloat16
    model = Changing(change).to(dtype)
    inputs = {"x": torch.randn(2, 3, 32, dtype=dtype)}
    round_layers(model) if rounds else join_projections(model)
    with torch.no_grad():
        expected = model(**inputs)
    _, output = functions(model, inputs, ALL)
    torch.testing.assert_close(output, expected, atol=1e-5 if rounds else 0.05, rtol=1e-5 if rounds else 0.05)


class Named(nn.Module):
    """Module that passes function arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        activated = f.gelu(input=f.linear(input=x, weight=self.q.weight, bias=self.q.bias))
        return (
            f.relu(f.linear(activated, self.k.weight, bias=self.k.bias)) + self.q(x) + self.k(f.gelu(input=activated))
        )


@pytest.mark.parametrize("rounds", [False, True], ids=["joined", "float8"])
def test_calls_with_keyword_arguments_are_unchanged(rounds: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Named(), {"x": torch.randn(2, 3, 32)}
    round_layers(model) if rounds else join_projections(model)
    with torch.no_grad():
        expected = model(**inputs)
    _, output = functions(model, inputs, ALL)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_models_that_read_weights_directly_read_rounded_weights() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = layer(x)
        assert round_layers(layer) == 2
        assert (layer.linear1.weight.shape, layer.linear1.bias.shape) == ((128, 64), (128,))
        assert 0 < (layer(x) - expected).abs().max() < 0.1 * expected.abs().max()
