"""The CPU backend through the conformance suite."""

from pathlib import Path

from accel.artifact import Artifact
from accel.stages.export import export
from accel.testing.conformance import BackendConformance
from accel.testing.generators import tiny_generator


class TestCpu(BackendConformance):
    backend = "cpu"

    def stateful_artifact(self, folder: Path) -> Artifact:
        return export(tiny_generator("llama"), folder, task="text-generation")
