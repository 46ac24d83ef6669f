"""Conformance suite for the OpenVINO plugin backend; skipped with a reason if Intel's package is not installed."""

from accel.testing.conformance import BackendConformance


class TestOpenVinoEp(BackendConformance):
    backend = "openvino-ep"
