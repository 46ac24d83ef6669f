"""Run the conformance suite on the CPU backend."""

from collections.abc import Callable

import pytest

from accel.artifact import Artifact
from accel.testing.conformance import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"

    # These fixtures replace the suite's own exports with exports that other tests share. The suite creates its own
    # exports when it tests the plugin template and the provider example.
    @pytest.fixture(scope="class")
    @classmethod
    def artifact(cls, tiny_artifact: Callable[..., Artifact]) -> Artifact:
        return tiny_artifact("bert")

    @pytest.fixture(scope="class")
    @classmethod
    def generating(cls, generator: Callable[..., Artifact]) -> Artifact:
        return generator("llama")
