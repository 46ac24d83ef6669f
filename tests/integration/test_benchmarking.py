"""Tests of `benchmark`, which measures each model variant in a separate process: the results, and the failures of
single variants.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel import benchmark
from accel.artifact import Artifact
from accel.errors import ConfigError
from accel.measuring.latency.benchmark import Baselines
from accel.measuring.latency.variants import Variant
from accel.measuring.processes import HelperProcess
from accel.measuring.report import html_page, write_png
from accel.stages.resolution import resolve

FEW = {"processes": 1, "rounds": 2, "calls": 3, "warmup": 1, "threads": 1}


@pytest.fixture(scope="module")
def benchmark_result(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]):
    """Return the benchmark of four variants: PyTorch, a correct artifact, an artifact of another model, and a variant
    that cannot be loaded.
    """
    artifact = tiny_artifact().path
    variants = [
        Variant(name="PyTorch eager float32", path=tiny_folder(), task="text-classification", backend="pytorch"),
        Variant(name="good", path=artifact, task="text-classification"),
        Variant(name="wrong", path=tiny_artifact("distilbert").path, task="text-classification"),
        Variant(name="absent", path=artifact / "nothing", task="text-classification"),
    ]
    return benchmark(variants, sequence=[5, 9], batch=[2], **FEW)


def test_correct_variant_is_measured(benchmark_result) -> None:
    good = benchmark_result["good"]
    assert good.error is None
    assert good.max_abs_difference < good.tolerance
    assert (good.backend, good.compute_dtype, good.threads) == ("cpu", "float32", 1)
    assert good.bytes > 10_000
    assert good.peak_memory_bytes > 50e6
    assert good.load_s > 0
    assert [cell.workload for cell in good.cells] == ["2x5", "2x9"]
    cell = good.cells[0]
    assert cell.latency.calls == 6
    assert [len(block) for block in cell.milliseconds] == [3, 3]
    assert cell.latency.min <= cell.latency.median <= cell.latency.p95 <= cell.latency.p99 <= cell.latency.max
    assert cell.ratio.low <= cell.ratio.value <= cell.ratio.high
    assert good.agreement == 1.0


def test_benchmark_result_is_pickled_and_copied(benchmark_result) -> None:
    for other in (pickle.loads(pickle.dumps(benchmark_result)), copy.deepcopy(benchmark_result)):
        assert str(other) == str(benchmark_result)


def test_processes_share_the_rounds(tiny_artifact: Callable[..., Artifact]) -> None:
    result = benchmark(tiny_artifact(), sequence=[5], **{**FEW, "processes": 2, "rounds": 3})
    assert result.settings["processes"] == 2
    for variant in result.variants:
        assert [len(block) for block in variant.cells[0].milliseconds] == [3, 3, 3]
        assert variant.cells[0].ratio is not None


def test_generation_is_timed_to_first_and_last_token(generator: Callable[..., Artifact]) -> None:
    artifact = generator("gpt2")
    result = benchmark(artifact, sequence=[6], new_tokens=8, **{**FEW, "rounds": 1, "calls": 2})
    for variant in result.variants:
        first, last = variant.cells
        assert (first.workload, last.workload) == ("1x6+1", "1x6+8")
        assert first.tokens_per_s is None
        # On a busy machine, generating one token may take longer than generating eight tokens.
        elapsed = last.latency.median - first.latency.median
        assert last.tokens_per_s == (pytest.approx(7000 / elapsed) if elapsed > 0 else None)
        assert ("tokens/s" in variant.lines()[1]) == (elapsed > 0)
    assert result.variants[1].max_abs_difference < result.variants[1].tolerance
    with pytest.raises(ConfigError, match="at least 2"):
        benchmark(artifact, new_tokens=1, **FEW)


def test_variant_with_wrong_outputs_is_not_timed(benchmark_result) -> None:
    assert "outputs differ from the outputs of the baseline" in benchmark_result["wrong"].error
    assert benchmark_result["wrong"].cells == ()


def test_failed_variant_does_not_stop_other_variants(benchmark_result) -> None:
    assert benchmark_result["absent"].error is not None
    assert len(benchmark_result["PyTorch eager float32"].cells) == 2


def test_result_lines_have_the_format_of_transformer_deploy(benchmark_result) -> None:
    line = benchmark_result["good"].lines()[0]
    assert line.startswith("[good] mean=")
    for word in ("sd=", "min=", "max=", "median=", "95p=", "99p="):
        assert word in line


def test_html_page_loads_nothing_from_the_network(benchmark_result) -> None:
    page = html_page(benchmark_result.to_dict())
    assert "http" not in page
    assert "<script" not in page
    assert "Not measured" in page
    assert "outputs differ" in page
    assert "2x9" in page


def test_png_without_matplotlib_names_the_extra(
    benchmark_result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="matplotlib") as info:
        write_png(benchmark_result.to_dict(), tmp_path / "x.png")
    assert "report" in str(info.value)


def test_texts_with_tokenizer_and_callers(tiny_folder, tiny_artifact, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("hello world\n\na much longer line of words than the first\nthird\n", encoding="utf-8")
    tiny_artifact()
    excluded = benchmark(tiny_artifact(), texts=texts, batch=[1], **FEW)
    sizes = excluded.settings["lengths"]["1 of texts.txt"]
    assert sizes["min"] < sizes["max"]
    included = benchmark(tiny_artifact(), texts=texts, tokenize=True, batch=[2], callers=2, rate=500.0, **FEW)
    assert included.settings["tokenizer"] == "included"
    assert all(variant.error is None for variant in included.variants)
    assert included.variants[1].cells[0].latency.calls == 6


def _die() -> None:
    os._exit(7)


def test_terminated_process_is_reported(tiny_artifact) -> None:
    from accel.errors import SessionError
    from accel.measuring.latency.worker import VariantProcess

    worker = VariantProcess(Variant(name="doomed", path=tiny_artifact().path, task="text-classification"), 1)
    try:
        worker.load()
        with pytest.raises(SessionError, match=r"The process of doomed ended unexpectedly \(exit code 7\)"):
            worker.call(_die)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": [0]}, "batch is"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rate": -1.0}, "rate is"),
        ({"pytorch": ["int3"]}, "dtype"),
        ({"tokenize": True}, "no texts were passed"),
    ],
)
def test_invalid_settings_raise(tiny_folder, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        benchmark(tiny_folder(), **settings)


def test_sequence_above_number_of_positions_raises(tiny_artifact) -> None:
    with pytest.raises(ConfigError, match="position embeddings"):
        benchmark(tiny_artifact(), sequence=[100_000], **FEW)


def test_cuda_graph_without_gpu_is_reported(tiny_artifact) -> None:
    result = benchmark(tiny_artifact(), cuda_graph=["float32"], sequence=[5], **FEW)
    graph = result["PyTorch eager float32 in a CUDA graph"]
    assert "needs an NVIDIA GPU" in graph.error
    assert result.variants[0].cells


def test_gpu_baselines_include_cuda_graphs(tiny_folder) -> None:
    model = resolve(tiny_folder())

    def captured(baselines: Baselines, device: str | None) -> list[str]:
        all_variants = baselines.variants(model, device)
        return [variant.name for variant in all_variants if (variant.provider_options or {}).get("cuda_graph")]

    assert captured(Baselines(eager=("float32", "float16")), "cuda:0") == [
        "PyTorch eager float32 in a CUDA graph",
        "PyTorch eager float16 in a CUDA graph",
    ]
    assert not captured(Baselines(), None)


@pytest.mark.thorough
def test_script_needs_no_main_guard(tiny_artifact, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    how = "sequence=[5], rounds=1, calls=1, warmup=0, threads=1"
    script.write_text(f"import accel\nprint(len(accel.benchmark({str(tiny_artifact().path)!r}, {how}).variants))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "Traceback" not in done.stderr, "the end of a process is quiet, too"


def _nothing() -> None: ...


@pytest.mark.skipif(sys.platform != "linux", reason="accel forks processes only on Linux")
def test_helper_processes_start_in_a_forked_child() -> None:
    """A forked child inherits the cleanup functions of its parent's helper processes. These functions must not fail in
    the child.
    """
    for _ in range(2):
        helper = HelperProcess()
        assert helper.call(os.getpid) != os.getpid()
        helper.close()
        child = multiprocessing.get_context("fork").Process(target=_nothing)
        child.start()
        child.join()
