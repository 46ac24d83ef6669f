"""Tests of the `aotinductor` backend, which runs packages of compiled code: the backend contract, checks of trust and
of the target machine, and opening without compilation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact, record_files
from accel.artifact.manifest import sealed
from accel.config import SessionOptions
from accel.errors import (
    AccelError,
    BackendUnavailableError,
    ConfigError,
    ExportError,
    IntegrityError,
    SessionError,
    TargetMismatchError,
)
from accel.interfaces.protocols import Backend, OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.testing.conformance import BackendConformance
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_model
from accel_plugins.pytorch.aotinductor import backend, exporter, packages
from accel_plugins.pytorch.upstream import cpp_compiler

_WITHOUT_COMPILER = """
import sys, torch, accel
model = accel.ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
assert model.backend == "aotinductor"
torch.save(model(input_ids=torch.arange(4, 13)[None], attention_mask=torch.ones(1, 9, dtype=torch.int64)).logits, sys.argv[2])
"""


@pytest.mark.thorough
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")
class TestAotInductor(BackendConformance):
    backend = "aotinductor"

    def test_package_opens_in_another_process_without_compiler(
        self, artifact: Artifact, original: Any, tmp_path: Path
    ) -> None:
        environment = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        words = [sys.executable, "-c", _WITHOUT_COMPILER, str(artifact.path), str(tmp_path / "found.pt")]
        subprocess.run(words, env=environment, check=True, timeout=120)
        with torch.no_grad():
            expected = original(input_ids=torch.arange(4, 13)[None]).logits
        torch.testing.assert_close(torch.load(tmp_path / "found.pt"), expected, atol=1e-5, rtol=0)
        assert not list((tmp_path / "cache").rglob("*.cpp")), "something was compiled"

    def test_package_of_another_user_requires_trust_remote_code(
        self, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Simulate the process of another user, which has its own home folder and has compiled no package.
        monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "another-user"))
        monkeypatch.setattr(packages, "_COMPILED", set())
        load = accel.ORTModelForSequenceClassification.from_pretrained
        with pytest.raises(ConfigError, match="native code that was not compiled on this machine"):
            load(artifact.path)
        assert load(artifact.path, trust_remote_code=True).backend == "aotinductor"
        with pytest.raises(ConfigError, match="native code that was not compiled on this machine"):
            load(artifact.path)

    def test_changed_byte_is_detected_before_code_is_loaded(self, artifact: Artifact, tmp_path: Path) -> None:
        accel.ORTModelForSequenceClassification.from_pretrained(artifact.path).save_pretrained(tmp_path / "copy")
        package = tmp_path / "copy" / "model.pt2"
        content = bytearray(package.read_bytes())
        content[len(content) // 2] ^= 1
        package.write_bytes(content)
        with pytest.raises(AccelError, match=r"model\.pt2"):
            accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "copy", trust_remote_code=True)

    @pytest.mark.parametrize("first", ["/etc/hostname", "known"])
    def test_second_manifest_record_does_not_make_package_trusted(
        self, artifact: Artifact, tmp_path: Path, first: str
    ) -> None:
        folder = Path(shutil.copytree(artifact.path, tmp_path / "copy"))
        with (folder / "model.pt2").open("ab") as package:
            package.write(b"somebody else's")
        values = json.loads((folder / "accel.json").read_text())
        del values["sha256"]
        component = values["components"][0]
        digest = component["files"][0]["sha256"]
        real = dataclasses.asdict(record_files(folder, ["model.pt2"])[0])
        component["files"] = [{**real, "sha256": digest if first == "known" else first}, real]
        (folder / "accel.json").write_text(sealed(values))
        with pytest.raises(AccelError, match=r"model\.pt2"):
            accel.ORTModelForSequenceClassification.from_pretrained(folder)

    def test_loaded_package_is_the_verified_copy(
        self,
        artifact: Artifact,
        implementation: Backend,
        where: DeviceSpec,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        copy = Artifact.load(shutil.copytree(artifact.path, tmp_path / "copy"))
        ours = copy.file().read_bytes()
        loaded: list[bytes] = []

        def load(package: Path) -> Any:
            # Change the package file after the integrity check and before loading. The session must load the verified
            # copy.
            copy.file().write_bytes(b"somebody else's")
            loaded.append(package.read_bytes())

        monkeypatch.setattr(backend, "opened", load)
        implementation.open(copy, OpenRequest(device=where))
        assert loaded == [ours]
        with pytest.raises(ConfigError, match="native code that was not compiled on this machine"):
            implementation.open(copy, OpenRequest(device=where))
        assert loaded == [ours]

    def test_missing_temporary_folder_raises(
        self, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        with pytest.raises(SessionError, match="cannot be copied") as caught:
            accel.ORTModelForSequenceClassification.from_pretrained(artifact.path)
        assert "TMPDIR" in str(caught.value.fix)

    def test_package_changed_in_place_is_detected_despite_equal_mtime(self, artifact: Artifact, tmp_path: Path) -> None:
        load = accel.ORTModelForSequenceClassification.from_pretrained
        folder = Path(shutil.copytree(artifact.path, tmp_path / "copy"))
        load(folder).close()
        package = folder / "model.pt2"
        before = package.stat()
        with package.open("r+b") as file:
            file.seek(before.st_size // 2)
            byte = file.read(1)[0]
            file.seek(before.st_size // 2)
            file.write(bytes([byte ^ 1]))
        os.utime(package, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(IntegrityError, match=r"model\.pt2"):
            load(folder)

    @pytest.mark.parametrize(
        "other",
        [{"torch": "2.0.0"}, {"device": "cuda"}, {"machine": "AVX512 AVX9000"}],
        ids=lambda changes: next(iter(changes)),
    )
    def test_package_for_another_target_is_refused(
        self, artifact: Artifact, implementation: Backend, where: DeviceSpec, other: dict[str, str]
    ) -> None:
        target = {**(artifact.manifest.target or {}), **other}
        foreign = replace(artifact, manifest=replace(artifact.manifest, target=target))
        with pytest.raises(TargetMismatchError, match="was compiled for"):
            implementation.open(foreign, OpenRequest(device=where))

    def test_other_compute_dtype_is_refused(
        self, artifact: Artifact, implementation: Backend, where: DeviceSpec
    ) -> None:
        with pytest.raises(ConfigError, match="was compiled to compute in float32"):
            implementation.open(artifact, OpenRequest(device=where, session=SessionOptions(compute_dtype="bfloat16")))


def test_generation_is_refused_before_compilation(tmp_path: Path) -> None:
    with pytest.raises(AccelError, match="text-generation"):
        accel.export(save_generator(tmp_path / "model", "llama"), tmp_path / "out", backend="aotinductor")
    assert not (tmp_path / "out").exists()


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "cpp_compiler", lambda: None)
    with pytest.raises(BackendUnavailableError, match="g\\+\\+"):
        accel.export(tiny_model("bert"), tmp_path / "out", backend="aotinductor")


def test_compiler_failure_raises_with_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no lowering for aten.something")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    with pytest.raises(ExportError, match="no lowering") as caught:
        accel.export(tiny_model("bert"), tmp_path / "out", backend="aotinductor")
    assert "another format" in str(caught.value.fix)
