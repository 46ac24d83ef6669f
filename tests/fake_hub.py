"""A replacement for the Hugging Face Hub that runs on this machine. Its repositories are dictionaries of files, and it
records all downloads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

SHA = "1" * 40


class FakeHub:
    """Repositories of the fake Hub, its answers to requests, and the downloaded files.

    Attributes:
        repositories: For each repository, a dictionary from file name to file content.
        fetched: Names of the files whose content was sent.
        refuses: Status and error code of every answer, or `None` if requests are answered normally.
        hangs: Whether the fake Hub answers no request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Mapping[str, bytes]] = {}
        self.fetched: list[str] = []
        self.refuses: tuple[int, str] | None = None
        self.hangs = False
        self.done = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.do_GET()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        if hub.hangs:
            hub.done.wait(60)
            return
        if hub.refuses is not None:
            status, code = hub.refuses
            self._answer(status, b"{}", {"X-Error-Code": code} if code else {})
            return
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            self._describe(path.removeprefix("api/models/"))
            return
        name, _, rest = path.partition("/resolve/")
        _, _, file = rest.partition("/")
        files = hub.repositories.get(name)
        if files is None or file not in files:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = files[file]
        if self.command == "GET":
            hub.fetched.append(file)
        tag = hashlib.sha1(content).hexdigest()
        self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": SHA})

    def _describe(self, path: str) -> None:
        name = "/".join(path.split("/")[:2])
        revision = path.partition("/revision/")[2]
        files = self.hub.repositories.get(name)
        if files is None:
            self._answer(401, b'{"error": "Invalid username or password."}', {})
        elif revision not in ("", "main", SHA):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            listed = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            self._answer(200, json.dumps(listed).encode(), {})
        else:
            info = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
            self._answer(200, json.dumps(info).encode(), {})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Start the fake Hub in a thread, yield its URL, and stop it afterwards."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.done.set()
        server.shutdown()
        server.server_close()


def use(address: str, cache: str, patch: pytest.MonkeyPatch) -> None:
    """Make `huggingface_hub` use this URL, and store its downloads in the folder `cache`."""
    from huggingface_hub import constants

    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": cache,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        patch.setattr(constants, name, value)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        patch.delenv(name, raising=False)
