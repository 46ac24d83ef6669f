"""Tests of reading tables in parts, and of unreadable rows, which are reported as single failed rows."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from accel.errors import ConfigError, InputError, TaskError
from accel.serving.batch.row_inputs import find_columns, inputs_of
from accel.serving.batch.table_files import FailedRow, scan
from accel.serving.operations import all_operations

VALUES = ["plain", 'a "quoted", one', "two\nlines", "Zürich 你好", "x" * 200_000, "", "last"]


def write(path: Path) -> Path:
    import csv

    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerow(["id", "text"])
            writer.writerows([[i, value] for i, value in enumerate(VALUES)])
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "text": value}) for i, value in enumerate(VALUES)))
    else:
        rows = pa.table({"id": list(range(len(VALUES))), "text": VALUES})
        parquet.write_table(rows, path, row_group_size=3)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_parts_contain_the_whole_table(suffix: str, size: int, tmp_path: Path) -> None:
    table = scan(write(tmp_path / f"rows{suffix}"), size)
    assert [part.start for part in table.parts] == list(range(0, len(VALUES), size))
    # Read the parts in reverse order, because a continued run may start with any part.
    rows: list[Any] = [row for part in reversed(table.parts) for row in reversed(table.read(part, ["text"]))]
    empty = None if suffix in (".csv", ".tsv") else ""
    assert [row["text"] for row in reversed(rows)] == [value or empty for value in VALUES]
    assert set(table.columns) == {"id", "text"}


def test_rows_of_several_files_are_numbered_continuously(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n\n{{"text": "{name} 2"}}\n')
    (tmp_path / "_done.jsonl").write_text("{}\n")
    table = scan(tmp_path, 10)
    assert [(part.start, part.rows) for part in table.parts] == [(0, 4)]
    assert table.rows == 4
    assert [row["text"] for part in table.parts for row in table.read(part, ["text"])] == [
        "a.jsonl",
        "a.jsonl 2",
        "b.jsonl",
        "b.jsonl 2",
    ]
    assert scan(str(tmp_path / "[ab]*.jsonl"), 10).files == table.files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"text": \n{"text": "c"}\n', "cannot be read as json"),
        ("rows.csv", b"text,id\na,1\nb,2,3\n", "cannot be read as csv"),
        ("rows.csv", b"text\na\n\xff\nc\n", "cannot be read as csv"),
        ("rows.csv", b'id,text\n1,good\n2,"never closed\n3,lost\n', "EOF inside string"),
        ("rows.csv", b"text,id,text\na,1,b\n", "two columns named 'text'"),
        ("rows.csv", "id,text\n1,ok\n".encode("utf-16"), "can't decode"),
        ("rows.csv", b"text\n", "no rows"),
        ("rows.csv", b"", "is empty"),
        ("rows.parquet", b"nothing", "cannot be read as parquet"),
    ],
)
def test_unreadable_file_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        scan(tmp_path / name, 10)


def test_column_may_contain_several_types(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{}\n')
    table = scan(tmp_path / "rows.jsonl", 10)
    assert [row["text"] for row in table.read(table.parts[0], ["text"])] == ["a", 3, None]


def test_csv_cells_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n007,null\n8,\n")
    table = scan(tmp_path / "rows.csv", 10)
    assert table.read(table.parts[0], ["id", "text"]) == [{"id": "007", "text": "null"}, {"id": "8", "text": None}]


def test_pickled_table_reads_the_files_again(tmp_path: Path) -> None:
    table = pickle.loads(pickle.dumps(scan(write(tmp_path / "rows.parquet"), 4)))
    assert [row["text"] for part in table.parts for row in table.read(part, ["text"])] == VALUES


@pytest.mark.parametrize(
    ("names", "message"),
    [({}, "no data file"), ({"a.csv": "text\nx\n", "b.jsonl": "{}"}, "as one table"), ({"a.xml": "x"}, "no data file")],
)
def test_other_files_are_refused(names: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in names.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        scan(tmp_path, 10)


@pytest.mark.parametrize(
    ("operation", "columns", "named", "expected"),
    [
        ("embed", ["id", "text"], {}, {"text": "text"}),
        ("embed", ["review"], {}, {"text": "review"}),
        ("embed", ["a", "b"], {"text": "b"}, {"text": "b"}),
        ("question-answering", ["context", "question"], {}, {"question": "question", "context": "context"}),
        ("text-classification", ["text", "b"], {"text_pair": "b"}, {"text": "text", "text_pair": "b"}),
        ("rank", ["query", "documents"], {}, {"query": "query", "documents": "documents"}),
    ],
)
def test_columns_are_found(operation: str, columns: list[str], named: dict[str, str], expected: dict[str, str]) -> None:
    assert find_columns(all_operations()[operation], columns, named) == expected


def test_unknown_columns_raise() -> None:
    with pytest.raises(InputError, match="contains the input 'text'") as error:
        find_columns(all_operations()["embed"], ["a", "b"])
    assert "--column text=NAME" in str(error.value)
    with pytest.raises(ConfigError, match="Did you mean 'review'"):
        find_columns(all_operations()["embed"], ["review"], {"text": "reviw"})
    with pytest.raises(ConfigError, match="no input 'texts'"):
        find_columns(all_operations()["embed"], ["review"], {"texts": "review"})
    with pytest.raises(TaskError, match="cannot run on the rows of a table"):
        find_columns(all_operations()["tensors"], ["review"])


@pytest.mark.parametrize(
    ("operation", "row", "reason"),
    [
        ("embed", {"text": None}, "'text' is missing"),
        ("embed", {"text": 7}, "'text' is 7, not a text"),
        ("rank", {"query": "a", "documents": ["b", None]}, "not a list of texts"),
        ("rank", {"query": "a", "documents": []}, "not a list of texts"),
    ],
)
def test_value_of_wrong_type_is_named(operation: str, row: dict[str, Any], reason: str) -> None:
    row_inputs = inputs_of(all_operations()[operation], row, {name: name for name in row})
    assert isinstance(row_inputs, FailedRow)
    assert reason in row_inputs.reason
