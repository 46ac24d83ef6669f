"""Command `optimum-cli accel ...` with all commands of `accel`. The arguments and exit codes are the same."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class AccelCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # Optimum is untyped here
    """Command `optimum-cli accel`, which passes all of its arguments to the command `accel`."""

    COMMAND = CommandInfo(name="accel", help="Export, optimize, quantize, tune and run models with accel.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Accept all arguments after `accel` unchanged, including `--help`."""
        # `REMAINDER` collects all arguments after `accel`, also arguments that begin with a dash.
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
