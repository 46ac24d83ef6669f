"""Fewer products: weights that are joined, and activations inside of products, against the model as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from accel.testing.models import tiny_model
from accel_plugins.pytorch.inductor import products
from accel_plugins.pytorch.inductor.products import activate_in_products, join_products, join_projections

LINEAR = nn.functional.linear


def functions(model: Any, inputs: dict[str, torch.Tensor], how: Any) -> tuple[list[Any], Any]:
    """Which functions a compiled model calls after the pass, and its answer."""
    called: list[Any] = []

    def backend(graph: GraphModule, _: Any) -> Any:
        for one in how:
            one(graph.graph)
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**inputs)
    return called, found


def texts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("roberta", "distilbert", "vit"))]
)
def test_projections_of_one_input_are_one_product(family: str) -> None:
    model = tiny_model(family, "image-classification" if family == "vit" else "text-classification")
    size = getattr(model.config, "image_size", 0)
    inputs = {"pixel_values": torch.rand(2, 3, size, size)} if family == "vit" else texts()
    with torch.no_grad():
        expected = model(**inputs)
    before, _ = functions(copy.deepcopy(model), inputs, [])
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    join_projections(model)
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected[0], atol=1e-6, rtol=0)
    after, found = functions(model, inputs, [join_products])
    layers = model.config.num_hidden_layers
    assert before.count(LINEAR) - after.count(LINEAR) == 2 * layers
    torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=0)


class Gated(nn.Module):
    """Two products of one input and one of another, all of equally many features."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8, bias=bias), nn.Linear(8, 12, bias=bias), nn.Linear(8, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x)).sum() + self.b(x)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_products_of_other_inputs_stay_apart(bias: bool) -> None:
    model, inputs = Gated(bias=bias), {"x": torch.rand(2, 5, 8)}
    expected = model(**inputs).detach()
    join_projections(model)
    called, found = functions(model, inputs, [join_products])
    assert called.count(LINEAR) == 2
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_weights_that_others_hold_or_that_are_no_plain_ones_are_left() -> None:
    model = Gated()
    model.b.weight = nn.Parameter(torch.rand(8, 8))
    model.b.bias = nn.Parameter(torch.rand(8))
    model.c.weight = model.b.weight
    model.a.forward = lambda x: x  # type: ignore[method-assign]
    held = [one.weight for one in (model.a, model.b, model.c)]
    join_projections(model)
    assert all(one is other.weight for one, other in zip(held, (model.a, model.b, model.c), strict=True))


class Block(nn.Module):
    """A product and what follows it."""

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
def test_activations_go_into_products(after: Any, shape: tuple[int, ...]) -> None:
    model, inputs = Block(after).to(torch.bfloat16), {"x": torch.rand(shape, dtype=torch.bfloat16)}
    called, found = functions(model, inputs, [lambda graph: activate_in_products(graph, "cpu")])
    assert called.count(torch._addmm_activation) == 1
    assert LINEAR not in called
    torch.testing.assert_close(found, model(**inputs).detach(), atol=1e-2, rtol=2e-2)


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
def test_other_activations_stay(model: nn.Module, dtype: torch.dtype, device: str) -> None:
    inputs = {"x": torch.rand(2, 3, 8, dtype=dtype)}
    called, _ = functions(model.to(dtype), inputs, [lambda graph: activate_in_products(graph, device)])
    assert torch._addmm_activation not in called
    assert called.count(LINEAR) == 1


def test_quantized_weights_keep_their_products() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="int8 is torchao's")
    model, inputs = Block(nn.functional.gelu).to(torch.bfloat16), {"x": torch.rand(2, 3, 8, dtype=torch.bfloat16)}
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    join_projections(model)
    called, found = functions(model, inputs, [lambda graph: activate_in_products(graph, "cpu")])
    assert torch._addmm_activation not in called
    torch.testing.assert_close(found, model(**inputs).detach(), atol=1e-2, rtol=2e-2)


def test_the_compilers_cache_knows_the_pass() -> None:
    assert products.FewerProducts().uuid() == products.FewerProducts().uuid() is not None
