"""Tests with cache folders that cannot be used. Features that need a cache folder raise one clear error; other features
work without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accel
from accel import Artifact, ORTModelForSequenceClassification
from accel.artifact.atomic_folder_writing import discard
from accel.artifact.cache import clear
from accel.artifact.checksums import recall, remember, sha256
from accel.artifact.home_folder import accel_home
from accel.backends.machine import machine
from accel.errors import AccelError, ConfigError, OutputFolderError
from accel.tuning.store import ResultStore

ROWS = [{"text": "my card is lost", "label": "LABEL_0"}, {"text": "the fee is bad", "label": "LABEL_1"}] * 4


def a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "file"))


def below_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_file(monkeypatch, tmp_path)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "file" / "home"))


def unreadable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Simulate missing permissions, because tests may run as root, and root can read every folder.
    home, access = tmp_path / "home", os.access
    home.mkdir()
    monkeypatch.setenv("ACCEL_HOME", str(home))
    monkeypatch.setattr("os.access", lambda path, mode: path != home and access(path, mode))


def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ACCEL_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)


def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, access = tmp_path / "home", os.access
    home.mkdir()
    monkeypatch.setenv("ACCEL_HOME", str(home))
    monkeypatch.setattr(
        "accel.artifact.cache.os.access",
        lambda path, mode: access(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(home)),
    )


HOMES = [a_file, below_a_file, unreadable, no_home]


@pytest.mark.parametrize("home", HOMES)
def test_unusable_cache_folder_names_its_setting(
    home: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(monkeypatch, tmp_path)
    with pytest.raises(ConfigError) as caught:
        accel_home()
    assert "ACCEL_HOME" in str(caught.value.fix)
    assert machine()["home"] == caught.value.message, "doctor says why there is none"
    remember("verified.json", {"a": 1})
    assert recall("verified.json") == {}


@pytest.mark.parametrize("home", HOMES)
def test_features_that_need_the_cache_raise_one_error(
    home: Callable[..., None],
    tiny_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = tiny_folder()
    home(monkeypatch, tmp_path)
    needs: dict[str, Callable[[], Any]] = {
        "an export on the fly": lambda: ORTModelForSequenceClassification.from_pretrained(source),
        "a pipeline over one": lambda: accel.pipeline("text-classification", model=str(source)),
        "a search": lambda: accel.tune(source, tmp_path / "out", data=ROWS, backends=["cpu"], max_drop=100.0),
        "clearing": clear,
    }
    for name, action in needs.items():
        with pytest.raises(AccelError) as caught:
            action()
        assert "ACCEL_HOME" in str(caught.value.fix), name
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "backend", ["cpu", "openvino", "pytorch", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_models_open_without_a_cache_folder(
    backend: str,
    home: Callable[..., None],
    tiny_folder: Callable[..., Path],
    tiny_artifact: Callable[..., Artifact],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = tiny_artifact().path if backend in ("cpu", "openvino") else tiny_folder()
    home(monkeypatch, tmp_path)
    with ORTModelForSequenceClassification.from_pretrained(source, backend=backend) as model:
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3)


def test_search_that_cannot_store_results_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    (tmp_path / "tune").write_text("")
    with pytest.raises(OutputFolderError, match="cannot be saved") as caught:
        ResultStore().put("accuracy", {"a": 1}, {"b": 2})
    assert "ACCEL_HOME" in str(caught.value.fix)


def test_search_with_read_only_home_names_the_setting(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tiny_folder()
    read_only(monkeypatch, tmp_path)
    with pytest.raises(OutputFolderError) as caught:
        accel.tune(source, tmp_path / "out", data=ROWS, backends=["cpu"], max_drop=100.0)
    assert "ACCEL_HOME" in str(caught.value.fix)


def test_removal_failure_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    discard(tmp_path / "file" / "nothing")
    (tmp_path / "folder").mkdir()

    def refused(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OutputFolderError, match="cannot be deleted"):
        discard(tmp_path / "folder")


def test_full_disk_stores_no_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accel_plugins.pytorch.inductor import compilation

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    monkeypatch.setattr(compilation.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    compilation.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("home", HOMES)
def test_unstored_compiled_code_is_logged_once(
    home: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from accel_plugins.pytorch.inductor import compilation

    compilation._tell_not_kept.cache_clear()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    home(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        compilation.keep_compiled_code()
        compilation.keep_compiled_code()
    assert caplog.text.count("Compiled code cannot be stored") == 1
    assert "ACCEL_HOME" in caplog.text
    assert "TORCHINDUCTOR_CACHE_DIR" not in compilation.os.environ


@pytest.mark.parametrize("home", HOMES)
def test_package_is_built_although_it_cannot_be_recorded(
    home: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The package opens in the process that built it, which keeps a record in memory. In another process, the user has
    to pass `trust_remote_code=True`.
    """
    from accel_plugins.pytorch.aotinductor import packages

    home(monkeypatch, tmp_path)
    monkeypatch.setattr(packages, "_COMPILED", set())
    package = tmp_path / "model.pt2"
    package.write_bytes(b"code")
    record = SimpleNamespace(name=package.name, sha256=sha256(package))
    component: Any = SimpleNamespace(file=package.name, files=(record,))
    with pytest.raises(ConfigError), packages.trusted(package, trust_remote_code=False):
        pass
    with caplog.at_level(logging.WARNING):
        packages.remember(component)
    assert "trust_remote_code=True" in caplog.text
    with packages.trusted(package, trust_remote_code=False) as copy:
        assert copy.read_bytes() == b"code"
    package.write_bytes(b"other")
    with pytest.raises(ConfigError), packages.trusted(package, trust_remote_code=False):
        pass


def test_openvino_checks_the_cache_folder_before_compiling(
    tiny_ir: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from accel_plugins.openvino import backend

    def compiled(*_: Any) -> Any:
        raise AssertionError("it was compiled before the folder was looked at")

    path = tiny_ir().path
    monkeypatch.setattr(backend, "_compile", compiled)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be written|is a file"):
            ORTModelForSequenceClassification.from_pretrained(
                path, backend="openvino", provider_options={"cache_dir": str(folder)}
            )
