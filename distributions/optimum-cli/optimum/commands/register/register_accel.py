"""`optimum-cli accel ...`: the commands of `accel`, in Optimum's place for commands of others."""

from accel.compat.optimum.commands import AccelCommand

REGISTER_COMMANDS = [AccelCommand]
