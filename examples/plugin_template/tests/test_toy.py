"""Run the conformance tests on the toy backend. A backend needs no tests in addition to the conformance tests."""

from pathlib import Path

from accel.artifact import Artifact
from accel.stages.export import export
from accel.testing.conformance import BackendConformance
from accel.testing.models import tiny_model


class TestToy(BackendConformance):
    backend = "toy"

    # Only backends whose sessions store a state between calls define this method.
    def stateful_artifact(self, folder: Path) -> Artifact:
        return export(tiny_model("bert", num_hidden_layers=1), folder, backend="toy")
