"""Manifests, checksums and atomic folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accel.artifact import (
    Artifact,
    Component,
    Manifest,
    Origin,
    Quantization,
    RunRecord,
    Step,
    TensorSpec,
    copy_companions,
    record_files,
)
from accel.artifact.writing import check_output, staging
from accel.errors import ArtifactNotFoundError, IntegrityError, OutputFolderError, SchemaError


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
        outputs=(TensorSpec("y", "float32", ("batch",), role="cache", pair="x"),),
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
        run=RunRecord(backend="cpu", session={"threads": 1}),
    )
    return Artifact.create(folder, manifest)


def test_round_trip(artifact: Artifact) -> None:
    assert Artifact.load(artifact.path) == artifact
    assert artifact.bytes == 705


def test_digest_ignores_how_it_was_measured(artifact: Artifact) -> None:
    from dataclasses import replace

    other = Artifact(artifact.path, replace(artifact.manifest, run=None, steps=()))
    assert other.digest == artifact.digest
    assert Artifact(artifact.path, replace(artifact.manifest, quantization=None)).digest != artifact.digest


def test_manifests_without_operator_domains_open_and_keep_their_digest(artifact: Artifact) -> None:
    from dataclasses import replace

    written = json.loads((artifact.path / "accel.json").read_text())
    assert "domains" not in written["components"][0], "what is unknown is not written"
    assert Artifact.load(artifact.path).domains is None
    components = tuple(replace(c, domains=("", "com.microsoft")) for c in artifact.components)
    told = Artifact.create(artifact.path, replace(artifact.manifest, components=components))
    assert told.digest == artifact.digest
    assert Artifact.load(artifact.path) == told
    assert told.domains == ("", "com.microsoft")


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damage_names_the_file(artifact: Artifact, damage: str) -> None:
    path = artifact.path / "weights.bin"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(b"w")
    else:
        path.write_bytes(b"x" * 700)
    with pytest.raises(IntegrityError, match="weights.bin") as info:
        Artifact.load(artifact.path)
    assert "Fix:" in str(info.value)


def test_a_verified_file_is_not_read_again(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    Artifact.load(artifact.path)
    monkeypatch.setattr("accel.artifact.checksums.sha256", lambda path: pytest.fail(f"read {path} again"))
    Artifact.load(artifact.path)


def test_manifest_may_not_point_outside(artifact: Artifact) -> None:
    file = artifact.path / "accel.json"
    values = json.loads(file.read_text())
    values["components"][0]["files"][0]["name"] = "../outside"
    file.write_text(json.dumps(values))
    with pytest.raises(IntegrityError, match="outside the folder"):
        Artifact.load(artifact.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99"),
        ({"schema": None}, "no schema"),
        ({"surprise": 1}, "malformed"),
        ({"task": None}, None),
    ],
)
def test_manifests_that_are_not_understood(artifact: Artifact, change: dict[str, object], message: str | None) -> None:
    file = artifact.path / "accel.json"
    values = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps(values))
    if message is None:
        assert Artifact.load(artifact.path).task is None
        return
    with pytest.raises(SchemaError, match=message):
        Artifact.load(artifact.path)


@pytest.mark.parametrize("change", [{"file": "../other/model.onnx"}, {"files": []}, {"file": "/etc/hostname"}])
def test_every_graph_is_recorded(artifact: Artifact, change: dict[str, object]) -> None:
    written = json.loads((artifact.path / "accel.json").read_text())
    written["components"][0] |= change
    (artifact.path / "accel.json").write_text(json.dumps(written))
    with pytest.raises(IntegrityError, match="no checksum of"):
        Artifact.load(artifact.path)


def test_links_stay_within_the_folder(artifact: Artifact, tmp_path: Path) -> None:
    weights = artifact.path / "weights.bin"
    inside = weights.rename(artifact.path / "blob.bin")
    weights.symlink_to(inside.name)
    assert Artifact.load(artifact.path) == artifact
    inside.rename(tmp_path / "outside.bin")
    weights.unlink()
    weights.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(IntegrityError, match=r"weights.bin is a link to .*outside of the folder"):
        Artifact.load(artifact.path)


def test_snapshots_of_the_hub_are_made_of_links(artifact: Artifact, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    artifact.path.rename(snapshot)
    (repository / "blobs").mkdir()
    (snapshot / "weights.bin").rename(repository / "blobs" / "1f")
    (snapshot / "weights.bin").symlink_to("../../blobs/1f")
    assert Artifact.load(snapshot).manifest == artifact.manifest
    (repository / "blobs" / "1f").rename(tmp_path / "outside.bin")
    (snapshot / "weights.bin").unlink()
    (snapshot / "weights.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(IntegrityError, match="outside of the folder"):
        Artifact.load(snapshot)


def test_not_json(artifact: Artifact) -> None:
    (artifact.path / "accel.json").write_text("{")
    with pytest.raises(IntegrityError, match="accel.json"):
        Artifact.load(artifact.path)


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="not an accel artifact"):
        Artifact.load(tmp_path)


def test_staging_moves_into_place(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_staging_leaves_nothing_on_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), staging(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_stale_folders_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    from accel.artifact.writing import _host

    dead = tmp_path / f".accel-staging-{_host()}-{2**22 + 1}-ab"
    alive = tmp_path / f".accel-staging-{_host()}-{os.getpid()}-cd"
    elsewhere = tmp_path / f".accel-staging-otherhost-{2**22 + 1}-ef"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    with staging(tmp_path / "out"):
        pass
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()


def test_check_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert check_output(tmp_path / "empty") == tmp_path / "empty"
    with pytest.raises(OutputFolderError, match="is a file"):
        check_output(tmp_path / "file")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "empty")
    with pytest.raises(OutputFolderError, match="also the input"):
        check_output(link, tmp_path / "empty")


def test_companions_are_small_files_without_weights(tmp_path: Path) -> None:
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
