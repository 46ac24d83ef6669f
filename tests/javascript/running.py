"""Run transformers.js in Node and in headless Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def node_modules() -> Path | None:
    """Return the folder with transformers.js (`ACCEL_NODE_MODULES`); `None` if Node or the package is not installed."""
    folder = Path(os.environ.get("ACCEL_NODE_MODULES", "node_modules")).absolute()
    installed = (folder / "@huggingface" / "transformers" / "package.json").is_file()
    return folder if shutil.which("node") and installed else None


def browser() -> str | None:
    """Return the command of Chromium; `None` if it is not installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def run_in_node(root: Path, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of transformers.js in Node for models in the folder `root`, one for each case."""
    modules = node_modules()
    assert modules is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "node_modules").symlink_to(modules)
        for file in ("node.mjs", "answers.mjs"):
            shutil.copyfile(HERE / file, folder / file)
        (folder / "cases.json").write_text(json.dumps({"root": str(root), "cases": list(cases)}))
        command = ["node", "node.mjs", "cases.json", "results.json"]
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert process.returncode == 0, process.stderr
        results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
        return results


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serve the page, the library, the models and the cases, and receive the answers of the page."""

    def __init__(
        self, folders: Mapping[str, Path], cases: bytes, results: list[Any], done: threading.Event, *args: Any
    ) -> None:
        self._folders, self._cases, self._results, self._done = folders, cases, results, done
        super().__init__(*args)

    def do_GET(self) -> None:
        """Send a file."""
        path = self.path.partition("?")[0]
        place = next((prefix for prefix in self._folders if path.startswith(prefix)), None)
        if path == "/cases.json":
            self._send(self._cases, "application/json")
        elif place is not None and (file := self._folders[place] / path.removeprefix(place)).is_file():
            kinds = {
                ".html": "text/html",
                ".mjs": "text/javascript",
                ".js": "text/javascript",
                ".wasm": "application/wasm",
            }
            self._send(file.read_bytes(), kinds.get(file.suffix, "application/octet-stream"))
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        """Send the headers of a file."""
        self.do_GET()

    def do_POST(self) -> None:
        """Receive the answers."""
        self._results.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b"", "text/plain")
        self._done.set()

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Write no log."""


def run_in_browser(
    root: Path, cases: Sequence[Mapping[str, Any]], *, page: Path = HERE / "browser.html", query: str = ""
) -> list[dict[str, Any]]:
    """Return the answers of the WebAssembly build in headless Chromium for models in the folder `root`, one for each case."""
    modules, command = node_modules(), browser()
    assert modules is not None
    assert command is not None
    results: list[dict[str, Any]] = []
    done = threading.Event()
    folders = {"/node_modules/": modules, "/models/": root, f"/{page.name}": page, "/": HERE}
    content = json.dumps({"cases": list(cases)}).encode()
    handler = functools.partial(_Handler, folders, content, results, done)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{page.name}{query}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        with subprocess.Popen(
            [command, *flags, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            finished = done.wait(300)
            process.terminate()
            process.wait(30)
        server.shutdown()
    assert finished, "the page sent no answers within 300 s"
    return results
