"""The `accel` command, with one module for each group of commands.

In: command-line arguments. Out: text, or one JSON value on stdout with `--json`, and an exit code. Each command
is a function in the module of its group. Shared options are in `options`, and shared behaviour is in `application`.
"""

from . import artifacts, batch_command, deploy, generate_command, machine_commands, measure, serve  # noqa: F401  # they join the application
from .application import app, main

__all__ = ["app", "main"]
