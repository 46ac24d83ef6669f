"""A small HTTP client for very many requests at once: connections that are kept, h11 for the protocol, asyncio for the rest."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ...errors import BackendUnavailableError, ConfigError

try:
    import h11
except ImportError as error:
    raise BackendUnavailableError(
        "A load test needs h11, which is not installed.", fix='pip install "accel-transformers[serve]"'
    ) from error

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        status: Of HTTP.
        body: All of it.
        headers: By names in lower case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Lost(Exception):  # noqa: N818  # it is counted, not raised to users
    """A connection that ended before its answer did.

    Attributes:
        begun: Whether a part of the answer was there.
    """

    def __init__(self, reason: str, *, begun: bool) -> None:
        super().__init__(reason)
        self.begun = begun


class Client:
    """Requests to one server.

    Args:
        url: Of it, with or without a path.
        key: Sent as a bearer token.
        connections: At once, at most; a request that finds none free waits.
        insecure: Do not check its certificate.

    Raises:
        ConfigError: No URL of a server.
    """

    def __init__(self, url: str, *, key: str | None = None, connections: int = 1024, insecure: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server.", fix="write http://HOST:PORT.")
        self._secure: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._secure = ssl.create_default_context()
            if insecure:
                self._secure.check_hostname, self._secure.verify_mode = False, ssl.CERT_NONE
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._headers = [("host", parts.netloc.rpartition("@")[2]), ("content-type", "application/json")]
        if key:
            self._headers.append(("authorization", f"Bearer {key}"))
        self._idle: list[_Connection] = []
        self._open = asyncio.Semaphore(connections)

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The answer to a request. One that was sent on a kept connection which the server had closed is sent again on a new one.

        Raises:
            OSError: Nobody listens there.
            Lost: The connection ended too early.
        """
        async with self._open:
            while True:
                kept = bool(self._idle)
                one = self._idle.pop() if kept else await self._connect()
                try:
                    reply = await one.ask(method, path, self._headers, body)
                except BaseException as error:
                    one.close()
                    if kept and isinstance(error, Lost | OSError) and not (isinstance(error, Lost) and error.begun):
                        continue
                    raise
                if one.reusable:
                    self._idle.append(one)
                else:
                    one.close()
                return reply

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._secure)
        return _Connection(reader, writer)

    def close(self) -> None:
        """Close what is idle."""
        for one in self._idle:
            one.close()
        self._idle.clear()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.reusable = False

    async def ask(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        http: Any = self._http
        self.reusable = False
        begun = False
        head = h11.Request(method=method, target=path, headers=[*headers, ("content-length", str(len(body)))])
        try:
            self._writer.write(http.send(head) + http.send(h11.Data(data=body)) + http.send(h11.EndOfMessage()))
            await self._writer.drain()
            status, found, parts = 0, {}, []
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    data = await self._reader.read(_CHUNK)
                    begun = begun or bool(data)
                    http.receive_data(data)
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    break
                elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    raise Lost("the connection was closed", begun=begun)
        except (h11.ProtocolError, ConnectionError) as error:
            raise Lost(str(error) or type(error).__name__, begun=begun) from error
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
            self.reusable = True
        return Reply(status, b"".join(parts), found)

    def close(self) -> None:
        self._writer.close()
