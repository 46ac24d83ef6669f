"""Tests of linear layers with packed weights of 4 and 8 bits (`quantization="int4"`), on the CPU. The tests of the GPU kernels
are in test_inductor_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import accel
from accel.errors import ConfigError
from accel.testing.generative_models import save_generator
from accel_plugins.pytorch.backend import PytorchBackend
from accel_plugins.pytorch.inductor import weight_only
from accel_plugins.pytorch.inductor.matmul_fusion import join_products
from accel_plugins.pytorch.inductor.precision import check_quantization
from accel_plugins.pytorch.inductor.steps import CompiledStepsSession
from accel_plugins.pytorch.inductor.weight_only import WeightOnlyLinear, dequantized, pack_layers, pack_rows
from accel_plugins.pytorch.upstream import cpp_compiler
from tests.backends.test_inductor_products import functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [2, 70, 128, 256, 300])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_packed_with_one_scale_per_block(bits: int, inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(33, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    weight[4, : min(inputs, 128)] *= 100
    packed, scales = pack_rows(weight, bits)
    blocks = -(-inputs // 128)
    assert (packed.dtype, packed.shape) == (torch.int32, (33, blocks, 4 * bits))
    assert (scales.dtype, scales.shape) == (dtype, (33, blocks))
    unpacked = dequantized(packed, scales, inputs)
    assert (unpacked.dtype, unpacked.shape) == (dtype, weight.shape)
    assert not unpacked[3].any()
    # The error of a row relative to its norm; the row of zeros has none.
    error = ((unpacked.float() - weight.float()).norm(dim=1) / weight.float().norm(dim=1)).nan_to_num(nan=0.0)
    assert error.mean() < {4: 0.11, 8: 0.01}[bits]
    assert error.max() < {4: 0.16, 8: 0.02}[bits]


def test_integers_are_stored_where_the_kernel_reads_them() -> None:
    """Weight `i * 32 + 2 * k + j` of a block is integer `2 * i + j` of word `k`."""
    weight = torch.zeros(1, 128)
    weight[0, 0], weight[0, 2 * 32 + 2 * 5 + 1] = -8.0, 3.0
    packed, scales = pack_rows(weight, 4)
    assert scales.item() == 1.0
    nibbles = (packed.view(16, 1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    assert nibbles[0, 0] == 0
    assert nibbles[5, 2 * 2 + 1] == 11
    assert (nibbles == 8).sum() == 126


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (9,)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_layer_computes_product_with_dequantized_weight(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(134, 20, bias=bias))
    plain: Any = model[0]
    assert pack_layers(model) == 1
    layer = model[0]
    assert isinstance(layer, WeightOnlyLinear)
    x = torch.randn(*shape, 134)
    expected = nn.functional.linear(x, layer.weight, plain.bias)
    torch.testing.assert_close(layer(x), expected)
    assert 0 < (layer(x) - plain(x)).norm() < 0.15 * plain(x).norm()


def _llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
def test_decoder_layers_have_4_bits_and_logits_have_8_bits(tied: bool) -> None:
    model = _llama(tie_word_embeddings=tied)
    table = model.get_input_embeddings().weight
    before = table.clone()
    assert pack_layers(model) == 2 * 7 + 1
    layers = {name: module for name, module in model.named_modules() if isinstance(module, WeightOnlyLinear)}
    assert len(layers) == 15
    bits = {name: layer.packed.shape[2] // 4 for name, layer in layers.items()}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}
    assert model.get_input_embeddings().weight is table
    assert torch.equal(table, before)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.packed is attention.k_proj.packed is attention.v_proj.packed


def test_products_of_the_same_input_are_joined() -> None:
    model = _llama()
    ids = torch.randint(3, 90, (1, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
    pack_layers(model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    called, output = functions(model, {"input_ids": ids, "use_cache": False}, [join_products])  # type: ignore[dict-item]
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
    # A layer has four products: of queries, keys and values; of the output; of gate and up; and of down.
    assert called.count(weight_only.LINEAR) == 2 * 4 + 1
    assert (expected - exact).norm() < 0.35 * exact.norm(), "random weights lose more than trained weights"


def test_layers_with_odd_number_of_inputs_are_not_packed() -> None:
    model = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 3))
    assert pack_layers(model) == 1
    assert type(model[0]) is nn.Linear


def test_int4_is_refused_on_cpus_and_in_float32() -> None:
    with pytest.raises(ConfigError, match="only on NVIDIA GPUs, not on cpu"):
        check_quantization("int4", torch.device("cpu"), torch.float16)
    with pytest.raises(
        ConfigError, match="needs activations in float16 or bfloat16, but the model computes in float32"
    ):
        check_quantization("int4", torch.device("cuda"), torch.float32)


@pytest.mark.thorough
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")
def test_compiled_steps_of_packed_decoder(
    shared: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = shared("inductor-llama", lambda folder: save_generator(folder, "llama"))

    def decoder(steps: bool) -> Any:
        def opened(self: PytorchBackend, model: Any, part: Any, component: Any, request: Any, dtype: str) -> Any:
            pack_layers(model)
            if steps:
                return CompiledStepsSession(model, part, component, request.device, dtype, forms=2)
            return plain(self, model, part, component, request, dtype)

        plain = original
        monkeypatch.setattr(PytorchBackend, "decoder", opened)
        return accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")

    original = PytorchBackend.decoder
    ids = torch.randint(5, 60, (1, 7), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = decoder(False).generate(ids, **options)
    stepping = decoder(True)
    assert torch.equal(stepping.generate(ids, **options), expected)
    assert not stepping.decoder_step.session._why_eager
