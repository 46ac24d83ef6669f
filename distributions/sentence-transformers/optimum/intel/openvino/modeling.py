"""The names that sentence-transformers imports from `optimum.intel.openvino.modeling`, implemented by accel."""

from accel.compat.optimum import OVModel

__all__ = ["OVModel"]
