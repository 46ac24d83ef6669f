"""`optimum-cli accel ...`: every command of `accel` under Optimum's command line, with the same words and exit codes."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class AccelCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # Optimum is untyped here
    """Hands its words to `accel`."""

    COMMAND = CommandInfo(name="accel", help="Export, optimize, quantize, tune and run models with accel.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take everything behind `accel` as it is, `--help` too."""
        # Only positional words up to the first one of `accel` are argparse's: options behind it are accel's own.
        parser.add_argument("words", nargs=REMAINDER, metavar="COMMAND ...", help="as in `accel --help`")

    def run(self) -> Any:
        """Run the command; ends the process with its exit code."""
        from ...cli import app

        app(args=self.args.words or ["--help"], prog_name="optimum-cli accel")
