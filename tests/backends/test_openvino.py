"""Tests of the OpenVINO backend: conformance suite, equal outputs for every family, options, folders of other tools,
compiled-model cache, and buckets.
"""

# ruff: noqa: E402

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

ov = pytest.importorskip("openvino")

import openvino.opset13 as ops

from accel import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForSequenceClassification,
    SessionOptions,
    export,
    optimize,
)
from accel.artifact import Artifact, TensorSpec
from accel.backends import registry
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.errors import (
    AccelError,
    ArtifactNotFoundError,
    BackendUnavailableError,
    ConfigError,
    ExportError,
    IntegrityError,
    SessionClosedError,
    SessionError,
)
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.testing.conformance import BackendConformance
from accel.testing.copies_without_manifest import as_foreign
from accel.testing.image_models import PICTURES
from accel.testing.models import tiny_model
from accel_plugins.openvino.exporter import output_specs
from accel_plugins.openvino.options import PRECISIONS, properties

TOLERANCE = 1e-4
CAPABILITIES = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class TestOpenVino(BackendConformance):
    backend = "openvino"

    @pytest.fixture(scope="class")
    @classmethod
    def artifact(cls, tiny_ir: Callable[..., Artifact]) -> Artifact:
        return tiny_ir("bert")

    @pytest.fixture(scope="class")
    @classmethod
    def generating(cls, generator: Callable[..., Artifact]) -> Artifact:
        return generator("llama", "openvino")


def text(batch: int = 2, sequence: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 100, (batch, sequence), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, sequence // 2 + 1 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def logits(artifact: Artifact, feeds: Mapping[str, torch.Tensor], **how: Any) -> torch.Tensor:
    model = ORTModelForSequenceClassification.from_pretrained(artifact.path, backend="openvino", **how)
    values: torch.Tensor = model(**feeds).logits
    return values


@pytest.mark.thorough
def test_outputs_of_fully_masked_tokens_equal_pytorch(tmp_path: Path) -> None:
    """Outputs equal PyTorch's if the attention mask covers CLIP's end-of-text token and all tokens before it. PyTorch's
    attention returns zeros for such tokens, but OpenVINO's attention would average all tokens.
    """
    config = transformers.CLIPTextConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=99,
        max_position_embeddings=40, bos_token_id=97, eos_token_id=98, pad_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    original = transformers.CLIPTextModel(config).eval()
    model = ORTModelForFeatureExtraction(
        export(original, tmp_path / "ir", task="feature-extraction", backend="openvino")
    )
    ids = torch.randint(3, 97, (2, 7))
    ids[0, 3], ids[1, 6] = 98, 98
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=mask)
    outputs = model(input_ids=ids, attention_mask=mask)
    assert torch.allclose(outputs.last_hidden_state, expected.last_hidden_state, atol=1e-4)
    assert torch.allclose(outputs.pooler_output, expected.pooler_output, atol=1e-4)


def test_axes_have_names(tiny_ir: Callable[..., Artifact]) -> None:
    component = tiny_ir("bert", "feature-extraction").component()
    assert [spec.shape for spec in component.inputs] == [("batch", "sequence")] * 3
    assert component.outputs[0].shape == ("batch", "sequence", 32)
    assert component.max_sizes == {"sequence": 96}
    assert component.inputs[1].role == "mask"


def test_axes_of_model_with_few_positions() -> None:
    """The exporter runs the graph with several input sizes to identify the axes of its outputs. These sizes stay within
    the model's number of positions, because the graph fails for longer inputs (as in Wav2Vec2-Conformer).
    """
    parameter = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.f32, name="x")
    parameter.output(0).set_names({"x"})
    length = ops.gather(ops.shape_of(parameter), np.array([1]), np.array(0))
    rows = ops.slice(np.ones((1, 20), np.float32), np.array([0]), length, np.array([1]), np.array([1]))
    answer = ops.multiply(parameter, ops.reshape(rows, ops.concat([np.array([1]), length], 0), False))
    answer.output(0).set_names({"y"})
    model = ov.Model([answer], [parameter], "positions")
    inputs = (TensorSpec("x", "float32", ("batch", "sequence")),)
    with pytest.raises(ExportError, match="fails for inputs of the sizes"):
        output_specs(model, inputs)
    assert output_specs(model, inputs, {"sequence": 20})[0].shape == ("batch", "sequence")


def test_fixed_axes_stay_fixed(tiny_ir: Callable[..., Artifact]) -> None:
    assert tiny_ir("vit", "image-classification").component().inputs[0].shape == ("batch", 3, 32, 32)


@pytest.mark.thorough
def test_from_pretrained_exports_on_the_fly(tiny_folder: Callable[..., Path]) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(tiny_folder("distilbert"), backend="openvino")
    assert (model.backend, model.artifact.format) == ("openvino", "openvino_ir")


def test_opset_is_refused(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opset"):
        export(tiny_folder("bert"), tmp_path / "out", backend="openvino", opset=20)
    assert not (tmp_path / "out").exists()


# The tests below check data types.


@pytest.mark.skipif("BF16" not in CAPABILITIES, reason="this CPU does not support bfloat16")
def test_compute_dtype_bfloat16_is_used(tiny_ir: Callable[..., Artifact]) -> None:
    artifact, feeds = tiny_ir(), text()
    exact = logits(artifact, feeds)
    model = ORTModelForSequenceClassification.from_pretrained(
        artifact.path, session_options=SessionOptions(compute_dtype="bfloat16")
    )
    assert model.compute_dtype == "bfloat16"
    difference = float((model(**feeds).logits - exact).abs().max())
    # With bfloat16, which has 8 bits of precision, expect differences from 1e-3 to 1e-1 for logits of order 1. Float32
    # would give differences below 1e-5.
    assert 1e-4 < difference < 0.2


@pytest.mark.skipif("FP16" in CAPABILITIES, reason="this test needs a CPU without float16 support")
@pytest.mark.thorough
def test_float16_export_does_not_compute_in_bfloat16(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    artifact = export(tiny_folder("bert"), tmp_path / "half", backend="openvino", dtype="float16")
    model = ORTModelForSequenceClassification.from_pretrained(artifact.path)
    assert model.compute_dtype == "float32", "OpenVINO takes bfloat16 when it is asked for float16"
    with pytest.raises(ConfigError, match="float16"):
        logits(artifact, text(), session_options=SessionOptions(compute_dtype="float16"))


def test_doctor_lists_data_types_of_the_cpu() -> None:
    cpu = registry.probe(registry.describe("openvino")).devices[0]
    assert cpu.type == "cpu"
    assert cpu.arch.split("+")[0] == "fp32"
    assert ("bf16" in cpu.arch) == ("BF16" in CAPABILITIES)


# The tests below check options and devices.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"performence_hint": "latency"}, "performance_hint"),
        ({"performance_hint": "letancy"}, "latency"),
        ({"NUM_STREAM": 1}, "NUM_STREAMS"),
        ({"streams": 0}, "at least 1"),
        ({"streams": "many"}, "must be a number"),
        ({"pinning": "yes"}, "type bool"),
        ({"cache_dir": __file__}, "is a file"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str, tiny_ir: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match=message):
        logits(tiny_ir(), text(), provider_options=options)


@pytest.mark.parametrize(
    "options",
    [{"graph_optimization": "basic"}, {"inter_op_threads": 2}, {"native": {"NO_SUCH_PROPERTY": 1}}],
    ids=lambda options: next(iter(options)),
)
def test_settings_without_openvino_counterpart_raise(options: dict[str, Any], tiny_ir: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match="OpenVINO has no"):
        logits(tiny_ir(), text(), session_options=SessionOptions(**options))


def test_options_reach_the_runtime(tiny_ir: Callable[..., Artifact]) -> None:
    settings = RunPreferences(
        provider_options={"performance_hint": "throughput", "streams": 2, "pinning": True},
        options=SessionOptions(threads=2, native={"ENABLE_HYPER_THREADING": False}),
    )
    opened = open_plan(make_plan(tiny_ir(), settings))
    compiled = opened.sessions["model"].runtime  # type: ignore[attr-defined]
    assert compiled.get_property("PERFORMANCE_HINT") == "THROUGHPUT"
    assert compiled.get_property("NUM_STREAMS") == 2
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 2


def test_kernel_cache_capacity(tiny_ir: Callable[..., Artifact]) -> None:
    """The kernel cache is limited to 1,500 entries unless an option sets another number. OpenVINO's default of 5,000
    entries can need gigabytes of memory. The test checks the properties that are passed to OpenVINO, because
    sessions do not report the limit.
    """
    options = SessionOptions()
    assert properties("CPU", {}, options, "float32")["CPU_RUNTIME_CACHE_CAPACITY"] == 1500
    assert properties("CPU", {"runtime_cache_capacity": 0}, options, "float32")["CPU_RUNTIME_CACHE_CAPACITY"] == 0
    assert logits(tiny_ir(), text(), provider_options={"runtime_cache_capacity": 7}).shape[0] == 2
    with pytest.raises(ConfigError, match="at least 0"):
        logits(tiny_ir(), text(), provider_options={"runtime_cache_capacity": -1})


def test_kv_cache_has_the_compute_dtype_by_default() -> None:
    options = SessionOptions()
    assert properties("CPU", {}, options, "float32")["KV_CACHE_PRECISION"] == PRECISIONS["float32"]
    assert properties("CPU", {"kv_cache_precision": "u8"}, options, "float32")["KV_CACHE_PRECISION"] == "u8"
    with pytest.raises(ConfigError, match="kv_cache_precision"):
        properties("CPU", {"kv_cache_precision": "u4"}, options, "float32")


def test_backend_raises_on_missing_device(tiny_ir: Callable[..., Artifact]) -> None:
    backend = registry.load(registry.describe("openvino"))
    with pytest.raises(BackendUnavailableError, match="It lists the devices CPU"):
        backend.open(tiny_ir(), OpenRequest(device=DeviceSpec("npu", 7)))


def test_auto_device(tiny_ir: Callable[..., Artifact]) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(tiny_ir().path, device="auto")
    assert (model.sessions["model"].device.type, model.device.type) == ("cpu", "cpu")
    assert model.compute_dtype == "float32"
    assert (model(**text()).logits - logits(tiny_ir(), text())).abs().max() <= TOLERANCE


@pytest.mark.parametrize("options", [{}, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32}], ids=["defaults", "given"])
def test_auto_device_uses_cpu_settings(options: dict[str, Any]) -> None:
    cpu_properties = properties("AUTO", options, SessionOptions(), "float32")["DEVICE_PROPERTIES"]["CPU"]
    expected = properties("CPU", options, SessionOptions(), "float32")
    assert cpu_properties == {name: expected[name] for name in cpu_properties}
    assert cpu_properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == options.get("DYNAMIC_QUANTIZATION_GROUP_SIZE", 0)


def test_auto_device_refuses_cache_dir(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="cannot store compiled models"):
        ORTModelForSequenceClassification.from_pretrained(tiny_ir().path, device="auto", provider_options=options)


def test_profile_is_written(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    opened = open_plan(make_plan(tiny_ir(), RunPreferences(options=SessionOptions(profile=str(tmp_path)))))
    opened.sessions["model"].run(text())
    opened.sessions["model"].close()
    nodes = json.loads((tmp_path / "openvino-model.json").read_text())
    assert max(node["us"] for node in nodes) > 0


# The tests below check inference calls.


def test_session_works_after_failed_call(tiny_ir: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed call, the session replaces all inference requests of the compiled model, even while other calls
    wait for a request.
    """
    model = ORTModelForSequenceClassification.from_pretrained(tiny_ir().path, backend="openvino")
    expected = model(**text()).logits
    session = model._session
    before = list(session._requests)

    def broken(request: Any, *, alone: bool) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(before[0]), "compute", broken)
        for _ in before:
            with pytest.raises(SessionError, match="OpenVINO failed on inputs.*no memory") as error:
                model(**text(seed=1))
            assert error.value.fix
    assert not set(map(id, before)) & set(map(id, session._requests))
    assert torch.equal(model(**text()).logits, expected)


def test_failed_step_leaves_state_unchanged(
    generator: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModelForCausalLM(generator("llama", "openvino"))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    cache = model(input_ids=ids).past_key_values
    expected = model(input_ids=torch.cat([ids.flip(0), ids[:, :1]], dim=1)).logits[:, -1]
    cache.reorder_cache(torch.tensor([1, 0]))
    state = cache.state
    with monkeypatch.context() as patch:
        patch.setattr(state, "check_step", lambda *args: 1)
        wrong = {"input_ids": ids[:, :1], "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
        wrong |= {"position_ids": torch.tensor([[4, 5, 6]] * 2), "logits_to_keep": torch.tensor([0])}
        with pytest.raises(SessionError, match="OpenVINO failed on inputs"):
            model.decoder_step.session.run(wrong, outputs=("logits",), state=state)
    logits = model(input_ids=ids[:, :1], past_key_values=cache).logits[:, -1]
    assert (logits - expected).abs().max() < TOLERANCE


def test_states_survive_decoder_rebuild_after_failed_step(
    generator: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed decoding step rebuilds the decoder. Earlier states keep their contents and can be continued, joined and
    copied. New states can also be created.
    """
    model = ORTModelForCausalLM(generator("llama", "openvino"))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    longer = torch.cat([ids, ids[:, 1:3]], dim=1)
    expected = model(input_ids=longer[:, :5]).logits[:, -1]
    after = model(input_ids=longer).logits[:, -1]
    session = model.decoder_step.session
    failing, other = (model(input_ids=ids).past_key_values for _ in range(2))
    single = model(input_ids=ids[:1]).past_key_values
    compiled = session.runtime
    with monkeypatch.context() as patch:
        patch.setattr(failing.state, "check_step", lambda *args: 1)
        wrong = {"input_ids": ids[:, :1], "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
        wrong |= {"position_ids": torch.tensor([[4, 5, 6]] * 2), "logits_to_keep": torch.tensor([0])}
        with pytest.raises(SessionError, match="OpenVINO failed on inputs"):
            session.run(wrong, outputs=("logits",), state=failing.state)
    assert session.runtime is not compiled
    copy = other.state.clone()
    for cache in (failing, other, None):
        with_one = model(input_ids=longer[:, 4:5] if cache is not None else longer[:, :5], past_key_values=cache)
        assert (with_one.logits[:, -1] - expected).abs().max() < TOLERANCE
        logits = model(input_ids=longer[:, 5:], past_key_values=with_one.past_key_values).logits[:, -1]
        assert (logits - after).abs().max() < TOLERANCE
    single.state.join(copy)
    step = {"input_ids": longer[[0, 0, 1], 4:5], "attention_mask": torch.ones(3, 5, dtype=torch.int64)}
    step |= {"position_ids": torch.full((3, 1), 4), "logits_to_keep": torch.tensor([0])}
    logits = session.run(step, state=single.state)["logits"][:, -1]
    assert (logits - expected[[0, 0, 1]]).abs().max() < TOLERANCE


def test_state_of_closed_decoder_is_refused(generator: Callable[..., Artifact]) -> None:
    model = ORTModelForCausalLM(generator("llama", "openvino"))
    cache = model(input_ids=torch.tensor([[5, 6]])).past_key_values
    model.close()
    with pytest.raises(SessionClosedError):
        model(input_ids=torch.tensor([[7]]), past_key_values=cache)


def test_large_outputs_are_not_overwritten(tiny_ir: Callable[..., Artifact]) -> None:
    model = ORTModelForFeatureExtraction.from_pretrained(tiny_ir("bert", "feature-extraction").path)
    original = tiny_model("bert", "feature-extraction")
    for _ in range(2):
        # The large output has 30 x 90 x 32 float32 values (340 KB), so the session does not copy it.
        # The small call uses the same inference request after the large call.
        large, small = text(30, 90, seed=1), text(2, 5, seed=2)
        hidden = model(**large).last_hidden_state
        copy = hidden.clone()
        again = model(**text(30, 90, seed=3)).last_hidden_state
        model(**small)
        assert torch.equal(hidden, copy)
        assert again.data_ptr() != hidden.data_ptr()
        with torch.inference_mode():
            assert (hidden - original(**large).last_hidden_state).abs().max() <= TOLERANCE
            assert (model(**small).last_hidden_state - original(**small).last_hidden_state).abs().max() <= TOLERANCE


def test_large_inputs_are_read_without_copy(tiny_ir: Callable[..., Artifact]) -> None:
    session = open_plan(make_plan(tiny_ir("vit", "image-classification"))).sessions["model"]
    original = tiny_model("vit", "image-classification")
    pixels = torch.randn(8, 3, 32, 32)
    first = session.run({"pixel_values": pixels})["logits"]
    # Change the values in the same memory. The session must not reuse the earlier values.
    pixels.mul_(-1)
    second = session.run({"pixel_values": pixels})["logits"]
    with torch.inference_mode():
        assert (second - original(pixel_values=pixels).logits).abs().max() <= TOLERANCE
        assert (first - original(pixel_values=-pixels).logits).abs().max() <= TOLERANCE


def test_output_buffer_with_wrong_shape_raises(tiny_ir: Callable[..., Artifact]) -> None:
    session = open_plan(make_plan(tiny_ir())).sessions["model"]
    with pytest.raises(AccelError, match="logits"):
        session.run(text(2, 4), out={"logits": torch.zeros(3, 3)})
    assert session.run(text(2, 4))["logits"].shape == (2, 3)


_FORK = """
import os, sys, torch
from accel import ORTModelForSequenceClassification

model = ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
ids = torch.ones(2, 5, dtype=torch.int64)
feeds = {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids * 0}
expected = model(**feeds).logits
child = os.fork()
if child == 0:
    os._exit(0 if torch.allclose(model(**feeds).logits, expected, atol=1e-4) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.thorough
def test_session_after_fork(tiny_ir: Callable[..., Artifact]) -> None:
    # Run this test in a separate process, because a process that has used the device AUTO cannot fork
    # (docs/backends/openvino.md).
    done = subprocess.run(
        [sys.executable, "-c", _FORK, str(tiny_ir().path)], timeout=300, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


# The tests below open folders of other tools.


def test_optimum_intel_folder(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = tiny_ir()
    folder = as_foreign(artifact.path, tmp_path / "foreign")
    model = ORTModelForSequenceClassification.from_pretrained(folder)
    assert model.backend == "openvino"
    adopted = model.artifact.component()
    # A foreign folder has no declared value ranges. The range of token ids is read from the embedding tables, so only
    # the mask has no range.
    specs = artifact.component().inputs
    assert adopted.inputs == tuple(replace(spec, bounds=None) if spec.role == "mask" else spec for spec in specs)
    assert adopted.outputs == artifact.component().outputs
    assert adopted.max_sizes == {"sequence": 96}
    assert torch.equal(model(**text()).logits, logits(artifact, text()))


def test_own_folder_without_manifest_is_refused(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_ir().path, tmp_path / "lost", ignore=shutil.ignore_patterns("accel.json"))
    with pytest.raises(IntegrityError, match=r"accel\.json is missing"):
        ORTModelForSequenceClassification.from_pretrained(folder)


def test_graph_without_weights_raises(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    ours = shutil.copytree(tiny_ir().path, tmp_path / "ours", ignore=shutil.ignore_patterns("*.bin"))
    for folder in (ours, as_foreign(tiny_ir().path, tmp_path / "foreign", leave_out=["*.bin"])):
        with pytest.raises(IntegrityError, match=r"openvino_model\.bin.*missing|missing.*openvino_model\.bin") as error:
            ORTModelForSequenceClassification.from_pretrained(folder)
        assert error.value.fix


def test_truncated_foreign_graph_raises(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = as_foreign(tiny_ir().path, tmp_path / "cut")
    graph = folder / "openvino_model.xml"
    graph.write_bytes(graph.read_bytes()[:500])
    with pytest.raises(IntegrityError, match=r"openvino_model\.xml"):
        ORTModelForSequenceClassification.from_pretrained(folder)


def test_foreign_graph_with_other_file_name_is_listed(tiny_ir: Callable[..., Artifact], tmp_path: Path) -> None:
    folder = as_foreign(tiny_ir().path, tmp_path / "named")
    for suffix in ("xml", "bin"):
        (folder / f"openvino_model.{suffix}").rename(folder / f"openvino_model_quantized.{suffix}")
    with pytest.raises(ArtifactNotFoundError, match=r"openvino_model_quantized\.xml"):
        ORTModelForSequenceClassification.from_pretrained(folder)


def test_onnx_artifacts_are_converted(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = tiny_artifact("bert")
    converted = optimize(artifact, tmp_path / "ir", backend="openvino")
    assert (converted.format, converted.manifest.opset) == ("openvino_ir", None)
    assert not list((tmp_path / "ir").glob("*.onnx*"))
    assert converted.manifest.steps[-1].validation["max_abs_difference"] <= TOLERANCE
    assert [spec.shape for spec in converted.component().inputs] == [spec.shape for spec in artifact.component().inputs]
    model = ORTModelForSequenceClassification.from_pretrained(tmp_path / "ir")
    assert model.backend == "openvino"
    assert (model(**text()).logits - logits(artifact, text())).abs().max() <= TOLERANCE


def test_onnx_folders_without_a_manifest_run(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = tiny_artifact("bert")
    folder = as_foreign(artifact.path, tmp_path / "plain")
    model = ORTModelForSequenceClassification.from_pretrained(folder, backend="openvino")
    assert (model.backend, model.artifact.format) == ("openvino", "onnx")
    assert (model(**text()).logits - logits(artifact, text())).abs().max() <= TOLERANCE


def test_conversion_refuses_named_fusions(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="named fusions"):
        optimize(tiny_artifact("bert"), tmp_path / "ir", backend="openvino", disable=("attention",))
    assert not (tmp_path / "ir").exists()


# The tests below check buckets and the cache.


def test_bucket_above_number_of_positions_raises(tiny_ir: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match="96 positions"):
        logits(tiny_ir(), text(), session_options=SessionOptions(buckets=(64, 128)))


@pytest.mark.parametrize("damage", ["garbage", "truncated", "changed"])
def test_damaged_cache_is_rebuilt(
    damage: str, tiny_ir: Callable[..., Artifact], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    expected = logits(tiny_ir(), text(), provider_options=options)
    (blob,) = (tmp_path / "cache").glob("*.blob")
    content = blob.read_bytes()
    middle = len(content) // 2
    blob.write_bytes(
        {
            "garbage": b"not a model",
            "truncated": content[:middle],
            "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(tiny_ir(), text(), provider_options=options), expected)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "damaged" in caplog.text
        assert torch.equal(logits(tiny_ir(), text(), provider_options=options), expected)
    assert len(caplog.records) == 1, "the rebuilt entry loads without a word"


def test_unwritable_cache_raises(tiny_ir: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        logits(tiny_ir(), text(), provider_options={"cache_dir": "/proc/accel"})


def test_gpus_of_other_vendors_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, tiny_artifact: Callable[..., Artifact]
) -> None:
    """GPUs of other vendors are not listed as devices. OpenVINO's GPU plugin detects them through OpenCL, but its
    kernels fail on them.
    """
    from accel_plugins.openvino import runtime

    names = {"CPU": "A processor", "GPU.0": "NVIDIA H200 (dGPU)", "GPU.1": "Intel(R) Arc(TM) Graphics (dGPU)"}

    class Core:
        available_devices = tuple(names)

        def get_property(self, device: str, name: str) -> Any:
            return names[device] if name == "FULL_DEVICE_NAME" else ["FP32"]

    monkeypatch.setattr(runtime, "core", Core)
    assert [str(device) for device in runtime.devices()] == ["cpu", "gpu:1", "auto:0"]
    assert runtime.device_name(DeviceSpec("auto")) == "AUTO:CPU,GPU.1"
    with pytest.raises(BackendUnavailableError, match="no device gpu:0"):
        runtime.device_name(DeviceSpec("gpu", 0))
    monkeypatch.undo()
    # If no GPU must be excluded, the device is plain `AUTO`. A list of devices such as `AUTO:CPU` must also compile.
    assert runtime.core().compile_model(str(tiny_artifact("bert").path / "model.onnx"), "AUTO:CPU")


def test_pooling_window_larger_than_image(tmp_path: Path) -> None:
    """EfficientNet, whose pooling window is as large as its number of channels, gives correct outputs. The window must
    not exceed the feature map of a smaller image.
    """
    torch.manual_seed(0)
    config = transformers.EfficientNetConfig(
        image_size=64, width_coefficient=1.0, depth_coefficient=1.0, in_channels=[32], out_channels=[16], kernel_sizes=[3],
        strides=[2], num_block_repeats=[1], expand_ratios=[1], hidden_dim=1280, num_labels=3,
    )  # fmt: skip
    model = transformers.EfficientNetForImageClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=2 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.5)
    opened = ORTModelForImageClassification.from_pretrained(
        export(model, tmp_path / "ir", task="image-classification", backend="openvino").path
    )
    for height, width in ((64, 64), (32, 96), (160, 48)):
        images = torch.randn((2, 3, height, width))
        with torch.inference_mode():
            expected = model(pixel_values=images).logits
        assert expected.std() > 0.1, "the image matters"
        assert (opened(pixel_values=images).logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["detr", "dpt", "glpn", "maskformer", "segformer", "yolos"])
def test_onnx_image_models_match_onnx_runtime(family: str, tiny_artifact: Callable[..., Artifact]) -> None:
    """OpenVINO and ONNX Runtime compute equal outputs of an ONNX graph for several image sizes. For SegFormer and DETR,
    OpenVINO divided image sizes wrongly. No other test compares ONNX graphs of image models between the two
    runtimes.
    """
    artifact = tiny_artifact(family, PICTURES[family][0])
    component = artifact.component()
    both = [
        open_plan(make_plan(artifact, RunPreferences(backend=name))).sessions[component.name]
        for name in ("cpu", "openvino")
    ]
    (images,) = (spec for spec in component.inputs if spec.name == "pixel_values")
    for sizes in ((1, 64, 64), (2, 64, 96)):
        remaining_sizes = iter(sizes)
        shape = [
            3 if i == 1 else next(remaining_sizes) if isinstance(n, str) else n for i, n in enumerate(images.shape)
        ]
        feeds = {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
        if any(spec.name == "pixel_mask" for spec in component.inputs):
            feeds["pixel_mask"] = torch.ones((shape[0], *shape[2:]), dtype=torch.int64)
        expected, outputs = (session.run(feeds) for session in both)
        for name, value in expected.items():
            assert (outputs[name] - value).abs().max() <= 1e-4 * max(1.0, float(value.abs().max())), name
