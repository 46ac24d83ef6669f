"""Tests of manifests, of checksums, and of folders that are written atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from filelock import FileLock
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from accel.artifact import (
    Artifact,
    Component,
    FastestRunSettings,
    Manifest,
    Origin,
    Quantization,
    Step,
    TensorSpec,
    checksums,
    copy_companions,
    manifest,
    record_files,
)
from accel.artifact.atomic_folder_writing import check_output, locked_file, scratch, staging
from accel.artifact.checksums import folder_digest
from accel.artifact.hub import HubOptions, locate
from accel.artifact.manifest import sealed
from accel.artifact.unrecorded_files import kind_of
from accel.errors import ArtifactError, ArtifactNotFoundError, IntegrityError, OutputFolderError, SchemaError
from accel.interfaces.required_tokens import with_row_tokens


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "graph.bin").write_bytes(b"graph")
    (folder / "weights.bin").write_bytes(b"weights" * 100)
    component = Component(
        name="model",
        file="graph.bin",
        files=record_files(folder, ["graph.bin", "weights.bin"]),
        inputs=(TensorSpec("x", "int64", ("batch", 3), pad_value=1),),
        outputs=(TensorSpec("y", "float32", ("batch", 3), role="cache", pair="x"),),
        max_sizes={"sequence": 5},
        unused_inputs=("z",),
    )
    manifest = Manifest(
        format="test",
        task="custom",
        components=(component,),
        source=Origin(id="org/name", revision="abc"),
        steps=(Step(stage="export", backend="b", validation={"max_abs_difference": 0.5}),),
        quantization=Quantization(scheme="int8", excluded=("n",)),
        run=FastestRunSettings(backend="cpu", session={"threads": 1}),
    )
    return Artifact.create(folder, manifest)


def test_round_trip(artifact: Artifact) -> None:
    assert Artifact.load(artifact.path) == artifact
    assert artifact.bytes == 705


def test_digest_ignores_run_settings_and_steps(artifact: Artifact) -> None:
    other = Artifact(artifact.path, replace(artifact.manifest, run=None, steps=()))
    assert other.digest == artifact.digest
    assert Artifact(artifact.path, replace(artifact.manifest, quantization=None)).digest != artifact.digest


def test_manifests_without_operator_domains_keep_their_digest(artifact: Artifact) -> None:
    written = json.loads((artifact.path / "accel.json").read_text())
    assert "domains" not in written["components"][0], "what is unknown is not written"
    assert Artifact.load(artifact.path).domains is None
    components = tuple(replace(c, domains=("", "com.microsoft")) for c in artifact.components)
    with_domains = Artifact.create(artifact.path, replace(artifact.manifest, components=components))
    assert with_domains.digest == artifact.digest
    assert Artifact.load(artifact.path) == with_domains
    assert with_domains.domains == ("", "com.microsoft")


@pytest.mark.parametrize(
    "wrong", [{"sha256": "f" * 64}, {"sha256": "/etc/hostname"}, {"bytes": -1}], ids=["other", "a path", "size"]
)
def test_file_has_one_record_with_a_checksum(artifact: Artifact, wrong: dict[str, Any]) -> None:
    file = artifact.path / "accel.json"
    values = json.loads(file.read_text())
    del values["sha256"]
    records = values["components"][0]["files"]
    records.insert(0, {**records[0], **wrong})
    file.write_text(sealed(values))
    with pytest.raises(SchemaError, match=r"graph\.bin"):
        Artifact.load(artifact.path)


def test_verified_file_is_not_read_again(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.artifact.checksums._LARGE", 100)
    Artifact.load(artifact.path)
    (artifact.path / "graph.bin").write_bytes(b"Graph")
    with pytest.raises(IntegrityError, match=r"graph.bin was changed: its SHA-256 checksum"):
        Artifact.load(artifact.path)
    (artifact.path / "graph.bin").write_bytes(b"graph")
    monkeypatch.setattr("accel.artifact.checksums._LARGE", -1)
    Artifact.load(artifact.path)
    monkeypatch.setattr("accel.artifact.checksums.sha256", lambda path: pytest.fail(f"read {path} again"))
    Artifact.load(artifact.path)


def rewritten(artifact: Artifact, values: dict[str, Any]) -> Path:
    """Write another manifest with a valid checksum, as an attacker can do. Return the folder."""
    (artifact.path / "accel.json").write_text(sealed({k: v for k, v in values.items() if k != "sha256"}))
    return artifact.path


def values_of(artifact: Artifact) -> dict[str, Any]:
    return json.loads((artifact.path / "accel.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a\0b", "", "x" * 5000])
def test_manifest_paths_outside_the_folder_are_refused(artifact: Artifact, name: str) -> None:
    values = values_of(artifact)
    values["files"] = [{**values["components"][0]["files"][0], "name": name}]
    with pytest.raises(IntegrityError, match="outside the folder"):
        Artifact.load(rewritten(artifact, values))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_recorded_files_must_be_regular_files(artifact: Artifact, make: Callable[[Path], None]) -> None:
    """A pipe that a manifest records is refused, because reading the pipe would never end."""
    extra_file = artifact.path / "more.json"
    make(extra_file)
    values = values_of(artifact)
    values["files"] = [{"name": "more.json", "bytes": extra_file.stat().st_size, "sha256": "0" * 64}]
    with pytest.raises(IntegrityError, match="is not a regular file"):
        Artifact.load(rewritten(artifact, values))


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", "", "a b", "x" * 200])
def test_component_names_must_not_be_paths(artifact: Artifact, name: str) -> None:
    """Component names that are paths are refused, because stages use component names in file names."""
    values = values_of(artifact)
    values["components"][0]["name"] = name
    with pytest.raises(SchemaError, match="not a valid name of a component"):
        Artifact.load(rewritten(artifact, values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema version 99"),
        ({"schema": None}, "no schema"),
        ({"surprise": 1}, "the unknown field 'surprise'"),
        ({"task": None}, "task is NoneType None, but it must be a value of type str"),
        ({"task": ["text-classification"]}, "task is list"),
        ({"components": []}, "has no component"),
        ({"components": {"name": "model"}}, "components is dict"),
        ({"run": {"backend": "cpu", "session": [1]}}, "run.session is list"),
        ({"opset": True}, "opset is bool"),
    ],
)
def test_invalid_manifests_are_refused(artifact: Artifact, change: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(message)):
        Artifact.load(rewritten(artifact, {**values_of(artifact), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "load"}, "the tensor 'x' has the unknown type 'load'"),
        ({"shape": ["batch", -1]}, "impossible shape"),
        ({"shape": [1 << 60]}, "impossible shape"),
        ({"shape": "batch"}, "shape is str"),
        ({"role": "attack"}, "role is str 'attack'"),
        ({"name": 3}, "name is int 3"),
    ],
)
def test_invalid_tensor_specs_are_refused(artifact: Artifact, change: dict[str, object], message: str) -> None:
    values = values_of(artifact)
    values["components"][0]["inputs"][0] |= change
    with pytest.raises(SchemaError, match=re.escape(message)):
        Artifact.load(rewritten(artifact, values))


@pytest.mark.parametrize("change", [{"file": "../other/model.onnx"}, {"files": []}, {"file": "/etc/hostname"}])
def test_every_graph_file_must_be_recorded(artifact: Artifact, change: dict[str, object]) -> None:
    values = values_of(artifact)
    values["components"][0] |= change
    with pytest.raises(IntegrityError, match="no checksum of"):
        Artifact.load(rewritten(artifact, values))


def test_changes_of_every_recorded_file_are_detected(artifact: Artifact) -> None:
    """Changes of configs, tokenizers, graphs and the manifest are detected, and the error names the changed file."""
    folder = artifact.path
    for name in ("config.json", "vocab.txt", "1_Pooling/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"labels": ["no", "yes"]}')
    Artifact.create(folder, artifact.manifest)
    # Files that are not recorded may change if no library reads them.
    (folder / "README.md").write_text("Hello.")
    assert [record.name for record in Artifact.load(folder).manifest.files] == [
        "1_Pooling/config.json", "config.json", "vocab.txt",
    ]  # fmt: skip
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    assert len(files) == 6
    chance = random.Random(0)
    for path in files:
        content = path.read_bytes()
        for _ in range(50):
            place = chance.randrange(len(content))
            changed = bytearray(content)
            changed[place] ^= chance.randrange(1, 256)
            path.write_bytes(changed)
            with pytest.raises(ArtifactError, match=re.escape(str(path))):
                Artifact.load(folder)
        path.write_bytes(content[:-1])
        with pytest.raises(ArtifactError, match=re.escape(path.name)):
            Artifact.load(folder)
        path.unlink()
        with pytest.raises(ArtifactError, match=re.escape(path.name)):
            Artifact.load(folder)
        path.write_bytes(content)
    assert Artifact.load(folder)


def test_accept_files_records_intended_changes(artifact: Artifact) -> None:
    (artifact.path / "tokenizer.json").write_text("{}")
    Artifact.create(artifact.path, artifact.manifest)
    (artifact.path / "tokenizer.json").write_text('{"added": 1}')
    with pytest.raises(IntegrityError, match="--accept-files"):
        Artifact.load(artifact.path)
    assert Artifact.accept_files(artifact.path) == Artifact.load(artifact.path)
    (artifact.path / "graph.bin").write_bytes(b"Graph")
    with pytest.raises(IntegrityError, match="graph.bin"):
        Artifact.accept_files(artifact.path)


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.txt", "tokenizer.model",
             "additional_chat_templates/rag.jinja"],
)  # fmt: skip
def test_added_tokenizer_file_is_detected(artifact: Artifact, name: str) -> None:
    added = artifact.path / name
    added.parent.mkdir(exist_ok=True)
    added.write_text("{}")
    # A tokenizer may be added to an artifact without a tokenizer.
    assert Artifact.load(artifact.path)
    added.unlink()
    (artifact.path / "tokenizer.json").write_text("{}")
    Artifact.create(artifact.path, artifact.manifest)
    (artifact.path / "README.md").write_text("Read me.")
    (artifact.path / "results.json").write_text("{}")
    assert Artifact.load(artifact.path)
    added.write_text("{}")
    with pytest.raises(IntegrityError, match=f"{re.escape(name)} is not recorded in the manifest.*tokenizer"):
        Artifact.load(artifact.path)
    assert Artifact.accept_files(artifact.path) == Artifact.load(artifact.path)


def _vocabulary_files(tokenizer: str) -> list[str]:
    try:
        return list(getattr(transformers, tokenizer).vocab_files_names.values())
    except (AttributeError, ImportError):
        # The tokenizer class requires a library that is not installed.
        return []


def test_every_file_that_transformers_reads_has_a_kind() -> None:
    constants = {
        name: value
        for module in (transformers.utils, transformers.tokenization_utils_base)
        for name, value in vars(module).items()
        if name.isupper() and name.endswith(("_FILE", "_NAME")) and isinstance(value, str) and "." in value
    }
    vocabularies = {
        name
        for classes in TOKENIZER_MAPPING_NAMES.values()
        for word in (classes if isinstance(classes, tuple | list) else (classes,))
        if word is not None
        for name in _vocabulary_files(word)
    }
    # config.json is always recorded. transformers does not read weights, adapters and model cards together with a
    # graph.
    others = {"config.json", "modelcard.json", "adapter_config.json"}
    names = {value for value in constants.values() if not value.endswith((".bin", ".safetensors", ".index.json"))}
    assert {"special_tokens_map.json", "vocab.txt"} <= names | vocabularies
    assert not {name for name in (names | vocabularies) - others if kind_of(name) is None}


def test_older_schemas_open_with_one_warning(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(manifest.logger, "warning", lambda text, *values: warnings.append(text % values))
    values = {k: v for k, v in values_of(artifact).items() if k not in ("sha256", "files")}
    (artifact.path / "accel.json").write_text(json.dumps({**values, "schema": 1}))
    for _ in range(2):
        assert Artifact.load(artifact.path).digest == artifact.digest
    assert len(warnings) == 1
    assert "no checksums of tokenizers" in warnings[0]


def test_links_outside_the_folder_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    weights = artifact.path / "weights.bin"
    inside = weights.rename(artifact.path / "blob.bin")
    weights.symlink_to(inside.name)
    assert Artifact.load(artifact.path) == artifact
    inside.rename(tmp_path / "outside.bin")
    weights.unlink()
    weights.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(IntegrityError, match=r"weights.bin is a link to .*outside the folder"):
        Artifact.load(artifact.path)


def test_hub_snapshots_may_contain_links(artifact: Artifact, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    artifact.path.rename(snapshot)
    (repository / "blobs").mkdir()
    (snapshot / "weights.bin").rename(repository / "blobs" / "1f")
    (snapshot / "weights.bin").symlink_to("../../blobs/1f")
    assert Artifact.load(snapshot).manifest == artifact.manifest


def test_folder_without_manifest_raises(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="not an artifact of accel"):
        Artifact.load(tmp_path)


def test_staging_moves_the_folder_into_place(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_staging_removes_its_folder_on_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), staging(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_scratch_removes_folders_of_killed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / ".accel-staging-left"
    stale.mkdir()
    with scratch() as first, scratch() as second:
        assert {first.parent, second.parent} == {tmp_path}
        assert first.is_dir()
        assert not stale.exists()
    assert list(tmp_path.iterdir()) == []


def test_stale_staging_folders_are_removed(tmp_path: Path) -> None:
    """A lock protects the temporary folder of a running process, also if the process has the same host name but is in
    another process namespace.
    """
    dead, alive = tmp_path / ".accel-staging-ab", tmp_path / ".accel-staging-cd"
    for folder in (dead, alive):
        folder.mkdir()
    (tmp_path / ".accel-staging-ef.lock").touch()
    with FileLock(f"{alive}.lock"):
        with staging(tmp_path / "out"):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".accel-staging-cd",
            ".accel-staging-cd.lock",
            "out",
        ]
    with staging(tmp_path / "next"):
        assert not alive.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next", "out"]


def test_recreated_staging_folder_raises(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputFolderError, match="another process removed its temporary folder"),
        staging(tmp_path / "out") as folder,
    ):
        folder.rmdir()
        folder.mkdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_output_written_by_another_process_raises(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputFolderError, match="Another process wrote to") as error, staging(out) as temporary:
        (temporary / "file").write_text("ours")
        if kind == "folder":
            out.mkdir()
        (out / "file" if kind == "folder" else out).write_text("theirs")
    assert "Errno" not in str(error.value)
    assert error.value.fix
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["theirs"]


def test_forked_child_removes_nothing_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        child = os.fork()
        if not child:
            stack.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert folder.is_dir()
        with scratch():
            assert folder.is_dir(), "it is locked still"
    assert list(tmp_path.iterdir()) == []


def test_full_disk_gives_one_error(tmp_path: Path) -> None:
    with pytest.raises(OutputFolderError, match="is full: 0.0 MB were written"), staging(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputFolderError, match="is full"), staging(tmp_path / "out"):
        # `ndarray.tofile` raises this error. At that time, the incomplete file is removed and the disk has free space
        # again.
        raise OSError("problem writing element 98304 to file")
    with pytest.raises(OutputFolderError, match="does not have enough space"), staging(tmp_path / "out", needs=1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="this system has no /proc, a folder in which even root cannot create files"
)
def test_unwritable_folder_raises() -> None:
    with pytest.raises(OutputFolderError, match="cannot be created"), staging("/proc/accel-test"):
        pass


def test_unwritable_lock_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFolderError, match="cannot be created"), locked_file(tmp_path / "file" / "lock"):
        pass


def test_unreadable_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", forbidden)
    with pytest.raises(ArtifactNotFoundError, match="cannot be read"):
        locate(str(tmp_path / "model"), HubOptions())


def test_check_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert check_output(tmp_path / "empty") == tmp_path / "empty"
    with pytest.raises(OutputFolderError, match="is a file"):
        check_output(tmp_path / "file")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "empty")
    with pytest.raises(OutputFolderError, match="the same as the input folder"):
        check_output(link, tmp_path / "empty")


def test_check_output_creates_a_folder_on_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems, such as `/proc`, report write permission and then refuse to create a folder."""
    check_output(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())

    def forbidden(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mkdir", forbidden)
    with pytest.raises(OutputFolderError, match="cannot be created, because .* is not writable"):
        check_output(tmp_path / "a" / "b")


def test_companion_files_exclude_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    for name in (
        "tokenizer.json",
        "vocab.txt",
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
    ):
        (source / name).write_text("{}")
    (source / "accel.json").write_text("{}")
    copy_companions(source, target)
    assert {path.name for path in target.iterdir()} == {"tokenizer.json", "vocab.txt"}


def test_companion_files_of_a_folder_of_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An export copies the companion files of a folder that links to the files of another model folder. Links to files
    elsewhere are not copied, because they may be private.
    """
    real, source = tmp_path / "real", tmp_path / "links"
    (real / "1_Pooling").mkdir(parents=True)
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        (real / name).write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    for name in ("config.json", "tokenizer.json", "1_Pooling"):
        (source / name).symlink_to(Path("..", "real", name))
    (source / "secret.json").symlink_to("../secret.json")

    (tmp_path / "exported").mkdir()
    copy_companions(source, tmp_path / "exported", linked=True)
    copied = {path.name for path in (tmp_path / "exported").iterdir()}
    assert copied == {"config.json", "tokenizer.json", "1_Pooling"}
    assert (tmp_path / "exported/1_Pooling/config.json").is_file()
    assert not (tmp_path / "exported/tokenizer.json").is_symlink()
    (warning,) = caplog.messages
    assert "secret.json" in warning
    assert "replace the link with a copy" in warning

    (tmp_path / "saved").mkdir()
    copy_companions(source, tmp_path / "saved")
    assert not list((tmp_path / "saved").iterdir())


def test_lock_admits_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "inner" / "a.lock"
    with locked_file(lock) as ours:
        assert ours
        with locked_file(lock) as theirs:
            assert not theirs
    assert not lock.exists()
    with locked_file(lock, keep=True) as ours:
        assert ours
    assert lock.exists()


def test_weights_changed_with_equal_size_and_time_change_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(bytes(3 << 20))
    os.utime(weights, (1, 1))
    before = folder_digest(weights.parent)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "sha256", lambda path: pytest.fail(f"{path} is read again"))
        assert folder_digest(weights.parent) == before
    content = bytearray(weights.read_bytes())
    content[70_001] = 1
    weights.write_bytes(content)
    os.utime(weights, (1, 1))
    assert folder_digest(weights.parent) != before


@pytest.mark.parametrize(
    ("settings", "token"),
    [({}, 2), ({"eos_token_id": 7}, 7), ({"eos_token_id": None}, 2)],
    ids=["default", "own", "none"],
)
def test_graphs_that_count_tokens_over_the_batch_require_equal_counts(
    artifact: Artifact, settings: dict[str, Any], token: int
) -> None:
    """Other tools and earlier versions of accel exported BART classifiers that mix up rows with different numbers of
    end tokens. Such graphs require equal numbers of end tokens in all rows.
    """
    (artifact.path / "config.json").write_text(json.dumps({"model_type": "bart", **settings}), encoding="utf-8")
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    outputs = (TensorSpec("logits", "float32", ("batch", 3)),)
    component = replace(artifact.components[0], inputs=(ids,), outputs=outputs)
    manifest = replace(
        artifact.manifest, architecture="BartForSequenceClassification", components=(component,), files=()
    )
    loaded = with_row_tokens(Artifact.load(Artifact.create(artifact.path, manifest).path))
    ids = loaded.components[0].inputs[0]
    assert (ids.name, ids.required, ids.equal_counts) == ("input_ids", token, True)
    # Change the artifact to one of a current export, whose graph computes each row independently.
    component = replace(component, inputs=(replace(ids, equal_counts=False),))
    again = with_row_tokens(
        Artifact.load(Artifact.create(artifact.path, replace(manifest, components=(component,))).path)
    )
    assert not again.components[0].inputs[0].equal_counts
