"""`optimum-cli accel ...`: all `accel` commands in Optimum's command line, with the same arguments and exit codes."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class AccelCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # Optimum is untyped here
    """The `optimum-cli accel` command, which passes its arguments to `accel`."""

    COMMAND = CommandInfo(name="accel", help="Export, optimize, quantize, tune and run models with accel.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Accept all arguments after `accel` unchanged, including `--help`."""
        # `REMAINDER` collects all arguments after the first positional argument.
        parser.add_argument(
            "words",
            nargs=REMAINDER,
            metavar="COMMAND ...",
            help="a command of accel and its arguments; see `accel --help`",
        )

    def run(self) -> Any:
        """Run the `accel` command. This ends the process with its exit code."""
        from ...cli import app

        app(args=self.args.words or ["--help"], prog_name="optimum-cli accel")
