"""Tests of untrusted folders: for any content of a manifest or a config, opening a folder quickly gives a model or an
error of accel, and writes no files.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel import ORTModel, ORTModelForSequenceClassification, SessionOptions
from accel.artifact import Artifact
from accel.artifact.manifest import sealed
from accel.artifact.processor_loading import open_companion
from accel.data.batches import load_processor
from accel.errors import AccelError, ArtifactNotFoundError, ConfigError, IntegrityError

_SECONDS, _BYTES = 10.0, 2 << 30
# In earlier versions, these values caused a hang, a huge allocation or an unexpected exception.
_HOSTILE: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 1 << 70,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: "",
    lambda: "load",
    lambda: "a\0b",
    lambda: "../../outside",
    lambda: "/etc/hostname",
    lambda: "x" * 100_000,
    list,
    dict,
    lambda: ["text-classification"],
    lambda: {"native": {"optimized_model_filepath": "written.onnx"}},
    lambda: [[[[[]]]]],
    lambda: _nested(90),
)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON value, as a tuple of keys and indices."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(values: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy of a JSON value in which up to three values are replaced, removed or duplicated."""
    copied = copy.deepcopy(values)
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice(list(places(copied)))
        parent = copied
        for key in way:
            parent = parent[key]
        kind = chance.random()
        if kind < 0.7:
            parent[last] = chance.choice(_HOSTILE)()
        elif kind < 0.85:
            del parent[last]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[f"{last}_"] = parent[last]
    return copied


def everything_in(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}


def tried(open_folder: Callable[[], Any]) -> bool:
    """Return whether the folder opens. Fail the test if another type of error is raised, if opening takes too long, or
    if it allocates gigabytes of memory.
    """
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        open_folder()
    except AccelError:
        return False
    finally:
        assert time.monotonic() - started < _SECONDS
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < _BYTES
    return True


COUNTS = [300, pytest.param(10_000, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_manifests_open_or_raise(
    count: int, tiny_artifact: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutated manifests with valid checksums open or raise an error of accel. Each model that still opens is also run."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "inner" / "artifact")
    values = json.loads((folder / "accel.json").read_text())
    del values["sha256"]
    values["run"] = {
        "backend": "cpu",
        "device": "cpu",
        "session": {"threads": 1},
        "provider_options": {},
        "measured": {},
    }
    outside = everything_in(tmp_path)
    chance = random.Random(count)
    opened = 0
    for _ in range(count):
        (folder / "accel.json").write_text(sealed(mutated(values, chance)))
        opened += tried(lambda: Artifact.load(folder))
        if chance.random() < 0.05:
            tried(lambda: ORTModelForSequenceClassification.from_pretrained(folder).close())
    assert 0 < opened < count
    outside_now = {name: at for name, at in everything_in(tmp_path).items() if "/home/" not in name}
    assert {name for name, at in outside_now.items() if outside.get(name) != at} <= {str(folder / "accel.json")}


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_mutated_generator_manifests_open_or_raise(
    family: str, count: int, generator: Callable[..., Artifact], tmp_path: Path
) -> None:
    """Mutated manifests of generating models open or raise an error of accel. Each model that still opens generates
    tokens, so a wrong description of the graph must be detected.
    """
    folder = shutil.copytree(generator(family).path, tmp_path / "artifact")
    values = json.loads((folder / "accel.json").read_text())
    del values["sha256"]
    chance = random.Random(count)

    def generate() -> None:
        with ORTModel.from_pretrained(folder) as model:
            model.generate(torch.tensor([[5, 6, 7], [7, 6, 5]]), max_new_tokens=3)

    for _ in range(count):
        (folder / "accel.json").write_text(sealed(mutated(values, chance)))
        tried(generate)


def _changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["components"][0]["inputs"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed(pad_value=float("nan")), "the padding value nan"),
        (_changed(pad_value=1 << 40), "padding value"),
        (_changed(pair="nothing"), "the pair of the cache tensor"),
        (_changed(shape=["batch"]), "axes for 'input_ids' instead of 1"),
        (_changed(dtype="float32"), "int64 for 'input_ids' instead of float32"),
        (_changed(name="other"), "has no input or output 'other'"),
        (lambda values: values["components"][0].update(inputs=[]), "has no input"),
        (lambda values: values["steps"][0]["validation"].update(padding_difference=float("nan")), "padding_difference"),
        (lambda values: values["steps"][0]["validation"].update(padding_difference="much"), "padding_difference"),
        (lambda values: values.update(architecture="HALF"), "surrogates not allowed"),
    ],
)  # fmt: skip
def test_manifests_that_contradict_the_graph_raise(
    change: Callable[[dict[str, Any]], None], message: str, tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    values = json.loads((folder / "accel.json").read_text())
    del values["sha256"]
    change(values)
    (folder / "accel.json").write_text(sealed(values).replace("HALF", r"\ud800"))
    for options in (None, SessionOptions(buckets=(8, 16))):
        with pytest.raises(AccelError, match=message):
            ORTModelForSequenceClassification.from_pretrained(folder, session_options=options)


def test_config_with_billions_of_labels_raises(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    values = json.loads((folder / "config.json").read_text())
    del values["id2label"], values["label2id"]
    (folder / "config.json").write_text(json.dumps({**values, "num_labels": 3_000_000_000}))
    Artifact.accept_files(folder)
    assert not tried(functools.partial(ORTModelForSequenceClassification.from_pretrained, folder))


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_mutated_configs_open_or_raise(count: int, tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """Mutated configs raise only errors of accel, for every type of error that transformers raises for them."""
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    values = json.loads((folder / "config.json").read_text())
    chance = random.Random(count)
    transformers.logging.set_verbosity_error()
    for _ in range(count):
        (folder / "config.json").write_text(json.dumps(mutated(values, chance)))
        Artifact.accept_files(folder)
        tried(lambda: ORTModelForSequenceClassification.from_pretrained(folder).close())


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 50, "[]", '"x"', "\xff\xfe", "", '{"schema": 1e999}', "null"])
def test_files_that_are_not_json_objects_raise(
    text: str, tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    for name in ("accel.json", "config.json"):
        folder = shutil.copytree(tiny_artifact().path, tmp_path / name)
        (folder / name).write_text(text, encoding="latin-1")
        assert not tried(functools.partial(ORTModelForSequenceClassification.from_pretrained, folder))


DAMAGED = ["", '{"a": ', "[]", "5", "null", '"x"', "\xff\xfe"]


@pytest.mark.parametrize("text", [*DAMAGED, "{}"])
def test_damaged_tokenizer_is_named(text: str, tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """The error names a damaged tokenizer, although its checksum is valid: the artifact was created with the damaged
    file, or the user accepted the file later.
    """
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    for name in ("tokenizer.json",) if text == "{}" else ("tokenizer.json", "tokenizer_config.json"):
        original = (folder / name).read_bytes()
        (folder / name).write_text(text, encoding="latin-1")
        Artifact.accept_files(folder)
        for open_folder in (
            functools.partial(accel.pipeline, "text-classification", folder),
            functools.partial(load_processor, folder, "text-classification"),
        ):
            with pytest.raises(IntegrityError, match=r"tokenizer") as error:
                open_folder()
            assert error.value.fix
            assert text == "{}" or name in error.value.message
        (folder / name).write_bytes(original)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_mutated_tokenizers_open_or_raise(
    name: str, count: int, tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    values = json.loads((folder / name).read_text())
    chance = random.Random(count)
    transformers.logging.set_verbosity_error()
    for _ in range(count):
        (folder / name).write_text(json.dumps(mutated(values, chance)))
        tried(lambda: open_companion("AutoTokenizer", folder))


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_generation_config_is_named(text: str, generator: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = shutil.copytree(generator("gpt2").path, tmp_path / "artifact")
    (folder / "generation_config.json").write_text(text, encoding="latin-1")
    Artifact.accept_files(folder)
    with pytest.raises(IntegrityError, match=r"generation_config\.json") as error:
        accel.ORTModelForCausalLM.from_pretrained(folder)
    assert error.value.fix
    (folder / "generation_config.json").unlink()
    with pytest.raises(ArtifactNotFoundError):
        open_companion("GenerationConfig", folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", "many"), ("max_length", [3]), ("eos_token_id", {}), ("eos_token_id", [3, "x"]), ("eos_token_id", 1.5),
        ("pad_token_id", [0]), ("do_sample", "yes"), ("temperature", "hot"), ("num_beams", "3"), ("top_k", True),
        ("suppress_tokens", "x"), ("decoder_start_token_id", {}), ("length_penalty", {}),
    ],
)  # fmt: skip
def test_generation_config_with_wrong_types_raises(name: str, value: Any, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "temperature": 1, name: value})
    )
    with pytest.raises(IntegrityError, match="generation.config") as error:
        open_companion("GenerationConfig", tmp_path)
    assert error.value.fix
    right = {"eos_token_id": [3, 4], "temperature": 1, "top_k": 5, "do_sample": True, "suppress_tokens": []}
    (tmp_path / "generation_config.json").write_text(json.dumps(right))
    assert open_companion("GenerationConfig", tmp_path).eos_token_id == [3, 4]


@pytest.mark.parametrize("loader", ["AutoImageProcessor", "AutoFeatureExtractor"])
@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_processor_is_named(loader: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(IntegrityError, match=r"preprocessor_config\.json"):
        open_companion(loader, tmp_path)


class PanicException(BaseException):
    """Exception with the name that the tokenizers library uses for panics of its Rust code."""


def test_tokenizers_panic_becomes_an_accel_error(
    tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(IntegrityError, match="unwrap"):
        open_companion("AutoTokenizer", tiny_artifact().path)


def test_missing_tokenizer_is_not_replaced_by_an_empty_one(
    tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_artifact().path, tmp_path / "artifact", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(ArtifactNotFoundError, match="no tokenizer"):
        open_companion("AutoTokenizer", folder)


def test_tokenizer_code_requires_trust(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_tokens.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own_tokens.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="Python code in the model repository"):
        open_companion("AutoTokenizer", tmp_path)
