"""The server as a Ray Serve application: the same ASGI application over the same engine, in as many processes as are needed."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, SessionError, did_you_mean
from .cluster import connected, replicas_of

_NAME = "accel"
_SLACK = 64
"""Requests beyond the engine's queue that Ray lets through to a replica, so that it is the engine that refuses, with 429."""


ARGUMENTS = ("models", "engine", "settings", "traces", "replicas", "cpus", "gpus", "target", "drain_s")
"""Of `build`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many there are, and what each takes.

    Attributes:
        count: `4`, or `1:4` for as many as the load asks for.
        cpus, gpus: Of each; fractions share a device.
        target: Requests in a replica that scaling aims at.
        drain_s: How long one that ends waits for requests that it has.
    """

    count: str = "1"
    cpus: float = 1.0
    gpus: float = 0.0
    target: float = 16.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        replicas_of(self.count)
        if self.cpus < 0 or self.gpus < 0 or self.target <= 0 or self.drain_s < 0:
            raise ConfigError(f"{self} cannot be.", fix="use numbers above 0.")

    def options(self, max_queue: int) -> dict[str, Any]:
        """As Ray Serve names them."""
        least, most = replicas_of(self.count)
        made: dict[str, Any] = {
            "name": "server",
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": max_queue + _SLACK,
            "graceful_shutdown_timeout_s": self.drain_s,
        }
        if least == most:
            return {**made, "num_replicas": least}
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": self.target}
        return {**made, "autoscaling_config": scaling}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What each replica serves.

    Attributes:
        models: As `Engine` takes them: ids, or folders that every node sees.
        engine: Of `Engine`.
        settings: Of `ServerSettings`.
        traces: Whether OpenTelemetry traces are sent.
    """

    models: Any
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    traces: bool = False


def application(served: Served, replicas: Replicas) -> Any:
    """The application, for `ray.serve.run`."""
    from ray import serve

    # What Ray gives a replica is not what the machine has.
    engine = {"processors": max(1, int(replicas.cpus)), **served.engine}

    def build() -> Any:
        from ..engine import Engine
        from ..http.app import create_app
        from ..http.server_settings import ServerSettings

        return create_app(Engine(served.models, **engine), ServerSettings(**served.settings), traces=served.traces)

    deployment: Any = serve.deployment(serve.ingress(build)(), **replicas.options(int(engine.get("max_queue", 512))))
    return deployment.bind()


def build(arguments: Mapping[str, Any]) -> Any:
    """The application for Ray's own tools: `serve run accel.serving.ray.ray_deployment:build models=...`, a config file, a RayService.

    Args:
        arguments: `models` (an id, a folder, or a mapping of names to them), `replicas`, `cpus`, `gpus`, `target`, `drain_s`,
            and mappings `engine` and `settings`.

    Raises:
        ConfigError: One that does not exist, or no models.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise ConfigError(
                f"There is no argument {name!r}.{did_you_mean(name, ARGUMENTS)}", fix=f"use {', '.join(ARGUMENTS)}."
            )
    if not arguments.get("models"):
        raise ConfigError("There are no models.", fix="set models.")
    given = dict(arguments)
    served = Served(**{name: given[name] for name in ("models", "engine", "settings", "traces") if name in given})
    numbers = {name: float(given[name]) for name in ("cpus", "gpus", "target", "drain_s") if name in given}
    return application(served, Replicas(count=str(given.get("replicas", "1")), **numbers))


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
    """Deploy, and serve until the process is told to end; then the replicas answer what they have, and are taken away.

    Args:
        served: What.
        replicas: How many.
        address: Of a cluster; a new one on this machine when `None`.
        host, port: Of Ray's proxies, on each node; 0 takes a free one. A cluster that serves something already keeps its own.
        on_ready: Called with the URL when requests are taken.
        until: Ends it, besides SIGTERM and SIGINT.

    Raises:
        BackendUnavailableError: Ray is not installed, or there is no cluster.
        ConfigError: The port is taken.
        SessionError: The replicas do not start.
    """
    ending = until or threading.Event()
    port = _free(host, port) if address is None else port
    with connected(address):
        from ray import serve

        before = {}
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                before[one] = signal.signal(one, lambda *_: ending.set())
        try:
            serve.start(http_options={"host": host, "port": port})
            try:
                serve.run(application(served, replicas), name=_NAME, route_prefix="/")
            except RuntimeError as error:
                raise SessionError(
                    f"The replicas do not start: {error}", fix="see their logs: `serve status`."
                ) from error
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            _wait(f"{url}/ready")
            if on_ready is not None:
                on_ready(url)
            while not ending.wait(1.0):
                pass
        finally:
            # Replicas finish what they have before they end.
            serve.delete(_NAME)
            if address is None:
                serve.shutdown()
            for one, handler in before.items():
                signal.signal(one, handler)


def _free(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ConfigError: It is taken.
    """
    try:
        with closing(socket.create_server((host, port))) as door:
            return int(door.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {error.strerror}.", fix="use another --port."
        ) from error


def _wait(url: str, seconds: float = 60.0) -> None:
    """Until it answers.

    Raises:
        SessionError: It does not.
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
                f"It is deployed, and {url} does not answer.",
                fix="the cluster may serve at another port already: see `serve config`, and pass --port.",
            )
        time.sleep(0.2)
