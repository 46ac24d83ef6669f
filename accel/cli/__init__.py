"""The `accel` command, with one module for each group of commands.

In: command-line arguments. Out: text, or one JSON value on stdout with `--json`, and an exit code. Each command
is a function in the module of its group. Shared options are in `options`, and shared behaviour is in `application`.
"""

# isort: off
# `accel --help` lists the commands in the order of these imports, which is the order in which a user needs them, and then the
# groups of commands.
from . import deploy, artifacts, machine_commands, measurement_commands, generate_command, batch_command, serve  # noqa: F401
# isort: on

from .application import app, main

__all__ = ["app", "main"]
