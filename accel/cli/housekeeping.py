"""Commands about this machine and what is kept on it: doctor, demo, cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .application import app, command, emit, print_line
from .exit_codes import FAILED
from .options import Backend, Device, Json, Revision, Task, Trust, Verbose

cache_app = typer.Typer(
    help="List or clear what is kept: exports made on the fly, and searches.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(cache_app, name="cache")


@app.command(epilog="Example: accel doctor MODEL --json")
def doctor(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Hub id or folder, to see how it runs.")] = None,
    task: Task = None,
    backend: Backend = None,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show every backend with what is missing, and its remedy; for a model, how it would run here and why."""
    with command(as_json, verbose):
        if model is not None:
            from ..models.arguments import read_arguments
            from ..models.base import ORTModel

            arguments = read_arguments(
                task=task, backend=backend, device=device, revision=revision, trust_remote_code=trust_remote_code
            )
            plan = ORTModel.plan(model, arguments)
            emit(plan.to_dict(), as_json, str(plan))
            if plan.why_not is not None:
                raise typer.Exit(FAILED)
            return
        if any((task, backend, device, revision, trust_remote_code)):
            raise ConfigError("These options are about a model.", fix="name the model: accel doctor MODEL.")
        from ..backends.doctor import list_backends
        from ..backends.machine import conflicts, machine

        facts, backends, problems = machine(), list_backends(), conflicts()
        if as_json:
            found = [status.to_dict() for status in backends]
            emit({"machine": facts, "backends": found, "conflicts": problems}, True, "")
        else:
            libraries = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
            print_line(f"accel {facts['accel']}, Python {facts['python']}, {facts['platform']}")
            print_line(f"{facts['processors']} of {facts['processors_of_machine']} processors usable; {libraries}\n")
            width = max((len(status.name) for status in backends), default=0)
            for status in backends:
                mark = "ok " if status.available else "no "
                print_line(f"{mark} {status.name:<{width}}  {status.summary}{'' if status.auto else ' (by name only)'}")
                for found_device in status.devices:
                    print_line(f"    {found_device}: {found_device.name} {found_device.arch}".rstrip())
                if status.prepares:
                    print_line(f"    prepares PyTorch models: {', '.join(status.prepares)}")
                for reason in status.reasons:
                    print_line(f"    {reason.message}{f'. Fix: {reason.remedy}' if reason.remedy else ''}")
            for problem in problems:
                print_line(f"\nConflict: {problem.message}. Fix: {problem.remedy}")
        if not any(status.available for status in backends) or problems:
            raise typer.Exit(FAILED)


@app.command(epilog="Example: accel demo --out demo-out/")
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the artifact here, the others beside it.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Do the main job on a real intent classifier, offline: export, optimize, quantize, evaluate, compare with PyTorch."""
    with command(as_json, verbose):
        from ..demo.walkthrough import render, run

        report = run(out)
        emit(report, as_json, render(report))


@cache_app.command("list", epilog="Example: accel cache list")
def cache_list(as_json: Json = False) -> None:
    """List exports that `from_pretrained` made, and what `accel tune` built and measured, with sizes."""
    with command(as_json, False):
        from ..artifact.cache import entries

        kept = entries()
        lines = [f"{entry.bytes / 1e6:9.1f} MB  {entry.name}  ({entry.what})\n{'':14}{entry.path}" for entry in kept]
        emit(kept, as_json, "\n".join(lines) or "The cache is empty.")


@cache_app.command("clear", epilog="Example: accel cache clear tune")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="Only entries whose name starts with this; see the list.")] = None,
    as_json: Json = False,
) -> None:
    """Remove exports that `from_pretrained` made, what `accel tune` keeps, and checksums remembered about them."""
    with command(as_json, False):
        from ..artifact.cache import clear

        removed = clear(name)
        freed = sum(entry.bytes for entry in removed)
        emit(
            {"removed": removed, "bytes": freed},
            as_json,
            f"Removed {', '.join(entry.name for entry in removed) or 'nothing'}: {freed / 1e6:.1f} MB.",
        )
