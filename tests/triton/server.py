"""Find a `tritonserver`, start it with a model repository, and send requests over HTTP as JSON.

Some servers have only the Python backend, for example the server in the package `nvidia-pytriton`. These servers run a
shadow of the repository: a copy with the same models, names and tensors, in which Python runs the ONNX graphs on the
CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from accel.deploying.triton.model_config import CONFIG, read, write
from accel.deploying.triton.repository import SERVED, SETTINGS
from accel.errors import ConfigError, SessionError

VARIABLE = "ACCEL_TRITONSERVER"
"""Environment variable with the path of a `tritonserver`, or of a Python interpreter that has the package `nvidia-pytriton`."""

_USUAL = Path("/opt/tritonserver/bin/tritonserver")
_ASK = """
import importlib.util, json, pathlib, sys, sysconfig
found = importlib.util.find_spec("pytriton")
root = pathlib.Path(found.origin).parent if found else None
print(json.dumps({"root": root and str(root), "libraries": sysconfig.get_config_var("LIBDIR"), "version": "%d.%d" % sys.version_info[:2]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Triton installation that can be started.

    Attributes:
        binary: Path of `tritonserver`.
        backends: Folder of the server's backends.
        stub: Program that runs Python models, if the server does not contain one for this Python version.
        environment: Environment variables that the server needs.
    """

    binary: Path
    backends: Path
    stub: Path | None = None
    environment: Mapping[str, str]

    def has(self, backend: str) -> bool:
        """Return whether the server can run models of a backend."""
        return backend == "ensemble" or (self.backends / backend).is_dir()


def find_server() -> Installation | None:
    """Return the Triton installation to use, or `None`.

    The candidates are the path in `ACCEL_TRITONSERVER`, a `tritonserver` in the usual places, and the server in the package
    `nvidia-pytriton` of this Python.

    Raises:
        ConfigError: The path in `ACCEL_TRITONSERVER` is not a Triton installation.
    """
    named = os.environ.get(VARIABLE)
    path = Path(named or shutil.which("tritonserver") or _USUAL)
    if path.name == "tritonserver" and path.is_file():
        return Installation(binary=path, backends=path.resolve().parents[1] / "backends", environment={})
    installation = _of_python(path if named else Path(sys.executable))
    if named and installation is None:
        raise ConfigError(f"{path} is no tritonserver and no Python with nvidia-pytriton.", fix=f"set {VARIABLE}.")
    return installation


def _of_python(python: Path) -> Installation | None:
    """Return the server in the package `nvidia-pytriton` of a Python interpreter, or `None`. This server has only the
    Python backend.
    """
    process = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        return None
    facts = json.loads(process.stdout.splitlines()[-1])
    if facts["root"] is None:
        return None
    root = Path(facts["root"])
    server = root / "tritonserver"
    stub = server / "python_backend_stubs" / facts["version"] / "triton_python_backend_stub"
    if not (server / "bin" / "tritonserver").is_file() or not stub.is_file():
        return None
    libraries = [root.parent / "nvidia_pytriton.libs", server / "external_libs", facts["libraries"]]
    return Installation(
        binary=server / "bin" / "tritonserver",
        backends=server / "backends",
        stub=stub,
        environment={
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": os.pathsep.join(
                str(library_path) for library_path in libraries if library_path and Path(library_path).is_dir()
            ),
        },
    )


class TritonServer:
    """Running Triton server. It is a context manager that stops the server at its end.

    Args:
        repository: Model repository.
        installation: Triton installation to start.

    Raises:
        SessionError: The server ended or was not ready in time. The error contains the errors in its log.
    """

    def __init__(self, repository: Path, installation: Installation) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="accel-triton-"))
        self._log = self._folder / "log"
        self.http, self.grpc = _free_port(), _free_port()
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={self._backends(installation)}",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--allow-metrics=false",
            "--exit-on-error=true",
        ]
        with self._log.open("wb") as stream:
            # Start a new process group, so that the test can kill the processes of Python models together with the
            # server, and so that Ctrl-C does not reach the server directly.
            self._process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **installation.environment},
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(120.0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server. A second call has no effect."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, path: str) -> Any:
        """Return the JSON response of the server for a URL path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/{path}", timeout=60) as answer:
            return json.load(answer)

    def stream(self, name: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed response from Triton's endpoint `generate_stream`."""
        url = f"http://127.0.0.1:{self.http}/v2/models/{name}/generate_stream"
        with urllib.request.urlopen(url, json.dumps(body).encode(), 60) as answer:
            events = [json.loads(line[5:]) for line in answer if line.startswith(b"data:")]
        assert not any("error" in event for event in events), events
        return events

    def statistics(self, name: str) -> dict[str, Any]:
        """Return the server's counters for a model, such as `inference_count` and `execution_count`."""
        model_stats: dict[str, Any] = self.ask(f"v2/models/{name}/stats")["model_stats"][0]
        return model_stats

    def _errors(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.startswith("E") or "error:" in line.lower()][-12:])

    def _backends(self, installation: Installation) -> Path:
        """Return the folder of backends, which contains the correct stub program for Python models."""
        if installation.stub is None:
            return installation.backends
        folder = self._folder / "backends"
        shutil.copytree(installation.backends, folder)
        shutil.copy(installation.stub, folder / "python" / "triton_python_backend_stub")
        return folder

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise SessionError(f"tritonserver ended with {self._process.returncode}:\n{self._errors()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SessionError(f"tritonserver was not ready after {timeout_s:.0f} s.\n{self._errors()}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def shadow(repository: Path, out: Path, *, threads: int = 1) -> list[str]:
    """Write the shadow of a model repository: a copy in which Python runs the ONNX graphs.

    Args:
        repository: Model repository.
        out: Folder for the shadow. It must not exist.
        threads: Number of threads for each graph.

    Returns:
        Names of the models whose graphs Python cannot run. The shadow does not contain these models.
    """
    left_out = []
    shutil.copytree(repository, out)
    for path in sorted(out.glob(f"*/{CONFIG}")):
        config = read(path)
        backend = config.backend or config.platform
        if backend in ("python", "ensemble"):
            continue
        if not backend.startswith("onnxruntime"):
            left_out.append(path.parent.name)
            shutil.rmtree(path.parent)
            continue
        graph = config.default_model_filename or "model.onnx"
        config.backend, config.platform = "python", ""
        for field in ("optimization", "parameters", "default_model_filename", "instance_group"):
            config.ClearField(field)
        config.instance_group.add(count=1, kind="KIND_CPU")
        write(config, path.parent)
        for version in (folder for folder in path.parent.iterdir() if folder.is_dir() and folder.name.isdigit()):
            shutil.copyfile(SERVED / "graph.py", version / "model.py")
            settings = {"graph": graph, "threads": threads}
            (version / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return left_out
