"""Conformance suite for the Core ML backend; skipped with a reason if ONNX Runtime does not have the Core ML provider."""

from accel.testing.conformance import BackendConformance


class TestCoreMl(BackendConformance):
    backend = "coreml"
