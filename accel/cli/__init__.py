"""The `accel` command: one module for each group of commands.

In: words on a command line. Out: text, or with `--json` one JSON value on stdout, and an exit code that tells. A command is
a function of its group's module; options that several share are in `options`, what all of them do in `application`.
"""

from . import artifacts, deploy, housekeeping, measure, prompt, scale, serve  # noqa: F401  # they join the application
from .application import app, main

__all__ = ["app", "main"]
