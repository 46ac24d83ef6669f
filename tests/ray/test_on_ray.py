"""Tests of the server and of offline inference on a Ray cluster on this machine.

Results are equal to results without Ray, and no request is lost when Ray kills a replica. `make test-ray` creates an
environment with Ray.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.decoding.generation_options import GenerationOptions
from accel.errors import ConfigError, InputError
from accel.serving.batch.batch_run import batch
from accel.serving.batch.ray_batch import batch_on_ray
from accel.serving.engine import Engine
from accel.serving.ray.cluster import connected
from accel.serving.ray.ray_deployment import Replicas, Served, build, serve_on_ray
from accel.testing.generative_models import save_generator

pytest.importorskip("ray", reason="the extra ray is not installed: see `make test-ray`")

# Ray and its dependencies raise warnings about their own code, so the tests ignore all warnings.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXTS = ["where is my card", "help", "my top up failed and nobody answers", "rate"]


@pytest.fixture(scope="module")
def models(tiny_folder: Callable[..., Path], shared: Callable[..., Path]) -> dict[str, str]:
    folder = shared("generator-llama", lambda out: save_generator(out, "llama"))
    return {"labels": str(tiny_folder("bert", "text-classification")), "writer": str(folder)}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with connected(None) as module:
        yield module


@pytest.fixture(scope="module")
def url(ray: Any, models: dict[str, str]) -> Iterator[str]:
    """Start a server with two replicas and yield its URL."""
    addresses: list[str] = []
    ready, until = threading.Event(), threading.Event()
    failed: list[Exception] = []

    def run() -> None:
        served = Served(models=models, engine={"backend": "pytorch"}, settings={"api_keys": ("key",)})
        try:
            serve_on_ray(
                served,
                Replicas(count="2", cpus=0.2),
                port=0,
                until=until,
                on_ready=lambda address: (addresses.append(address), ready.set()),
            )
        except Exception as error:  # noqa: BLE001  # the fixture reports it
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(300)
        assert not failed, failed
        yield addresses[0]
    finally:
        until.set()
        thread.join(120)


def post(url: str, body: Any, key: str = "key") -> tuple[int, bytes]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_results_equal_the_engines(url: str, models: dict[str, str]) -> None:
    with Engine(models, backend="pytorch") as engine:
        expected = engine.run(TEXTS, model="labels")
        written = engine.generator("writer")(TEXTS[0], GenerationOptions(max_new_tokens=6)).text
    status, body = post(f"{url}/classify", {"inputs": TEXTS})
    assert status == 200
    assert json.loads(body) == [
        {"label": answer["label"], "score": pytest.approx(answer["score"], abs=1e-6)} for answer in expected
    ]
    status, body = post(f"{url}/generate", {"inputs": TEXTS[0], "max_new_tokens": 6})
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    assert "".join(event["text"] for event in events) == written


def test_api_keys_and_errors_equal_the_servers(url: str) -> None:
    assert post(f"{url}/classify", {"inputs": "help"}, key="other")[0] == 401
    status, body = post(f"{url}/classify", {"inputs": "help", "topk": 2})
    assert (status, json.loads(body)["error"]["type"]) == (422, "invalid_request")


def test_callers_can_retry_if_a_replica_is_killed(url: str, ray: Any) -> None:
    answers: list[int] = []
    tries: list[int] = []
    end = threading.Event()

    def call() -> None:
        while not end.is_set():
            for _ in range(40):
                try:
                    status, body = post(f"{url}/classify", {"inputs": "help"})
                except OSError:
                    status, body = 0, b""
                if status == 200:
                    answers.append(len(json.loads(body)))
                    break
                tries.append(status)
                time.sleep(0.25)
            else:
                answers.append(0)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for thread in callers:
        thread.start()
    try:
        _until(lambda: len(answers) > 40)
        before = _replicas(ray)
        assert len(before) == 2
        ray.kill(ray.get_actor(before[0], namespace="serve"), no_restart=True)
        _until(lambda: len(set(_replicas(ray)) - {before[0]}) == 2)
        answered = len(answers)
        _until(lambda: len(answers) > answered + 40)
    finally:
        end.set()
        for thread in callers:
            thread.join(60)
    assert set(answers) == {1}, f"tried again after {tries}"


def _replicas(ray: Any) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in named if actor["name"].startswith("SERVE_REPLICA"))


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_arguments_of_ray_tools_are_checked(ray: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'replicas'"):
        build({"models": "x", "replica": 2})
    with pytest.raises(ConfigError, match="no models"):
        build({})
    assert build({"models": {"a": "folder"}, "replicas": "1:4", "gpus": 0.5}) is not None


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{TEXTS[i % 4]} {i}"}) + "\n" for i in range(40)))
    return path


def table(folder: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(folder).to_pydict()


def test_batch_equals_one_process_and_continues(ray: Any, models: dict[str, str], rows: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"rows_a_part": 8, "backend": "pytorch"}
    batch(models["labels"], rows, tmp_path / "here", **arguments)
    batch_on_ray(models["labels"], rows, tmp_path / "there", cpus=0.2, **arguments)
    (tmp_path / "there" / "rows-000000000016-000000000023.parquet").unlink()
    done = batch_on_ray(models["labels"], rows, tmp_path / "there", cpus=0.2, **arguments)
    assert (done.rows, done.computed, done.parts) == (40, 8, 5)
    local_table, ray_table = table(tmp_path / "here"), table(tmp_path / "there")
    assert ray_table["row"] == local_table["row"] == list(range(40))
    assert ray_table["label"] == local_table["label"]
    assert ray_table["score"] == pytest.approx(local_table["score"], abs=1e-6)


def test_invalid_row_is_named(ray: Any, models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "help"}\n{"text": 7}\n')
    with pytest.raises(InputError, match=r"Row 1: 'text' is 7, not a text"):
        batch_on_ray(models["labels"], path, tmp_path / "out", cpus=0.2, backend="pytorch")
