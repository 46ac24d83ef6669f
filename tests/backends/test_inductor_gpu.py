"""Tests of the `inductor` backend on a GPU: the backend contract, and decoders with compiled decoding steps."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
import accel.errors
from accel import SessionOptions
from accel.artifact import Artifact
from accel.config import AccelerateConfig, PrepareConfig
from accel.testing.conformance import BackendConformance
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny, tiny_model
from tests.devices import GPU

pytestmark = pytest.mark.gpu


class TestInductorOnGpu(BackendConformance):
    backend = "inductor"
    device = str(GPU)
    artifact_format = "torch"

    def preparation(self, scheme: str) -> PrepareConfig:
        return AccelerateConfig(keep_slower=True)

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        return accel.export(save_generator(folder.parent / "llama", "llama"), folder, format="torch")


@pytest.fixture
def opened(shared: Callable[..., Path]) -> Callable[[str], list[Any]]:
    """Return a function that opens a small float32 decoder on the GPU with the backends `pytorch` and `inductor`, and
    returns both models.
    """

    def get(family: str) -> list[Any]:
        folder = shared(f"inductor-{family}", lambda folder: save_generator(folder, family))
        options = SessionOptions(compute_dtype="float32")
        return [
            accel.ORTModelForCausalLM.from_pretrained(folder, backend=name, device=str(GPU), session_options=options)
            for name in ("pytorch", "inductor")
        ]

    return get


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_compiled_steps_give_the_models_tokens(family: str, opened: Callable[[str], list[Any]]) -> None:
    plain, stepping = opened(family)
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0)).to(GPU)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for settings in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **settings}
        assert torch.equal(stepping.generate(ids, **options), plain.generate(ids, **options)), settings
    session = stepping.decoder_step.session
    assert not session._why_eager
    assert sorted(session._steps) == [(2, 256), (6, 256)]


def test_unsupported_attention_falls_back_with_warning(
    opened: Callable[[str], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    plain, stepping = opened("mistral")
    ids = torch.tensor([[5, 6, 7, 8]]).to(GPU)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(stepping.generate(ids, **options), plain.generate(ids, **options))
    assert "attention with sliding_window" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_full_and_padded_batches_equal_the_model(family: str, dtype: str) -> None:
    model = tiny_model(family).to(GPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(5, 90, (64, 32), generator=torch.Generator().manual_seed(0)).to(GPU)
    mask = torch.ones_like(ids)
    padded = (
        (torch.arange(32) < torch.randint(1, 33, (64, 1), generator=torch.Generator().manual_seed(1))).long().to(GPU)
    )
    calls = [{"attention_mask": mask}, {}, {"attention_mask": padded}, {"attention_mask": padded.flip(1)}]
    with torch.no_grad():
        expected = [model(input_ids=ids, **call).logits for call in calls]
        accel.accelerate(model, dtype=dtype, keep_slower=True)
        logits = [model(input_ids=ids, **call).logits for call in calls]
    for output, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(
            output, other, atol=float(other.abs().max()) * (0.01 if dtype == "float16" else 0.05), rtol=0
        )
    forms = model.acceleration.engine.forms.values()
    step = ids.numel() // 16
    real = -(-int(padded.sum()) // step) * step
    assert [form.tokens for form in forms] == ["all", "all", real, None], "rows that begin with padding are not packed"
    assert all(form.state == "compiled" for form in forms)
    model.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_repeated_calls_replay_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call replays a CUDA graph with its own input values, in any autograd mode. A call with an additional
    input is planned again.
    """
    model = tiny_model("bert").to(GPU)
    random = torch.Generator().manual_seed(0)
    calls: list[dict[str, Any]] = []
    for rows, tokens, filled in ((1, 16, 16), (64, 32, 32), (64, 32, 20), (64, 32, 19), (1, 16, 9)):
        ids = torch.randint(5, 90, (rows, tokens), generator=random).to(GPU)
        mask = (torch.arange(tokens) < filled).long().expand(rows, tokens).to(GPU)
        calls += [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids.flip(0), "attention_mask": mask}]
    with torch.no_grad():
        expected = [model(**call).logits for call in calls]
        accel.accelerate(model, dtype="float16", keep_slower=True)
        engine = model.acceleration.engine
        for _ in range(2):
            [model(**call) for call in calls]
        bind = engine.bind

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it was looked at")

        monkeypatch.setattr(engine, "bind", refuse)
        for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cuda", torch.bfloat16)):
            with mode:
                outputs = [model(**call) for call in calls]
            for output, other in zip(outputs, expected, strict=True):
                assert type(output).__name__ == "SequenceClassifierOutput"
                assert (output.logits.dtype, output.logits.requires_grad) == (torch.float32, False)
                torch.testing.assert_close(output.logits, other, atol=float(other.abs().max()) * 0.01, rtol=0)
        other = {**calls[0], "token_type_ids": torch.ones_like(calls[0]["input_ids"])}
        with pytest.raises(AssertionError, match="looked at"):
            model(**other)
        monkeypatch.setattr(engine, "bind", bind)
        assert (model(**other).logits - expected[0]).abs().max() > 0.02 * expected[0].abs().max()
        model.classifier.bias.add_(1)
        with pytest.raises(accel.errors.PrepareError, match="weights were changed"):
            model(**calls[0])
    model.restore()


def test_decoding_step_does_not_synchronize(opened: Callable[[str], list[Any]]) -> None:
    """A decoding step does not wait for the GPU. The next step copies its positions and its mask from the CPU while the
    GPU still runs the previous step.
    """
    models = opened("llama")
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0)).to(GPU)
    tokens = [ids[:, i : i + 1] for i in range(6)]
    (cache, expected), (stepping_cache, logits) = ((model(ids).past_key_values, []) for model in models)
    plain, stepping = models
    expected += [plain(token, past_key_values=cache).logits for token in tokens]
    # The first step compiles the code and captures a CUDA graph; later steps replay the CUDA graph.
    logits += [stepping(token, past_key_values=stepping_cache).logits for token in tokens[:2]]
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits += [stepping(token, past_key_values=stepping_cache).logits for token in tokens[2:]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stepping.decoder_step.session._steps
    for reference, other in zip(expected, logits, strict=True):
        assert (reference - other).abs().max() <= 1e-4 * reference.abs().max()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "shared", "share", "capacity", "size", "width"),
    [(1, 2, 7, 256, 64, 64), (2, 1, 4, 300, 20, 24), (1, 2, 1, 1024, 128, 128), (3, 2, 2, 40, 80, 80), (2, 1, 1, 700, 256, 256)],
)  # fmt: skip
def test_attention_kernel_for_one_query_token(
    rows: int, shared: int, share: int, capacity: int, size: int, width: int, dtype: str
) -> None:
    """The attention kernel for one new token is correct with padding, and in a cache that is less than half full. In
    such a cache, whole blocks are masked.
    """
    from accel_plugins.pytorch.inductor.steps import _attend

    random = torch.Generator().manual_seed(0)
    shapes = (rows, shared * share, 1, size), (rows, shared, capacity, size), (rows, shared, capacity, width)
    query, key, value = (torch.randn(shape, generator=random).to(getattr(torch, dtype)) for shape in shapes)
    visible = torch.rand(rows, capacity, generator=random) < 0.7
    visible[:, : capacity // 4], visible[:, capacity // 2 :], visible[:, capacity // 3] = False, False, True
    bias = torch.where(visible[:, None, None], 0.0, torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    expected, _ = _attend(module, query.double(), key.double(), value.double(), bias.double())
    with torch.cuda.device(GPU):
        attended, _ = _attend(module, *(tensor.to(GPU) for tensor in (query, key, value, bias)))
    assert attended.dtype == query.dtype
    assert (attended.cpu() - expected).abs().max() <= {"float16": 1e-3, "float32": 1e-5}[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "rows", "tokens"), [(8, 1, 16), (20, 1, 17), (64, 3, 50), (128, 2, 129), (32, 1, 700)], ids=str
)
def test_attention_kernel_with_mask(size: int, rows: int, tokens: int, dtype: str) -> None:
    """Hidden states of all tokens are correct for padding on the right, for padding on the left, for holes in the mask,
    and without a mask.
    """
    model = tiny_model("bert", hidden_size=4 * size, num_attention_heads=4, max_position_embeddings=1024).bert
    model = model.to(GPU).to(getattr(torch, dtype))
    exact = copy.deepcopy(model).float()
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (rows, tokens), generator=random).to(GPU)
    right = torch.ones_like(ids)
    right[:, -tokens // 3 :] = 0
    holes = (torch.rand(rows, tokens, generator=random) < 0.7).long().to(GPU)
    holes[:, 0] = 1
    calls = [{}, *({"attention_mask": mask} for mask in (right, right.flip(1), holes))]
    with torch.no_grad():
        expected, before = ([module(ids, **call)[0].float() for call in calls] for module in (exact, model))
        accel.accelerate(model, keep_slower=True)
        outputs = [model(ids, **call)[0].float() for call in calls]
    forms = model.acceleration.engine.forms.values()
    assert [(form.attends, form.state) for form in forms] == [(True, "compiled")] * 2
    for output, other, truth in zip(outputs, before, expected, strict=True):
        assert (output - truth).abs().max() <= 1.5 * (other - truth).abs().max() + 1e-3


def test_repeated_computation_starts_before_mask_is_read() -> None:
    model = tiny_model("bert").to(GPU)
    ids = torch.randint(5, 90, (64, 32), generator=torch.Generator().manual_seed(0)).to(GPU)
    masks = [(torch.arange(32) < filled).long().expand(64, 32).to(GPU) for filled in (32, 20)]
    order = [0] * 12 + [1] * 2 + [0] + [1] * 30 + [0] * 2
    with torch.no_grad():
        expected = [model(input_ids=ids, attention_mask=mask).logits for mask in masks]
        accel.accelerate(model, dtype="float16", keep_slower=True)
        for which in order:
            logits = model(input_ids=ids, attention_mask=masks[which]).logits
            torch.testing.assert_close(logits, expected[which], atol=float(expected[which].abs().max()) * 0.01, rtol=0)
        (repeated,) = model.acceleration.engine._repeats._calls.values()
        assert (repeated.last, repeated.times, repeated.enough) == ("all", 2, 32), "two guesses were wrong"
    model.restore()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float8_has_small_error(dtype: str) -> None:
    if torch.cuda.get_device_capability(GPU) < (8, 9):
        pytest.skip("this GPU does not support float8")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = tiny_model("bert", seed=1, **sizes).to(GPU)
    ids = torch.randint(5, 90, (64, 32), generator=torch.Generator().manual_seed(0)).to(GPU)
    mask = (torch.arange(32) < torch.randint(1, 33, (64, 1), generator=torch.Generator().manual_seed(1))).long().to(GPU)
    with torch.no_grad():
        for call_mask in (torch.ones_like(mask), mask):
            expected = model(input_ids=ids, attention_mask=call_mask).logits
            accel.accelerate(model, dtype=dtype, quantization="float8", keep_slower=True)
            logits = model(input_ids=ids, attention_mask=call_mask).logits
            assert [form.state for form in model.acceleration.engine.forms.values()] == ["compiled"]
            model.restore()
            assert 0 < (logits - expected).abs().max() <= 0.25 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "bits"),
    [(100, 256, 4), (33, 130, 4), (70, 4096, 4), (8, 14336, 4), (5, 66, 4), (100, 256, 8), (33, 300, 8)],
)
def test_products_with_packed_weights(outputs: int, inputs: int, bits: int, dtype: torch.dtype) -> None:
    """The kernels for packed weights agree with the dequantized weight on the CPU, with incomplete blocks, several rows
    and a bias, and for a range of rows of the weight.
    """
    from accel_plugins.pytorch.inductor.weight_only import dequantized, pack_rows, weight_only_linear

    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype)
    packed, scales = pack_rows(weight, bits)
    unpacked = dequantized(packed, scales, inputs)
    on_gpu = [tensor.to(GPU) for tensor in (packed, scales)]
    # Two ways to quantize may round a few weights differently.
    packed_on_gpu, _ = pack_rows(weight.to(GPU), bits)
    assert (packed_on_gpu.cpu() != packed).float().mean() < 0.01
    with torch.cuda.device(GPU):
        assert torch.equal(dequantized(*on_gpu, inputs).cpu(), unpacked)
        for rows in (1, 2, 6, 7):
            x = torch.randn(rows, 1, inputs, generator=random).to(dtype)
            product = weight_only_linear(x.to(GPU), *on_gpu, bias.to(GPU)).cpu()
            expected = torch.nn.functional.linear(x.double(), unpacked.double(), bias.double())
            assert (product.dtype, product.shape) == (dtype, expected.shape)
            limit = 2e-3 if dtype is torch.float16 else 1e-2
            assert (product - expected).norm() <= limit * expected.norm()
        part = weight_only_linear(x[:1].to(GPU), *(tensor[3:] for tensor in on_gpu), None).cpu()
        plain = torch.nn.functional.linear(x[:1].double(), unpacked[3:].double())
        assert (part - plain).norm() <= limit * plain.norm()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decoder_with_int4_weights(dtype: str, shared: Callable[..., Path]) -> None:
    """Compiled decoding steps with 4-bit weights agree with the same quantized model without compiled code."""
    from accel_plugins.pytorch.inductor.weight_only import WeightOnlyLinear, pack_layers

    folder = shared("inductor-llama", lambda folder: save_generator(folder, "llama"))
    model = accel.ORTModelForCausalLM.from_pretrained(
        folder, backend="inductor", device=str(GPU), provider_options={"quantization": "int4"},
        session_options=SessionOptions(compute_dtype=dtype),
    )  # fmt: skip
    ids = torch.randint(5, 60, (1, 7), generator=torch.Generator().manual_seed(0)).to(GPU)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    session = model.decoder_step.session
    assert not session._why_eager
    assert sorted(session._steps) == [(1, 256)]
    assert any(isinstance(module, WeightOnlyLinear) for module in session.runtime.modules())
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(GPU).eval()
    pack_layers(plain)
    cache = model(ids).past_key_values
    with torch.no_grad():
        for count in range(3):
            tokens = torch.cat([ids, ids[:, : count + 1]], 1)
            expected = plain(tokens).logits[:, -1].float()
            logits = model(ids[:, count : count + 1], past_key_values=cache).logits[:, -1].float()
            limit = 0.02 if dtype == "float16" else 0.1
            assert (logits - expected).abs().max() <= limit * expected.abs().max()


def test_int4_needs_half_precision(shared: Callable[..., Path]) -> None:
    folder = shared("inductor-llama", lambda folder: save_generator(folder, "llama"))
    with pytest.raises(accel.errors.ConfigError, match="float16 or bfloat16"):
        accel.ORTModelForCausalLM.from_pretrained(
            folder, backend="inductor", device=str(GPU), provider_options={"quantization": "int4"}
        )


@pytest.mark.parametrize("generates", [False, True], ids=["encoder", "decoder"])
def test_deleted_model_releases_gpu_memory(generates: bool, tmp_path: Path) -> None:
    def resident() -> int:
        for _ in range(3):
            gc.collect()
        return torch.cuda.memory_allocated(GPU)

    words = 2_000_003  # the table must be much larger than the workspaces of PyTorch, which take 34 MB on an H200
    save, family, kind = (
        (save_generator, "llama", accel.ORTModelForCausalLM)
        if generates
        else (save_tiny, "bert", accel.ORTModelForSequenceClassification)
    )
    save(tmp_path, family, vocab_size=words)
    before = resident()
    model = kind.from_pretrained(tmp_path, backend="inductor", device=str(GPU))
    ids = torch.ones(2, 8, dtype=torch.int64, device=str(GPU))
    for _ in range(3):
        if generates:
            model.generate(ids, max_new_tokens=5)
        else:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    table = words * model.config.hidden_size * 4
    assert resident() - before >= table
    del model
    # PyTorch keeps its workspaces for matrix products allocated, so some memory stays in use.
    assert resident() - before < table / 4
