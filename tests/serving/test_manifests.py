"""Tests of the manifests in the documentation: they are valid YAML, use existing URL paths, and pass arguments that
exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.serving.http.app import endpoints
from accel.serving.http.server_settings import ServerSettings
from accel.serving.model_queue import QueueLimits
from accel.serving.ray.ray_deployment import ARGUMENTS, Replicas

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "scale-out.md"


def documents() -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def values_of(value: Any, name: str) -> Iterator[Any]:
    """Yield all values of a key in nested mappings and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == name:
                yield item
            yield from values_of(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from values_of(item, name)


def test_each_manifest_has_a_kind_and_a_name() -> None:
    identities = [(document["kind"], document["apiVersion"], document["metadata"]["name"]) for document in documents()]
    assert {kind for kind, _, _ in identities} == {"Deployment", "Service", "HorizontalPodAutoscaler", "RayService"}


def test_probes_use_open_paths() -> None:
    open_paths = {item.path for item in endpoints() if item.open and item.method == "GET"}
    probed = {probe["path"] for item in documents() for probe in values_of(item, "httpGet")}
    assert probed
    assert probed <= open_paths


def test_pod_has_more_shutdown_time_than_the_server_needs() -> None:
    (seconds,) = [value for document in documents() for value in values_of(document, "terminationGracePeriodSeconds")]
    settings = ServerSettings()
    assert seconds > settings.drain_s + settings.linger_s


def test_ray_manifest_uses_existing_arguments() -> None:
    (service,) = [document for document in documents() if document["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("accel.serving.ray.ray_deployment", "build")
    arguments = application["args"]
    assert set(arguments) <= set(ARGUMENTS)
    assert Replicas(count=arguments["replicas"], cpus=arguments["cpus"]).options(256)["autoscaling_config"]
    ServerSettings(**arguments["settings"])
    assert set(arguments["engine"]) <= {field.name for field in fields(QueueLimits)}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("3", {"num_replicas": 3}),
        ("1:4", {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16.0}}),
    ],
)
def test_replicas_become_ray_options(count: str, expected: dict[str, Any]) -> None:
    options = Replicas(count=count, cpus=2, gpus=0.5).options(100)
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5}
    # Ray's limit must be greater than the engine's queue, so that the engine refuses requests and Ray does not.
    assert options["max_ongoing_requests"] > 100
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize("count", ["0", "4:1", "many", "1:2:3", "-1"])
def test_invalid_numbers_of_replicas_are_refused(count: str) -> None:
    with pytest.raises(ValueError, match="not a number of replicas"):
        Replicas(count=count)
