"""The application that commands join, and what all of them do alike: progress, output, errors as exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from .._version import __version__
from ..artifact.json_text import json_text
from ..errors import AccelError, ConfigError
from ..upstream.library_output import hush_imports
from .exit_codes import FAILED, INTERRUPTED, exit_code
from .streams import lost_output, watch_output

_QUOTES = "'\""
_SETTING = re.compile(rf"\b([a-z_]+)=(\.\.\.|True|[{_QUOTES}][^{_QUOTES}]*[{_QUOTES}])(?! \(--)")

app = typer.Typer(
    name="accel",
    help="Run Hugging Face transformers fast: export, check, optimize, quantize, evaluate and run them on the hardware at hand.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `accel` command."""
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
    # Short output is written only now.
    lost = lost_output(output)
    sys.exit(ended if lost is None else lost)


def print_line(text: str = "") -> None:
    """A line on stdout."""
    sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def emit(result: Any, as_json: bool, text: str) -> None:
    """The result of a command, for a program or for a person."""
    print_line(json_text(_plain(result), indent=2, ensure_ascii=True) if as_json else text)


@contextlib.contextmanager
def command(as_json: bool, verbose: bool) -> Iterator[None]:
    """Progress on stderr, log level, and errors as exit codes."""
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
        named = "check that path, and who may read and write it."
        fix = named if error.filename is not None else "run it again with --verbose, which shows where it happened."
        _tell(type(error).__name__, f"{error}.", fix, as_json)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; nothing was left half-written.\n")
        raise typer.Exit(INTERRUPTED) from None


def _tell(kind: str, message: str, fix: str | None, as_json: bool) -> None:
    """What went wrong: an object on stdout, or lines on stderr."""
    fix = _as_options(fix) if fix is not None else None
    if as_json:
        print_line(json.dumps({"error": message, "type": kind, "fix": fix}, indent=2))
    else:
        sys.stderr.write(f"Error: {AccelError(message, fix=fix)}\n")


def _as_options(words: str) -> str:
    """A remedy for callers of the library in the words of the command line: `calibration=...` as `--calibration`."""
    flags = {
        name: next((flag for flag in info.param_decls or () if flag.startswith("--")), f"--{name.replace('_', '-')}")
        for one in app.registered_commands
        if one.callback is not None
        for name, hint in get_type_hints(one.callback, include_extras=True).items()
        for info in getattr(hint, "__metadata__", ())
        if isinstance(info, OptionInfo)
    }

    def said(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip(_QUOTES)
        if name not in flags:
            return found[0]
        return flags[name] if value in ("...", "True") else f"{flags[name]} {value}"

    return _SETTING.sub(said, words)


@contextlib.contextmanager
def _progress_bar() -> Iterator[None]:
    """Show what `accel.progress` reports, on stderr and only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from .. import progress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # What is printed meanwhile goes where it was sent: rich would take stdout, redirected or not, for its own.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("starting", total=None)

        def listener(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        with progress.listening(listener):
            yield


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print_line(__version__)
        raise typer.Exit


def columns_of(pairs: list[str] | None) -> dict[str, str] | None:
    """What `--column` says."""
    return pairs_of(pairs, "--column", "text=query")


def pairs_of(pairs: list[str] | None, option: str, example: str) -> dict[str, str] | None:
    """Options of the form `NAME=VALUE` as a mapping.

    Raises:
        ConfigError: One without an equals sign.
    """
    found = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"{option} {pair!r} is not NAME=VALUE.", fix=f"write, for example, {option} {example}.")
        found[name] = value
    return found or None


if __name__ == "__main__":
    main()
