"""Registration of the command `optimum-cli accel ...`, which runs the commands of `accel`."""

from accel.compat.optimum.commands import AccelCommand

REGISTER_COMMANDS = [AccelCommand]
