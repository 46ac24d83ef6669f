"""The command `accel serve`, which serves models over HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifact.signatures import REQUIREMENT
from ..errors import BackendUnavailableError, ConfigError
from . import options
from .application import app, command, print_line, show_steps

_KEYS = "ACCEL_API_KEYS"


@app.command(epilog="Example: accel serve out-int8/ --port 8000 --workers 2 --api-keys keys.txt")
def serve(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Artifacts, folders or Hub ids. NAME=MODEL sets the name of a model."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts requests from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free port.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Number of sessions per model. They share the processors.")] = 1,
    threads: options.Threads = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of rows per model call.")] = 64,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens per model call, including padding.")
    ] = 16384,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Maximum number of waiting inputs. Further requests get HTTP status 429.")
    ] = 512,
    max_wait_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="A request with a longer expected wait gets HTTP status 429 immediately."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of generated tokens that a request may set.")
    ] = 4096,
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which a request is dropped.")] = 60.0,
    max_client_batch: Annotated[int, typer.Option(min=1, help="Maximum number of inputs per request.")] = 256,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Maximum size of a request, in MiB.")] = 8.0,
    max_text_chars: Annotated[
        int, typer.Option(min=1, help="Maximum number of characters of all texts in a request.")
    ] = 1 << 20,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help=f"File with one API key per line; or set {_KEYS} to keys with commas. By default, no key is required."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may send requests, such as https://app.example.org, or *. Repeat the flag for several."
        ),
    ] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to finish accepted requests after SIGTERM.")] = 60.0,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate file, for https.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key file of the TLS certificate.")] = None,
    traces: Annotated[
        bool,
        typer.Option(
            "--traces", help="Send OpenTelemetry traces (OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra `traces`)."
        ),
    ] = False,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A second model that gets copies of requests; NAME=MODEL if the server has several models.",
        ),
    ] = None,
    share: Annotated[
        str, typer.Option(help="With --shadow: part of the requests that are copied, such as 5% or 0.05.")
    ] = "5%",
    switch_agreement: Annotated[
        float | None,
        typer.Option(
            help="With --shadow: switch to it when the lower end of the agreement's interval is at least this, such as 0.99."
        ),
    ] = None,
    switch_latency: Annotated[
        float | None,
        typer.Option(
            help="With --shadow: and the upper end of the interval of its relative computing time is at most this."
        ),
    ] = None,
    ray: options.Ray = False,
    address: options.Address = None,
    replicas: options.ReplicaCount = options.REPLICAS,
    cpus: options.Cpus = options.CPUS,
    gpus: options.Gpus = options.GPUS,
    task: options.Task = None,
    backend: options.Backend = None,
    device: options.Device = None,
    revision: options.Revision = None,
    require_signature: options.RequireSignature = None,
    trust_remote_code: options.Trust = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve models over HTTP, with the OpenAI API, the Open Inference Protocol, an endpoint per task, and a page at /docs."""
    with command(False, verbose):
        try:
            from ..serving.http.app import create_app
            from ..serving.http.server_process import serve as run
            from ..serving.http.server_settings import ServerSettings
        except ImportError as error:
            raise BackendUnavailableError(
                f"`accel serve` needs the Python package {error.name}, which is not installed.",
                fix='install the extra: pip install "accel-transformers[serve]".',
            ) from error
        from ..config import SessionOptions
        from ..serving.engine import Engine

        show_steps("accel.serving")
        options.require_signatures(require_signature)
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
            if shadow is not None:
                raise ConfigError(
                    "--shadow cannot be used with --ray, because each replica would have its own comparison.",
                    fix="remove --shadow, or serve without --ray.",
                )
            if require_signature is not None:
                raise ConfigError(
                    "--require-signature cannot be used with --ray, because the models are opened by other processes of the cluster.",
                    fix=f"set the environment variable {REQUIREMENT} on all nodes, and remove --require-signature.",
                )
            if ssl_certfile is not None or ssl_keyfile is not None:
                raise ConfigError(
                    "--ssl-certfile and --ssl-keyfile cannot be used with --ray, because the HTTP proxies of Ray do not support "
                    "TLS.",
                    fix="remove --ssl-certfile and --ssl-keyfile, and run a proxy with TLS in front of the server.",
                )
            from ..serving.ray.ray_deployment import Replicas, Served, serve_on_ray

            served = Served(models=_absolute(_named(models)), engine=arguments, settings=limits, traces=traces)
            replica_options = Replicas(count=replicas, cpus=cpus, gpus=gpus, drain_s=drain)

            def deployed(url: str) -> None:
                print_line(f"Serving {', '.join(models)} on Ray, {replicas} replicas\n{url}/docs")
                sys.stdout.flush()

            serve_on_ray(served, replica_options, address=address, host=host, port=port, on_ready=deployed)
            return
        second = _shadow(shadow, share, switch_agreement, switch_latency, arguments)
        engine = Engine(_named(models), **arguments, shadow=second)
        web_app = create_app(engine, ServerSettings(**limits), traces=traces)

        def ready(url: str) -> None:
            names = ", ".join(f"{name} ({', '.join(engine.operations(name))})" for name in engine.models)
            print_line(f"Serving {names}\n{url}/docs")
            sys.stdout.flush()

        secure = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
        run(web_app, host=host, port=port, on_ready=ready, **{name: str(path) for name, path in secure.items() if path})


def _shadow(
    source: str | None, share: str, agreement: float | None, latency: float | None, arguments: dict[str, Any]
) -> Any:
    """Return the shadow, or `None` without one."""
    if source is None:
        if agreement is not None or latency is not None:
            raise ConfigError(
                "--switch-agreement and --switch-latency need a shadow.", fix="add --shadow MODEL, or remove them."
            )
        return None
    from ..serving.shadow import Shadow, ShadowSettings

    try:
        part = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--share is {share!r}, which is no part.", fix="write 5% or 0.05.") from error
    name, separator, model = source.partition("=") if not Path(source).exists() else ("", "", source)
    opening = {key: arguments[key] for key in ("task", "backend", "device", "session_options", "trust_remote_code")}
    settings = ShadowSettings(share=part, min_agreement=agreement, max_latency_ratio=latency)
    return Shadow(model if separator else source, settings, model=name or None, **opening)


def _named(models: list[str]) -> dict[str, str] | list[str]:
    """Return models by name if an argument has the form `NAME=MODEL`; if not, return the list unchanged."""
    if not any("=" in argument and not Path(argument).exists() for argument in models):
        return models
    from ..serving.worker_models import name_of

    sources: dict[str, str] = {}
    for argument in models:
        name, separator, source = argument.partition("=") if not Path(argument).exists() else ("", "", "")
        name, source = (name, source) if separator else (name_of(argument), argument)
        if not name or not source or name in sources:
            conflict = f"Two models have the same name, {name!r}." if name in sources else ""
            raise ConfigError(
                conflict or f"The argument {argument!r} does not have the form MODEL or NAME=MODEL.",
                fix="write NAME=MODEL, with a different name for each model.",
            )
        sources[name] = source
    return sources


def _absolute(models: dict[str, str] | list[str]) -> dict[str, str]:
    """Return models by name. Paths are made absolute, because other processes open them."""
    from ..serving.worker_models import named

    sources = named(models if isinstance(models, dict) else list(models))
    return {
        name: str(Path(str(source)).resolve()) if Path(str(source)).exists() else str(source)
        for name, source in sources.items()
    }


def _keys(file: Path | None) -> tuple[str, ...]:
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"The file of --api-keys, {file}, cannot be read: {error.strerror}.",
                fix="use a readable file with one key per line.",
            ) from error
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        if not keys:
            raise ConfigError(
                f"The file of --api-keys, {file}, contains no key.", fix="write one key per line into the file."
            )
        return keys
    return tuple(key for part in os.environ.get(_KEYS, "").split(",") if (key := part.strip()))
