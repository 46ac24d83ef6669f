"""The command-line application and the shared behaviour of its commands: progress, output, and errors as exit codes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from .._version import __version__
from ..artifact.json_writing import json_text
from ..errors import AccelError, ConfigError
from ..upstream.output_silencing import hush_imports
from . import options
from .exit_codes import FAILED, INTERRUPTED, exit_code
from .stdout_errors import lost_output, watch_output

_QUOTES = "'\""
_SETTING = re.compile(rf"\b([a-z_]+)=(\.\.\.|True|[{_QUOTES}][^{_QUOTES}]*[{_QUOTES}])(?! \(--)")

app = typer.Typer(
    name="accel",
    help="Run Hugging Face transformers fast: export, check, optimize, quantize, evaluate and serve models on your hardware.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the `accel` command and exit with its exit code."""
    output = watch_output()
    ended: int | str | None = 0
    try:
        app()
    except SystemExit as error:
        ended = error.code
    except OSError:
        ended = lost_output(output)
        if ended is None:
            raise
    # Flush now, because errors of buffered output occur only when it is written.
    lost = lost_output(output)
    sys.exit(ended if lost is None else lost)


def show_steps(logger: str) -> None:
    """Show the log messages of a package about each step on stderr."""
    if not logging.getLogger("accel").isEnabledFor(logging.DEBUG):
        logging.getLogger(logger).setLevel(logging.INFO)


def print_line(text: str = "") -> None:
    """Write a line to stdout."""
    sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    """Convert dataclasses, paths and tuples to JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        value: The result for `--json`.
        text: The text that is printed without `--json`.
        failed: Whether the command failed without raising an error. The exit code is then 1.
    """

    value: Any
    text: str
    failed: bool = False


def subcommand(
    group: typer.Typer, name: str | None = None, *, epilog: str, verbose: bool = True
) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Add a function as a command with the options `--json` and `--verbose`. The command prints the function's
    `CommandResult`.

    Args:
        group: The application, or a command group.
        name: Name of the command; the function's name when `None`.
        epilog: The last line of the help text.
        verbose: Whether the command has the option `--verbose`.
    """

    def add(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
        @functools.wraps(function)
        def call(*, as_json: bool = False, verbose: bool = False, **arguments: Any) -> None:
            with command(as_json, verbose):
                outcome = function(**arguments)
                emit(outcome.value, as_json, outcome.text)
                if outcome.failed:
                    raise typer.Exit(FAILED)

        shared = {"as_json": options.Json, **({"verbose": options.Verbose} if verbose else {})}
        signature = inspect.signature(function, eval_str=True)
        parameters = [
            *signature.parameters.values(),
            *(
                inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
                for flag, kind in shared.items()
            ),
        ]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        group.command(name, epilog=epilog)(call)
        return function

    return add


def emit(result: Any, as_json: bool, text: str) -> None:
    """Print the result of a command, as JSON or as text."""
    print_line(json_text(_plain(result), indent=2, ensure_ascii=True) if as_json else text)


@contextlib.contextmanager
def command(as_json: bool, verbose: bool) -> Iterator[None]:
    """Show progress on stderr, set the log level, and turn errors into exit codes."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("accel").setLevel(logging.DEBUG if verbose else logging.WARNING)
    if not verbose:
        hush_imports()
    try:
        with _progress_bar():
            yield
    except AccelError as error:
        _tell(type(error).__name__, error.message, error.fix, as_json)
        if verbose:
            raise
        raise typer.Exit(exit_code(error)) from error
    except OSError as error:
        lost = lost_output()
        if lost is not None:
            raise typer.Exit(lost) from error
        if verbose:
            raise
        named = "check this path and its read and write permissions."
        fix = named if error.filename is not None else "run the command again with --verbose to see the traceback."
        _tell(type(error).__name__, f"{error}.", fix, as_json)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. No incomplete output was left.\n")
        raise typer.Exit(INTERRUPTED) from None


def _tell(kind: str, message: str, fix: str | None, as_json: bool) -> None:
    """Print an error: a JSON object on stdout, or text on stderr."""
    fix = _as_options(fix) if fix is not None else None
    if as_json:
        print_line(json.dumps({"error": message, "type": kind, "fix": fix}, indent=2))
    else:
        sys.stderr.write(f"Error: {AccelError(message, fix=fix)}\n")


def _as_options(words: str) -> str:
    """Replace Python arguments in a remedy by command-line options, for example `calibration=...` by `--calibration`."""
    flags = {
        name: next((flag for flag in info.param_decls or () if flag.startswith("--")), f"--{name.replace('_', '-')}")
        for command in app.registered_commands
        if command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items()
        for info in getattr(hint, "__metadata__", ())
        if isinstance(info, OptionInfo)
    }

    def as_option(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip(_QUOTES)
        if name not in flags:
            return match[0]
        return flags[name] if value in ("...", "True") else f"{flags[name]} {value}"

    return _SETTING.sub(as_option, words)


@contextlib.contextmanager
def _progress_bar() -> Iterator[None]:
    """Show the progress of `accel.progress` on stderr: a progress bar if stderr is a terminal, and else one line for each stage."""
    from .. import progress

    if not sys.stderr.isatty():
        with progress.listening(_StageLines()):
            yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Without these arguments, rich would capture stdout, even if stdout is redirected.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("starting", total=None)

        def listener(description: str, done: int, total: int | None) -> None:
            bar.update(task, description=description, completed=done, total=total)

        with progress.listening(listener):
            yield


class _StageLines:
    """Listener that writes a line to stderr when a stage starts."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what == self._last or (done and done == total):
            return
        self._last = what
        # Progress is optional, so the command continues if nobody reads stderr.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print_line(__version__)
        raise typer.Exit


def columns_of(pairs: list[str] | None) -> dict[str, str] | None:
    """Parse the values of `--column`."""
    return pairs_of(pairs, "--column", "text=query")


def pairs_of(pairs: list[str] | None, option: str, example: str) -> dict[str, str] | None:
    """Parse values of the form `NAME=VALUE`.

    Raises:
        ConfigError: A value does not have this form.
    """
    values = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name or not value:
            raise ConfigError(
                f"The value {pair!r} of {option} does not have the form NAME=VALUE.",
                fix=f"use, for example, {option} {example}.",
            )
        values[name] = value
    return values or None


if __name__ == "__main__":
    main()
