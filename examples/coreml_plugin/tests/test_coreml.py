"""Run the conformance tests on the Core ML backend. They are skipped if ONNX Runtime does not have the Core ML provider."""

from accel.testing.conformance import BackendConformance


class TestCoreMl(BackendConformance):
    backend = "coreml"
