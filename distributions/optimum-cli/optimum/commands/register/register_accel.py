"""Registers the commands of `accel` with Optimum's command line: `optimum-cli accel ...`."""

from accel.compat.optimum.commands import AccelCommand

REGISTER_COMMANDS = [AccelCommand]
