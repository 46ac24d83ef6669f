"""Tests of the `cuda` backend on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accel import capture
from accel.artifact import Artifact
from accel.backends import registry
from accel.config import SessionOptions
from accel.errors import ConfigError, InputError, SessionError
from accel.interfaces.protocols import OpenRequest, Session
from accel.interfaces.specs import DeviceSpec
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.testing.conformance import BackendConformance
from accel.testing.generative_models import save_generator
from accel.testing.models import rescale, tiny_model
from tests.devices import GPU

pytestmark = pytest.mark.gpu

Open = Callable[..., Session]
DEVICE = DeviceSpec.parse(str(GPU))


class TestCuda(BackendConformance):
    backend = "cuda"
    device = str(GPU)

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        """Return a float32 decoder artifact. Its attention is computed with basic operators."""
        return export(save_generator(folder.parent / "llama", "llama"), folder)


class TestCudaGraphs(TestCuda):
    """Conformance tests with a float16 decoder, whose decoding step runs as one CUDA graph."""

    tolerance = 0.15  # float16 rounding error for logits of up to 70

    def stateful_artifact(self, folder: Path) -> Artifact | None:
        exported = super().stateful_artifact(folder.parent / "float32")
        return optimize(exported, folder, backend="cuda", level="O4")


@pytest.fixture
def open_on_gpu() -> Iterator[Open]:
    opened: list[Session] = []

    def get(artifact: Artifact, session: SessionOptions | None = None, **options: object) -> Session:
        backend = registry.load(registry.describe("cuda"))
        sessions = backend.open(
            artifact, OpenRequest(device=DEVICE, options=options, session=session or SessionOptions())
        )
        opened.extend(sessions.values())
        return sessions["model"]

    yield get
    for session in opened:
        session.close()


@pytest.fixture(scope="module")
def fused(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """Return a function that returns an artifact optimized for CUDA. The function creates each artifact at its first
    use.
    """
    root = tmp_path_factory.mktemp("fused")
    artifacts: dict[tuple[str, str, str], Artifact] = {}

    def get(family: str = "bert", task: str = "text-classification", level: str = "O2") -> Artifact:
        key = (family, task, level)
        if key not in artifacts:
            artifacts[key] = optimize(tiny_artifact(family, task), root / "-".join(key), backend="cuda", level=level)
        return artifacts[key]

    return get


def feeds_of(artifact: Artifact, batch: int, sequence: int, seed: int = 0) -> dict[str, torch.Tensor]:
    sizes = {"batch": batch, "sequence": sequence}
    return capture.feeds_for(artifact.components[0].inputs, sizes, seed=seed, folder=artifact.path)


def on_gpu(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(GPU) for name, tensor in feeds.items()}


def on_cpu(artifact: Artifact, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    backend = registry.load(registry.describe("cpu"))
    session = backend.open(artifact, OpenRequest(device=DeviceSpec("cpu")))["model"]
    return session.run({name: tensor.cpu() for name, tensor in feeds.items()})


def difference(outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    return max(float((outputs[name].cpu().float() - expected[name].float()).abs().max()) for name in expected)


def masks(feeds: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield copies of the inputs with every kind of padding. Padding on the right is used for the first copy, the last
    copy, and some copies between them.
    """
    sequence = feeds["attention_mask"].shape[1]
    right = feeds["attention_mask"]
    hole = torch.ones_like(right)
    hole[0, sequence // 3 : sequence // 2] = 0
    single = right.clone()
    single[-1, 1:] = 0
    kinds = [("right", right), ("full", torch.ones_like(right)), ("left", right.flip(1)), ("right", right)]
    kinds += [("hole", hole), ("full", torch.ones_like(right)), ("single", single), ("right", right)]
    for kind, mask in kinds:
        yield kind, {**feeds, "attention_mask": mask}


@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
@pytest.mark.parametrize("graphs", [0, 4])
def test_any_padding_gives_correct_results(
    fused: Callable[..., Artifact],
    tiny_artifact: Callable[..., Artifact],
    open_on_gpu: Open,
    task: str,
    graphs: int,
    where: str,
) -> None:
    """Results are correct even if the padding differs from the previous call. The session tries the execution plan of
    the previous call first.
    """
    session = open_on_gpu(fused("bert", task), cuda_graphs=graphs)
    for _ in range(2):
        for kind, feeds in masks(feeds_of(session_artifact := tiny_artifact("bert", task), 4, 24)):
            inputs = on_gpu(feeds) if where == "gpu" else feeds
            assert difference(session.run(inputs), on_cpu(session_artifact, feeds)) < 1e-4, kind


def with_lengths(feeds: Mapping[str, torch.Tensor], fill: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the same tokens with padding on the right, in rows of random lengths."""
    batch, sequence = feeds["attention_mask"].shape
    generator = torch.Generator().manual_seed(seed)
    longest = max(2, int(2 * fill * sequence))
    lengths = torch.randint(1, longest, (batch,), generator=generator).clamp(max=sequence)
    mask = (torch.arange(sequence) < lengths[:, None]).long()
    return {**feeds, "attention_mask": mask}


@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
@pytest.mark.parametrize("graphs", [0, 4])
def test_packed_execution_gives_correct_results(
    fused: Callable[..., Artifact],
    tiny_artifact: Callable[..., Artifact],
    open_on_gpu: Open,
    task: str,
    graphs: int,
    where: str,
) -> None:
    """Results of packed execution, which skips padding tokens, are correct when the amount of padding changes between
    calls. Full batches and other masks are tested between these calls.
    """
    original = tiny_artifact("bert", task)
    session: Any = open_on_gpu(fused("bert", task, "O4"), cuda_graphs=graphs)
    full_feeds = feeds_of(original, 64, 64)
    calls = [with_lengths(full_feeds, fill, seed) for seed, fill in enumerate((0.3, 0.3, 0.3, 0.5, 0.1, 0.45, 0.3))]
    calls[4:4] = [feeds for _, feeds in masks(full_feeds)]
    for feeds in calls:
        outputs, expected = session.run(on_gpu(feeds) if where == "gpu" else feeds), on_cpu(original, feeds)
        real_tokens = feeds["attention_mask"].bool()
        for name, value in expected.items():
            output = outputs[name].cpu()
            if value.shape[:2] == real_tokens.shape:
                output, value = output[real_tokens], value[real_tokens]
            assert (output - value).abs().max() < 3e-2
    assert session._runtime.packs
    if graphs:
        plans = next(iter(session._graphs.values())).graphs
        assert len({plan.rows for plan in plans if plan.form == "packed"}) >= 2


def test_packed_execution_returns_zeros_for_padding(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    artifact = fused("bert", "feature-extraction", "O4")
    session = open_on_gpu(artifact)
    feeds = with_lengths(feeds_of(artifact, 64, 64), 0.3, 0)
    for _ in range(3):
        hidden = session.run(on_gpu(feeds))["last_hidden_state"].cpu()
    assert not hidden[feeds["attention_mask"] == 0].any()
    assert hidden[feeds["attention_mask"] == 1].any(-1).all()


def test_packing_can_be_disabled(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    artifact = fused("bert", "text-classification", "O4")
    session: Any = open_on_gpu(artifact, packing=False)
    for _ in range(3):
        session.run(on_gpu(with_lengths(feeds_of(artifact, 64, 64), 0.3, 0)))
    assert all(plan.form != "packed" for graphs in session._graphs.values() for plan in graphs.graphs)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "vit"])
@pytest.mark.parametrize(("level", "accepted"), [("O2", 1e-4), ("O4", 2e-2)])
def test_optimized_models_give_correct_results(
    fused: Callable[..., Artifact],
    tiny_artifact: Callable[..., Artifact],
    open_on_gpu: Open,
    family: str,
    level: str,
    accepted: float,
) -> None:
    task = "image-classification" if family == "vit" else "text-classification"
    original = tiny_artifact(family, task)
    artifact = fused(family, task, level)
    session = open_on_gpu(artifact)
    assert session.compute_dtype == ("float16" if level == "O4" else "float32")
    for seed in range(4):
        feeds = feeds_of(original, 3, 17, seed)
        assert difference(session.run(on_gpu(feeds)), on_cpu(original, feeds)) < accepted
    assert session.graph_count == 1  # type: ignore[attr-defined]


def test_bfloat16_gives_correct_results(
    tiny_artifact: Callable[..., Artifact], tmp_path: Path, open_on_gpu: Open
) -> None:
    original = tiny_artifact()
    artifact = optimize(original, tmp_path / "bf16", backend="cuda", level="O2", enable=("bfloat16",), atol=0.2)
    session = open_on_gpu(artifact)
    assert session.compute_dtype == "bfloat16"
    for seed in range(3):
        feeds = feeds_of(original, 3, 17, seed)
        # The tolerance is large: bfloat16 has 8 bits of mantissa, and errors grow through two layers.
        assert difference(session.run(on_gpu(feeds)), on_cpu(original, feeds)) < 0.15


def test_number_of_cuda_graphs_is_limited(
    fused: Callable[..., Artifact], tiny_artifact: Callable[..., Artifact], open_on_gpu: Open
) -> None:
    original = tiny_artifact()
    session: Any = open_on_gpu(fused(), cuda_graphs=2)
    for sequence in (4, 8, 16, 32, 4, 32):
        feeds = feeds_of(original, 2, sequence)
        for _ in range(2):
            assert difference(session.run(on_gpu(feeds)), on_cpu(original, feeds)) < 1e-4
    assert session.graph_count == 2


def test_cuda_graphs_can_be_disabled(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    session: Any = open_on_gpu(fused(), cuda_graphs=0)
    feeds = on_gpu(feeds_of(fused(), 2, 8))
    for _ in range(3):
        session.run(feeds)
    assert session.graph_count == 0


def test_unoptimized_model_replays_correctly(tiny_artifact: Callable[..., Artifact], open_on_gpu: Open) -> None:
    artifact = tiny_artifact("roberta")
    session = open_on_gpu(artifact)
    for seed in range(4):
        feeds = feeds_of(artifact, 3, 20, seed)
        assert difference(session.run(on_gpu(feeds)), on_cpu(artifact, feeds)) < 1e-4


@pytest.mark.parametrize("graphs", [0, 4])
def test_calls_are_ordered_on_the_callers_stream(
    fused: Callable[..., Artifact], open_on_gpu: Open, graphs: int
) -> None:
    """A call waits for inputs that the caller's CUDA stream is still computing, and the caller's stream waits for the
    results of the call.
    """
    artifact = fused()
    session = open_on_gpu(artifact, cuda_graphs=graphs)
    feeds = on_gpu(feeds_of(artifact, 4, 32))
    expected = [session.run(feeds)["logits"].clone() for _ in range(3)][-1]
    torch.cuda.synchronize(GPU)
    busy = torch.randn(4096, 4096, device=str(GPU))
    for stream in (torch.cuda.Stream(GPU), torch.cuda.Stream(GPU), torch.cuda.default_stream(GPU)):
        late = {name: torch.zeros_like(tensor) for name, tensor in feeds.items()}
        torch.cuda.synchronize(GPU)
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            for name, tensor in late.items():
                tensor.copy_(feeds[name])
            logits = session.run(late)["logits"]
            doubled = logits * 2
        stream.synchronize()
        assert (doubled - 2 * expected).abs().max() < 1e-4


def test_call_copies_no_data_through_host_memory(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    from torch.profiler import ProfilerActivity, profile

    artifact = fused()
    for padding, flags in (("right", 1), ("check", 2)):
        session = open_on_gpu(artifact, padding=padding)
        feeds = on_gpu(feeds_of(artifact, 4, 32))
        for _ in range(4):
            session.run(feeds)
        torch.cuda.synchronize(GPU)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
            session.run(feeds)
            torch.cuda.synchronize(GPU)
        names = [event.name for event in profiled.events()]
        assert not [name for name in names if "HtoD" in name]
        # The session copies one flag to host memory: whether all ids are within bounds. With `padding="check"`, it also
        # copies two numbers about the mask.
        assert len([name for name in names if "DtoH" in name]) == flags


@pytest.mark.parametrize("within", [False, True])
def test_inference_mode_may_change_between_calls(
    fused: Callable[..., Artifact], open_on_gpu: Open, within: bool
) -> None:
    with torch.inference_mode(within):
        session = open_on_gpu(fused())
    feeds = on_gpu(feeds_of(fused(), 2, 8))
    with torch.inference_mode():
        expected = [session.run(feeds)["logits"] for _ in range(3)][-1]
    assert (session.run(feeds)["logits"] - expected).abs().max() < 1e-4


def test_tf32_is_off_by_default(tiny_artifact: Callable[..., Artifact], open_on_gpu: Open) -> None:
    artifact = tiny_artifact()
    assert open_on_gpu(artifact).compute_dtype == "float32"
    assert open_on_gpu(artifact, use_tf32=True).compute_dtype == "tf32"


def test_sessions_share_weights(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    first, second = open_on_gpu(fused()), open_on_gpu(fused())
    assert first._runtime is second._runtime  # type: ignore[attr-defined]
    feeds = on_gpu(feeds_of(fused(), 2, 8))
    first.close()
    assert second.run(feeds)["logits"].shape[0] == 2


def test_graph_forms_share_weights(tmp_path: Path, open_on_gpu: Open) -> None:
    """Up to four forms of the graph in one session share one copy of the weights in GPU memory."""
    vocabulary, hidden = 2_000_000, 32
    model = tiny_model("bert", vocab_size=vocabulary)
    artifact = export(model, tmp_path / "onnx", task="text-classification")
    optimized = optimize(artifact, tmp_path / "fused", backend="cuda", level="O2")
    session = open_on_gpu(optimized, cuda_graphs=0)
    short, long = feeds_of(optimized, 4, 24), feeds_of(optimized, 2, 80)
    expected = [(feeds, on_cpu(optimized, feeds)) for _, feeds in (*masks(short), *masks(long))]
    session.run(on_gpu(long))
    torch.cuda.synchronize(GPU)
    free_before, _ = torch.cuda.mem_get_info(GPU)
    for feeds, answer in expected:
        assert difference(session.run(on_gpu(feeds)), answer) < 1e-4
    torch.cuda.synchronize(GPU)
    free_after, _ = torch.cuda.mem_get_info(GPU)
    # The limit leaves memory for cuBLAS and for the intermediate results of each graph form.
    assert free_before - free_after < 0.75 * 4 * vocabulary * hidden


def test_memory_limit(fused: Callable[..., Artifact], open_on_gpu: Open) -> None:
    artifact = fused()
    feeds = on_gpu(feeds_of(artifact, 64, 90))
    with pytest.raises(SessionError):
        open_on_gpu(artifact, gpu_mem_limit=1024).run(feeds)


def test_compute_dtype_is_refused_with_fix(tiny_artifact: Callable[..., Artifact], open_on_gpu: Open) -> None:
    with pytest.raises(ConfigError, match="float16"):
        open_on_gpu(tiny_artifact(), SessionOptions(compute_dtype="float16"))


def test_buckets_give_correct_results(fused: Callable[..., Artifact], tiny_artifact: Callable[..., Artifact]) -> None:
    from accel import ORTModelForSequenceClassification

    artifact, original = fused(), tiny_artifact()
    model = ORTModelForSequenceClassification.from_pretrained(
        artifact.path, backend="cuda", device=str(GPU), session_options=SessionOptions(buckets=(16, 32))
    )
    for sequence in (5, 11, 16, 17, 31):
        feeds = feeds_of(original, 2, sequence)
        logits = model(**on_gpu(feeds)).logits
        assert logits.is_cuda
        assert difference({"logits": logits}, on_cpu(original, feeds)) < 1e-4


def test_pytorch_in_cuda_graph_gives_correct_results(tiny_folder: Callable[..., Path]) -> None:
    from accel import benchmark

    result = benchmark(
        tiny_folder(), device=str(GPU), backends=["cuda"], batch=[2], sequence=[5, 9], rounds=2, calls=3, warmup=2
    )
    graph = result["PyTorch eager float32 in a CUDA graph"]
    assert graph.error is None
    assert graph.max_abs_difference <= graph.tolerance
    assert [cell.workload for cell in graph.cells] == ["2x5", "2x9"]


SHAPES = (
    *((1, 7), (1, 64), (1, 128), (2, 33), (2, 512), (3, 100), (4, 24), (4, 128)),
    *((8, 64), (8, 200), (16, 64), (16, 128), (16, 256), (32, 64)),
)


@pytest.mark.parametrize("name", ["Albert", "MegatronBert", "Bert"])
def test_every_graph_form_at_every_shape(name: str, tmp_path: Path, open_on_gpu: Open) -> None:
    """For every graph form and input shape, the error is at most three times the error of eager PyTorch in float16."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
    config = getattr(transformers, f"{name}Config")(vocab_size=120, max_position_embeddings=512, **sizes)
    model = rescale(getattr(transformers, f"{name}ForSequenceClassification")(config)).eval()
    artifact = optimize(
        export(model, tmp_path / "onnx", task="text-classification"), tmp_path / "o4", backend="cuda", level="O4"
    )
    session: Any = open_on_gpu(artifact)
    exact, eager = model.to(GPU), copy.deepcopy(model).half().to(GPU)
    ratios: dict[str, float] = {}
    for batch, sequence in SHAPES:
        lengths = torch.linspace(sequence, 1, batch).round().long() if batch > 1 else torch.tensor([sequence - 1])
        right = (torch.arange(sequence) < lengths[:, None]).long()
        for kind, mask in {"right": right, "left": right.flip(1), "none": torch.ones_like(right)}.items():
            ours = theirs = 0.0
            # Compare at least sixteen rows, because the error of the few logits of a single row is mostly random.
            for seed in range(max(1, 16 // batch)):
                feeds = on_gpu({**feeds_of(artifact, batch, sequence, seed), "attention_mask": mask})
                with torch.inference_mode():
                    expected = exact(**feeds).logits
                    theirs += float((eager(**feeds).logits - expected).square().sum())
                ours += max(float((session.run(feeds)["logits"] - expected).square().sum()) for _ in range(3))
            ratios[f"{batch}x{sequence} {kind}"] = (ours / theirs) ** 0.5
    assert max(ratios.values()) <= 3, ratios
    assert session._runtime.packs
    assert {verdict.form for verdict in session.check_forms() if verdict.passed} >= {"lengths", "full", "packed"}


def test_wrong_graph_form_is_detected_before_its_first_result(
    fused: Callable[..., Artifact],
    tiny_artifact: Callable[..., Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from accel_plugins.cuda import runtime

    right = runtime.in_form

    def wrong(path: Path, form: Any) -> bytes:
        # Simulate a wrong graph form: replace the form with row lengths by the form that ignores the attention mask.
        return right(path, "full" if form == "lengths" else form)

    monkeypatch.setattr(runtime, "in_form", wrong)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    # Create a new backend object, so that this test shares no runtime with other tests.
    backend = type(registry.load(registry.describe("cuda")))()
    artifact = fused("bert", "text-classification", "O4")
    session: Any = backend.open(artifact, OpenRequest(device=DEVICE, options={"packing": False}))["model"]
    feeds = with_lengths(feeds_of(artifact, 8, 40), 0.3, 0)
    for _ in range(3):
        assert difference(session.run(on_gpu(feeds)), on_cpu(tiny_artifact("bert"), feeds)) < 3e-2
    assert "'lengths'" in caplog.text
    assert {verdict.form: verdict.passed for verdict in session.check_forms()}["lengths"] is False
    session.close()


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("padding", ["check", "right"])
@pytest.mark.parametrize("wrong", [-100, 10**6])
def test_invalid_ids_on_gpu_raise(
    fused: Callable[..., Artifact], open_on_gpu: Open, wrong: int, padding: str, level: str
) -> None:
    artifact = fused(level=level)
    session = open_on_gpu(artifact, padding=padding)
    feeds = on_gpu(feeds_of(artifact, 4, 24))
    bad = {**feeds, "input_ids": feeds["input_ids"].index_fill(1, torch.tensor([3], device=str(GPU)), wrong)}
    with pytest.raises(InputError, match=f"contains the value {wrong}"):
        session.run(bad)
    expected = [{n: t.clone() for n, t in session.run(feeds).items()} for _ in range(3)][-1]
    # The session has captured a CUDA graph for this shape. With `padding="right"`, a call does not wait for the check
    # of its ids, so a later call reports the invalid ids.
    with pytest.raises(InputError, match="This call, or an earlier call on this GPU"):
        session.run(bad)
        assert padding == "right" or level == "O1"
        torch.cuda.synchronize(GPU)
        session.run(feeds)
    assert difference(session.run(feeds), {name: tensor.cpu() for name, tensor in expected.items()}) == 0


def test_invalid_ids_of_last_call_are_logged_at_close(
    fused: Callable[..., Artifact], open_on_gpu: Open, caplog: pytest.LogCaptureFixture
) -> None:
    session = open_on_gpu(fused(), padding="right")
    feeds = on_gpu(feeds_of(fused(), 4, 24))
    for _ in range(3):
        session.run(feeds)
    session.run({**feeds, "input_ids": feeds["input_ids"] - 10**6})
    session.close()
    assert "This call, or an earlier call on this GPU" in caplog.text
