"""Run the conformance suite on the toy backend: a plugin needs no other tests."""

from pathlib import Path

from accel.artifact import Artifact
from accel.stages.export import export
from accel.testing.conformance import BackendConformance
from accel.testing.models import tiny_model


class TestToy(BackendConformance):
    backend = "toy"

    # Only for backends that keep a state.
    def stateful_artifact(self, folder: Path) -> Artifact:
        return export(tiny_model("bert", num_hidden_layers=1), folder, backend="toy")
