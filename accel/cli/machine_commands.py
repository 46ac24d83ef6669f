"""Commands about this machine and its cache: doctor, demo, cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from . import options
from .application import CommandResult, app, subcommand

cache_app = typer.Typer(
    help="List or remove cached files: exports made by `from_pretrained`, and results of `accel tune`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(cache_app, name="cache")


@subcommand(app, epilog="Example: accel doctor MODEL --json")
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Hub id or folder of a model, to see how it would run.")
    ] = None,
    task: options.Task = None,
    backend: options.Backend = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Show every backend and task, what is missing and how to install it. With MODEL, show how the model would run on this machine."""
    if model is not None:
        from ..models.base import ORTModel
        from ..models.loading_arguments import read_arguments

        arguments = read_arguments(
            task=task, backend=backend, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        plan = ORTModel.plan(model, arguments)
        return CommandResult(plan.to_dict(), str(plan), failed=plan.why_not is not None)
    if any((task, backend, device, revision, trust_remote_code)):
        raise ConfigError(
            "--task, --backend, --device, --revision and --trust-remote-code require the argument MODEL.",
            fix="add the model: accel doctor MODEL.",
        )
    from ..backends.doctor import list_backends
    from ..backends.machine import conflicts, machine
    from ..interfaces.task_registry import all_tasks, broken_tasks

    facts, backends, problems, broken = machine(), list_backends(), conflicts(), broken_tasks()
    tasks = [spec.name for spec in all_tasks() if spec.name not in broken]
    libraries = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
    lines = [
        f"accel {facts['accel']}, Python {facts['python']}, {facts['platform']}",
        f"{facts['processors']} of {facts['processors_of_machine']} processors usable; {libraries}\n",
    ]
    width = max((len(status.name) for status in backends), default=0)
    for status in backends:
        mark = "ok " if status.available else "no "
        lines.append(
            f"{mark} {status.name:<{width}}  {status.summary}{'' if status.auto else ' (used only if you name it)'}"
        )
        lines += [f"    {spec}: {spec.name} {spec.arch}".rstrip() for spec in status.devices]
        if status.prepares:
            lines.append(f"    prepares PyTorch models: {', '.join(status.prepares)}")
        lines += [_reason(f"    {reason.message}", reason.remedy) for reason in status.reasons]
    lines.append(f"\nTasks: {', '.join(tasks)}")
    lines += [_reason(f"no  {error.message}", error.fix) for error in broken.values()]
    lines += [_reason(f"\nConflict: {problem.message}", problem.remedy) for problem in problems]
    return CommandResult(
        {
            "machine": facts,
            "backends": [status.to_dict() for status in backends],
            "conflicts": problems,
            "tasks": tasks,
            "broken_tasks": {name: error.message for name, error in broken.items()},
        },
        "\n".join(lines),
        failed=bool(problems) or not any(status.available for status in backends),
    )


def _reason(message: str, remedy: str | None) -> str:
    return f"{message.rstrip('.')}. Fix: {remedy}" if remedy else message


@subcommand(app, epilog="Example: accel demo --out demo-out/")
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the exported artifact in this folder, and the other artifacts next to this folder."),
    ] = None,
) -> CommandResult:
    """Export, optimize and quantize the included intent classifier, and compare it with PyTorch. Runs offline."""
    from ..demo.walkthrough import render, run

    report = run(out)
    return CommandResult(report, render(report))


@subcommand(cache_app, "list", verbose=False, epilog="Example: accel cache list")
def cache_list() -> CommandResult:
    """List the cached exports of `from_pretrained` and the cached results of `accel tune`, with their sizes."""
    from ..artifact.cache import entries

    cached = entries()
    lines = [f"{entry.bytes / 1e6:9.1f} MB  {entry.name}  ({entry.what})\n{'':14}{entry.path}" for entry in cached]
    return CommandResult(cached, "\n".join(lines) or "The cache is empty.")


@subcommand(cache_app, "clear", verbose=False, epilog="Example: accel cache clear tune")
def cache_clear(
    name: Annotated[str | None, typer.Argument(help="Remove only entries whose name starts with this text.")] = None,
) -> CommandResult:
    """Remove the cached exports of `from_pretrained`, the results of `accel tune`, and cached checksums."""
    from ..artifact.cache import clear

    removed = clear(name)
    freed = sum(entry.bytes for entry in removed)
    return CommandResult(
        {"removed": removed, "bytes": freed},
        f"Removed {', '.join(entry.name for entry in removed) or 'nothing'}: {freed / 1e6:.1f} MB.",
    )
