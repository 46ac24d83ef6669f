"""Run the conformance tests on the OpenVINO execution provider. They are skipped if `onnxruntime-ep-openvino` is not installed."""

from accel.testing.conformance import BackendConformance


class TestOpenVinoEp(BackendConformance):
    backend = "openvino-ep"
