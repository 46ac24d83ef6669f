"""Tests of offline inference: results equal the engine's results, and each row is written exactly once, also if the
process is killed.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import accel
from accel.artifact.atomic_folder_writing import locked_file
from accel.cli import app
from accel.errors import ConfigError, InputError, IntegrityError, OutputFolderError
from accel.serving.batch.batch_run import batch
from accel.serving.engine import Engine
from accel.testing.generative_models import save_generator

TEXTS = ["where is my card", "help", "my top up failed", "what is the exchange rate", "pay"]


def rows_file(path: Path, count: int = 20) -> Path:
    path.write_text("".join(json.dumps({"id": f"n{i}", "text": f"{TEXTS[i % 5]} {i}"}) + "\n" for i in range(count)))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "rows.jsonl")


@pytest.fixture
def model(served: Callable[[str], accel.ORTModel]) -> accel.ORTModel:
    return served("text-classification")


def read(folder: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = parquet.read_table(folder).to_pydict()
    return columns


PAIRED = {"text-classification": {"text": TEXTS[0], "text_pair": TEXTS[1]}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    # For each operation, the table has the task of the model, a row of the data, options, and a function that converts
    # the engine's result to output columns.
    "text-classification": (
        "text-classification", {"text": TEXTS[0]}, {}, lambda result: {"label": result[0]["label"], "score": result[0]["score"]},
    ),
    "token-classification": (
        "token-classification", {"text": TEXTS[0]}, {},
        lambda result: {"entities": [{key: part[key] for key in ("entity", "score", "word", "start", "end")} for part in result]},
    ),
    "question-answering": ("question-answering", {"question": TEXTS[1], "context": TEXTS[2]}, {}, dict),
    "zero-shot-classification": (
        "zero-shot-classification", {"text": TEXTS[0]}, {"candidate_labels": ["bank", "sport"]},
        lambda result: {"label": result["labels"][0], "score": result["scores"][0], "labels": result["labels"], "scores": result["scores"]},
    ),
    "fill-mask": (
        "fill-mask", {"text": "where is my [MASK]"}, {"top_k": 2},
        lambda result: {"fills": [{"mask": 0, **{key: part[key] for key in ("token_str", "token", "score")}} for part in result]},
    ),
    "embed": ("sentence-similarity", {"text": TEXTS[0]}, {"normalize_embeddings": True}, lambda result: {"embedding": result}),
    "feature-extraction": ("sentence-similarity", {"text": TEXTS[0]}, {}, lambda result: {"features": result[0]}),
    "rank": (
        "rank", {"query": TEXTS[0], "documents": TEXTS[1:]}, {},
        lambda result: {"scores": [part["score"] for part in sorted(result, key=lambda part: part["corpus_id"])]},
    ),
    "tokenize": (
        "text-classification", {"text": TEXTS[0]}, {},
        lambda result: {"ids": [part["id"] for part in result[0]], "tokens": [part["text"] for part in result[0]]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", CASES)
def test_results_of_each_operation_equal_the_engines(
    operation: str, served: Callable[[str], accel.ORTModel], tmp_path: Path
) -> None:
    task, row, options, columns = CASES[operation]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    model = served(task)
    done = batch(model, path, tmp_path / "out", operation=operation, options=options)
    with Engine(model) as engine:
        inputs = [row["text"]] if operation == "tokenize" else row.get("text", row)
        if operation == "rank":
            inputs = (row["query"], row["documents"])
        expected = columns(engine.run(inputs, operation=operation, **options))
    results = parquet.read_table(tmp_path / "out").to_pylist()
    assert (done.operation, done.rows, done.broken) == (operation, 2, 0)
    for result, number in zip(results, (0, 1), strict=True):
        assert (result.pop("row"), result.pop("error")) == (number, None)
        assert set(result) == set(expected)
        for name, value in result.items():
            _assert_close(value, expected[name])


def _assert_close(actual: Any, expected: Any) -> None:
    if isinstance(actual, list) and actual and isinstance(actual[0], dict):
        for item, other in zip(actual, expected, strict=True):
            for key in item:
                _assert_close(item[key], other[key])
    elif isinstance(actual, float | list) and not (isinstance(actual, list) and actual and isinstance(actual[0], str)):
        # The engine and the offline run put the rows into different batches, so float32 sums are rounded differently.
        np.testing.assert_allclose(np.array(actual), np.array(expected), rtol=1e-4, atol=1e-5)
    else:
        assert actual == expected


def test_generated_rows_equal_single_generations(shared: Callable[..., Path], tmp_path: Path) -> None:
    folder = shared("generator-llama", lambda out: save_generator(out, "llama"))
    model = accel.ORTModel.from_pretrained(folder, backend="pytorch")
    options = {"max_new_tokens": 5}
    batch(model, rows_file(tmp_path / "rows.jsonl", 6), tmp_path / "out", options=options, rows_a_part=4)
    columns = read(tmp_path / "out")
    with accel.GenerationEngine(model) as engine:
        alone = [engine(f"{TEXTS[i % 5]} {i}", accel.GenerationOptions(max_new_tokens=5)).text for i in range(6)]
    model.close()
    assert columns["text"] == alone
    assert columns["new_tokens"] == [5] * 6


def test_text_pairs_and_several_labels(model: accel.ORTModel, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\nhelp,where is my card\n")
    batch(model, path, tmp_path / "out", columns={"text": "a", "text_pair": "b"}, options={"top_k": 2})
    with Engine(model) as engine:
        expected = engine.run({"text": "help", "text_pair": "where is my card"}, top_k=2)
    (labels,) = read(tmp_path / "out")["labels"]
    assert [label["label"] for label in labels] == [label["label"] for label in expected]
    _assert_close(labels, expected)


def test_output_files_contain_rows_in_order_with_kept_columns(
    model: accel.ORTModel, rows: Path, tmp_path: Path
) -> None:
    done = batch(model, rows, tmp_path / "out", rows_a_part=8, keep=["id"], format="jsonl")
    names = sorted(path.name for path in (tmp_path / "out").glob("rows-*"))
    assert names == [f"rows-{a:012d}-{b:012d}.jsonl" for a, b in ((0, 7), (8, 15), (16, 19))]
    results = [json.loads(line) for name in names for line in (tmp_path / "out" / name).read_text().splitlines()]
    assert [(result["row"], result["id"]) for result in results] == [(i, f"n{i}") for i in range(20)]
    assert (done.rows, done.computed, done.parts) == (20, 20, 3)


def test_only_missing_parts_are_computed(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"rows_a_part": 4, "on_error": "stop"}
    batch(model, rows, tmp_path / "out", **arguments)
    before = read(tmp_path / "out")
    (tmp_path / "out" / "rows-000000000004-000000000007.parquet").unlink()
    # Simulate a process that was killed while it wrote the record of a second part, and while it wrote a file.
    record = tmp_path / "out" / "_done.jsonl"
    record.write_bytes(record.read_bytes()[:-20])
    (tmp_path / "out" / ".part-rows-left").write_bytes(b"half")
    done = batch(model, rows, tmp_path / "out", **arguments | {"on_error": "record"})
    assert done.computed == 8
    after = read(tmp_path / "out")
    assert after["row"] == list(range(20))
    assert after["label"] == before["label"]
    assert not list((tmp_path / "out").glob(".part-*"))
    assert batch(model, rows, tmp_path / "out", **arguments).computed == 0


@pytest.mark.parametrize("changed", ["data", "options", "columns", "model", "rows_a_part"])
def test_run_with_other_arguments_is_refused(
    changed: str, served: Callable[[str], accel.ORTModel], rows: Path, tmp_path: Path
) -> None:
    model, arguments = served("text-classification"), {"rows_a_part": 8}
    batch(model, rows, tmp_path / "out", **arguments)
    changes: dict[str, dict[str, Any]] = {
        "options": {"options": {"function_to_apply": "sigmoid"}},
        "columns": {"columns": {"text": "id"}},
        "rows_a_part": {"rows_a_part": 4},
    }
    if changed == "data":
        rows.write_text(rows.read_text().replace("help", "HELP"))
    other = served("rank") if changed == "model" else model
    with pytest.raises(ConfigError, match=f"{changed}.* was .* and is .* now"):
        batch(
            other,
            rows,
            tmp_path / "out",
            **{"operation": "text-classification", **arguments, **changes.get(changed, {})},
        )


def test_run_with_other_parts_is_refused(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    """Continuing a run of an earlier version raises an error. Earlier versions started a new part at each input file."""
    batch(model, rows, tmp_path / "out", rows_a_part=8)
    record = tmp_path / "out" / "_done.jsonl"
    record.write_text(record.read_text().replace('"start": 8', '"start": 9'))
    with pytest.raises(ConfigError, match="divided the rows into parts differently"):
        batch(model, rows, tmp_path / "out", rows_a_part=8)


def test_folders_with_other_files_are_refused(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match="not written by `accel batch`"):
        batch(model, rows, tmp_path / "out")


def test_two_processes_do_not_write_to_one_folder(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    with locked_file(tmp_path / "out" / "_lock"), pytest.raises(OutputFolderError, match="Another process is writing"):
        batch(model, rows, tmp_path / "out")


def test_changed_part_raises(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    batch(model, rows, tmp_path / "out", format="jsonl")
    part = next((tmp_path / "out").glob("rows-*"))
    part.write_text(part.read_text().replace("n1", "n2") + "\n")
    with pytest.raises(IntegrityError, match="was changed after"):
        batch(model, rows, tmp_path / "out", format="jsonl")


BAD = '{"text": "help"}\n{"text": null}\n{"text": 3}\n{"text": "%s"}\n{"text": "pay"}\n' % ("help " * 3000)


@pytest.mark.parametrize("name", ["_batch.json", "_done.jsonl"])
@pytest.mark.parametrize("content", ["{", '{"number": 1}\n'])
def test_invalid_record_raises(name: str, content: str, model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    batch(model, rows, tmp_path / "out")
    (tmp_path / "out" / name).write_text(content + "\n")
    with pytest.raises((IntegrityError, ConfigError), match="is damaged|a different run"):
        batch(model, rows, tmp_path / "out")


def test_run_continues_after_a_full_disk(
    model: accel.ORTModel, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync
    writes_left = [7]

    def full(descriptor: int) -> None:
        writes_left[0] -= 1
        if writes_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    out = tmp_path / "out"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputFolderError, match="No space left on device"):
        batch(model, rows, out, rows_a_part=4)
    monkeypatch.undo()
    assert not [*out.glob(".part-*")]
    done = batch(model, rows, out, rows_a_part=4)
    assert 0 < done.computed < done.rows == 20
    assert read(out)["row"] == list(range(20))


def test_output_path_that_is_a_file_is_refused(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    for out in (rows, rows / "below"):
        with pytest.raises(OutputFolderError):
            batch(model, rows, out)


def test_bytes_cannot_be_kept_in_json(model: accel.ORTModel, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["help"], "image": [b"1"]}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match="contains bytes"):
        batch(model, tmp_path / "rows.parquet", tmp_path / "out", keep=["image"], format="jsonl")


def test_invalid_row_stops_the_run(model: accel.ORTModel, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(BAD)
    with pytest.raises(InputError, match=r"Row 1 of the data cannot be processed: 'text' is missing") as error:
        batch(model, tmp_path / "rows.jsonl", tmp_path / "out")
    assert "--on-error record" in str(error.value)
    assert not list((tmp_path / "out").glob("rows-*"))


def test_invalid_rows_are_recorded(model: accel.ORTModel, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(BAD)
    done = batch(model, tmp_path / "rows.jsonl", tmp_path / "out", on_error="record")
    columns = read(tmp_path / "out")
    assert (done.rows, done.broken) == (5, 3)
    assert [label is None for label in columns["label"]] == [False, True, True, True, False]
    assert columns["error"][1:3] == ["'text' is missing", "'text' is 3, not a text"]
    assert "accepts at most" in columns["error"][3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "embed"}, "does not support the operation 'embed'"),
        ({"keep": ["nothing"]}, "keep include 'nothing'"),
        ({"keep": ["score"]}, "already has columns"),
        ({"format": "xlsx"}, "not a supported format"),
        ({"on_error": "ignore"}, "on_error"),
        ({"rows_a_part": 0}, "rows_a_part is 0"),
        ({"options": {"top_k": 0}}, "top_k is 0"),
        ({"options": {"top_k": "x"}}, "top_k is 'x'"),
    ],
)
def test_invalid_arguments_are_refused_before_reading_rows(
    arguments: dict[str, Any], message: str, model: accel.ORTModel, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "help", "score": 1}\n')
    with pytest.raises((ConfigError, InputError), match=message):
        batch(model, path, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_command_prints_a_report(tiny_folder: Callable[..., Path], rows: Path, tmp_path: Path) -> None:
    arguments = [
        "batch",
        str(tiny_folder("bert", "text-classification")),
        "--data",
        str(rows),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--backend", "pytorch", "--keep", "id", "--option", "truncation=true", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["computed"] == 20
    assert read(tmp_path / "out")["id"] == [f"n{i}" for i in range(20)]


KILLED = """
import os, signal, sys
from accel.serving.batch import ledger
from accel.serving.batch.batch_run import batch
import accel.models.pipelines.pipeline, transformers.models.bert.modeling_bert

model, data, out = sys.argv[1:]
settled = os.fsync
def run(point):
    left = point
    def fsync(descriptor):
        # The moments around which files become complete: before, between and after their names are changed.
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        settled(descriptor)
    os.fsync = fsync
    batch(model, data, out, rows_a_part=4, backend="pytorch")

kills = 0
for point in range(1, 40):
    child = os.fork()
    if child == 0:
        import torch
        torch.set_num_threads(1)
        try:
            run(point)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status)) if os.WEXITSTATUS(status) else None
        print(kills)
        break
    kills += 1
"""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks processes, which this system does not support")
def test_run_killed_at_each_write_contains_each_row_once(
    tiny_folder: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    model = tiny_folder("bert", "text-classification")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(model), str(rows), str(tmp_path / "killed")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Each process was killed one write later than the process before it, until one process finished.
    assert int(done.stdout) >= 5
    batch(model, rows, tmp_path / "whole", rows_a_part=4, backend="pytorch")
    killed, complete = read(tmp_path / "killed"), read(tmp_path / "whole")
    assert killed["row"] == list(range(20))
    assert killed["label"] == complete["label"]
    assert killed["score"] == pytest.approx(complete["score"], abs=1e-5)
    assert sorted(path.name for path in (tmp_path / "killed").glob("rows-*")) == sorted(
        path.name for path in (tmp_path / "whole").glob("rows-*")
    )


@pytest.mark.parametrize("command", ["batch", "serve"])
def test_missing_ray_names_the_extra(command: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    more = ["--data", str(rows), "--out", str(tmp_path / "out")] if command == "batch" else ["--port", "0"]
    done = CliRunner().invoke(app, [command, "model", "--ray", *more])
    assert done.exit_code == 1
    assert "accel-transformers[ray]" in done.output


@pytest.mark.parametrize("on_error", ["stop", "record"])
def test_unknown_option_stops_the_run(on_error: Any, model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no option 'topk'") as caught:
        batch(model, rows, tmp_path / "out", options={"topk": 3}, on_error=on_error)
    assert "Row" not in str(caught.value)
    assert "on-error" not in str(caught.value.fix)
    done = batch(model, rows, tmp_path / "out", options={"top_k": 3}, on_error=on_error)
    assert done.broken == 0


@pytest.mark.parametrize("on_error", ["stop", "record"])
def test_error_names_the_option_that_fails(on_error: Any, model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    options = {"truncation": True, "function_to_apply": "tanh"}
    with pytest.raises(InputError, match=r"with the option function_to_apply='tanh', but .* without") as caught:
        batch(model, rows, tmp_path / "out", options=options, on_error=on_error)
    assert caught.value.fix == "correct the option function_to_apply, or leave it out."


def test_folder_with_unrecorded_results_is_refused(model: accel.ORTModel, rows: Path, tmp_path: Path) -> None:
    batch(model, rows, tmp_path / "out")
    (record,) = (path for path in (tmp_path / "out").iterdir() if "done" in path.name)
    record.unlink()
    with pytest.raises(ConfigError, match="a different run"):
        batch(model, rows, tmp_path / "out", rows_a_part=3)
