"""Tests of the `pytorch` backend: the backend contract, generation with transformers' KV cache, data types, and
options.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.config import ExportConfig, PrepareConfig, QatConfig, SessionOptions
from accel.errors import ConfigError, InputError, SessionError
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.stages.foreign_folders import weights_of
from accel.stages.resolution import resolve
from accel.testing.conformance import BackendConformance
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny, tiny_tokenizer
from accel_plugins.pytorch.backend import PytorchBackend
from accel_plugins.pytorch.session import CapturedModule
from tests.devices import GPU


class TestPytorch(BackendConformance):
    backend = "pytorch"

    def preparation(self, scheme: str) -> PrepareConfig:
        return QatConfig(scheme=scheme)

    def ranges(self, scheme: str, feeds: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [feeds]

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        return accel.export(save_generator(folder.parent / "llama", "llama"), folder, format="torch")


def inputs(rows: int = 2) -> dict[str, torch.Tensor]:
    texts = ["where is my card", "i lost it please help"][:rows]
    return dict(tiny_tokenizer()(texts, padding=True, return_tensors="pt"))


def test_folder_with_a_graph_uses_another_backend(tiny_artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    assert model.backend != "pytorch"


def test_outputs_are_writable(tiny_folder: Callable[..., Path]) -> None:
    logits = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")(
        **inputs()
    ).logits
    logits[0] = 0
    assert not logits[0].any()


def test_two_threads_open_two_tasks_of_one_folder(tiny_folder: Callable[..., Path]) -> None:
    """A model that one thread has loaded for `open` is never used by another thread."""
    backend = PytorchBackend()

    def described(task: str) -> Artifact:
        return backend.adopt(tiny_folder(), task=task, config=ExportConfig())

    def answers(artifact: Artifact) -> list[str]:
        session = backend.open(artifact, OpenRequest(device=DeviceSpec("cpu")))["model"]
        return list(session.run({spec.name: torch.ones(2, 4, dtype=torch.int64) for spec in session.inputs}))

    first = described("text-classification")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(described, "feature-extraction").result()
    assert answers(first) == ["logits"]
    first, _ = described("text-classification"), described("feature-extraction")
    assert answers(first) == ["logits"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_declared_output_types(tiny_folder: Callable[..., Path], dtype: str) -> None:
    exact = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    model = accel.ORTModelForSequenceClassification.from_pretrained(
        tiny_folder(), backend="pytorch", session_options=SessionOptions(compute_dtype=dtype)
    )
    assert model.compute_dtype == dtype
    logits, expected = model(**inputs()).logits, exact(**inputs()).logits
    assert logits.dtype is torch.float32
    # Logits are of order 1, and bfloat16 has 8 bits of precision.
    assert 0 < (logits - expected).abs().max() < 0.1


def test_saved_models_load_with_transformers_and_with_us(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    model.save_pretrained(tmp_path / "saved")
    again = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert (again.backend, again.artifact.format) == ("pytorch", "torch")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    with torch.inference_mode():
        expected = theirs(**inputs()).logits
    assert torch.equal(again(**inputs()).logits, expected)


def test_exporters_accept_torch_artifacts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "bert", num_hidden_layers=1)
    weights = accel.export(folder, tmp_path / "torch", format="torch")
    assert weights.manifest.steps[-1].validation["max_abs_difference"] == 0
    graph = accel.export(weights.path, tmp_path / "onnx")
    assert (graph.format, graph.manifest.source.id) == ("onnx", str(weights.path))


@pytest.mark.thorough
def test_embeddings_are_pooled_as_in_an_export(tiny_folder: Callable[..., Path]) -> None:
    how = {"task": "sentence-similarity", "pooling": "cls", "normalize": True}
    folder = tiny_folder("bert", "feature-extraction")
    ours, theirs = (
        accel.ORTModelForFeatureExtraction.from_pretrained(folder, backend=name, **how) for name in ("pytorch", "cpu")
    )
    outputs, expected = ours(**inputs()), theirs(**inputs())
    assert set(outputs) == set(expected)
    assert (outputs.sentence_embedding - expected.sentence_embedding).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart"])
def test_generation_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = save_generator(tmp_path / family, family)
    task = resolve(folder).task
    weights = weights_of(resolve(folder))
    cls = {"text-generation": accel.ORTModelForCausalLM, "text2text-generation": accel.ORTModelForSeq2SeqLM}[task]
    auto = {
        "text-generation": transformers.AutoModelForCausalLM,
        "text2text-generation": transformers.AutoModelForSeq2SeqLM,
    }[task]
    model, original = cls(weights), auto.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for how in ({}, {"num_beams": 3}, {"use_cache": False}):
        settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **how}
        tokens = model.generate(input_ids=ids, attention_mask=mask, **settings)
        expected = original.generate(input_ids=ids, attention_mask=mask, **settings)
        assert torch.equal(tokens, expected), how


def test_prompt_lookup_with_writable_logits(tmp_path: Path) -> None:
    folder = save_generator(tmp_path / "llama", "llama")
    model = accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    settings = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 4, "repetition_penalty": 1.4, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), original.generate(ids, **settings))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider_options": {"cuda_graph": True}}, "needs an NVIDIA GPU"),
        ({"provider_options": {"cuda_graphs": True}}, "no option 'cuda_graphs'.* Did you mean 'cuda_graph'"),
        ({"session_options": SessionOptions(graph_optimization="none")}, "SessionOptions.graph_optimization"),
    ],
)
def test_unsupported_options_are_refused(tiny_folder: Callable[..., Path], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch", **options)


def test_invalid_position_ids_raise(tmp_path: Path) -> None:
    model = accel.ORTModelForCausalLM(weights_of(resolve(save_generator(tmp_path / "gpt2", "gpt2"))))
    with pytest.raises(InputError, match="contains the value 500, but the model allows only 0 to 191"):
        model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 500]]))


def test_pytorch_errors_become_session_errors(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside the model becomes a `SessionError`. If the first layers changed the KV cache before the error,
    generation continues with the cache contents from before the call.
    """
    encoder = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    monkeypatch.setattr(torch.nn.Linear, "forward", _broken)
    with pytest.raises(SessionError, match="PyTorch failed on inputs .*input_ids.*IndexError: no such row") as error:
        encoder(**inputs())
    assert error.value.fix
    monkeypatch.undo()
    model = accel.ORTModelForCausalLM(weights_of(resolve(save_generator(tmp_path / "llama", "llama"))))
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = model(input_ids=ids).past_key_values
    expected = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[:, -1]
    last = model.decoder_step.session.runtime.model.layers[-1]
    monkeypatch.setattr(last, "forward", _broken)
    with pytest.raises(SessionError, match="no such row"):
        model(input_ids=torch.tensor([[9]]), past_key_values=cache)
    monkeypatch.undo()
    logits = model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits[:, -1]
    assert (logits - expected).abs().max() < 1e-4


def _broken(*args: object, **kwargs: object) -> None:
    raise IndexError("no such row")


@pytest.mark.gpu
def test_cuda_graph_does_not_write_to_released_memory() -> None:
    """Each CUDA graph has its own cuBLAS workspace. PyTorch keeps one workspace per stream, and frees it when the first
    graph is released or when `torch.compile` records a graph.
    """
    device = GPU
    # These products have few results and long sums. cuBLAS splits such products and uses its workspace for partial
    # sums.
    weights = [torch.randn(size, 32, dtype=torch.float16, device=device) for size in (8192, 16384, 65536)]
    inputs = {f"x{i}": torch.randn(8, len(w), dtype=torch.float16, device=device) for i, w in enumerate(weights)}

    def model(**tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor @ weight for tensor, weight in zip(tensors.values(), weights, strict=True)]

    gone = CapturedModule(model, device)
    gone(**inputs)
    del gone
    gc.collect()
    captured = CapturedModule(model, device)
    expected = captured(**inputs)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    of_others = [
        torch.full((size << 20,), 7, dtype=torch.uint8, device=device) for size in (1, 8, 32) for _ in range(20)
    ]
    torch.testing.assert_close(captured(**inputs), expected)
    assert all(bool((tensor == 7).all()) for tensor in of_others)


@pytest.mark.gpu
def test_callers_on_different_streams_do_not_overlap() -> None:
    device = GPU
    weight = torch.randn(2048, 2048, device=device)

    def model(*, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x @ weight / 45)
        return x

    call = CapturedModule(model, device)
    inputs = [torch.randn(512, 2048, device=device) for _ in range(8)]
    expected = [model(x=x) for x in inputs]
    call(x=inputs[0])
    torch.cuda.synchronize(GPU)
    outputs = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):  # type: ignore[no-untyped-call]
            outputs.append(call(x=x))
    torch.cuda.synchronize(GPU)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, atol=1e-4, rtol=1e-4)
