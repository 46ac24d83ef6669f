"""Tests of the command line: its output, the stream of the output (stdout or stderr), and its exit codes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import accel
from accel import __version__
from accel.artifact import Artifact
from accel.cli import app
from accel.cli.application import command
from accel.cli.exit_codes import PIPE_CLOSED
from accel.demo import walkthrough
from accel.errors import ConfigError
from accel.interfaces.entry_points import group_of
from accel.testing.models import save_tiny

COMMANDS = ["export", "validate", "benchmark", "tune", "convert", "doctor", "demo", "cache list", "cache clear"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: accel {command}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "words", ["loadtest http://127.0.0.1:8000 --rate 5", "sizing load.json --objective-ms 50", "sizing"]
)
def test_removed_command_names_its_replacement(words: str) -> None:
    result = run(*words.split(), "--json")
    assert result.exit_code == 2
    assert "docs/guides/load-test.md" in json.loads(result.stdout)["fix"]


def test_version() -> None:
    assert run("--version").output.strip() == __version__


@pytest.fixture(scope="session")
def small_folder(shared: Callable[..., Path]) -> Path:
    """Return the folder of a transformers model with one layer, which is exported quickly."""
    return shared("distilbert-of-one-layer", lambda folder: save_tiny(folder, "distilbert", n_layers=1))


def test_export_and_validate(small_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("export", small_folder, out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["task"] == "text-classification"
    assert json.loads(result.stdout)["path"] == str(out)
    result = run("validate", out)
    assert result.exit_code == 0
    assert result.stdout.startswith("passed: largest difference from PyTorch")
    result = run("validate", out, "--atol", "1e-12", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False


def test_quantization_options(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    four = run("quantize", tiny_artifact().path, tmp_path / "four", "--scheme", "weight-int4", "--block-size", "16",
               "--algorithm", "hqq", "--asymmetric", "--json")  # fmt: skip
    assert four.exit_code == 0, four.output
    config = json.loads(four.stdout)["steps"][-1]["config"]
    assert (config["block_size"], config["algorithm"], config["symmetric"]) == (16, "hqq", False)
    tensor = run("quantize", tiny_artifact().path, tmp_path / "tensor", "--per-tensor", "--operator", "Gemm", "--json")
    assert tensor.exit_code == 0, tensor.output
    config = json.loads(tensor.stdout)["steps"][-1]["config"]
    assert (config["per_channel"], config["operators"]) == (False, ["Gemm"])
    wrong = run("quantize", tiny_artifact().path, tmp_path / "wrong", "--scheme", "weight-int4", "--block-size", "20")
    assert wrong.exit_code == 2
    assert "power of two" in wrong.stderr


def test_static_quantization_without_calibration_data(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    result = run("quantize", tiny_artifact().path, tmp_path / "static", "--scheme", "static-int8")
    assert result.exit_code == 1
    fix = "Fix: pass a file or data set with typical inputs as --calibration, or use --scheme dynamic-int8."
    assert fix in result.stderr


def test_optimize_reads_calibration_data(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("query\nlost card\nnew pin please\n", encoding="utf-8")
    options = ("--level", "O4", "--calibration", rows, "--column", "text=query", "--json")
    report = json.loads(run("optimize", tiny_artifact().path, tmp_path / "half", *options).stdout)["steps"][-1][
        "report"
    ]
    assert report["float16"]["watched"] == "calibration data"
    assert report["calibration"]["source"].endswith("rows.csv")


def test_output_to_a_pipe_gets_one_line_per_stage(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    result = run("optimize", tiny_artifact().path, tmp_path / "optimized", "--json")
    assert json.loads(result.stdout)
    assert result.stderr.splitlines() == [
        "optimizing (O2)", "comparing with the input artifact", "comparing outputs",
    ]  # fmt: skip


def test_validate_against_another_model_fails(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "bert", seed=1)
    result = run("validate", tiny_artifact().path, "--against", other)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAILED")


def test_errors_go_to_stderr_with_a_fix_or_to_stdout_as_json(tmp_path: Path) -> None:
    words = ("export", tmp_path / "nothing", tmp_path / "out")
    result = run(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: The model folder" in result.stderr
    assert "Fix:" in result.stderr
    result = run(*words, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["type"] == "ArtifactNotFoundError"


@pytest.mark.parametrize(
    ("error", "message", "fix"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/some/file"),
            "Permission denied: '/some/file'",
            "this path",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory", "--verbose"),
    ],
)
def test_system_errors_have_a_fix(error: OSError, message: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, command(as_json=False, verbose=False):
        raise error
    assert ended.value.exit_code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"Error: [Errno {error.errno}] {message}."
    assert fix in lines[1]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("pass calibration=..., or use scheme='dynamic-int8'.", "pass --calibration, or use --scheme dynamic-int8."),
        ("pass trust_remote_code=True.", "pass --trust-remote-code."),
        ("leave calibration=... (--calibration) out.", "leave calibration=... (--calibration) out."),
        ("pass no_option=...", "pass no_option=..."),
    ],
)
def test_fix_names_command_line_options(words: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), command(as_json=False, verbose=False):
        raise ConfigError("It cannot be.", fix=words)
    assert capsys.readouterr().err.splitlines()[1] == f"Fix: {shown}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("export",),
        ("export", "a", "b", "--no-such-flag"),
        ("no-such-command",),
        ("export", "a", "b", "--dtype", "fp16"),
    ],
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_doctor() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    backends = {entry["name"]: entry for entry in report["backends"]}
    assert backends["cpu"]["available"]
    assert backends["cpu"]["devices"][0]["type"] == "cpu"
    assert "torch" in report["machine"]["libraries"]
    assert "text-classification" in report["tasks"]
    assert "ONNX Runtime on the CPU" in run("doctor").stdout


def test_doctor_lists_broken_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.entry_points
    broken = metadata.EntryPoint("horoscope", "no_such_module:SPEC", group_of("tasks"))
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda group: (*real(group=group), broken) if group == group_of("tasks") else real(group=group),
    )
    report = json.loads(run("doctor", "--json").stdout)
    assert "no_such_module" in report["broken_tasks"]["horoscope"]
    assert "horoscope" not in report["tasks"]
    assert "no  The task 'horoscope' cannot be imported" in run("doctor").stdout


def test_files_of_an_interrupted_cache_clear_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    begun = [tmp_path / ".accel-staging-0", tmp_path / "exports" / ".accel-staging-1"]
    for folder in begun:
        folder.mkdir(parents=True)
        (folder / "half").write_text("an entry")
    assert run("cache", "clear").exit_code == 0
    assert not any(folder.exists() for folder in begun)


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_folder: Path) -> None:
    import accel

    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    assert run("cache", "list").stdout.strip() == "The cache is empty."
    accel.ORTModelForSequenceClassification.from_pretrained(small_folder)
    entries = json.loads(run("cache", "list", "--json").stdout)
    assert len(entries) == 1
    assert entries[0]["bytes"] > 10_000
    wrong = run("cache", "clear", "nothing-like-it")
    assert wrong.exit_code == 2
    assert "no entry whose name starts with 'nothing-like-it'" in wrong.output
    search = tmp_path / "tune" / "artifacts" / "abc"
    search.mkdir(parents=True)
    (search / "model.onnx").write_bytes(b"0" * 1000)
    (tmp_path / "tune" / "screens").mkdir()
    (tmp_path / "tune" / "screens" / "def.json").write_text("{}")
    listed = json.loads(run("cache", "list", "--json").stdout)[-1]
    assert (listed["name"], listed["what"], listed["bytes"]) == ("tune", "searches: 1 artifacts, 1 results", 1002)
    assert "tune  (searches" in run("cache", "list").stdout
    assert [entry["name"] for entry in json.loads(run("cache", "clear", "tune", "--json").stdout)["removed"]] == [
        "tune"
    ]
    assert not (tmp_path / "tune").exists()
    assert len(json.loads(run("cache", "clear", "--json").stdout)["removed"]) == 1
    assert run("cache", "list").stdout.strip() == "The cache is empty."


def test_demo_prints_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check only the printed report, with a replacement for the demo. Another test runs the real demo."""
    folders: list[Path | None] = []
    report = walkthrough.DemoReport(
        rows=(), max_abs_difference=0.0, queries=3080, shape=(1, 16), threads=1, seconds=0.0
    )
    monkeypatch.setattr(walkthrough, "run", lambda out: folders.append(out) or report)
    result = run("demo", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["queries"] == 3080
    assert folders == [tmp_path / "out"]


def test_benchmark_prints_lines_and_writes_a_page(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    few = ("--rounds", 2, "--calls", 2, "--warmup", 0, "--threads", 1, "-s", 7)
    result = run("benchmark", tiny_artifact().path, "--report", page, "--json", *few)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [cell["workload"] for cell in values["variants"][1]["cells"]] == ["1x7"]
    assert "<svg" in page.read_text()


def test_benchmark_with_a_failing_variant_exits_with_1(tiny_artifact: Callable[..., Artifact]) -> None:
    few = ("--rounds", 1, "--calls", 1, "--warmup", 0, "--threads", 1, "-s", 7)
    result = run("benchmark", tiny_artifact().path, "--atol", "1e-12", *few)
    assert result.exit_code == 1
    assert "failed: " in result.stdout
    assert "[PyTorch eager float32] mean=" in result.stdout


def test_unwritable_report_page_is_refused_before_measuring(
    tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    result = run("benchmark", tiny_artifact().path, "--report", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


@pytest.mark.thorough
def test_convert_writes_artifacts_and_a_report(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = ("--nb-measures", 4, "--warmup", 0, "--threads", 1, "-s", 7, "--optimize", "none")
    result = run("convert", "-m", tiny_folder(), out, "--backend", "cpu", "--quantize", "dynamic-int8", *few)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {"onnx", "onnx-dynamic-int8", "benchmark.json", "report.html"}
    assert Artifact.load(out / "onnx-dynamic-int8").manifest.quantization is not None
    assert "mean=" in result.stdout


def test_convert_with_scheme_writes_only_the_quantized_artifact(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = tiny_folder(), tmp_path / "out"
    result = run("convert", folder, out, "--scheme", "weight-int8")
    assert result.exit_code == 0, result.output
    artifact = Artifact.load(out)
    assert [step.stage for step in artifact.manifest.steps] == ["export", "optimize", "quantize"]
    assert artifact.manifest.quantization is not None
    assert artifact.manifest.quantization.scheme == "weight-int8"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    exported = accel.export(folder, tmp_path / "1")
    steps = accel.quantize(accel.optimize(exported, tmp_path / "2"), tmp_path / "3", scheme="weight-int8")
    for name in ("model.onnx", "model.onnx.data"):
        assert (out / name).read_bytes() == (steps.path / name).read_bytes()


@pytest.mark.parametrize(
    "flags", [("--quantize", "dynamic-int8"), ("-s", 7), ("--warmup", 1), ("--backend", "cpu", "--backend", "openvino")]
)
def test_convert_with_scheme_refuses_flags_that_it_does_not_use(
    flags: tuple[object, ...], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    result = run("convert", tiny_folder(), tmp_path / "out", "--scheme", "weight-int8", *flags)
    assert result.exit_code == 2
    assert "--scheme writes one folder and times nothing, so it cannot be used with" in result.stderr


def test_convert_refuses_unknown_options(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert run("convert", tiny_folder(), tmp_path / "out", "--fp16").exit_code == 2
    result = run("convert", tiny_folder(), tmp_path / "out", "--quantize", "int3")
    assert result.exit_code == 2
    assert "No installed backend can quantize with the scheme 'int3'" in result.stderr
    assert run("convert", tiny_folder()).exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [("--temperature", 0), ("--top-p", 2), ("--top-k", -3), ("--num-beams", 0)])
def test_invalid_sampling_options_are_refused(wrong: tuple[str, object], tmp_path: Path) -> None:
    result = run("generate", tmp_path, "--prompt", "x", "--sample", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output


def _shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command line in which `accel` is this Python's `accel` command. The exit code of a pipe is the exit
    code of `accel`.
    """
    script = f'set -o pipefail; accel() {{ {shlex.quote(sys.executable)} -m accel "$@"; }}; {words}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "", **environment},
    )  # fmt: skip


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no /dev/full, a device on which every write fails"
)
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--version", ""),
        *(
            pytest.param(words, unbuffered, marks=pytest.mark.thorough)
            for words, unbuffered in itertools.product(
                ("doctor --json", "--version", "doctor --help", "export ./nowhere out --json"), ("", "1")
            )
            if (words, unbuffered) != ("--version", "")
        ),
    ],
)
def test_output_to_full_disk_gives_one_error(words: str, unbuffered: str) -> None:
    done = _shell(f"accel {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["Error", "Fix"]
    assert "No space left" in done.stderr


@pytest.mark.parametrize("words", ["--version", pytest.param("doctor --json", marks=pytest.mark.thorough)])
def test_closed_output_gives_one_error(words: str) -> None:
    done = _shell(f"accel {words} >&-")
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["Error", "Fix"]


@pytest.mark.parametrize("words", ["doctor --help", pytest.param("doctor --json", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.thorough)])
def test_closed_pipe_ends_the_command_quietly(words: str, unbuffered: str) -> None:
    # The reader of the pipe closes its end before the command writes any output.
    done = _shell(f"accel {words} | exec 0<&-", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == PIPE_CLOSED
    assert done.stderr == ""


def test_closed_standard_error_is_accepted() -> None:
    done = _shell("accel --version 2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("options", [("--ssl-certfile",), ("--ssl-keyfile",), ("--ssl-certfile", "--ssl-keyfile")])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_invalid_certificates_are_refused(
    options: tuple[str, ...], content: str | None, tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    result = run("serve", tiny_artifact().path, "--port", 0, *(word for option in options for word in (option, file)))
    assert result.exit_code == 2
    assert "Error: The TLS certificate" in result.stderr
    assert "Fix: " in result.stderr
