"""Tests of the discovery and selection of backends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accel.artifact import Artifact
from accel.artifact.resolved_model import ResolvedModel
from accel.backends import doctor, plan, registry
from accel.backends.stage_backend_selection import plan_stage
from accel.config import PrepareConfig
from accel.errors import BackendUnavailableError, ConfigError, PluginError, UnknownBackendError
from accel.interfaces.entry_points import group_of
from accel.interfaces.specs import BackendSpec, Capability, DeviceSpec, Probe, Reason
from accel.stages.prepare import prepare


def spec(name: str, **changes: object) -> BackendSpec:
    values: dict[str, object] = {
        "name": name,
        "summary": "for tests",
        "extra": name,
        "impl": f"{name}_plugin:Backend",
        "auto": True,
        "capabilities": (Capability(stage="run", consumes="onnx", devices=("cpu", "cuda")),),
    }
    return BackendSpec(**{**values, **changes})  # type: ignore[arg-type]


CPU = Probe(devices=(DeviceSpec("cpu"),))
CUDA = Probe(devices=(DeviceSpec("cuda", 0), DeviceSpec("cuda", 1)))
BROKEN = Probe(reasons=(Reason("driver", "the driver is too old", "install driver 580"),))


def select(specs: list[BackendSpec], probes: list[Probe], **changes: object) -> plan.Selection:
    backend = changes.pop("backend", None)
    question: dict[str, object] = {"format": "onnx", "task": "text-classification", "dtype": "float32", **changes}
    probed = {s.name: p for s, p in zip(specs, probes, strict=True)}
    inventory = registry.Inventory(specs=tuple(specs), probe=lambda spec: probed[spec.name], missing=lambda spec: None)
    named = inventory.spec(backend) if isinstance(backend, str) else None
    return plan.select(plan.SelectionRequest(**question), inventory, named)  # type: ignore[arg-type]


def test_backend_with_highest_priority_is_selected() -> None:
    selection = select([spec("a", priority=1), spec("b", priority=2)], [CPU, CUDA])
    assert (selection.backend, str(selection.device)) == ("b", "cuda:0")
    assert {row.backend: row.verdict for row in selection.table} == {"a": "possible", "b": "chosen"}


def test_unavailable_backends_are_skipped_with_reasons() -> None:
    selection = select([spec("a", priority=1), spec("b", priority=2)], [CPU, BROKEN])
    assert selection.backend == "a"
    assert "the driver is too old (install driver 580)" in str(selection)


def test_named_backend_is_the_only_candidate() -> None:
    selection = select([spec("a", priority=1), spec("b", priority=2)], [CPU, BROKEN], backend="b")
    assert selection.backend is None
    selection = select([spec("a", priority=1), spec("b", priority=2)], [CPU, CUDA], backend="a")
    assert selection.backend == "a"


def test_backend_with_auto_false_is_selected_only_by_name() -> None:
    specs = [spec("a", priority=1), spec("b", priority=9, auto=False)]
    assert select(specs, [CPU, CPU]).backend == "a"
    assert select(specs, [CPU, CPU], backend="b").backend == "b"


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"format": "openvino_ir"}, "it runs models in the format onnx, not openvino_ir"),
        ({"dtype": "float16"}, "float16"),
        ({"device": DeviceSpec("cuda", 3)}, "no device cuda:3, only cuda:0, cuda:1"),
        ({"task": "depth-estimation"}, "does not run the task depth-estimation"),
    ],
)
def test_every_mismatch_is_a_reason(question: dict[str, object], reason: str) -> None:
    limited = spec("a", capabilities=(Capability(stage="run", consumes="onnx", tasks=("text-classification",)),))
    selection = select([limited], [CUDA], **question)
    assert selection.backend is None
    assert reason in str(selection)


def test_limited_capability_is_preferred_to_a_general_one() -> None:
    run = {"stage": "run", "consumes": "onnx"}
    capabilities = (
        Capability(**run, dtypes=("float32", "float16"), excludes=("translation",)),
        Capability(**run, dtypes=("float16",), tasks=("text-generation",)),
    )
    backend = spec("a", capabilities=capabilities)
    assert select([backend], [CUDA], task="fill-mask", dtype="float32").backend == "a"
    assert select([backend], [CUDA], task="text-generation", dtype="float16").backend == "a"
    refused = select([backend], [CUDA], task="text-generation", dtype="float32")
    assert refused.backend is None
    assert "does not run float32 graphs of the task text-generation, only float16" in str(refused)
    assert "it does not run the task translation" in str(select([backend], [CUDA], task="translation"))


def test_task_in_another_format_suggests_an_export() -> None:
    capabilities = (
        Capability(stage="export", produces="openvino_ir"),
        Capability(stage="run", consumes="openvino_ir"),
        Capability(stage="run", consumes="onnx", excludes=("text-generation",)),
    )
    refused = str(select([spec("a", capabilities=capabilities)], [CPU], task="text-generation"))
    assert (
        "it runs the task text-generation in the format openvino_ir, not onnx (export the model for this backend:"
        in refused
    )
    assert "accel export MODEL OUT --backend a" in refused


def standard_only(name: str, *stages: Capability) -> BackendSpec:
    run = Capability(stage="run", consumes="onnx", domains=("",))
    return spec(name, capabilities=(run, *stages))


def test_unsupported_operators_exclude_a_backend() -> None:
    specs = [standard_only("a"), spec("b")]
    for domains in (("",), None):
        assert select(specs, [CPU, CPU], backend="a", domains=domains).backend == "a"
    selection = select(specs, [CPU, CPU], backend="a", domains=("", "com.vendor"))
    assert selection.backend is None
    assert "the graph uses operators of com.vendor, which this backend does not have (use the exported artifact" in str(
        selection
    )
    assert "or use the backend b)" in str(selection)
    assert select(specs, [CPU, CPU], domains=("", "com.vendor")).backend == "b"


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        (Capability(stage="optimize", consumes="onnx", produces="onnx"), "accel optimize EXPORT OUT --backend a"),
        (Capability(stage="export", produces="own"), "accel export MODEL OUT --backend a"),
    ],
)
def test_remedy_for_operators_names_an_existing_stage(stage: Capability, remedy: str) -> None:
    selection = select([standard_only("a", stage)], [CPU], backend="a", domains=("com.vendor",))
    assert remedy in selection.table[0].reasons[0].remedy


def test_only_candidates_are_probed_until_one_fits() -> None:
    specs = (spec("a", priority=1), spec("b", priority=2), spec("c", priority=3), spec("d", priority=4, auto=False))
    probes, probed = {"a": CPU, "b": CPU, "c": BROKEN, "d": CPU}, []

    def probe(spec: BackendSpec) -> Probe:
        probed.append(spec.name)
        return probes[spec.name]

    inventory = registry.Inventory(specs=specs, probe=probe, missing=lambda spec: None)
    question = plan.SelectionRequest("onnx", "text-classification", "float32")
    assert plan.select(question, inventory).backend == "b"
    assert probed == ["c", "b"]


def test_plan_depends_only_on_its_arguments(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    export = Capability(stage="export", produces="onnx")
    backend = standard_only("a", export)
    inventory = registry.Inventory(specs=(backend,), probe=lambda spec: CPU, missing=lambda spec: None)
    weights = ResolvedModel(kind="weights", id="org/name", task="text-classification", folder=tmp_path)
    plan_for_weights = plan.make_plan(weights, inventory=inventory)
    assert (plan_for_weights.backend, plan_for_weights.artifact, str(plan_for_weights.device)) == (backend, None, "cpu")
    assert plan_for_weights.exporter is not None
    assert plan_for_weights.exporter.backend is backend
    assert plan_for_weights == plan.make_plan(weights, inventory=inventory)
    artifact = tiny_artifact()
    assert plan_for_weights.with_artifact(artifact, inventory).artifact is artifact
    component = replace(artifact.components[0], domains=("com.vendor",))
    other = replace(artifact, manifest=replace(artifact.manifest, components=(component,)))
    with pytest.raises(
        BackendUnavailableError, match="cannot run the exported model in .*: the graph uses operators of com.vendor"
    ):
        plan_for_weights.with_artifact(other, inventory)


def test_device_is_found_by_index() -> None:
    assert str(select([spec("a")], [CUDA], device=DeviceSpec("cuda", 1)).device) == "cuda:1"


# The tests below check third-party plugins.


def install(monkeypatch: pytest.MonkeyPatch, *plugins: tuple[str, str, object]) -> None:
    """Register entry points and the modules that they refer to. If the value is `None`, the module cannot be imported."""
    entries = []
    for name, module_name, value in plugins:
        if value is not None:
            module = ModuleType(module_name)
            module.SPEC = value  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module_name, module)
        entries.append(metadata.EntryPoint(name, f"{module_name}:SPEC", group_of("backends")))
    real = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: entries if group == group_of("backends") else real(group=group)
    )
    registry._describe.cache_clear()
    registry.probe.cache_clear()
    registry.tell_broken.cache_clear()


def test_broken_plugin_does_not_affect_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("good", "good_spec", spec("good")), ("bad", "no_such_module_at_all", None))
    specs, broken = registry.describe_all()
    assert [s.name for s in specs] == ["good"]
    assert "no_such_module_at_all" in broken["bad"].message
    statuses = {status.name: status for status in doctor.list_backends()}
    assert statuses["bad"].summary == "broken plugin"
    assert not statuses["bad"].available
    with pytest.raises(PluginError, match="cannot be loaded"):
        registry.describe("bad")


def test_two_plugins_with_one_name_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("x", "spec_one", spec("x")), ("x", "spec_two", spec("x")), ("y", "spec_y", spec("y")))
    with pytest.raises(PluginError, match=r"Several installed plugins have the name 'x'.*spec_one.*spec_two"):
        registry.describe("x")
    assert [s.name for s in registry.describe_all()[0]] == ["y"]


def test_ignored_plugin_is_warned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(registry.logger, "warning", lambda text, *values: warnings.append(text % values))
    usable = spec("y", impl="json:JSONDecoder", requires=())
    install(monkeypatch, ("x", "spec_one", spec("x")), ("x", "spec_two", spec("x")), ("y", "spec_y", usable))
    for _ in range(2):
        assert plan_stage("run", "onnx").backend.name == "y"
    assert len(warnings) == 1
    assert "The backend 'x' is ignored" in warnings[0]
    assert "Several installed plugins have the name 'x'" in warnings[0]


def test_plugin_that_exits_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "exits_on_probe.py").write_text("class Backend:\n    def probe(self):\n        raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    install(
        monkeypatch,
        ("a", "exits_on_import", None),
        ("b", "spec_b", spec("b", impl="exits_on_probe:Backend", requires=())),
    )
    assert "SystemExit: 3" in registry.describe_all()[1]["a"].message
    assert "the search for devices of this backend failed: SystemExit: 3" in str(
        registry.probe(registry.describe("b")).reasons[0]
    )
    assert not any(status.available for status in doctor.list_backends())


def test_missing_entry_points_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(
        BackendUnavailableError, match=r"entry points of accel-transformers are missing.*\n?.*pip install"
    ):
        plan_stage("export", "onnx")


def test_invalid_specs_are_reported_to_their_author(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        ("a", "spec_a", "not a spec"),
        ("b", "spec_b", spec("other")),
        ("c", "spec_c", spec("c", api=(4, 0))),
        ("d", "spec_d", spec("d", api=(3, 9))),
    )
    specs, broken = registry.describe_all()
    assert specs == ()
    assert "is a str, not a BackendSpec" in broken["a"].message
    assert "with the name 'other'" in broken["b"].message
    assert "version 4.0 of the plugin API" in broken["c"].message
    assert "version 3.9 of the plugin API" in broken["d"].message


def test_plugin_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("a", "spec_a", spec("a")), ("b", "no_such_module_at_all", None))
    monkeypatch.setenv("ACCEL_PLUGINS", "a, c")
    assert list(registry.installed()) == ["a"], "the baseline is not installed in this test"
    assert registry.describe_all()[1] == {}


def test_backend_names_and_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("alpha", "spec_a", spec("alpha", aliases=("AlphaExecutionProvider",))))
    assert registry.describe("AlphaExecutionProvider").name == "alpha"
    with pytest.raises(UnknownBackendError, match=r"Did you mean 'alpha'\? Installed backends: alpha"):
        registry.describe("alfa")


def test_probe_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def probe(self) -> Probe:
            raise OSError("libvendor.so: cannot open")

    module = ModuleType("failing_plugin")
    module.Backend = Backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing_plugin", module)
    install(monkeypatch, ("failing", "spec_f", spec("failing")))
    probe = registry.probe(registry.describe("failing"))
    assert not probe.available
    assert "libvendor.so" in probe.reasons[0].message


def test_missing_extra_is_the_remedy(monkeypatch: pytest.MonkeyPatch, tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact()
    install(
        monkeypatch, ("v", "spec_v", spec("v", requires=("no_such_vendor",), impl="accel_plugins.v:B", extra="vendor"))
    )
    with pytest.raises(BackendUnavailableError, match="no_such_vendor is not installed") as info:
        plan.make_plan(artifact, plan.RunPreferences(backend="v")).check()
    assert 'pip install "accel-transformers[vendor]"' in str(info.value)


def test_stage_is_run_by_the_backend_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = Capability(stage="quantize", consumes="onnx", produces="onnx", schemes=("dynamic-int8",))
    install(
        monkeypatch,
        ("a", "spec_a", spec("a", priority=5)),
        ("b", "spec_b", spec("b", capabilities=(quantizer,))),
    )
    assert plan_stage("quantize", "onnx").backend.name == "b"
    assert plan_stage("quantize", "onnx", scheme="dynamic-int8").backend.name == "b"
    with pytest.raises(BackendUnavailableError, match="Did you mean 'dynamic-int8'"):
        plan_stage("quantize", "onnx", scheme="dynamc-int8")
    limited = Capability(stage="quantize", consumes="onnx", produces="own", schemes=("dynamic-int8",), domains=("",))
    install(monkeypatch, ("c", "spec_c", spec("c", capabilities=(limited,))))
    assert plan_stage("quantize", "onnx", domains=("",)).backend.name == "c"
    with pytest.raises(BackendUnavailableError, match="'c' cannot quantize this graph: the graph uses operators of x"):
        plan_stage("quantize", "onnx", domains=("", "x"))
    with pytest.raises(BackendUnavailableError, match="No installed backend can optimize a model in the format 'onnx'"):
        plan_stage("optimize", "onnx")
    # The suggested fix must work: if no backend reads the format, another scheme does not help.
    with pytest.raises(
        BackendUnavailableError,
        match=r"No installed backend can quantize a model in the format 'pt2'\.\nFix: pass a model in the format onnx\.",
    ):
        plan_stage("quantize", "pt2", scheme="dynamic-int8")


def test_export_to_a_format_that_the_named_backend_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    own_format = Capability(stage="export", produces="own")
    onnx_format = Capability(stage="export", produces="onnx")
    install(
        monkeypatch,
        ("a", "spec_a", spec("a", capabilities=(own_format,))),
        ("b", "spec_b", spec("b", capabilities=(own_format, onnx_format))),
    )
    assert plan_stage("export", None, "a").capability.produces == "own"
    assert plan_stage("export", None, "b").capability.produces == "onnx"
    assert plan_stage("export", "own", "b").capability.produces == "own"
    assert plan_stage("export", None).backend.name == "b"
    with pytest.raises(ConfigError, match="The backend 'a' does not export models to the format 'onnx'") as info:
        plan_stage("export", "onnx", "a")
    assert info.value.fix == "use format='own', or leave out the format or the backend."


def preparing(name: str, *schemes: str) -> BackendSpec:
    return spec(name, capabilities=tuple(Capability(stage="prepare", schemes=(scheme,)) for scheme in schemes))


def test_preparer_is_found_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        ("a", "spec_a", preparing("a", "accelerate")),
        ("b", "spec_b", preparing("b", "other", "qat-int8")),
        ("c", "spec_c", spec("c")),
    )
    assert plan_stage("prepare", "torch", scheme="qat-int8").backend.name == "b"
    assert plan_stage("prepare", "torch", scheme="accelerate").backend.name == "a"
    with pytest.raises(BackendUnavailableError, match="'c' cannot prepare .*'accelerate'.\nFix: .*'a'"):
        plan_stage("prepare", "torch", "c", scheme="accelerate")
    with pytest.raises(BackendUnavailableError, match="Did you mean 'accelerate'"):
        plan_stage("prepare", "torch", scheme="acelerate")
    assert {status.name: status.prepares for status in doctor.list_backends()}["b"] == ("other", "qat-int8")


class Doubling:
    """Backend that prepares models on the CPU."""

    def probe(self) -> Probe:
        return CPU

    def preparer(self) -> Doubling:
        return self

    def prepare(self, model: torch.nn.Module, *, config: PrepareConfig, calibration: object = None) -> torch.nn.Module:
        return torch.nn.Sequential(model, model)


def test_model_is_passed_to_its_preparer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("doubling_plugin")
    module.Backend = Doubling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "doubling_plugin", module)
    declared = (Capability(stage="prepare", schemes=("doubled",)),)
    install(monkeypatch, ("d", "spec_d", spec("d", impl="doubling_plugin:Backend", capabilities=declared)))
    model = torch.nn.Linear(2, 2)
    assert isinstance(prepare(model, PrepareConfig(scheme="doubled")), torch.nn.Sequential)
    with pytest.raises(
        BackendUnavailableError, match="cannot run the scheme 'doubled' for a model on the device 'meta'"
    ):
        prepare(model.to("meta"), PrepareConfig(scheme="doubled"))
    with pytest.raises(ConfigError, match="The model is a str"):
        prepare("some/model", PrepareConfig(scheme="doubled"))  # type: ignore[arg-type]


def test_declared_preparation_without_preparer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("empty_plugin")
    module.Backend = type("Backend", (), {"probe": lambda self: CPU})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "empty_plugin", module)
    declared = (Capability(stage="prepare", schemes=("empty",)),)
    install(monkeypatch, ("e", "spec_e", spec("e", impl="empty_plugin:Backend", capabilities=declared)))
    with pytest.raises(PluginError, match="its implementation has no preparer"):
        prepare(torch.nn.Linear(2, 2), PrepareConfig(scheme="empty"))
