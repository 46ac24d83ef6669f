"""The names that sentence-transformers imports from `optimum.intel`, implemented by accel."""

from accel.compat.optimum.import_conflicts import refuse_if_installed

refuse_if_installed("optimum-intel")

from accel.compat.optimum import OVQuantizationConfig  # noqa: E402  # The check above must run before this import.

__all__ = ["OVQuantizationConfig"]
