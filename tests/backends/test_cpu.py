"""The CPU backend through the conformance suite."""

from accel.testing.conformance import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"
