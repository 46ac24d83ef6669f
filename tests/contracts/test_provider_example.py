"""Run the conformance suite on the example backend for the Core ML execution provider. The test replaces Core ML by a
provider that is available on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from accel.artifact import Artifact
from accel.backends.plan import RunPreferences, make_plan
from accel.errors import BackendUnavailableError
from accel.interfaces.entry_points import group_of
from accel.interfaces.protocols import Backend
from accel.interfaces.specs import BackendSpec, DeviceSpec
from accel.stages.optimize import optimize
from accel.testing.conformance import BackendConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "coreml_plugin"
MODULE = "accel_coreml_here"


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[BackendSpec]:
    """Register the example backend as an installed plugin that uses ONNX Runtime's CPU provider instead of Core ML."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        import accel_coreml
        from accel_coreml.backend import CoreMlBackend

        module = ModuleType(MODULE)
        module.SPEC = replace(accel_coreml.SPEC, impl=f"{MODULE}:Here")  # type: ignore[attr-defined]
        module.Here = type("Here", (CoreMlBackend,), {"provider": "CPUExecutionProvider"})  # type: ignore[attr-defined]
        patch.setitem(sys.modules, MODULE, module)
        entry = metadata.EntryPoint("coreml", f"{MODULE}:SPEC", group_of("backends"))
        real = metadata.entry_points
        patch.setattr(
            metadata,
            "entry_points",
            lambda group: (*real(group=group), *([entry] if group == group_of("backends") else [])),
        )
        yield accel_coreml.SPEC
    for name in [name for name in sys.modules if name.split(".")[0] == "accel_coreml"]:
        del sys.modules[name]


class TestExample(BackendConformance):
    backend = "coreml"
    device = "cpu"

    def test_missing_provider_has_a_remedy(self, example: BackendSpec) -> None:
        import onnxruntime as ort
        from accel_coreml.backend import CoreMlBackend

        if CoreMlBackend.provider in ort.get_available_providers():
            pytest.skip("this test needs a build of ONNX Runtime without Core ML")
        probe = CoreMlBackend().probe()
        assert not probe.available
        assert probe.reasons[0].remedy

    def test_device_selects_the_compute_units(self, implementation: Backend, artifact: Artifact) -> None:
        options = implementation.provider_options(  # type: ignore[attr-defined]
            artifact, artifact.components[0], DeviceSpec("npu"), {"ModelCacheDirectory": "/tmp"}
        )
        assert options == {
            "ModelCacheDirectory": "/tmp", "ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndNeuralEngine",
        }  # fmt: skip

    def test_graphs_with_other_operators_are_refused_with_fix(self, artifact: Artifact, tmp_path: Path) -> None:
        fused = optimize(artifact, tmp_path / "fused", level="O2", backend="cpu")
        with pytest.raises(BackendUnavailableError, match="uses operators of com.microsoft") as info:
            make_plan(fused, RunPreferences(backend="coreml")).check()
        assert "accel optimize EXPORT OUT --backend coreml" in str(info.value.fix)
        plain = optimize(artifact, tmp_path / "plain", level="O1", backend="coreml")
        assert plain.domains == ("",)
        assert plain.manifest.steps[-1].backend == "coreml"


def test_example_is_short() -> None:
    assert len((EXAMPLE / "accel_coreml" / "backend.py").read_text(encoding="utf-8").splitlines()) < 60
