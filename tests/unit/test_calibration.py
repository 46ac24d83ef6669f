"""Tests of calibration rows from data sets and files, of the mapping of their columns, and of batches of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from accel.artifact import Artifact
from accel.config import QuantizeConfig
from accel.data.batches import Batches, calibration_batches, longest
from accel.data.columns import map_columns
from accel.data.encoded_rows import EncodedRows
from accel.data.labels import label_ids
from accel.data.rows import is_rows, load_rows, take
from accel.errors import ArtifactNotFoundError, ConfigError, InputError, QuantizeError

ROWS = [
    {"text": "my card is lost", "label": 0},
    {"text": "null", "label": 1},
    {"text": "where is the cash machine?", "label": 2},
    {"text": "help", "label": 1},
]


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text('text,label\nmy card is lost,0\nnull,1\n"where, is it?",2\nhelp,1\n', encoding="utf-8")
    return path


class TestLoading:
    @pytest.mark.parametrize(
        ("first", "expected"),
        [
            ({"input_ids": np.ones((1, 3)), "labels": np.ones(1)}, False),
            ({"input_ids": torch.ones(1, 3), "labels": 1}, False),
            ({"image": np.ones((8, 8, 3)), "label": 1}, True),
            ({"text": "help", "label": 1}, True),
        ],
    )
    def test_rows_are_distinguished_from_batches(self, first: dict[str, Any], expected: bool) -> None:
        assert is_rows([first], {"input_ids", "attention_mask"}) is expected

    def test_csv_keeps_words_that_look_missing(self, csv_file: Path) -> None:
        rows = load_rows(csv_file)
        assert rows.dataset["text"][:] == ["my card is lost", "null", "where, is it?", "help"]

    def test_file_formats_give_equal_rows(self, tmp_path: Path) -> None:
        dataset = datasets.Dataset.from_list(ROWS)
        files = [tmp_path / name for name in ("a.csv", "a.tsv", "a.json", "a.jsonl", "a.parquet")]
        dataset.to_csv(files[0], index=False)
        dataset.to_csv(files[1], index=False, sep="\t")
        files[2].write_text(json.dumps(ROWS), encoding="utf-8")
        dataset.to_json(files[3])
        dataset.to_parquet(files[4])
        for file in files:
            assert load_rows(file).dataset.to_list() == ROWS, file.name

    def test_sample_records_file_name_and_checksum(self, csv_file: Path) -> None:
        sample = load_rows(csv_file).sample.to_dict()
        assert sample["source"] == "rows.csv"
        assert len(sample["sha256"]) == 64
        assert (sample["n"], sample["total"]) == (4, 4)
        assert "split" not in sample

    def test_data_set_records_split_fingerprint_and_commit(self) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        info = datasets.DatasetInfo(
            dataset_name="banking77",
            config_name="default",
            download_checksums={f"hf://datasets/org/banking77@{commit}/test.parquet": {}},
        )
        dataset = datasets.Dataset.from_list(ROWS, info=info, split=datasets.Split.TEST)
        sample = load_rows(dataset).sample
        assert (sample.source, sample.split, sample.revision) == ("banking77", "test", commit)
        assert sample.fingerprint == dataset._fingerprint

    def test_equal_rows_have_equal_fingerprints(self) -> None:
        changed = [*ROWS[:3], {"text": "help!", "label": 1}]
        first, again, other = (load_rows(rows).sample.fingerprint for rows in (ROWS, list(ROWS), changed))
        assert first == again != other

    def test_folder_written_by_datasets(self, tmp_path: Path) -> None:
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
        assert len(load_rows(tmp_path / "saved")) == 4

    def test_several_splits_must_be_named(self) -> None:
        dataset = datasets.Dataset.from_list(ROWS)
        both = datasets.DatasetDict({"train": dataset, "test": dataset.select([0])})
        with pytest.raises(ConfigError, match="train, test"):
            load_rows(both)
        with pytest.raises(ConfigError, match="Did you mean 'test'"):
            load_rows(both, split="tests")
        assert len(load_rows(both, split="test")) == 1

    def test_split_of_a_file_is_refused(self, csv_file: Path) -> None:
        with pytest.raises(ConfigError, match="has no splits, but split is 'test'"):
            load_rows(csv_file, split="test")

    @pytest.mark.parametrize("content", ["", "text,label\n"])
    def test_empty_file_raises(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "rows.csv"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=r"rows\.csv (is empty|has no rows)"):
            load_rows(path)

    @pytest.mark.parametrize(("separator", "word"), [(";", "';'"), ("\t", "tab")])
    def test_other_column_separators_raise(self, tmp_path: Path, separator: str, word: str) -> None:
        path = tmp_path / "rows.csv"
        path.write_text(f"text{separator}label\nhelp{separator}0\n", encoding="utf-8")
        with pytest.raises(InputError, match=f"separates its columns with {word}") as raised:
            load_rows(path)
        assert str(raised.value).count("Fix: ") == 1

    def test_empty_list_raises(self) -> None:
        with pytest.raises(InputError, match="no rows"):
            load_rows([])

    def test_missing_file_raises(self) -> None:
        with pytest.raises(ArtifactNotFoundError, match=r"The data file 'missing\.csv' does not exist"):
            load_rows("missing.csv")

    def test_unreachable_hub_data_set_raises(self) -> None:
        with pytest.raises(ArtifactNotFoundError, match="can be downloaded from the Hub"):
            load_rows("no-such-org/no-such-data")

    def test_unknown_file_format_raises(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.xlsx"
        path.write_bytes(b"x")
        with pytest.raises(ConfigError, match=r"\.parquet"):
            load_rows(path)

    def test_invalid_data_type_raises(self) -> None:
        with pytest.raises(InputError, match="of type int, which accel cannot read"):
            load_rows(3)


class TestSampling:
    def test_same_seed_gives_the_same_rows(self) -> None:
        rows = load_rows([{"text": str(i)} for i in range(100)])
        first, again, other = (take(rows, 10, seed).dataset["text"][:] for seed in (1, 1, 2))
        assert first == again != other
        assert len(set(first)) == 10

    def test_sampling_is_recorded(self) -> None:
        sample = take(load_rows(ROWS), 2, seed=7).sample
        assert (sample.n, sample.total, sample.seed) == (2, 4, 7)

    def test_all_rows_record_no_seed(self) -> None:
        assert take(load_rows(ROWS), 100, seed=7).sample.seed is None

    def test_zero_rows_raise(self) -> None:
        with pytest.raises(ConfigError, match="number of rows is 0"):
            take(load_rows(ROWS), 0)


def columns(rows: list[dict[str, Any]], task: str, **kwargs: Any) -> Any:
    return dict(map_columns(load_rows(rows), task, **kwargs).sample.columns or {})


class TestColumns:
    def test_common_column_names_are_recognized(self) -> None:
        assert columns([{"id": "7", "query": "a", "intent": "b"}], "text-classification") == {
            "label": "intent",
            "text": "query",
        }

    def test_text_pairs_are_preferred_to_single_texts(self) -> None:
        mapping = columns([{"question": "a", "sentence": "b", "label": 1, "idx": 0}], "text-classification")
        assert mapping == {"label": "label", "text": "question", "text_pair": "sentence"}

    def test_only_remaining_column_is_the_text(self) -> None:
        assert columns([{"phrase": "a", "label": 1}], "text-classification")["text"] == "phrase"

    def test_ambiguous_text_column_lists_the_columns(self) -> None:
        rows = [{"one": "a", "two": "b", "label": 1}]
        with pytest.raises(InputError, match=r"one \(string\), two \(string\), label \(int64\)") as error:
            columns(rows, "text-classification")
        assert "--column text=<column>" in str(error.value)
        assert columns(rows, "text-classification", columns={"text": "two"})["text"] == "two"

    def test_missing_label_lists_the_columns(self) -> None:
        with pytest.raises(InputError, match=r"is the 'label' column \(labels\). The columns are text \(string\)"):
            columns([{"text": "a"}], "text-classification")

    def test_calibration_requires_no_label(self) -> None:
        assert columns([{"text": "a"}], "text-classification", answers=False) == {"text": "text"}

    def test_unknown_column_names_get_suggestions(self) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'label'"):
            columns(ROWS, "text-classification", columns={"label": "lable"})
        with pytest.raises(ConfigError, match="columns maps 'texts'"):
            columns(ROWS, "text-classification", columns={"texts": "text"})

    def test_column_of_wrong_type_raises(self) -> None:
        with pytest.raises(ConfigError, match="must be a column of text"):
            columns(ROWS, "text-classification", columns={"text": "label"})

    def test_columns_of_words_and_tags(self) -> None:
        rows = [{"id": "0", "tokens": ["paris", "is"], "ner_tags": [1, 0]}]
        assert columns(rows, "token-classification") == {"tags": "ner_tags", "words": "tokens"}

    def test_columns_of_questions(self) -> None:
        rows = [{"id": "0", "question": "a?", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}}]
        assert columns(rows, "question-answering") == {
            "answers": "answers",
            "question": "question",
            "context": "context",
        }

    def test_columns_of_sentence_pairs(self) -> None:
        rows = [{"sentence1": "a", "sentence2": "b", "score": 4.5}]
        assert columns(rows, "sentence-similarity") == {
            "score": "score",
            "text": "sentence1",
            "text_pair": "sentence2",
        }
        assert columns([{"text": "a"}], "sentence-similarity", answers=False) == {"text": "text"}


CONFIG = SimpleNamespace(label2id={"no": 0, "Yes": 1, "maybe": 2}, num_labels=3)


def ids(rows: Any) -> list[Any]:
    return label_ids(map_columns(load_rows(rows), "text-classification"), "label", CONFIG)


class TestLabels:
    def test_label_names(self) -> None:
        assert ids([{"text": "a", "label": "maybe"}, {"text": "b", "label": "yes"}]) == [2, 1]

    def test_label_numbers(self) -> None:
        assert ids([{"text": "a", "label": 2}, {"text": "b", "label": 0}]) == [2, 0]

    def test_class_labels_are_matched_by_name(self) -> None:
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])}
        )
        assert ids(datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)) == [1, 0]

    def test_ignored_tags_stay_ignored(self) -> None:
        features = datasets.Features(
            {
                "tokens": datasets.List(datasets.Value("string")),
                "tags": datasets.List(datasets.ClassLabel(names=["yes", "no"])),
            }
        )
        dataset = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "tags": [[1, -100]]}, features=features)
        assert label_ids(map_columns(load_rows(dataset), "token-classification"), "tags", CONFIG) == [[0, -100]]

    def test_unknown_label_name_raises(self) -> None:
        with pytest.raises(
            InputError, match="not in the label2id of the model's config: 'perhaps'. The labels of the model are 'no'"
        ):
            ids([{"text": "a", "label": "perhaps"}])

    def test_mixed_label_names_and_numbers_raise(self) -> None:
        with pytest.raises(InputError, match="mixes label names and label ids: '1', 'no'"):
            ids([{"text": "a", "label": "no"}, {"text": "b", "label": "1"}])

    def test_unknown_label_number_raises(self) -> None:
        with pytest.raises(InputError, match="only the ids 0 to 2"):
            ids([{"text": "a", "label": 3}])

    @pytest.mark.parametrize("missing", [-1, None])
    def test_missing_labels_raise(self, missing: int | None) -> None:
        with pytest.raises(InputError, match="1 of 2 labels"):
            ids([{"text": "a", "label": 1}, {"text": "b", "label": missing}])

    def test_fractional_labels_raise(self) -> None:
        with pytest.raises(InputError, match="must be label names or whole numbers"):
            ids([{"text": "a", "label": 0.5}])


class TestEncoding:
    def test_batches_contain_similar_lengths_and_are_padded(self) -> None:
        encoded = EncodedRows(
            tokens={"input_ids": [[5, 6, 7], [5], [5, 6]], "attention_mask": [[1, 1, 1], [1], [1, 1]]},
            padding={"input_ids": 9},
        )
        assert encoded.plan(2) == [[1, 2], [0]]
        batch = encoded.batch([1, 2])
        assert batch["input_ids"].tolist() == [[5, 9], [5, 6]]
        assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]

    def test_padding_on_the_left(self) -> None:
        encoded = EncodedRows(tokens={"input_ids": [[5, 6], [7]]}, padding={"input_ids": 9}, left=True)
        assert encoded.batch([0, 1])["input_ids"].tolist() == [[5, 6], [9, 7]]

    def test_lengths_are_not_mixed_without_padding_token(self) -> None:
        encoded = EncodedRows(tokens={"input_ids": [[1, 2], [3], [4, 5]]})
        assert encoded.plan(8) == [[1], [0, 2]]

    def test_maximum_length(self) -> None:
        tokenizer = SimpleNamespace(model_max_length=94)
        assert longest(96, tokenizer, None) == 94
        assert longest(96, tokenizer, 64) == 64
        assert longest(None, SimpleNamespace(model_max_length=int(1e30)), None) is None
        with pytest.raises(ConfigError, match="at most 96, the number of positions of the model"):
            longest(96, tokenizer, 200)


class TestCalibrationBatches:
    def test_calibration_batches_can_be_read_twice(self, tiny_artifact: Callable[..., Artifact]) -> None:
        artifact = tiny_artifact()
        batches = calibration_batches(artifact, datasets.Dataset.from_list(ROWS), batch_size=3)
        first, again = list(batches), list(batches)
        assert [list(batch) for batch in first] == [[spec.name for spec in artifact.components[0].inputs]] * 2
        assert sum(len(batch["input_ids"]) for batch in first) == 4
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))

    def test_sample_is_recorded(self, tiny_artifact: Callable[..., Artifact], csv_file: Path) -> None:
        batches = calibration_batches(tiny_artifact(), csv_file, config=QuantizeConfig(samples=2, seed=5))
        assert isinstance(batches, Batches)
        assert {"source": "rows.csv", "n": 2, "total": 4, "seed": 5}.items() <= batches.record.items()
        assert batches.record["columns"] == {"text": "text"}

    def test_list_of_arrays_is_read_as_batches(self, tiny_artifact: Callable[..., Artifact]) -> None:
        ids = np.arange(5, 13).reshape(2, 4)
        batch = next(
            iter(calibration_batches(tiny_artifact(), [{"input_ids": ids, "attention_mask": np.ones_like(ids)}]))
        )
        assert batch["input_ids"].tolist() == ids.tolist()
        assert batch["input_ids"].dtype == torch.int64

    def test_iterator_of_batches_can_be_read_twice(self, tiny_artifact: Callable[..., Artifact]) -> None:
        feeds = {
            "input_ids": torch.ones(1, 4, dtype=torch.int64),
            "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        }
        batches = calibration_batches(tiny_artifact(), (feeds for _ in range(3)))
        assert [len(list(batches)), len(list(batches))] == [3, 3]
        assert next(iter(batches))["token_type_ids"].tolist() == [[0, 0, 0, 0]]

    def test_batches_without_an_input_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        batches = calibration_batches(tiny_artifact(), [{"attention_mask": torch.ones(1, 4, dtype=torch.int64)}])
        with pytest.raises(InputError, match="requires the input 'input_ids'"):
            list(batches)

    def test_no_batches_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(QuantizeError, match="no batches"):
            calibration_batches(tiny_artifact(), iter(()))

    def test_non_finite_values_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        artifact = tiny_artifact("vit", "image-classification")
        pixels = torch.zeros(1, 3, 32, 32)
        pixels[0, 0, 0, 0] = float("nan")
        with pytest.raises(InputError, match="The input 'pixel_values' in batch 0"):
            list(calibration_batches(artifact, [{"pixel_values": pixels}]))

    def test_rows_without_text_raise(self, tiny_artifact: Callable[..., Artifact]) -> None:
        with pytest.raises(InputError, match="1 of 2 rows of rows have no text"):
            calibration_batches(tiny_artifact(), [{"text": "a"}, {"text": None}])

    def test_images_become_batches(self, tiny_artifact: Callable[..., Artifact]) -> None:
        from PIL import Image

        artifact = tiny_artifact("vit", "image-classification")
        pictures = [Image.new("L", (40, 30), shade) for shade in (0, 100, 200)]
        batches = calibration_batches(artifact, [{"image": picture} for picture in pictures], batch_size=2)
        assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(2, 3, 32, 32), (1, 3, 32, 32)]
