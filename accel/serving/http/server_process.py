"""Run the server as a process: uvicorn runs the application, and a signal starts a graceful shutdown.

After SIGTERM or SIGINT, the server finishes the accepted requests and refuses new ones with 503, so that a load balancer stops sending
requests before the socket closes. A second signal ends the process immediately.
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
from .middleware import OuterMiddleware

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""Thread switch interval of Python in seconds.

With the default of 5 ms, the event loop and the worker threads wait for each other longer than a small model takes to run.
"""


class _Server(uvicorn.Server):
    """A uvicorn server that shuts down in three steps: refuse new requests, finish accepted ones, close."""

    def __init__(self, config: uvicorn.Config, front: OuterMiddleware, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._front = front
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs.

        uvicorn's own method raises the signals again at the end, and the exit code would then report a failure.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a graceful shutdown at the first signal, and exit immediately at the second signal."""
        if self._front.server.draining:
            self.force_exit = self.should_exit = True
        else:
            self._front.server.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, which opens the models before it accepts requests."""
        await super().startup(sockets)
        # Garbage collection between requests would scan the objects of models and libraries. These objects stay alive,
        # so exclude them.
        gc.collect()
        gc.freeze()
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Start the shutdown if a signal arrived; uvicorn calls this method ten times a second."""
        if self._front.server.draining and self._ending is None and not self.should_exit:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        server = self._front.server
        settings = server.settings
        logger.info("The server is shutting down; %d requests are in progress.", server.in_flight)
        loop = asyncio.get_running_loop()
        start = loop.time()
        # Keep the socket open for `linger_s`, so that new requests get 503 instead of a refused connection.
        await asyncio.sleep(settings.linger_s)
        for limit in tuple(server.reading):
            # Requests whose bodies are incomplete are not accepted yet: end them now.
            limit.reschedule(loop.time())
        while server.in_flight and loop.time() - start < settings.drain_s:
            await asyncio.sleep(0.02)
        if server.in_flight:
            logger.warning(
                "%d requests did not finish within %g s and are aborted.", server.in_flight, settings.drain_s
            )
            self.force_exit = True
        self.should_exit = True


def _check_certificate(config: uvicorn.Config) -> None:
    """Load the TLS certificate early, because uvicorn would load it only after the models are open.

    Raises:
        ConfigError: A file is missing or damaged, or the key does not belong to the certificate.
    """
    if not config.is_ssl:
        return
    try:
        config.load()
    # uvicorn raises `AssertionError` if there is a key without a certificate.
    except (OSError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"The TLS certificate {config.ssl_certfile!s} with the key {config.ssl_keyfile!s} cannot be loaded: "
            f"{error or 'a key was passed without a certificate'}.",
            fix="pass readable PEM files: the certificate as ssl_certfile=... and its private key as ssl_keyfile=...",
        ) from error


def serve(
    front: OuterMiddleware,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str], None] | None = None,
    **options: object,
) -> None:
    """Open the models and run the application until a signal ends it.

    Args:
        front: The application, from `create_app`.
        host: Address to listen on; the default accepts connections only from this machine.
        port: Port; 0 selects a free port.
        on_ready: Called with the URL when the server accepts requests.
        **options: Arguments of `uvicorn.Config`, such as `ssl_certfile` and `ssl_keyfile`.

    Raises:
        ConfigError: The port is in use, or a certificate is invalid.
    """
    config = uvicorn.Config(
        front, host=host, port=port, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=True,
        timeout_keep_alive=75, proxy_headers=False, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    _check_certificate(config)
    door = bound_socket(host, port)
    secure = "https" if config.is_ssl or options.get("ssl_certfile") else "http"
    shown, number = door.getsockname()[:2]
    url = f"{secure}://{f'[{shown}]' if ':' in shown else shown}:{number}"
    server = _Server(config, front, functools.partial(on_ready, url) if on_ready is not None else None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        # Open the models before the event loop runs, so that errors of the models are raised here.
        with front.server.engine:
            server.run(sockets=[door])
    finally:
        sys.setswitchinterval(before)
        door.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        ConfigError: The port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Pass the protocol explicitly, because asyncio sets TCP_NODELAY only for sockets with an explicit protocol. Without
    # TCP_NODELAY, a response takes 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        another = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host, an address of this machine"
        raise ConfigError(
            f"The server cannot listen on {host}:{port}: {error.strerror}.", fix=f"use another {another}."
        ) from error
    return bound
