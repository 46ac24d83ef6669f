"""Tests of `accel_plugins.pytorch.upstream`, which calls private functions of PyTorch, with the installed version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel.capture import quiet
from accel_plugins.pytorch import upstream

compiler = pytest.mark.skipif(upstream.cpp_compiler() is None, reason="no C++ compiler is installed")


def test_tree_functions_flatten_nested_outputs() -> None:
    nested = {"a": torch.ones(2), "b": (torch.zeros(1), None)}
    leaves, spec = upstream.tree_flatten(nested)
    assert [leaf is None for leaf in leaves] == [False, False, True]
    assert upstream.tree_unflatten(leaves, spec) == nested
    assert upstream.tree_leaves(nested)[0] is nested["a"]
    assert upstream.tree_map_only(torch.Tensor, len, nested) == {"a": 2, "b": (1, None)}


def test_copy_all_copies_every_input() -> None:
    buffers = [torch.zeros(2), torch.zeros(3)]
    upstream.copy_all(buffers, [torch.ones(2), torch.full((3,), 2.0)])
    assert [buffer.tolist() for buffer in buffers] == [[1, 1], [2, 2, 2]]


def test_activated_product_applies_relu() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    output = upstream.activated_product(bias, x, weight.t(), use_gelu=False)
    torch.testing.assert_close(output, torch.relu(x @ weight.t() + bias))


def test_scaled_product_of_float8() -> None:
    x, weight = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones(())
    product = upstream.scaled_product(x, weight.t(), scale_a=scale, scale_b=2 * scale, out_dtype=torch.float32)
    assert torch.equal(product, torch.full((16, 16), 32.0))


def test_rounding_has_a_gradient_for_the_step() -> None:
    step = torch.tensor([0.5], requires_grad=True)
    x = torch.tensor([[0.6, -0.9]])
    rounded = upstream.rounded_by_tensor(x, step, torch.zeros(1), -128, 127, 1.0)
    assert rounded.tolist() == [[0.5, -1.0]]
    rows = upstream.rounded_by_channel(x, step, torch.zeros(1), 0, -127, 127, 1.0)
    (rounded + rows).sum().backward()
    assert step.grad is not None


def test_compiler_marks_are_removed() -> None:
    tensor = torch.ones(1)
    torch._dynamo.mark_static_address(tensor)
    upstream.keep_address(tensor)
    assert "_dynamo_static_input_type" not in vars(tensor)
    assert not upstream.is_traceable_wrapper_subclass(tensor)


def test_compiled_code_has_a_default_folder() -> None:
    assert Path(upstream.default_code_folder()).is_absolute()


@compiler
def test_code_is_compiled_with_settings_and_released() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with quiet(), upstream.compiler_settings(freezing=True, ignored_calls=(print,)):
        assert torch._inductor.config.freezing
        assert torch.compile(double, fullgraph=True)(torch.ones(2)).tolist() == [2, 2]
    assert not torch._inductor.config.freezing
    upstream.release_code(double.__code__)
    assert not torch._inductor.codecache.PyCodeCache.modules


@compiler
def test_package_reports_its_device_and_runs(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    with quiet():
        upstream.compile_package(program, tmp_path / "relu.pt2")
        assert upstream.package_metadata(tmp_path / "relu.pt2")["AOTI_DEVICE_KEY"] == "cpu"
        (output,) = upstream.load_package(tmp_path / "relu.pt2").run([torch.tensor([-1.0, 1.0])])
    assert output.tolist() == [0, 1]
