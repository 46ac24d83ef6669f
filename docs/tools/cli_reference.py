"""Write `docs/reference/cli.md` from the command line itself.

python docs/tools/cli_reference.py            # write
python docs/tools/cli_reference.py --check    # exit 1 if the page differs from the commands
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from accel.cli import app

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"
WIDTH = 96
INTRODUCTION = """\
# Command line

<!-- Written by docs/tools/cli_reference.py; run it again after changing a command. -->

| exit code | meaning |
|---|---|
| 0 | The command succeeded. |
| 1 | The command failed. |
| 2 | An option is wrong, or a backend does not exist. |
| 130 | The user interrupted the command with Ctrl-C. |
| 141 | The reader of the output closed the pipe. |

With `--json`, a command writes exactly one JSON value to stdout. For an error, this value is `{"error": ..., "type": ..., "fix": ...}`.

Commands show their progress on stderr: a progress bar on a terminal, and one line for each stage if stderr is a file or a pipe.
"""


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, command and context of `accel` and of all its subcommands that are not hidden, depth first."""

    def walk(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
        context = command.context_class(
            command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        context.help_option_names = ["-h", "--help"]
        yield context.command_path, command, context
        for child_name, child in getattr(command, "commands", {}).items():
            if not child.hidden:
                yield from walk(child_name, child, context)

    yield from walk("accel", typer.main.get_command(app), None)


def options(command: Any, context: Any) -> set[str]:
    """Return every flag of a command, including `--help`."""
    words = {word for parameter in command.get_params(context) for word in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in words if word.startswith("-")}


def render() -> str:
    """Return the page."""
    sections = [INTRODUCTION]
    for path, command, context in commands():
        level = "##" if path.count(" ") < 2 else "###"
        text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        sections.append(f"{level} {path}\n\n```text\n$ {path} --help\n{text}\n```\n")
    return "\n".join(sections)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    text = render()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    difference = list(
        difflib.unified_diff(page.splitlines(), text.splitlines(), "the page", "the commands", lineterm="")
    )
    if difference:
        print("\n".join(difference))
        print(f"{PAGE.name} is out of date. Fix: python docs/tools/cli_reference.py")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
