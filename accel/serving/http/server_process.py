"""The server as a process: uvicorn around the application, and a polite end.

Told to end (SIGTERM, SIGINT), it answers what it accepted and refuses what comes then with 503, so that a load balancer turns
away before the door closes; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from ...errors import ConfigError
from .middleware import Front

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""How long a thread may keep Python's lock while others want it. With the default of 5 ms the event loop and the workers wait for
each other longer than a small model computes."""


class _Server(uvicorn.Server):
    """uvicorn's server, which here ends in three steps: refuse, finish, close."""

    def __init__(self, config: uvicorn.Config, front: Front, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._front = front
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it runs; uvicorn would raise them again at the end, and the exit code would tell of a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends it politely, the second one at once."""
        if self._front.server.draining:
            self.force_exit = self.should_exit = True
        else:
            self._front.server.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the models, and the door behind them."""
        await super().startup(sockets)
        # What models and libraries hold stays: the collector need not look through it between requests.
        gc.collect()
        gc.freeze()
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._front.server.draining and self._ending is None and not self.should_exit:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        server = self._front.server
        settings = server.settings
        logger.info("Ending: %d requests are being answered.", server.in_flight)
        loop = asyncio.get_running_loop()
        start = loop.time()
        # The door stays open for a moment: whoever comes is told to go elsewhere instead of finding nobody.
        await asyncio.sleep(settings.linger_s)
        for limit in tuple(server.reading):
            # What has not arrived was not accepted.
            limit.reschedule(loop.time())
        while server.in_flight and loop.time() - start < settings.drain_s:
            await asyncio.sleep(0.02)
        if server.in_flight:
            logger.warning("%d requests were not answered within %g s.", server.in_flight, settings.drain_s)
            self.force_exit = True
        self.should_exit = True


def _check_certificate(config: uvicorn.Config) -> None:
    """Load the certificate, which uvicorn would do once the models are open.

    Raises:
        ConfigError: A file is missing or damaged, or the key is not the certificate's.
    """
    if not config.is_ssl:
        return
    try:
        config.load()
    # uvicorn asserts that there is a certificate beside a key.
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"The certificate {config.ssl_certfile!s} with the key {config.ssl_keyfile!s} cannot be used: "
            f"{error or 'the one needs the other'}.",
            fix="pass files in PEM format that can be read: ssl_certfile=... and the key that belongs to it, ssl_keyfile=...",
        ) from error


def serve(
    front: Front,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,
    **options: object,
) -> None:
    """Open the models and run the application until it is told to end.

    Args:
        front: Made by `create_app`.
        host: Address; the default is reached from this machine alone.
        port: 0 takes a free one.
        on_ready: Called with the URL when requests are taken.
        **options: Of `uvicorn.Config`, such as `ssl_certfile` and `ssl_keyfile`.

    Raises:
        ConfigError: The port is taken, or a certificate cannot be used.
    """
    config = uvicorn.Config(
        front, host=host, port=port, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=True,
        timeout_keep_alive=75, proxy_headers=False, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    _check_certificate(config)
    door = _bound(host, port)
    secure = "https" if config.is_ssl or options.get("ssl_certfile") else "http"
    shown, number = door.getsockname()[:2]
    url = f"{secure}://{f'[{shown}]' if ':' in shown else shown}:{number}"
    server = _Server(config, front, functools.partial(on_ready, url) if on_ready is not None else None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        # Before the loop runs, so that what is wrong with a model is raised here.
        with front.server.engine:
            server.run(sockets=[door])
    finally:
        sys.setswitchinterval(before)
        door.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: The port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named; without it an answer takes 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        another = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host, an address of this machine"
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {error.strerror}.", fix=f"use another {another}."
        ) from error
    return made
