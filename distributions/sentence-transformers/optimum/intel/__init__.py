"""The names that sentence-transformers imports from `optimum.intel`, implemented by accel."""

from accel.compat.optimum.standing import stand_in_for

stand_in_for("optimum-intel")

from accel.compat.optimum import OVQuantizationConfig  # noqa: E402  # behind the refusal

__all__ = ["OVQuantizationConfig"]
