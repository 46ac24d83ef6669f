"""What sentence-transformers imports from `optimum.intel.openvino.modeling`, by accel."""

from accel.compat.optimum import OVModel

__all__ = ["OVModel"]
