"""Run the server as a Ray Serve application: the same ASGI application and engine in several processes."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, SessionError, did_you_mean
from .cluster import connected, replicas_of

_NAME = "accel"
_SLACK = 64
"""Number of requests that Ray sends to a replica beyond the size of the engine's queue, so that the engine refuses them with 429."""


ARGUMENTS = ("models", "engine", "settings", "traces", "replicas", "cpus", "gpus", "target", "drain_s")
"""Names of the arguments that `build` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Number and resources of the replicas.

    Attributes:
        count: Number of replicas: `4`, or `1:4` to scale with the load.
        cpus, gpus: Number of processors and GPUs of a replica; with a fraction, replicas share a device.
        target: Number of concurrent requests per replica that autoscaling aims at.
        drain_s: Seconds that a replica waits for its running requests before it ends.
    """

    count: str = "1"
    cpus: float = 1.0
    gpus: float = 0.0
    target: float = 16.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        replicas_of(self.count)
        if self.cpus < 0 or self.gpus < 0 or self.target <= 0 or self.drain_s < 0:
            raise ConfigError(
                f"A setting of the replicas is negative, or the target number of requests is 0: cpus={self.cpus:g}, gpus={self.gpus:g}, "
                f"target={self.target:g}, drain_s={self.drain_s:g}.",
                fix="use a target above 0, and at least 0 for cpus, gpus and drain_s.",
            )

    def options(self, max_queue: int) -> dict[str, Any]:
        """Return the options of the Ray Serve deployment."""
        least, most = replicas_of(self.count)
        options: dict[str, Any] = {
            "name": "server",
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": max_queue + _SLACK,
            "graceful_shutdown_timeout_s": self.drain_s,
        }
        if least == most:
            return {**options, "num_replicas": least}
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": self.target}
        return {**options, "autoscaling_config": scaling}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The server that each replica runs.

    Attributes:
        models: Argument `models` of `Engine`: Hub ids, or folders that exist on every node.
        engine: Further arguments of `Engine`.
        settings: Fields of `ServerSettings`.
        traces: Whether to send OpenTelemetry traces.
    """

    models: Any
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    traces: bool = False


def application(served: Served, replicas: Replicas) -> Any:
    """Return the Ray Serve application, to pass to `ray.serve.run`."""
    from ray import serve

    # Ray assigns only some of the machine's processors to a replica.
    engine = {"processors": max(1, int(replicas.cpus)), **served.engine}

    def build() -> Any:
        from ..engine import Engine
        from ..http.app import create_app
        from ..http.server_settings import ServerSettings

        return create_app(Engine(served.models, **engine), ServerSettings(**served.settings), traces=served.traces)

    deployment: Any = serve.deployment(serve.ingress(build)(), **replicas.options(int(engine.get("max_queue", 512))))
    return deployment.bind()


def build(arguments: Mapping[str, Any]) -> Any:
    """Return the application for Ray's tools, which import this function by name.

    Examples are `serve run accel.serving.ray.ray_deployment:build models=...`, a Serve config file, and a RayService.

    Args:
        arguments: `models` (a Hub id, a folder, or a mapping from model name to one of them), `replicas`, `cpus`, `gpus`, `target`,
            `drain_s`, `traces`, and the mappings `engine` and `settings`.

    Raises:
        ConfigError: An argument is unknown, or `models` is missing.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise ConfigError(
                f"The Serve application has no argument {name!r}.{did_you_mean(name, ARGUMENTS)}",
                fix=f"use the arguments {', '.join(ARGUMENTS)}.",
            )
    if not arguments.get("models"):
        raise ConfigError(
            "The argument `models` of the Serve application is missing or empty.",
            fix="set models to a Hub id, a folder, or a mapping from model name to Hub id or folder.",
        )
    values = dict(arguments)
    served = Served(**{name: values[name] for name in ("models", "engine", "settings", "traces") if name in values})
    numbers = {name: float(values[name]) for name in ("cpus", "gpus", "target", "drain_s") if name in values}
    return application(served, Replicas(count=str(values.get("replicas", "1")), **numbers))


def serve_on_ray(
    served: Served,
    replicas: Replicas,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,
    until: threading.Event | None = None,
) -> None:
    """Serve models on Ray until a signal ends the process. Then the replicas finish their requests and end.

    Args:
        served: The server that each replica runs.
        replicas: Number and resources of the replicas.
        address: Address of the cluster; `None` starts a cluster on this machine.
        host, port: Address of Ray's HTTP proxy on each node; port 0 selects a free port. A cluster whose proxy runs already keeps its
            address.
        on_ready: Called with the URL when the server accepts requests.
        until: Event that ends the server, like SIGTERM and SIGINT.

    Raises:
        BackendUnavailableError: Ray is not installed, or there is no cluster.
        ConfigError: The port is in use.
        SessionError: The replicas do not start.
    """
    ending = until or threading.Event()
    if address is None:
        from ..http.server_process import bound_socket

        # Check the port before a cluster is started, because the start of a cluster takes seconds.
        with bound_socket(host, port) as door:
            port = int(door.getsockname()[1])
    with connected(address):
        from ray import serve

        before = {}
        if threading.current_thread() is threading.main_thread():
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                before[signal_number] = signal.signal(signal_number, lambda *_: ending.set())
        try:
            serve.start(http_options={"host": host, "port": port})
            try:
                serve.run(application(served, replicas), name=_NAME, route_prefix="/")
            except RuntimeError as error:
                raise SessionError(
                    f"The replicas of the server did not start: {error}",
                    fix="run `serve status`, and read the logs of the replicas.",
                ) from error
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            _wait(f"{url}/ready")
            if on_ready is not None:
                on_ready(url)
            while not ending.wait(1.0):
                pass
        finally:
            # The replicas finish their running requests before they end.
            serve.delete(_NAME)
            if address is None:
                serve.shutdown()
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)


def _wait(url: str, seconds: float = 60.0) -> None:
    """Wait until a URL responds with status 200.

    Raises:
        SessionError: The URL does not respond in time.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if time.monotonic() > end:
            raise SessionError(
                f"The server is deployed on the Ray cluster, but {url} did not respond with status 200 within {seconds:g} s.",
                fix="the cluster may already use another HTTP port: run `serve config` to see it, and pass it with --port.",
            )
        time.sleep(0.2)
