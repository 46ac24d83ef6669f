"""Tests of the operator domains of a graph, which its manifest contains. A runtime that does not support these domains
is not selected.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.artifact.tensor_specs import TensorSpec
from accel.backends import registry
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.errors import BackendUnavailableError, SessionError
from accel.interfaces.specs import DeviceSpec, Probe
from accel.stages.foreign_folders import adopt
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.testing.copies_without_manifest import as_foreign, edit_manifest

MICROSOFT = "com.microsoft"


@pytest.fixture(scope="module")
def fused(tiny_artifact: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return optimize(tiny_artifact(), tmp_path_factory.mktemp("fused") / "O2", level="O2", backend="cpu")


def test_stages_record_operator_domains(
    tiny_artifact: Callable[..., Artifact], fused: Artifact, tmp_path: Path
) -> None:
    assert tiny_artifact().domains == ("",)
    assert fused.domains == ("", MICROSOFT)
    assert Artifact.load(fused.path).domains == fused.domains
    packed = quantize(tiny_artifact(), tmp_path / "w", scheme="weight-int8", backend="cpu")
    assert packed.domains == ("", MICROSOFT)


def test_decoders_use_microsoft_operators(generator: Callable[..., Artifact]) -> None:
    assert generator("llama").domains == ("", MICROSOFT)


def test_domains_of_foreign_folders_are_read(fused: Artifact, tmp_path: Path) -> None:
    folder = as_foreign(fused.path, tmp_path / "plain")
    assert adopt(folder, task=fused.task).domains == ("", MICROSOFT)


def test_domains_of_functions_and_branches(tmp_path: Path) -> None:
    def value(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, ["batch"])

    branch = [
        helper.make_graph([helper.make_node(op, ["x"], ["b"], domain=domain)], op, [], [value("b")])
        for op, domain in (("Gelu", MICROSOFT), ("Identity", "ai.onnx"))
    ]
    function = helper.make_function(
        "local", "twice", ["a"], ["b"], [helper.make_node("Scale", ["a"], ["b"], domain="org.other")],
        [helper.make_opsetid("org.other", 1)],
    )  # fmt: skip
    nodes = [
        helper.make_node("twice", ["x"], ["t"], domain="local"),
        helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1]),
    ]
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [value("x"), condition], [value("y")])
    domains = ("", MICROSOFT, "local", "org.other")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, 1) for d in domains], functions=[function])
    onnx.save(model, tmp_path / "model.onnx")
    assert adopt(tmp_path, task="custom").domains == ("", MICROSOFT, "org.other")

    import onnx_ir as ir

    from accel_plugins.ortkit.graph.editing import operator_domains

    assert operator_domains(ir.load(tmp_path / "model.onnx")) == ("", MICROSOFT, "org.other")


def test_tensorrt_refuses_domains_before_opening(
    fused: Artifact, tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Probe(devices=(DeviceSpec("cuda"),))
    real = registry.probe
    monkeypatch.setattr(registry, "probe", lambda spec: gpu if spec.name == "tensorrt" else real(spec))
    monkeypatch.setattr(registry, "load", lambda spec: pytest.fail("opened"))
    with pytest.raises(
        BackendUnavailableError, match="uses operators of com.microsoft, which this backend does not have"
    ) as info:
        open_plan(make_plan(fused, RunPreferences(backend="tensorrt")))
    assert "accel optimize EXPORT OUT --backend tensorrt" in str(info.value.fix)
    assert make_plan(tiny_artifact(), RunPreferences(backend="tensorrt")).why_not is None


def test_older_artifacts_without_domains_open(fused: Artifact, tmp_path: Path) -> None:
    folder = shutil.copytree(fused.path, tmp_path / "before")
    edit_manifest(folder, lambda values: [component.pop("domains") for component in values["components"]])
    before = Artifact.load(folder)
    assert before.domains is None
    assert before.digest == fused.digest
    opened = open_plan(make_plan(before, RunPreferences(backend="cpu")))
    opened.close()


def test_openvino_names_unsupported_operators(fused: Artifact, tmp_path: Path) -> None:
    """OpenVINO supports many of ONNX Runtime's own operators, so its spec does not list the whole domain. An
    unsupported operator raises an error when the graph opens.
    """
    pytest.importorskip("openvino")
    open_plan(make_plan(fused, RunPreferences(backend="openvino"))).close()
    graph = helper.make_graph(
        [helper.make_node("NoSuchOperator", ["x"], ["y"], domain=MICROSOFT)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)])
    onnx.save(model, tmp_path / "model.onnx")
    adopted = adopt(tmp_path, task="custom")
    spec = TensorSpec("x", "float32", ("batch",))
    component = replace(adopted.components[0], inputs=(spec,), outputs=(replace(spec, name="y"),))
    artifact = Artifact(adopted.path, replace(adopted.manifest, components=(component,)))
    with pytest.raises(SessionError, match="NoSuchOperator") as info:
        open_plan(make_plan(artifact, RunPreferences(backend="openvino")))
    assert "before it was optimized" in str(info.value.fix)
