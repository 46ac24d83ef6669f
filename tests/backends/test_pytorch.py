"""PyTorch as a backend: the contract, generation by transformers' own cache, types, options."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.config import ExportConfig, PrepareConfig, QatConfig, SessionOptions
from accel.errors import ConfigError, InputError, SessionError
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.stages.export import weights_of
from accel.stages.resolution import resolve
from accel.testing.conformance import BackendConformance
from accel.testing.generators import save_generator
from accel.testing.models import save_tiny, tiny_model, tiny_tokenizer
from accel_plugins.pytorch.backend import PytorchBackend
from accel_plugins.pytorch.cuda_graphs import Turns, captured
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


def test_answers_are_those_of_transformers(tiny_folder: Callable[..., Path]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    with torch.inference_mode():
        expected = tiny_model("bert")(**inputs()).logits
    assert torch.equal(model(**inputs()).logits, expected)
    assert (model.backend, model.dtype, model.compute_dtype) == ("pytorch", torch.float32, "float32")


def test_it_is_not_chosen_for_a_folder_that_holds_a_graph(tiny_artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)
    assert model.backend != "pytorch"


def test_answers_may_be_written_to(tiny_folder: Callable[..., Path]) -> None:
    logits = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")(
        **inputs()
    ).logits
    logits[0] = 0
    assert not logits[0].any()


def test_two_tasks_of_one_folder_in_two_threads(tiny_folder: Callable[..., Path]) -> None:
    """What one thread has described, another does not open."""
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
def test_half_precision_keeps_the_declared_types(tiny_folder: Callable[..., Path], dtype: str) -> None:
    exact = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    model = accel.ORTModelForSequenceClassification.from_pretrained(
        tiny_folder(), backend="pytorch", session_options=SessionOptions(compute_dtype=dtype)
    )
    assert model.compute_dtype == dtype
    found, expected = model(**inputs()).logits, exact(**inputs()).logits
    assert found.dtype is torch.float32
    # Logits are of order 1; bfloat16 has 8 bits.
    assert 0 < (found - expected).abs().max() < 0.1


def test_saved_models_load_with_transformers_and_with_us(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    model.save_pretrained(tmp_path / "saved")
    again = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert (again.backend, again.artifact.format) == ("pytorch", "torch")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    with torch.inference_mode():
        expected = theirs(**inputs()).logits
    assert torch.equal(again(**inputs()).logits, expected)


def test_exporters_read_torch_artifacts(tmp_path: Path) -> None:
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
    found, expected = ours(**inputs()), theirs(**inputs())
    assert set(found) == set(expected)
    assert (found.sentence_embedding - expected.sentence_embedding).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart"])
def test_generation_is_transformers_own(family: str, tmp_path: Path) -> None:
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
        found = model.generate(input_ids=ids, attention_mask=mask, **settings)
        expected = original.generate(input_ids=ids, attention_mask=mask, **settings)
        assert torch.equal(found, expected), how


def test_candidates_are_judged_by_logits_that_are_written_to(tmp_path: Path) -> None:
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
def test_what_it_does_not_have_is_refused(tiny_folder: Callable[..., Path], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch", **options)


def test_positions_that_the_model_does_not_have(tmp_path: Path) -> None:
    model = accel.ORTModelForCausalLM(weights_of(resolve(save_generator(tmp_path / "gpt2", "gpt2"))))
    with pytest.raises(InputError, match="holds 500; the model has 0 to 191"):
        model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 500]]))


def test_what_pytorch_raises_is_an_error_of_ours(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a cache that the first layers had written to goes on as if the call had not been."""
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
    found = model(input_ids=torch.tensor([[9]]), past_key_values=cache).logits[:, -1]
    assert (found - expected).abs().max() < 1e-4


def _broken(*args: object, **kwargs: object) -> None:
    raise IndexError("no such row")


def test_a_shape_is_captured_once_and_replayed_with_new_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for `torch.cuda`, whose graphs call again what was captured: the buffers and the order of things."""
    calls: list[torch.Tensor] = []

    class Graph:
        def replay(self) -> None:
            self.result.copy_(self.buffers["x"] * 2)

    @contextlib.contextmanager
    def graph(made: Graph, **options: object) -> Iterator[None]:
        captures.append(made)
        yield

    def model(*, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        result = x * 2
        if captures and not hasattr(captures[-1], "result"):
            captures[-1].buffers, captures[-1].result = {"x": x}, result
        return result

    captures: list[Graph] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda: stream,
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "stream": lambda s: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    call = CapturedModule(model, torch.device("cuda"))
    given = torch.tensor([1.0, 2.0])
    assert call(x=given).tolist() == [2.0, 4.0]
    assert call(x=torch.tensor([5.0, 6.0])).tolist() == [10.0, 12.0]
    assert given.tolist() == [1.0, 2.0], "a graph's buffers are its own"
    assert len(calls) == 4, "three calls to warm up and the captured one"
    assert call(x=torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert len(captures) == 2


def test_a_capture_runs_on_a_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.graph` keeps one stream for all captures, which belongs to the device that was current at the first."""
    current, captures = ["cuda:0"], []

    @contextlib.contextmanager
    def device(index: torch.device) -> Iterator[None]:
        before, current[0] = current[0], str(index)
        yield
        current[0] = before

    def stream() -> SimpleNamespace:
        return SimpleNamespace(device=current[0], wait_stream=lambda other: None)

    def graph(made: object, *, stream: SimpleNamespace, **options: str) -> contextlib.AbstractContextManager[None]:
        captures.append((stream.device, current[0]))
        return contextlib.nullcontext()

    for name, value in {
        "device": device,
        "Stream": stream,
        "current_stream": stream,
        "stream": lambda s: contextlib.nullcontext(),
        "CUDAGraph": object,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    for name in ("cuda:0", "cuda:1"):
        captured(lambda: None, torch.device(name))
    assert captures == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]
    assert current == ["cuda:0"]


def test_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []
    streams = {
        handle: SimpleNamespace(name=name, wait_stream=lambda other, name=name: waits.append((name, other.name)))
        for handle, name in ((0, "first"), (5, "second"))
    }
    current = 0
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current])
    turns = Turns(torch.device("cuda:0"))
    for current in (0, 0, 5, 5, 0):  # noqa: B007
        turns.take()
    assert waits == [("second", "first"), ("first", "second")]


@pytest.mark.gpu
def test_a_graph_writes_to_no_memory_but_its_own_after_others_went() -> None:
    """cuBLAS' scratch memory is kept by stream: of a graph that went, until `torch.compile` records one of its own."""
    device = GPU
    # Few results of long sums: they are computed in pieces, in scratch memory.
    weights = [torch.randn(size, 32, dtype=torch.float16, device=device) for size in (8192, 16384, 65536)]
    inputs = {f"x{i}": torch.randn(8, len(w), dtype=torch.float16, device=device) for i, w in enumerate(weights)}

    def model(**given: torch.Tensor) -> list[torch.Tensor]:
        return [one @ weight for one, weight in zip(given.values(), weights, strict=True)]

    gone = CapturedModule(model, device)
    gone(**inputs)
    del gone
    gc.collect()
    kept = CapturedModule(model, device)
    expected = kept(**inputs)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    of_others = [
        torch.full((size << 20,), 7, dtype=torch.uint8, device=device) for size in (1, 8, 32) for _ in range(20)
    ]
    torch.testing.assert_close(kept(**inputs), expected)
    assert all(bool((tensor == 7).all()) for tensor in of_others)


@pytest.mark.gpu
def test_callers_on_streams_of_their_own_take_turns() -> None:
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
    found = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):  # type: ignore[no-untyped-call]
            found.append(call(x=x))
    torch.cuda.synchronize(GPU)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)
