"""Core ML through the conformance suite; skipped, with the reason, where ONNX Runtime has no such provider."""

from accel.testing.conformance import BackendConformance


class TestCoreMl(BackendConformance):
    backend = "coreml"
