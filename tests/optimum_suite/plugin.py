"""Pytest plugin for Optimum's tests. It installs replacement modules and local models, and records the outcome of each
test.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import hub, left_out, replacement_modules

RESULTS = "ACCEL_OPTIMUM_SUITE_RESULTS"
"""Name of the environment variable with the path of the results file, which has one line for each test."""
KNOWN = "ACCEL_OPTIMUM_SUITE_KNOWN"
"""Name of the environment variable with the path of the file that lists tests which must not be run again."""
PASSED, FAILED, LEFT_OUT, SKIPPED = "passed", "failed", "left out", "skipped by themselves"


def pytest_configure(config: pytest.Config) -> None:
    """Install the replacements before pytest imports any test. Each worker process of the run calls this hook."""
    replacement_modules.install()
    _answer_for_the_hub()
    # Optimum's tests import their table of architectures, `testing_utils`, by this name.
    sys.path.insert(0, str(config.rootpath / "tests" / "onnxruntime"))
    import testing_utils

    testing_utils.MODEL_NAMES.update({word: hub.LOCAL + word for word in testing_utils.MODEL_NAMES})


def _answer_for_the_hub() -> None:
    """Patch the loading functions, so that the name of a Hub repository loads the local folder instead."""
    import datasets
    import huggingface_hub
    import requests
    import transformers
    from transformers import image_utils

    from accel.compat.optimum import models

    # Patch every auto class, because each auto class has its own `from_pretrained`.
    loaders = [getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModel")]
    for cls in (*(loader for loader in loaders if hasattr(loader, "_model_mapping")), models.OptimumModelMixin):
        _load_local(cls, hub.task_of)
    pipeline = models.pipeline
    models.pipeline = lambda task=None, model=None, **settings: pipeline(
        task, hub.local(model, task) if isinstance(model, str) else model, **settings
    )
    for name in ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor"):
        _load_local(getattr(transformers, name), lambda _: None)
    huggingface_hub.HfApi.snapshot_download = lambda _, repo_id, local_dir, **__: shutil.copytree(
        hub.local(repo_id), local_dir
    )
    datasets.load_dataset = _some_sentences
    # Replace the download of the image that Optimum's tests use.
    for client in (requests, image_utils.httpx):
        client.get = lambda *_, **__: types.SimpleNamespace(raw=io.BytesIO(_picture()), content=_picture())


def _load_local(cls: Any, task_of: Callable[[type[Any]], str | None]) -> None:
    original = cls.from_pretrained.__func__

    def from_pretrained(cls: type[Any], name: Any, *values: Any, **named: Any) -> Any:
        folder = hub.local(name, task_of(cls), named.get("revision")) if isinstance(name, str) else name
        if folder != name:
            named.pop("revision", None)
        return original(cls, folder, *values, **named)

    cls.from_pretrained = classmethod(from_pretrained)


def _some_sentences(*_: Any, **__: Any) -> Any:
    """Return a data set of sentences that replaces GLUE's SST-2."""
    import datasets

    words = ("a good bank", "the slow card", "what a lost machine", "where is my new phone")
    return datasets.Dataset.from_dict({"sentence": [f"{words[i % 4]} {i}" for i in range(64)], "label": [0, 1] * 32})


def _picture() -> bytes:
    """Return a PNG image of noise with the size of the original image, 640 by 480 pixels."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)).save(file, "png")
    return file.getvalue()


def name_of(nodeid: str) -> str:
    """Return `file::Class::test` for the node id of a pytest test."""
    return Path(nodeid.partition("::")[0]).name + "::" + nodeid.partition("::")[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove tests that already have a result, and mark the tests that are left out as skipped."""
    finished_tests = json.loads(Path(os.environ[KNOWN]).read_text(encoding="utf-8")) if KNOWN in os.environ else []
    items[:] = [item for item in items if name_of(item.nodeid) not in finished_tests]
    for item in items:
        if why := left_out.reason(name_of(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=f"{LEFT_OUT}: {why}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Report a test as left out if it got the expected error with a different message."""
    report = yield
    if call.excinfo is not None and left_out.only_words_differ(name_of(item.nodeid), call.excinfo.value):
        why = f"{LEFT_OUT}: {left_out.WORDS}: {call.excinfo.value}"
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, why)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test. Only the main process records outcomes, because it receives the reports of all
    workers.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    if report.passed:
        _write(report.nodeid, PASSED)
    elif report.failed:
        _write(report.nodeid, FAILED, _last_line(report))
    else:
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        why = why.removeprefix("Skipped: ")
        ours = why.startswith(LEFT_OUT)
        _write(report.nodeid, LEFT_OUT if ours else SKIPPED, why.removeprefix(f"{LEFT_OUT}: "))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a test file that cannot be imported as one failure."""
    if report.failed:
        _write(report.nodeid, FAILED, _last_line(report))


def _write(nodeid: str, outcome: str, error: str = "") -> None:
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([name_of(nodeid), [outcome, error]]) + "\n")


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return (lines[0] if crash is not None else lines[-1]) if lines else ""
