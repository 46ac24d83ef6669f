"""Find a `tritonserver`, start it on a repository, and send it requests over HTTP with plain JSON.

A server that has the Python backend alone, such as the one in the package `nvidia-pytriton`, runs the shadow of a repository: the same
models, names and tensors, with ONNX graphs run by Python on the CPU.
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
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from accel.deploying.triton.model_config import CONFIG, kind, read, write
from accel.deploying.triton.repository import SERVED, SETTINGS
from accel.errors import ConfigError, SessionError

VARIABLE = "ACCEL_TRITONSERVER"
"""Environment variable with the path of a `tritonserver`, or of a Python that has the package `nvidia-pytriton`."""

_USUAL = Path("/opt/tritonserver/bin/tritonserver")
_ASK = """
import importlib.util, json, pathlib, sys, sysconfig
found = importlib.util.find_spec("pytriton")
root = pathlib.Path(found.origin).parent if found else None
print(json.dumps({"root": root and str(root), "libraries": sysconfig.get_config_var("LIBDIR"), "version": "%d.%d" % sys.version_info[:2]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A Triton that can be started.

    Attributes:
        binary: `tritonserver`.
        backends: The folder of its backends.
        stub: What runs Python models, where the server does not bring the one for this Python.
        environment: Variables that it needs.
    """

    binary: Path
    backends: Path
    stub: Path | None = None
    environment: Mapping[str, str]

    def has(self, backend: str) -> bool:
        """Whether it can run models of that backend."""
        return backend == "ensemble" or (self.backends / backend).is_dir()


def find_server(named: str | os.PathLike[str] | None = None) -> Installation | None:
    """The Triton that was named, that the environment variable `ACCEL_TRITONSERVER` names, that is on the path or in its usual
    place, or in the package `nvidia-pytriton` of this Python; `None` where there is none.

    Raises:
        ConfigError: What was named is not there.
    """
    given = named or os.environ.get(VARIABLE)
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"There is no file {path}.", fix="name a tritonserver, or a Python that has nvidia-pytriton."
            )
        chosen = _of_binary(path) if path.name == "tritonserver" else _of_python(path)
        if chosen is None:
            raise ConfigError(f"{path} has no package nvidia-pytriton.", fix=f"{path} -m pip install nvidia-pytriton")
        return chosen
    on_path = shutil.which("tritonserver")
    for usual in (Path(on_path) if on_path else _USUAL, _USUAL):
        if usual.is_file():
            return _of_binary(usual)
    return _of_python(Path(sys.executable))


def _of_binary(path: Path) -> Installation:
    path = path.resolve()
    return Installation(binary=path, backends=path.parents[1] / "backends", environment={})


def _of_python(python: Path) -> Installation | None:
    """The server inside the package `nvidia-pytriton` of a Python: it has the Python backend alone."""
    asked = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return None
    facts = json.loads(asked.stdout.splitlines()[-1])
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
            "LD_LIBRARY_PATH": os.pathsep.join(str(one) for one in libraries if one and Path(one).is_dir()),
        },
    )


class TritonServer:
    """A running server; a context manager that stops it.

    Args:
        repository: A model repository, or several.
        installation: Which server.
        timeout_s: How long it may take to be ready, in seconds.
        arguments: Further arguments of `tritonserver`.

    Raises:
        SessionError: It ended, or was not ready in time; with the errors of its log.
    """

    def __init__(
        self,
        repository: Path | Sequence[Path],
        installation: Installation,
        *,
        timeout_s: float = 120.0,
        arguments: Sequence[str] = (),
    ) -> None:
        folders = [repository] if isinstance(repository, Path) else list(repository)
        self._folder = Path(tempfile.mkdtemp(prefix="accel-triton-"))
        self.log = self._folder / "log"
        self.http, self.grpc = _free_port(), _free_port()
        command = [
            str(installation.binary),
            *(f"--model-repository={folder}" for folder in folders),
            f"--backend-directory={self._backends(installation)}",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--allow-metrics=false",
            "--exit-on-error=true",
            *arguments,
        ]
        self.log.touch()
        try:
            with self.log.open("wb") as stream:
                # A process group of its own: the processes of Python models end with it, and Ctrl-C reaches it through us alone.
                self._process = subprocess.Popen(
                    command,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **installation.environment},
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise SessionError(
                f"{installation.binary} cannot be started: {error}.", fix="check the path, or leave it out."
            ) from error
        try:
            self._wait(timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it answers over HTTP."""
        return f"http://127.0.0.1:{self.http}"

    def close(self) -> None:
        """Stop it. A second call does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        """The JSON at a path, such as `v2/models/NAME/infer`, or `None` for an empty answer.

        Raises:
            SessionError: The server refused, and why; or it does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/{path}", data, timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise SessionError(f"Triton answered {path} with {error.code}: {said}", fix="see the message.") from error
        except OSError as error:
            raise SessionError(f"Triton does not answer {path}: {error}.", fix="see its log.") from error
        return json.loads(content) if content else None

    def infer(
        self, name: str, inputs: Mapping[str, tuple[str, Any]], parameters: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Outputs by name, as nested lists' flat values with their shapes: `{"SCORE": ([1, 1], [0.9])}`.

        Args:
            name: The model.
            inputs: Triton's type and an array for each input.
            parameters: Of the request.
        """
        given = [
            {"name": key, "datatype": kind, "shape": list(values.shape), "data": values.ravel().tolist()}
            for key, (kind, values) in inputs.items()
        ]
        found = self.ask(f"v2/models/{name}/infer", {"inputs": given, "parameters": dict(parameters or {})})
        return {one["name"]: (one["shape"], one["data"]) for one in found["outputs"]}

    def stream(self, name: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """The pieces of an answer, in their order, from Triton's endpoint `generate_stream`.

        Args:
            name: A decoupled model.
            body: Inputs by name, and `parameters`.
            timeout_s: How long a piece may take, in seconds.

        Raises:
            SessionError: The server refused, and why.
        """
        path = f"v2/models/{name}/generate_stream"
        try:
            with urllib.request.urlopen(f"{self.url}/{path}", json.dumps(body).encode(), timeout_s) as answer:
                events = [json.loads(line[5:]) for line in answer if line.startswith(b"data:")]
        except OSError as error:
            said = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else str(error)
            raise SessionError(f"Triton answered {path} with: {said}", fix="see the message.") from error
        if any("error" in event for event in events):
            raise SessionError(f"Triton answered {path} with: {events[-1]['error']}", fix="see the message.")
        return events

    def statistics(self, name: str) -> dict[str, Any]:
        """What the server counted for a model: `inference_count`, `execution_count`, ..."""
        found: dict[str, Any] = self.ask(f"v2/models/{name}/stats")["model_stats"][0]
        return found

    def errors(self) -> list[str]:
        """Lines of its log that say what failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.startswith("E") or "error:" in line.lower()]

    def _backends(self, installation: Installation) -> Path:
        """The folder of backends, with the right stub for Python models in it."""
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
                said = "\n".join(self.errors()[-12:]) or self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SessionError(
                    f"tritonserver ended with {self._process.returncode}:\n{said}", fix="see the messages of its log."
                )
            try:
                with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        said = "\n".join(self.errors()[-12:])
        raise SessionError(f"tritonserver was not ready after {timeout_s:.0f} s.\n{said}", fix="allow it more time.")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def shadow(repository: Path, out: Path, *, threads: int = 1) -> list[str]:
    """Write the shadow of a repository into the folder `out`, which must not exist.

    Args:
        repository: A model repository.
        out: Where its shadow goes.
        threads: Of each graph.

    Returns:
        The models whose graphs cannot be run by Python; they are left out.
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
        config.instance_group.add(count=1, kind=kind("KIND_CPU"))
        write(config, path.parent)
        for version in (one for one in path.parent.iterdir() if one.is_dir() and one.name.isdigit()):
            shutil.copyfile(SERVED / "graph.py", version / "model.py")
            settings = {"graph": graph, "threads": threads}
            (version / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return left_out
