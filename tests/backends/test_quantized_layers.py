"""Tests of PyTorch models with integer layers: saving, export to ONNX and OpenVINO, and quantization-aware training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact, Quantization
from accel.backends.plan import make_plan
from accel.backends.sessions import open_plan
from accel.capture import (
    BlockLinear,
    IntegerLinear,
    QuantizedLinear,
    pack,
    quantized_layers,
    unpack,
    with_record,
)
from accel.capture import quantized_linears as quantized_module
from accel.capture.quantized_linears import without_training
from accel.errors import ConfigError, ExportError, IntegrityError, PrepareError
from accel.testing.generative_models import tiny_generator
from accel.testing.models import tiny_model
from accel_plugins.ortkit.export.quantized import lower_quantized_layers
from accel_plugins.pytorch import distillation, training

SCHEMES = ("static-int8", "weight-int4")
PRESETS = ("int8", "int8-symmetric", "int4-per-tensor", "int4")


def rows(count: int = 8, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(6, 100, (2, 4 + i % 9), generator=generator) for i in range(count)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def integers(linear: torch.nn.Linear) -> IntegerLinear:
    layer = IntegerLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    weight = linear.weight.detach()
    layer.scale = weight.abs().amax(1) / 127
    layer.weight = torch.round(weight / layer.scale[:, None]).to(torch.int8)
    layer.x_scale, layer.x_zero = torch.tensor(0.04), torch.tensor(120, dtype=torch.uint8)
    return layer


def blocks(linear: torch.nn.Linear) -> BlockLinear:
    layer = BlockLinear(linear.in_features, linear.out_features, bits=4, block_size=16, bias=linear.bias is not None)
    parts = linear.weight.detach().reshape(linear.out_features, -1, 16)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    layer.scales = (high - low) / 15
    zeros = torch.round(-low / layer.scales)
    values = (torch.round(parts / layer.scales[..., None]) + zeros[..., None]).clamp(0, 15)
    layer.packed, layer.zeros = pack(values.to(torch.uint8), 4), pack(zeros.to(torch.uint8), 4)
    return layer


def quantized(scheme: str, family: str = "bert") -> Any:
    model = tiny_model(family)
    for name, linear in list(model.named_modules()):
        if type(linear) is torch.nn.Linear:
            layer: QuantizedLinear = integers(linear) if scheme == "static-int8" else blocks(linear)
            if linear.bias is not None:
                layer.bias = linear.bias.detach()
            model.set_submodule(name, layer)
    return with_record(model, Quantization(scheme=scheme))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    folder, artifacts = tmp_path_factory.mktemp("quantized"), dict[str, Artifact]()

    def get(scheme: str) -> Artifact:
        if scheme not in artifacts:
            artifacts[scheme] = accel.export(quantized(scheme), folder / scheme, format="torch")
        return artifacts[scheme]

    return get


@pytest.fixture(scope="session")
def exported(
    saved: Callable[[str], Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Artifact]:
    folder, artifacts = tmp_path_factory.mktemp("graphs"), dict[tuple[str, str], Artifact]()

    def get(scheme: str, format: str) -> Artifact:
        if (scheme, format) not in artifacts:
            artifacts[scheme, format] = accel.export(saved(scheme).path, folder / f"{scheme}-{format}", format=format)
        return artifacts[scheme, format]

    return get


@pytest.mark.parametrize("bits", [4, 8])
def test_unpack_reverses_pack(bits: int) -> None:
    values = torch.randint(0, 2**bits, (3, 7), dtype=torch.uint8)
    assert torch.equal(unpack(pack(values, bits), bits, 7), values)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_model_gives_equal_outputs_without_float_weights(saved: Callable[[str], Artifact], scheme: str) -> None:
    from safetensors import safe_open

    artifact = saved(scheme)
    session = open_plan(make_plan(artifact)).sessions["model"]
    for case in rows(3):
        full = {**case, "token_type_ids": torch.zeros_like(case["input_ids"])}
        assert torch.equal(session.run(full)["logits"], quantized(scheme)(**full).logits)
    with safe_open(artifact.file(), framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    dense = [name for name, kind in kinds.items() if "dense.weight" in name and kind.startswith("F")]
    assert not dense
    assert artifact.manifest.quantization == Quantization(scheme=scheme)


def test_transformers_refuses_the_folder(saved: Callable[[str], Artifact]) -> None:
    with pytest.raises(OSError, match="no file named"):
        transformers.AutoModelForSequenceClassification.from_pretrained(saved("static-int8").path)


def test_dtype_of_a_quantized_model_cannot_change(saved: Callable[[str], Artifact], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be exported with dtype"):
        accel.export(saved("static-int8").path, tmp_path / "half", dtype="float16")


def test_inconsistent_files_are_refused(saved: Callable[[str], Artifact], tmp_path: Path) -> None:
    import shutil

    broken = shutil.copytree(saved("weight-int4").path, tmp_path / "broken")
    text = (broken / "accel_quantized.json").read_text(encoding="utf-8")
    (broken / "accel_quantized.json").write_text(text.replace('"block_size": 16', '"block_size": 32'), encoding="utf-8")
    (broken / "accel.json").unlink()
    with pytest.raises(IntegrityError, match="does not match its config.json"):
        accel.export(broken, tmp_path / "out")


@pytest.mark.parametrize("scheme", ["static-int8", pytest.param("weight-int4", marks=pytest.mark.thorough)])
def test_onnx_contains_the_models_integers(
    saved: Callable[[str], Artifact], exported: Callable[[str, str], Artifact], scheme: str
) -> None:
    artifact = exported(scheme, "onnx")
    assert artifact.manifest.quantization is not None
    assert artifact.manifest.quantization.scheme == scheme
    weights = weights_of_graph(onnx_ir.load(artifact.file()))
    expected = [layer.dequantized().numpy() for layer in quantized_layers(quantized(scheme)).values()]
    assert len(weights) == len(expected)
    for want in expected:
        assert any(have.shape == want.shape and np.array_equal(have, want) for have in weights)


def weights_of_graph(model: onnx_ir.Model) -> list[np.ndarray]:
    """Return the dequantized weight matrices, each `(outputs, inputs)`, of an ONNX graph."""
    weights = []
    for node in model.graph:
        constants = [value.const_value.numpy() if value and value.const_value else None for value in node.inputs]
        if node.op_type == "MatMulNBits":
            layer = BlockLinear(node.attributes.get_int("K"), node.attributes.get_int("N"), bits=4, block_size=16)
            layer.packed, layer.scales, layer.zeros = (torch.from_numpy(np.array(tensor)) for tensor in constants[1:4])
            weights.append(layer.dequantized().numpy())
        elif node.op_type == "DequantizeLinear" and constants[0] is not None and constants[0].ndim == 2:
            values = constants[0].astype(np.float32) - constants[2].astype(np.float32)
            weights.append((values * constants[1]).T)
    return weights


def test_static_graphs_have_integer_products_after_loading(exported: Callable[[str, str], Artifact]) -> None:
    graph = onnx_ir.load(exported("static-int8", "onnx").file()).graph
    kinds = [node.op_type for node in graph]
    # Query, key and value read the same activation, so they share one Q/DQ pair.
    assert kinds.count("QuantizeLinear") < kinds.count("DequantizeLinear") / 2
    assert "accel_layers" not in {node.domain for node in graph}


def test_zero_points_are_separate_where_weights_become_unsigned(
    exported: Callable[[str, str], Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_plugins.cpu import backend
    from accel_plugins.ortkit.quantization.zero_points import with_separate_zero_points

    artifact = exported("static-int8", "onnx")
    separate = with_separate_zero_points(artifact.file())
    assert separate is not None
    for value in onnx_ir.from_proto(onnx.load_from_string(separate)).graph.initializers.values():
        if value.dtype == onnx_ir.DataType.INT8:
            assert len(value.uses()) == 1
    # ONNX Runtime makes weights unsigned on processors with AVX2 and without VNNI.
    monkeypatch.setattr(backend, "cpu_flags", lambda: ("avx2",))
    tokens = {"input_ids": torch.tensor([[2, 5, 6, 7, 3]]), "attention_mask": torch.ones((1, 5), dtype=torch.int64)}
    model = accel.ORTModelForSequenceClassification.from_pretrained(artifact.path, backend="cpu")
    expected = quantized("static-int8")(**tokens).logits.detach()
    assert (model(**tokens).logits - expected).abs().max() < 0.02 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.thorough
def test_openvino_contains_the_models_integers(exported: Callable[[str, str], Artifact], scheme: str) -> None:
    ov = pytest.importorskip("openvino")
    artifact = exported(scheme, "openvino_ir")
    nodes = ov.Core().read_model(str(artifact.file())).get_ops()
    kinds = [node.get_output_element_type(0).get_type_name() for node in nodes if node.get_type_name() == "Constant"]
    layers = len(quantized_layers(quantized(scheme)))
    # Each layer has one constant for its integer weights. A layer that is quantized in blocks has a second constant for
    # its zero points.
    assert kinds.count("i8" if scheme == "static-int8" else "u4") == layers * (1 if scheme == "static-int8" else 2)
    assert not [n for n in nodes if n.get_type_name() == "Constant" and _is_dense(n)]


def _is_dense(node: Any) -> bool:
    """Return whether a constant is a floating-point weight matrix of a linear layer. Token embeddings have 96 rows or
    more, so they are not counted.
    """
    shape = list(node.get_output_shape(0))
    return (
        node.get_output_element_type(0).get_type_name() == "f32"
        and len(shape) == 2
        and 16 < min(shape) <= max(shape) < 96
    )


# The tests below check quantization-aware training.


@pytest.mark.parametrize(("apart", "level"), [(4.0, 4), (100.0, 0)])
def test_inputs_with_very_different_scales_are_not_rounded(apart: float, level: int) -> None:
    """Inputs with very different AWQ scales are not rounded to 8 bits. AWQ divides a nearly inactive input by a tiny
    number, and rounding would set the other inputs of its block to zero.
    """
    layer = blocks(torch.nn.Linear(32, 8, bias=False))
    x = onnx_ir.Value(name="x", shape=onnx_ir.Shape(["rows", 32]), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
    constants = {
        "factor": np.linspace(1, apart, 32, dtype=np.float32), "packed": layer.packed.numpy(),
        "scales": layer.scales.numpy(), "zeros": layer.zeros.numpy(),
    }  # fmt: skip
    values = {name: onnx_ir.tensor(array, name=name) for name, array in constants.items()}
    graph_values = {
        name: onnx_ir.Value(name=name, const_value=value, shape=value.shape) for name, value in values.items()
    }
    scaled = onnx_ir.node("Mul", [x, graph_values.pop("factor")])
    sizes = {"bits": 4, "block_size": 16, "inner": 32}
    product = onnx_ir.node(
        "block_linear", [scaled.outputs[0], *graph_values.values()], sizes, domain="accel_layers", name="p"
    )
    initializers = [*graph_values.values(), scaled.inputs[1]]
    graph = onnx_ir.Graph(
        [x], product.outputs, nodes=[scaled, product], initializers=initializers, opset_imports={"": 21}
    )
    assert lower_quantized_layers(onnx_ir.Model(graph, ir_version=10)) == 1
    [node] = [node for node in graph if node.op_type == "MatMulNBits"]
    assert node.attributes.get_int("accuracy_level", 0) == level


def prepared(preset: str, **settings: Any) -> Any:
    calibration = None if preset == "int4" else rows()
    return accel.prepare_qat(tiny_model("bert"), calibration=calibration, preset=preset, block_size=16, **settings)


@pytest.mark.parametrize("preset", PRESETS)
def test_prepared_model_trains_and_matches_its_integers(preset: str) -> None:
    from accel.capture.quantized_linears import without_training

    model = prepared(preset).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        batch = rows(1)[0]
        loss = model(**batch, labels=torch.tensor([0, 2])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    steps = {name: p.grad is None for name, p in model.named_parameters() if name.endswith("log_change")}
    assert steps
    fixed = without_training(model.eval())
    assert quantized_layers(fixed).keys() >= {"classifier"}
    with torch.no_grad():
        for case in rows(4, seed=7):
            # A value halfway between two integers may be rounded to either integer, because PyTorch's operator
            # multiplies by the inverse of the scale.
            assert (fixed(**case).logits - model(**case).logits).abs().max() < 0.02
    assert not quantized_layers(model), "the model that was given goes on training"


@pytest.mark.thorough
def test_exported_model_equals_the_trained_model(tmp_path: Path) -> None:
    model = prepared("int8").eval()
    artifact = accel.export(model, tmp_path / "onnx")
    session = open_plan(make_plan(artifact)).sessions["model"]
    assert artifact.manifest.quantization == Quantization(scheme="static-int8", preset="qat-int8")
    case = rows(1, seed=3)[0]
    case["token_type_ids"] = torch.zeros_like(case["input_ids"])
    with torch.no_grad():
        assert (session.run(case)["logits"] - model(**case).logits).abs().max() < 0.02


def test_prepared_and_plain_checkpoints_load_into_each_other() -> None:
    model, plain = prepared("int8"), tiny_model("bert")
    assert not model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    left = tiny_model("bert").load_state_dict(model.state_dict(), strict=False)
    assert not left.missing_keys
    other = prepared("int8")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**rows(1)[0]).logits, model(**rows(1)[0]).logits)


def test_teacher_changes_the_loss_and_is_not_saved() -> None:
    model, alone = prepared("int4", distillation=0.5), prepared("int4")
    batch = {**rows(1)[0], "labels": torch.tensor([0, 2])}
    assert model.state_dict().keys() == alone.state_dict().keys()
    model.eval()
    assert torch.equal(model(**batch).loss, alone.eval()(**batch).loss)
    for trained_model in (model, alone):
        trained_model.train()
        for module in trained_model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    assert model(**batch).loss != alone(**batch).loss


def test_invalid_models_are_refused_and_unchanged() -> None:
    model = tiny_model("bert")
    with pytest.raises(ConfigError, match="needs calibration data"):
        accel.prepare_qat(model)
    with pytest.raises(ConfigError, match="does not divide"):
        accel.prepare_qat(model, preset="int4", block_size=256)
    with pytest.raises(ConfigError, match="matches none of the"):
        accel.prepare_qat(model, preset="int4", exclude=["clasifier"], block_size=16)
    with pytest.raises(PrepareError, match="does not run on the calibration data"):
        accel.prepare_qat(model, calibration=[{"no_such_input": torch.zeros(1, 2)}])
    with pytest.raises(PrepareError, match="float16"):
        accel.prepare_qat(tiny_model("bert").half(), preset="int4", block_size=16)
    assert {type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)} == {torch.nn.Linear}
    twice = accel.prepare_qat(model, preset="int4", block_size=16, exclude=["re:classifier"])
    assert type(twice.classifier) is torch.nn.Linear
    with pytest.raises(PrepareError, match="already prepared"):
        accel.prepare_qat(twice, preset="int4", block_size=16)
    with pytest.raises(PrepareError, match="converted to torch.bfloat16"):
        twice.to(torch.bfloat16)(**rows(1)[0])
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        accel.prepare_qat(tiny_model("bert"), preset="int4", exclude=["re:("])
    with pytest.raises(PrepareError, match="contain NaN or infinity"):
        accel.prepare_qat(tiny_model("bert"), calibration=[{"inputs_embeds": torch.full((1, 2, 32), torch.nan)}])
    marked = tiny_model("bert")
    object.__setattr__(marked, "acceleration", object())
    with pytest.raises(PrepareError, match="is accelerated"):
        accel.prepare_qat(marked, calibration=rows())


def test_encoder_decoders_are_calibrated_with_labels() -> None:
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=120, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )
    batches = [{**batch, "labels": batch["input_ids"]} for batch in rows(2)]
    prepared = accel.prepare_qat(model, calibration=batches)
    assert type(prepared.decoder.block[0].layer[2].DenseReluDense.wi) is not torch.nn.Linear


def test_block_layers_have_a_weight_dtype(tmp_path: Path) -> None:
    """T5 converts activations to the data type of the layer's weights, so layers that are quantized in blocks must
    report a data type.
    """
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=120, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    ).eval()
    accel.prepare_qat(model, preset="int4", block_size=16)
    artifact = accel.export(model, tmp_path / "torch", format="torch")
    opened = accel.ORTModelForSeq2SeqLM.from_pretrained(artifact.path)
    case = rows(1)[0]
    before = torch.tensor([[0, 5, 7], [0, 9, 8]])
    with torch.no_grad():
        expected = model(**case, decoder_input_ids=before).logits
    assert torch.allclose(opened(**case, decoder_input_ids=before).logits, expected, atol=1e-4)


def test_unsupported_layer_types_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(training.logger, "warning", lambda text, *values: warnings.append(text % values))
    settings = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64, pad_token_id=0)
    accel.prepare_qat(transformers.GPT2ForSequenceClassification(settings), calibration=rows())
    assert len(warnings) == 1
    assert "8 layers of the class Conv1D" in warnings[0]
    with pytest.raises(PrepareError, match="8 layers, such as .*, have the class Conv1D"):
        accel.prepare_qat(transformers.GPT2LMHeadModel(settings), calibration=rows())


def test_checkpoint_in_training_is_not_exported_as_float_model(tmp_path: Path) -> None:
    prepared("int8").save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="checkpoint of quantization-aware training"):
        accel.export(tmp_path / "checkpoint", tmp_path / "onnx")


def test_unused_teacher_is_warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    model = prepared("int4", distillation=0.5).train()
    monkeypatch.setattr(distillation.logger, "warning", warnings.append)
    for _ in range(2):
        model(**rows(1)[0])
    assert len(warnings) == 1
    assert "distillation has no effect" in warnings[0]


def test_mixed_precision_around_forward_is_not_exported(tmp_path: Path) -> None:
    """The mixed precision that accelerate adds around `forward` is not exported. Trainer adds it with `bf16=True`."""
    accelerate = pytest.importorskip("accelerate", reason="Trainer's mixed precision is accelerate's")
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(prepared("int8")).eval()
    assert "forward" in vars(model)
    artifact = accel.export(model, tmp_path / "torch", format="torch")
    assert "forward" in vars(model)
    case = {**rows(1, seed=3)[0]}
    with torch.no_grad():
        expected = type(model).forward(model, **case).logits
    case["token_type_ids"] = torch.zeros_like(case["input_ids"])
    assert torch.allclose(open_plan(make_plan(artifact)).sessions["model"].run(case)["logits"], expected, atol=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["adapter", "rounding"])
def test_adapters_stay_in_float_on_quantized_layers(first: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    settings = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], init_lora_weights=False)
    with warnings.catch_warnings():
        # PEFT reads a deprecated attribute of transformers, and transformers warns about the attribute.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        if first == "adapter":
            model = accel.prepare_qat(peft.get_peft_model(tiny_model("bert"), settings), calibration=rows())
        else:
            model = peft.get_peft_model(prepared("int8"), settings)
    query = model.eval().base_model.model.bert.encoder.layer[0].attention.self.query
    assert type(query.lora_A["default"]) is torch.nn.Linear
    assert type(query.base_layer) is not torch.nn.Linear
    with pytest.raises(ExportError, match="PEFT adapters and quantized layers"):
        accel.export(model, tmp_path / "torch", task="text-classification", format="torch")
    artifact = accel.export(model, tmp_path / "onnx", task="text-classification")
    assert artifact.manifest.quantization is not None
    case = rows(1, seed=3)[0]
    with torch.no_grad():
        expected = model(**case).logits
    names = {spec.name for spec in artifact.components[0].inputs}
    feeds = {**case, "token_type_ids": torch.zeros_like(case["input_ids"])}
    logits = open_plan(make_plan(artifact)).sessions["model"].run({name: feeds[name] for name in names})["logits"]
    assert (logits - expected).abs().max() < 0.02


def _with_adapter(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    with warnings.catch_warnings():
        # PEFT reads a deprecated attribute of transformers, and transformers warns about the attribute.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], **settings))


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_adapters_that_read_base_weights_are_refused(preset: str, tmp_path: Path) -> None:
    """DoRA divides by the norms of the base layer's weights. If the base layer has integer weights, the exported graph
    gave wrong results, so the combination is refused.
    """
    before = _with_adapter(tiny_model("bert"), use_dora=True)
    settings: dict[str, Any] = {} if preset == "int4" else {"calibration": rows()}
    with pytest.raises(PrepareError, match="computes with the weights of its base layer"):
        accel.prepare_qat(before, preset=preset, block_size=16, **settings)
    assert not [
        module
        for module in before.modules()
        if isinstance(module, training.FakeQuantizedLinear | training.BlockFakeQuantizedLinear)
    ]
    after = _with_adapter(prepared(preset), use_dora=True)
    with pytest.raises(ExportError, match="cannot be used on a quantized layer"):
        accel.export(after, tmp_path / "onnx", task="text-classification")


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_merged_adapter_outside_of_scales_is_warned(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(quantized_module.logger, "warning", lambda text, *values: warnings.append(text % values))
    model = _with_adapter(prepared(preset), init_lora_weights=False)
    without_training(model)
    assert not warnings, "beside the layers it is computed in floating point"
    merged = model.merge_and_unload()
    without_training(merged)
    assert len(warnings) == 1
    assert "2 of 14 layers" in warnings[0]
    again = tiny_model("bert")
    again.load_state_dict(merged.state_dict(), strict=False)
    settings: dict[str, Any] = {} if preset == "int4" else {"calibration": rows()}
    without_training(accel.prepare_qat(again, preset=preset, block_size=16, **settings))
    assert len(warnings) == 1


@pytest.mark.parametrize("preset", ["int8", "int4-per-tensor", "int4"])
def test_weight_decay_does_not_change_scales(preset: str) -> None:
    """Weight decay, which moves parameters toward zero, does not change the quantization scales.

    If the parameter were the logarithm of a scale below 1, weight decay would increase the scale.
    """
    model = prepared(preset)
    before = _steps(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, steps in _steps(model).items():
        assert torch.equal(steps, before[name]), name


def _steps(model: Any) -> dict[str, torch.Tensor]:
    layers = quantized_layers(without_training(model)).items()
    return {name: layer.scale if isinstance(layer, IntegerLinear) else layer.scales for name, layer in layers}


@pytest.mark.parametrize("preset", ["int4-per-tensor", "int4-int8"])
def test_int4_scale_minimizes_the_error(preset: str) -> None:
    """One very large weight does not turn all other weights into zero, because the initial scale fits the other
    weights.
    """
    model = tiny_model("bert")
    layer = model.bert.encoder.layer[0].attention.self.query
    with torch.no_grad():
        layer.weight[0, 0] = 3.0
    accel.prepare_qat(model, calibration=rows(), preset=preset)
    trained = quantized_layers(without_training(model))["bert.encoder.layer.0.attention.self.query"]
    others = layer.weight.detach()[1:]
    step = layer.weight.detach().abs().amax() / 7
    lost, by_largest = (
        float((rounded - others).square().sum() / others.square().sum())
        for rounded in (trained.dequantized()[1:], torch.round(others / step) * step)
    )
    assert lost < 0.1
    assert by_largest > 5 * lost


# The tests below check the loss of the model, and layers that have several names.


def _gradient(model: Any, feeds: dict[str, torch.Tensor], parts: int, **more: Any) -> torch.Tensor:
    """Return the gradient of a batch that is summed over `parts` smaller batches, as Trainer accumulates gradients."""
    model.zero_grad()
    rows = len(feeds["input_ids"]) // parts
    for i in range(parts):
        model(**{name: value[i * rows : (i + 1) * rows] for name, value in feeds.items()}, **more).loss.backward()
    # Skip the gradients of input scales, because their factor depends on the number of activations in a call.
    learned = (p.grad for name, p in sorted(model.named_parameters()) if not name.endswith("x_log_change"))
    return torch.cat([grad.flatten() for grad in learned if grad is not None])


@pytest.mark.parametrize("ignored", [0, 3])
def test_distillation_loss_with_gradient_accumulation(ignored: int) -> None:
    """With gradient accumulation, some models divide their loss by the number of labels of all batches in the training
    step. The distillation loss is then divided by the same number.
    """
    model = tiny_generator("llama").train()
    ids = torch.randint(6, 90, (8, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :ignored] = -100
    feeds = {"input_ids": ids, "labels": labels}
    accel.prepare_qat(model, calibration=[{"input_ids": ids}], distillation=0.9, temperature=1.0)
    count = labels[:, 1:].ne(-100).sum()
    full_gradient, parts = (_gradient(model, feeds, n, num_items_in_batch=count) for n in (1, 4))
    torch.testing.assert_close(parts, full_gradient, atol=1e-5 * float(full_gradient.abs().max()), rtol=1e-3)
    torch.testing.assert_close(
        full_gradient, _gradient(model, feeds, 1), atol=1e-5 * float(full_gradient.abs().max()), rtol=1e-3
    )


def test_distillation_loss_if_the_model_ignores_accumulation() -> None:
    """If a model ignores `num_items_in_batch`, as BERT's classifier does, the distillation loss is not divided by this
    number.
    """
    model = tiny_model("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    ids = torch.randint(6, 100, (8, 8), generator=torch.Generator().manual_seed(0))
    feeds = {"input_ids": ids, "labels": ids[:, 0] % 3}
    accel.prepare_qat(model, calibration=[{"input_ids": ids}], distillation=0.9)
    gradient = _gradient(model, feeds, 1, num_items_in_batch=torch.tensor(32))
    assert torch.equal(gradient, _gradient(model, feeds, 1))


def test_distillation_of_spans_and_regression() -> None:
    """Distillation works for the start and end logits of question answering, and for regression, which has no classes."""
    ids = torch.randint(6, 100, (4, 8), generator=torch.Generator().manual_seed(0))
    spans = tiny_model("bert", "question-answering")
    numbers = tiny_model("bert", num_labels=1)
    for model, targets in (
        (spans, {"start_positions": torch.ones(4, dtype=torch.long), "end_positions": torch.full((4,), 2)}),
        (numbers, {"labels": torch.ones(4)}),
    ):
        accel.prepare_qat(model, calibration=[{"input_ids": ids}], preset="int4-per-tensor", distillation=1.0)
        model.train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.eval()
        loss = model(input_ids=ids, **targets).loss
        loss.backward()
        assert loss > 1e-6
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_layer_with_two_names_is_shared(tmp_path: Path) -> None:
    model = tiny_model("bert")
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    second.query = first.query
    ids = torch.randint(6, 100, (4, 8), generator=torch.Generator().manual_seed(0))
    accel.prepare_qat(model, calibration=[{"input_ids": ids}], preset="int4-per-tensor")
    assert type(first.query) is not torch.nn.Linear
    assert second.query is first.query
    artifact = accel.export(model, tmp_path / "out", format="torch")
    plain = without_training(model)
    with torch.inference_mode():
        expected = plain(input_ids=ids).logits
    query, other = (layer.attention.self.query for layer in plain.bert.encoder.layer)
    assert isinstance(query, IntegerLinear)
    assert query is other
    opened = accel.ORTModelForSequenceClassification.from_pretrained(artifact.path)
    torch.testing.assert_close(opened(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_modules_in_evaluation_mode_stay_in_it() -> None:
    model = tiny_model("bert").train()
    model.bert.embeddings.eval()
    before = [module.training for module in model.modules()]
    ids = torch.randint(6, 100, (4, 8), generator=torch.Generator().manual_seed(0))
    accel.prepare_qat(model, calibration=[{"input_ids": ids}])
    assert not model.bert.embeddings.training
    assert before == [module.training for module in model.modules()]
