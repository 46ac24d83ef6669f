"""Shared fixtures of all tests. Tests run offline with a temporary home folder, and each tiny model is exported once in
a test run.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # There is at least one pytest worker for each processor. With more threads in each worker, tiny models would only
    # wait for processors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if version("torch") >= "2.13":
    # Disable PyTorch's cache of operator output shapes. The cache saves a quarter of the tracing time for models of 12
    # layers, but costs a fifth more time for models of 2 layers, as in these tests. torch 2.11 needs the cache for some
    # models, so only tests disable it.
    os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# The library `datasets` reads this variable when it is imported. A temporary folder keeps test files out of the user's
# cache.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="accel-tests-datasets-")

from accel.artifact import Artifact
from accel.stages.export import export
from accel.testing.audio_models import CLAP, SOUND_FAMILIES, VITS, save_clap, save_sound_model, save_vits
from accel.testing.document_models import DOCUMENT_FAMILIES, save_document_model
from accel.testing.generative_models import GENERATORS, save_generator
from accel.testing.image_models import PICTURES, save_tiny_pictures
from accel.testing.models import save_tiny
from accel.testing.table_model import TAPAS, save_tapas
from accel.testing.video_models import VIDEO_FAMILIES, save_video_model

# An export creates a million objects that live for seconds, in addition to as many permanent objects of the imported
# libraries. With Python's default threshold of 700 new objects, garbage collection takes a fifth of the time (measured
# with tests/integration/test_parity.py: 88 s of processor time, and 70 s with this threshold).
gc.set_threshold(50_000, 20, 50)
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


_ALONE: dict[str, Callable[[Path], object]] = {CLAP: save_clap, TAPAS: save_tapas, VITS: save_vits}
"""For families with only one model, the function that saves this model."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` if the required backend cannot run on this machine. The required backend is `cuda`, or
    the backend that the mark names. The skip message contains all reasons.
    """
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    from accel.backends import registry

    status = registry.probe(registry.describe(mark.args[0] if mark.args else "cuda"))
    if not status.available:
        pytest.skip(f"no GPU can be used: {'; '.join(reason.message for reason in status.reasons)}")


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["ACCEL_HOME"] = str(tmp_path_factory.mktemp("accel-home"))


@pytest.fixture(autouse=True)
def _loggers_of_a_new_process() -> None:
    """Reset the log levels that commands and libraries of earlier tests have set in this process, because other tests
    check that warnings are logged.
    """
    logging.disable(logging.NOTSET)
    if logging.root.level > logging.WARNING:
        logging.root.setLevel(logging.WARNING)
    for handler in logging.root.handlers:
        # Libraries that silence logging for some time set the level of every handler, also of pytest's handlers, and do
        # not restore the level.
        handler.setLevel(logging.NOTSET)
    for name, named_logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(named_logger, logging.Logger) and name.partition(".")[0] in ("accel", "accel_plugins"):
            named_logger.disabled, named_logger.propagate = False, True
            if named_logger.level:
                named_logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that creates a folder by name. All worker processes of a test run share the folder, and the
    first process that needs it creates it.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / name
        with FileLock(root / f"{name}.lock"):
            if not folder.exists():
                make(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_folder(shared: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that returns the transformers folder of a tiny model. The first call with a model creates its
    folder.
    """

    def get(family: str = "bert", task: str = "text-classification") -> Path:
        if family in PICTURES:
            return shared(f"{family}-{task}", lambda folder: save_tiny_pictures(folder, family))
        if family in VIDEO_FAMILIES:
            return shared(f"{family}-{task}", lambda folder: save_video_model(folder, family))
        if family in DOCUMENT_FAMILIES:
            return shared(f"{family}-{task}", lambda folder: save_document_model(folder, family))
        if family in _ALONE:
            return shared(f"{family}-{task}", _ALONE[family])
        save = save_sound_model if family in SOUND_FAMILIES else save_tiny
        return shared(f"{family}-{task}", lambda folder: save(folder, family, task))

    return get


@pytest.fixture(scope="session")
def tiny_artifact(tiny_folder: Callable[..., Path], shared: Callable[..., Path]) -> Callable[..., Artifact]:
    """Return a function that returns the ONNX export of a tiny model. The first call with a model exports it."""

    def get(family: str = "bert", task: str = "text-classification") -> Artifact:
        source = tiny_folder(family, task)
        return Artifact.load(shared(f"{family}-{task}-onnx", lambda folder: export(source, folder, task=task)))

    return get


@pytest.fixture(scope="session")
def tiny_ir(tiny_folder: Callable[..., Path], shared: Callable[..., Path]) -> Callable[..., Artifact]:
    """Return a function that returns the OpenVINO export of a tiny model. The first call with a model exports it."""

    def get(family: str = "bert", task: str = "text-classification") -> Artifact:
        source = tiny_folder(family, task)
        path = shared(f"{family}-{task}-openvino", lambda folder: export(source, folder, task=task, backend="openvino"))
        return Artifact.load(path)

    return get


@pytest.fixture(scope="session")
def generator(shared: Callable[..., Path]) -> Callable[..., Artifact]:
    """Return a function that returns the export of a tiny generating model. The first call with a model family exports
    it.
    """

    def get(family: str, backend: str = "cpu") -> Artifact:
        source = shared(f"generator-{family}", lambda folder: save_generator(folder, family))
        task = GENERATORS[family][0]
        path = shared(
            f"generator-{family}-{backend}", lambda folder: export(source, folder, task=task, backend=backend)
        )
        return Artifact.load(path)

    return get
