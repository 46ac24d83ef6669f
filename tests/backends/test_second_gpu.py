"""Tests of all GPU features on the second GPU while the first GPU is the current device. Outputs are equal, and the
current device does not change.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import SessionOptions, export, optimize
from accel.artifact import Artifact
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"this test needs two GPUs, but the machine has {torch.cuda.device_count()}",
    ),
]

GPUS = ("cuda:0", "cuda:1")
# Two GPUs of the same model run the same kernels, so their results are equal. The compiler tunes code for each GPU, so
# float16 sums of compiled code may have a different order.
EQUAL, TUNED = 1e-5, 1e-2
# A different order of addition may round a value to the next float8 value, which differs by up to 1/8. The measured
# difference of the logits on two GPUs is 0.013 of the largest logit.
FLOAT8 = 5e-2


@pytest.fixture(autouse=True)
def _first_gpu_stays_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


def batch(rows: int, tokens: int, device: str, padded: bool = True) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (rows, tokens), generator=random)
    mask = torch.ones_like(ids)
    if padded:
        mask = (torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=random)).long()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def assert_equal(outputs: dict[str, torch.Tensor], tolerance: float) -> None:
    first, second = (outputs[gpu] for gpu in GPUS)
    assert (str(first.device), str(second.device)) == GPUS
    expected = first.float().cpu()
    assert (second.float().cpu() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "float16"}, {"dtype": "float16", "quantization": "float8"}], ids=str
)
def test_accelerated_model(settings: dict[str, Any]) -> None:
    if "quantization" in settings and torch.cuda.get_device_capability(1) < (8, 9):
        pytest.skip("this GPU does not support float8")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    for padded in (False, True):
        outputs = {}
        for gpu in GPUS:
            model = tiny_model("bert", seed=1, **sizes).to(gpu)
            with torch.no_grad():
                accel.accelerate(model, keep_slower=True, **settings)
                # The third call replays the CUDA graph that the first call captured.
                outputs[gpu] = [model(**batch(64, 32, gpu, padded)).logits for _ in range(3)][-1]
            assert [form.state for form in model.acceleration.engine.forms.values()] == ["compiled"]
            model.restore()
        assert_equal(outputs, FLOAT8 if "quantization" in settings else TUNED)


def test_accelerated_generator(tmp_path: Path) -> None:
    """An accelerated generator gives equal outputs on both GPUs. The compiler records its decoding steps as CUDA
    graphs.
    """
    import transformers

    save_generator(tmp_path, "llama")
    tokens = {}
    for gpu in GPUS:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval().to(gpu)
        accel.accelerate(model, keep_slower=True)
        ids = torch.tensor([[5, 6, 7, 8]], device=gpu)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        tokens[gpu] = [model.generate(ids, **options) for _ in range(2)][-1]
        model.restore()
    assert_equal(tokens, 0)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("pytorch", {}), ("pytorch", {"cuda_graph": True}), ("inductor", {"keep_slower": True}), ("cuda", {}), ("cuda", {"cuda_graphs": 0})],
    ids=str,
)  # fmt: skip
def test_session(backend: str, options: dict[str, Any], tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Test the session from the main thread and from a new thread, whose current device is the first GPU."""
    source: Path = tiny_folder("bert")
    if backend == "cuda":
        source = optimize(export(source, tmp_path / "onnx"), tmp_path / "o4", backend="cuda", level="O4").path
    outputs, threaded = {}, {}
    for gpu in GPUS:
        model: Any = accel.ORTModelForSequenceClassification.from_pretrained(
            source, backend=backend, device=gpu, provider_options=options
        )
        calls = [batch(8, 16, gpu), batch(64, 32, gpu), batch(8, 16, gpu, padded=False)]
        answers = [torch.cat([model(**call).logits for call in calls]) for _ in range(3)]

        def call(model: Any = model, calls: list[dict[str, torch.Tensor]] = calls, gpu: str = gpu) -> None:
            threaded[gpu] = torch.cat([model(**inputs).logits for inputs in calls])

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        outputs[gpu] = answers[-1]
        assert torch.cuda.current_device() == 0
        model.close()
    assert_equal(outputs, TUNED)
    assert_equal(threaded, TUNED)


def test_deleted_session_keeps_the_current_device(tiny_artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(
        tiny_artifact().path, backend="cuda", device="cuda:1"
    )
    model(**batch(2, 8, "cuda:1"))
    del model
    assert torch.zeros(1, device="cuda").device.index == 0


def test_deleted_decoder_keeps_the_current_device(tmp_path: Path) -> None:
    source = export(save_generator(tmp_path / "llama", "llama"), tmp_path / "onnx")
    half = optimize(source, tmp_path / "o4", backend="cuda", level="O4").path
    model: Any = accel.ORTModelForCausalLM.from_pretrained(half, backend="cuda", device="cuda:1")
    model.generate(torch.tensor([[5, 6, 7, 8]], device="cuda:1"), max_new_tokens=4)
    del model
    gc.collect()
    assert torch.zeros(1, device="cuda").device.index == 0


@pytest.mark.parametrize(
    ("backend", "dtype"), [("pytorch", ""), ("inductor", ""), ("cuda", "float16"), ("cuda", "")], ids=str
)
def test_generation(backend: str, dtype: str, tmp_path: Path) -> None:
    """Generated tokens are equal on both GPUs. On the `cuda` backend, a float16 decoder runs each decoding step as one
    CUDA graph, and a float32 decoder launches each kernel separately.
    """
    source: Any = save_generator(tmp_path / "llama", "llama")
    if backend == "cuda":
        source = export(source, tmp_path / "onnx")
        if dtype:
            source = optimize(source, tmp_path / "o4", backend="cuda", level="O4")
        source = source.path
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    for beams in ({}, {"num_beams": 3}):
        tokens = {}
        for gpu in GPUS:
            model: Any = accel.ORTModelForCausalLM.from_pretrained(source, backend=backend, device=gpu)
            options = {"attention_mask": mask.to(gpu), **settings, **beams}
            tokens[gpu] = [model.generate(ids.to(gpu), **options) for _ in range(2)][-1]
            assert torch.cuda.current_device() == 0
            model.close()
        assert_equal(tokens, 0)


def test_engine(tiny_artifact: Callable[..., Artifact]) -> None:
    texts = ["where is my card", "help", "the bank"]
    answers = []
    for gpu in GPUS:
        with accel.Engine(tiny_artifact().path, backend="cuda", device=gpu) as engine:
            answers.append([engine.run(text) for text in texts])
    for first, other in zip(*answers, strict=True):
        (first,), (other,) = ([answer] if isinstance(answer, dict) else answer for answer in (first, other))
        assert first["label"] == other["label"]
        assert abs(first["score"] - other["score"]) <= EQUAL


def test_benchmark_waits_for_the_second_gpu(tiny_folder: Callable[..., Path]) -> None:
    result = accel.benchmark(
        tiny_folder(), device="cuda:1", backends=["cuda"], batch=[2], sequence=[5], rounds=2, calls=3, warmup=2
    )
    graph = result["PyTorch eager float32 in a CUDA graph"]
    assert graph.error is None
    assert graph.max_abs_difference <= graph.tolerance


def test_calibrated_model(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """A model with calibrated Q/DQ pairs gives equal outputs on both GPUs with the CUDA execution provider."""
    fused = optimize(tiny_artifact(), tmp_path / "o2", backend="cuda", level="O2")
    feeds = [{name: tensor.cpu() for name, tensor in batch(2, 8, "cpu", padded).items()} for padded in (False, True)]
    calibration = [{**row, "token_type_ids": torch.zeros_like(row["input_ids"])} for row in feeds]
    quantized = accel.quantize(fused, tmp_path / "q", backend="cuda", scheme="static-int8", calibration=calibration)
    logits = {}
    for gpu in GPUS:
        model = accel.ORTModelForSequenceClassification.from_pretrained(quantized.path, backend="cuda", device=gpu)
        logits[gpu] = model(**batch(4, 8, gpu)).logits
        model.close()
    assert_equal(logits, EQUAL)


def test_buckets_and_thread_settings(tiny_artifact: Callable[..., Artifact]) -> None:
    logits = {}
    for gpu in GPUS:
        model = accel.ORTModelForSequenceClassification.from_pretrained(
            tiny_artifact().path, backend="cuda", device=gpu, session_options=SessionOptions(buckets=(16, 32))
        )
        logits[gpu] = torch.cat([model(**batch(2, tokens, gpu)).logits for tokens in (5, 16, 17, 5)])
        model.close()
    assert_equal(logits, EQUAL)


def test_aotinductor_offers_no_gpu() -> None:
    """Packages of the `aotinductor` backend run only on CPUs, so the backend lists no GPU."""
    from accel.backends import registry

    assert {device.type for device in registry.probe(registry.describe("aotinductor")).devices} == {"cpu"}
