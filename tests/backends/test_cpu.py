"""The CPU backend through the conformance suite."""

from collections.abc import Callable

import pytest

from accel.artifact import Artifact
from accel.testing.conformance import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"

    # Exports that other tests have, too; the suite makes its own for the plugin template and the provider example.
    @pytest.fixture(scope="class")
    @classmethod
    def artifact(cls, tiny_artifact: Callable[..., Artifact]) -> Artifact:
        return tiny_artifact("bert")

    @pytest.fixture(scope="class")
    @classmethod
    def generating(cls, generator: Callable[..., Artifact]) -> Artifact:
        return generator("llama")
