"""The command `accel serve`, which serves models over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import BackendUnavailableError, ConfigError
from . import options
from .application import app, command, print_line, show_steps

_KEYS = "ACCEL_API_KEYS"


@app.command(epilog="Example: accel serve out-int8/ --port 8000 --workers 2 --api-keys keys.txt")
def serve(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Artifacts, folders or Hub ids; NAME=MODEL gives one a name."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines, too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Sessions a model; they share the processors.")] = 1,
    threads: options.Threads = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows in one call of a model.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one call, padding counted.")] = 16384,
    max_queue: Annotated[int, typer.Option(min=1, help="Inputs that may wait; the next request gets 429.")] = 512,
    max_wait_ms: Annotated[
        float | None, typer.Option(min=0.001, help="A request that would wait longer gets 429 at once.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a generated answer that a request may ask for.")
    ] = 4096,
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds until a request is dropped.")] = 60.0,
    max_client_batch: Annotated[int, typer.Option(min=1, help="Inputs in one request.")] = 256,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Size of a request.")] = 8.0,
    max_text_chars: Annotated[int, typer.Option(min=1, help="Letters of all texts in one request.")] = 1 << 20,
    api_keys: Annotated[
        Path | None,
        typer.Option(help=f"File with a key a line; or {_KEYS}, with commas between. Without: none is asked for."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call from a browser, such as https://app.example.org, or *; repeat."),
    ] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that accepted requests get after SIGTERM.")] = 60.0,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    traces: Annotated[
        bool,
        typer.Option(
            "--traces", help="Send OpenTelemetry traces (OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra `traces`)."
        ),
    ] = False,
    ray: options.Ray = False,
    address: options.Address = None,
    replicas: options.ReplicaCount = options.REPLICAS,
    cpus: options.Cpus = options.CPUS,
    gpus: options.Gpus = options.GPUS,
    task: options.Task = None,
    backend: options.Backend = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve models over HTTP: OpenAI's API, the Open Inference Protocol, an endpoint for each task, and a page at /docs."""
    with command(False, verbose):
        try:
            from ..serving.http.app import create_app
            from ..serving.http.server_process import serve as run
            from ..serving.http.server_settings import ServerSettings
        except ImportError as error:
            raise BackendUnavailableError(
                f"Serving needs {error.name}.", fix='install the extra: pip install "accel-transformers[serve]".'
            ) from error
        from ..config import SessionOptions
        from ..serving.engine import Engine

        show_steps("accel.serving")
        arguments: dict[str, Any] = {
            "workers": workers, "task": task, "backend": backend, "device": device, "revision": revision,
            "session_options": SessionOptions(threads=threads) if threads is not None else None,
            "trust_remote_code": trust_remote_code, "max_batch": max_batch, "max_batch_tokens": max_batch_tokens,
            "max_queue": max_queue, "max_wait_s": None if max_wait_ms is None else max_wait_ms / 1e3, "timeout_s": timeout,
            "max_new_tokens": max_new_tokens,
        }  # fmt: skip
        limits: dict[str, Any] = {
            "max_body_bytes": int(max_body_mb * (1 << 20)), "max_client_batch": max_client_batch,
            "max_text_chars": max_text_chars, "api_keys": _keys(api_keys), "drain_s": drain,
            "cors_origins": tuple(cors_origin or ()),
        }  # fmt: skip
        if options.wants_ray(ray, address, replicas, cpus, gpus):
            if ssl_certfile is not None or ssl_keyfile is not None:
                raise ConfigError(
                    "Ray's proxies speak no TLS.", fix="put a proxy with TLS in front, without --ssl-certfile."
                )
            from ..serving.ray.ray_deployment import Replicas, Served, serve_on_ray

            served = Served(models=_absolute(_named(models)), engine=arguments, settings=limits, traces=traces)
            wanted = Replicas(count=replicas, cpus=cpus, gpus=gpus, drain_s=drain)

            def deployed(url: str) -> None:
                print_line(f"Serving {', '.join(models)} on Ray, {replicas} replicas\n{url}/docs")
                sys.stdout.flush()

            serve_on_ray(served, wanted, address=address, host=host, port=port, on_ready=deployed)
            return
        engine = Engine(_named(models), **arguments)
        front = create_app(engine, ServerSettings(**limits), traces=traces)

        def ready(url: str) -> None:
            names = ", ".join(f"{name} ({', '.join(engine.operations(name))})" for name in engine.models)
            print_line(f"Serving {names}\n{url}/docs")
            sys.stdout.flush()

        secure = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
        run(front, host=host, port=port, on_ready=ready, **{name: str(path) for name, path in secure.items() if path})


def _named(models: list[str]) -> dict[str, str] | list[str]:
    """Return models by name if an argument has the form `NAME=MODEL`; if not, return the list unchanged."""
    if not any("=" in one and not Path(one).exists() for one in models):
        return models
    from ..serving.worker_models import name_of

    found: dict[str, str] = {}
    for one in models:
        name, separator, source = one.partition("=") if not Path(one).exists() else ("", "", "")
        name, source = (name, source) if separator else (name_of(one), one)
        if not name or not source or name in found:
            raise ConfigError(f"{one!r} names no model, or its name is taken.", fix="write NAME=MODEL, names unlike.")
        found[name] = source
    return found


def _absolute(models: dict[str, str] | list[str]) -> dict[str, str]:
    """Return models by name. Paths are made absolute, because other processes open them."""
    from ..serving.worker_models import named

    found = named(models if isinstance(models, dict) else list(models))
    return {name: str(Path(str(one)).resolve()) if Path(str(one)).exists() else str(one) for name, one in found.items()}


def _keys(file: Path | None) -> tuple[str, ...]:
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}.", fix="name a file with a key a line."
            ) from error
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        if not keys:
            raise ConfigError(f"{file} holds no key.", fix="write one a line.")
        return keys
    return tuple(key for part in os.environ.get(_KEYS, "").split(",") if (key := part.strip()))
