"""OpenVINO through the conformance suite; skipped, with the reason, where Intel's package is not installed."""

from accel.testing.conformance import BackendConformance


class TestOpenVinoEp(BackendConformance):
    backend = "openvino-ep"
