"""Tests of scripts written for Optimum, in which only the import line is changed."""

from __future__ import annotations

import importlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.compat import optimum
from accel.errors import AccelError, BackendUnavailableError, ConfigError, OutputFolderError, QuantizeError

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "from-optimum.md"
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder()


@pytest.fixture(scope="module")
def inputs(folder: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(["where is my card", "lost"], padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def expected_logits(folder: Path, inputs: Any) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.fixture
def model(tiny_artifact: Callable[..., Artifact]) -> Any:
    return optimum.ORTModelForSequenceClassification.from_pretrained(tiny_artifact().path)


def test_every_exported_name_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name in optimum.__all__:
        assert getattr(optimum, name) is not None
        documented = name in text or re.match(r"(ORT|OV)ModelFor", name) or re.search(r"_(NAME|PATTERN)\Z", name)
        assert documented, f"docs/guides/from-optimum.md does not tell what becomes of {name}"


@pytest.mark.parametrize("name", ["ORTStableDiffusionPipeline", "OVMixedQuantizationConfig", "OVSentenceTransformer"])
def test_name_without_counterpart_raises_with_a_reason(name: str) -> None:
    with pytest.raises(ImportError, match="does not provide Optimum's"):
        getattr(importlib.import_module("accel.compat.optimum"), name)
    with pytest.raises(AttributeError):
        _ = optimum.NoSuchName


@pytest.mark.parametrize("kind", ["ORT", "OV"])
def test_every_task_has_a_compatible_class(kind: str) -> None:
    ours = [name for name in accel.__all__ if name.startswith("ORTModelFor")]
    assert len(ours) > 10
    base = getattr(optimum, f"{kind}Model")
    for name in ours:
        cls = getattr(optimum, kind + name.removeprefix("ORT"))
        assert issubclass(cls, getattr(accel, name))
        assert issubclass(cls, base)
        assert cls.task == getattr(accel, name).task
    assert getattr(optimum, f"{kind}ModelForPix2Struct") is getattr(optimum, f"{kind}ModelForVision2Seq")


def test_model_is_exported_saved_with_tokenizer_and_loaded(
    folder: Path, inputs: Any, expected_logits: torch.Tensor, tmp_path: Path
) -> None:
    model = optimum.ORTModelForSequenceClassification.from_pretrained(
        folder, export=True, provider="AzureExecutionProvider", use_io_binding=False, force_download=True
    )
    assert (model.providers, model.use_io_binding) == (["CPUExecutionProvider"], False)
    assert hasattr(model.session, "get_providers")
    model.save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    loaded = optimum.ORTModel.from_pretrained(tmp_path / "saved", file_name="model.onnx")
    assert type(loaded) is optimum.ORTModelForSequenceClassification
    torch.testing.assert_close(loaded(**inputs).logits, expected_logits, **CLOSE)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loaded))(**inputs).logits, expected_logits, **CLOSE)


def test_use_cache_false_is_kept(generator: Any) -> None:
    path = generator("gpt2").path
    model = optimum.ORTModelForCausalLM.from_pretrained(path, use_cache=False)
    assert (model.can_use_cache, model.use_cache, model.config.use_cache) == (False, False, False)
    assert optimum.ORTModelForCausalLM.from_pretrained(path, use_cache=True).can_use_cache
    assert optimum.ORTModelForCausalLM.from_pretrained(path).generation_config.use_cache is True
    ids = torch.tensor([[3, 4, 5]])
    assert model(input_ids=ids, use_cache=False).past_key_values is None


@pytest.mark.parametrize("level", ["O1", pytest.param("O3", marks=pytest.mark.thorough)])
def test_optimizer(model: Any, inputs: Any, expected_logits: torch.Tensor, level: str, tmp_path: Path) -> None:
    config = getattr(optimum.AutoOptimizationConfig, level)()
    folder = optimum.ORTOptimizer.from_pretrained(model).optimize(config, save_dir=tmp_path / "out")
    # Like Optimum, the optimizer writes the graph and its weights as one file, because scripts may copy only this file.
    assert {path.name for path in folder.glob("*.onnx*")} == {"model_optimized.onnx"}
    record = json.loads((folder / "ort_config.json").read_text())
    assert record["optimization"]["optimization_level"] == config.optimization_level
    assert optimum.ORTConfig.from_pretrained(folder).to_dict() == optimum.ORTConfig(optimization=config).to_dict()
    loaded = type(model).from_pretrained(folder, file_name="model_optimized.onnx")
    assert loaded.artifact.manifest.steps[-1].config["level"] == level
    # Level O3 approximates GELU, so its tolerance is larger than the tolerance for O1.
    torch.testing.assert_close(loaded(**inputs).logits, expected_logits, rtol=0.0, atol=1e-5 if level == "O1" else 1e-2)
    differences = optimum.ORTOptimizer.get_operators_difference(model.path, loaded.path)
    assert sum(differences.values()) == optimum.ORTOptimizer.get_nodes_number_difference(model.path, loaded.path)


def test_graph_file_copied_alone_loads(model: Any, inputs: Any, expected_logits: torch.Tensor, tmp_path: Path) -> None:
    optimized = optimum.ORTOptimizer.from_pretrained(model).optimize(
        optimum.AutoOptimizationConfig.O1(), tmp_path / "made", file_suffix=""
    )
    (tmp_path / "alone" / "onnx").mkdir(parents=True)
    (tmp_path / "alone" / "onnx" / "model_O1.onnx").write_bytes((optimized / "model.onnx").read_bytes())
    (tmp_path / "alone" / "config.json").write_bytes((optimized / "config.json").read_bytes())
    loaded = type(model).from_pretrained(tmp_path / "alone", subfolder="onnx", file_name="model_O1.onnx")
    torch.testing.assert_close(loaded(**inputs).logits, expected_logits, **CLOSE)


def test_quantizer_writes_next_to_a_saved_model(
    model: Any, inputs: Any, expected_logits: torch.Tensor, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "both")
    quantizer = optimum.ORTQuantizer.from_pretrained(tmp_path / "both", file_name="model.onnx")
    quantizer.quantize(optimum.AutoQuantizationConfig.avx512_vnni(is_static=False), save_dir=tmp_path / "both")
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path / "both")(**inputs).logits, expected_logits, **CLOSE
    )
    quantized = type(model).from_pretrained(tmp_path / "both", file_name="model_quantized.onnx")
    logits = quantized(**inputs).logits
    # The tolerance allows for 8-bit weights of a random model whose logits are of order 1.
    torch.testing.assert_close(logits, expected_logits, rtol=0.0, atol=0.2)
    assert not torch.allclose(logits, expected_logits, **CLOSE)


def test_generator_is_quantized_next_to_its_graph(generator: Any, tmp_path: Path) -> None:
    model = optimum.ORTModelForCausalLM.from_pretrained(generator("gpt2").path)
    config = optimum.AutoQuantizationConfig.avx2(is_static=False, per_channel=False)
    quantizer = optimum.ORTQuantizer.from_pretrained(model)
    model.save_pretrained(tmp_path / "saved")
    quantizer.quantize(config, tmp_path / "saved")
    with pytest.raises(OutputFolderError, match="file_suffix"):
        quantizer.quantize(config, tmp_path / "saved" / "quantized", file_suffix="")
    quantized = optimum.ORTModelForCausalLM.from_pretrained(tmp_path / "saved", file_name="model_quantized.onnx")
    assert (tmp_path / "saved" / "model_quantized.onnx").is_file()
    assert quantized.artifact.manifest.quantization.scheme == "dynamic-int8"
    assert optimum.ORTModelForCausalLM.from_pretrained(tmp_path / "saved").artifact.manifest.quantization is None
    assert quantized.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)
    nodes = onnx.load(tmp_path / "saved" / "model_quantized.onnx").graph.node
    assert any(node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul") for node in nodes)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("minmax", {"moving_average": True}),
        pytest.param("percentiles", {"percentile": 99.9}, marks=pytest.mark.thorough),
    ],
)
def test_static_quantization(model: Any, folder: Path, method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text\nwhere is my card\nlost money\n", encoding="utf-8")
    quantizer = optimum.ORTQuantizer.from_pretrained(model)
    rows = quantizer.get_calibration_dataset(
        str(tmp_path / "data"),
        num_samples=2,
        dataset_split="train",
        preprocess_function=lambda row: tokenizer(row["text"], padding="max_length", max_length=8),
    )
    assert {"input_ids", "attention_mask"} <= set(rows.column_names) <= set(model.input_names)
    config = optimum.AutoQuantizationConfig.avx512_vnni(is_static=True)
    with pytest.raises(QuantizeError, match="needs calibration ranges"):
        quantizer.quantize(config, tmp_path / "out")
    calibration = getattr(optimum.AutoCalibrationConfig, method)(rows, **settings)
    ranges = quantizer.fit(rows, calibration, batch_size=2)
    static = Artifact.load(quantizer.quantize(config, tmp_path / "out", calibration_tensors_range=ranges))
    quantization = static.manifest.quantization
    assert quantization is not None
    assert quantization.scheme == "static-int8"
    assert quantization.calibration is not None
    assert quantization.calibration["rows"] == 2


def test_optimum_configs_are_converted() -> None:
    config = optimum.OptimizationConfig(optimization_level=2, disable_attention_fusion=True).to_accel()
    assert config.level == "O2"
    assert config.disable == ("attention",)
    static = optimum.QuantizationConfig(
        is_static=True, activations_dtype="QInt8", nodes_to_exclude=["/head"], operators_to_quantize=["MatMul"]
    ).to_accel()
    assert (static.scheme, static.preset, static.exclude, static.operators) == (
        "static-int8", "arm64", ("/head",), ("MatMul",),
    )  # fmt: skip
    weights = optimum.OVWeightQuantizationConfig(bits=4, group_size=64, ratio=0.8, ignored_scope={"patterns": ["h.*"]})
    ours = weights.to_accel()
    assert (ours.scheme, ours.block_size, ours.ratio, ours.exclude) == ("weight-int4", 64, 0.8, ("re:h.*",))
    assert type(optimum.OVConfig(weights.to_dict() | {"weight_only": True}).quantization_config) is type(weights)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimum.OptimizationConfig(no_attention_mask=True),
        lambda: optimum.OptimizationConfig(optimization_level=7),
        lambda: optimum.AutoOptimizationConfig.with_optimization_level("O9"),
        lambda: optimum.QuantizationConfig(is_static=False),
        lambda: optimum.QuantizationConfig(is_static=True, weights_dtype="QInt5"),
        lambda: optimum.OVWeightQuantizationConfig(bits=3),
        lambda: optimum.OVWeightQuantizationConfig(lora_correction=True),
        lambda: optimum.OVQuantizationConfig(dtype="f8e4m3"),
    ],
)
def test_calls_without_counterpart_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.fix


def test_openvino(tiny_ir: Callable[..., Artifact], inputs: Any, expected_logits: torch.Tensor, tmp_path: Path) -> None:
    cls = optimum.OVModelForSequenceClassification
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    model = cls.from_pretrained(tiny_ir().path, device="CPU", compile=False, ov_config=options)
    assert (model.backend, model.ov_config, model.compute_dtype) == ("openvino", options, "float32")
    torch.testing.assert_close(model(**inputs).logits, expected_logits, **CLOSE)
    torch.testing.assert_close(model.reshape(2, 16)(**inputs).logits, expected_logits, **CLOSE)
    with pytest.raises(ConfigError):
        model.reshape(2, 10_000)
    torch.testing.assert_close(model(**inputs).logits, expected_logits, **CLOSE)
    quantizer = optimum.OVQuantizer.from_pretrained(model)
    rows = [{name: tensor[0].tolist() for name, tensor in inputs.items()}]
    quantizer.quantize(rows, save_directory=tmp_path / "int8")
    logits = model(**inputs).logits
    assert not torch.allclose(logits, expected_logits, **CLOSE)
    again = optimum.OVModel.from_pretrained(tmp_path / "int8")
    assert type(again) is cls
    torch.testing.assert_close(again(**inputs).logits, logits, **CLOSE)
    record = optimum.OVConfig.from_pretrained(tmp_path / "int8").quantization_config
    assert isinstance(record, optimum.OVQuantizationConfig)
    # Rename the graph files, because other libraries use other file names.
    for ending in ("xml", "bin"):
        (tmp_path / "int8" / f"openvino_model.{ending}").rename(tmp_path / "int8" / f"openvino_model_q.{ending}")
    (tmp_path / "int8" / "accel.json").unlink()
    named = cls.from_pretrained(tmp_path / "int8", file_name="openvino_model_q.xml")
    torch.testing.assert_close(named(**inputs).logits, logits, **CLOSE)


def test_openvino_load_in_8bit(tiny_ir: Callable[..., Artifact], inputs: Any) -> None:
    path = tiny_ir().path
    model = optimum.OVModelForSequenceClassification.from_pretrained(path, load_in_8bit=True)
    assert model.artifact.manifest.quantization.scheme == "weight-int8"
    with pytest.raises(QuantizeError, match="needs calibration data"):
        optimum.OVModelForSequenceClassification.from_pretrained(
            path, quantization_config=optimum.OVQuantizationConfig()
        )


def test_pipeline(folder: Path) -> None:
    pipe = optimum.pipeline("text-classification", model=str(folder), accelerator="ort")
    assert isinstance(pipe.model, optimum.ORTModelForSequenceClassification)
    assert set(pipe("where is my card")[0]) == {"label", "score"}


def test_images_are_not_padded(tiny_ir: Callable[..., Artifact]) -> None:
    model = optimum.OVModelForImageClassification.from_pretrained(tiny_ir("vit", "image-classification").path)
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = model(pixels).logits
    assert torch.equal(model.reshape(1, 3, 32, 32)(pixels).logits, expected)
    assert torch.equal(model.reshape(1, 3, height=32, width=32)(pixels).logits, expected)


@pytest.mark.thorough
def test_feature_pipeline_accepts_a_custom_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("bert", "feature-extraction")
    optimum.ORTModelForFeatureExtraction.from_pretrained(folder).save_pretrained(tmp_path)
    model = optimum.ORTModelForCustomTasks.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    features = optimum.pipeline("feature-extraction", model=model, tokenizer=tokenizer)("where is my card")
    assert len(features[0]) == len(tokenizer("where is my card").input_ids)


@pytest.mark.parametrize("arrays", ["pt", "np"])
def test_feature_outputs_equal_optimums_and_pytorchs(
    arrays: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder, path = tiny_folder("bert", "feature-extraction"), tiny_artifact("bert", "feature-extraction").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    outputs = optimum.ORTModelForFeatureExtraction.from_pretrained(path)(**tokenizer("lost", return_tensors=arrays))
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(folder)(**tokenizer("lost", return_tensors="pt"))
    # The output is an instance of `BaseModelOutput`, which Optimum returns, and of transformers' output class with pooled
    # states.
    assert isinstance(outputs, transformers.modeling_outputs.BaseModelOutput)
    assert isinstance(outputs, transformers.modeling_outputs.BaseModelOutputWithPooling)
    assert list(outputs) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(outputs[name]), value, **CLOSE)
    again = pickle.loads(pickle.dumps(outputs))
    assert type(again) is type(outputs)
    assert list(again) == list(outputs)


def test_installed_optimum_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.compat.optimum import import_conflicts

    import_conflicts.refuse_if_installed("no-such-distribution")
    monkeypatch.setattr(import_conflicts.metadata, "version", lambda name: "9.9")
    with pytest.raises(BackendUnavailableError, match="optimum-onnx 9.9") as caught:
        import_conflicts.refuse_if_installed("optimum-onnx")
    assert "pip uninstall optimum-onnx" in str(caught.value)
    assert isinstance(caught.value, ImportError | AccelError)


def test_optimization_level_zero_changes_nothing(model: Any, tmp_path: Path) -> None:
    config = optimum.OptimizationConfig(optimization_level=0, enable_transformers_specific_optimizations=False)
    model.save_pretrained(tmp_path)
    optimizer = optimum.ORTOptimizer.from_pretrained(model)
    optimizer.optimize(config, tmp_path)
    pair = (tmp_path / "model.onnx", tmp_path / "model_optimized.onnx")
    assert optimizer.get_nodes_number_difference(*pair) == 0
    assert optimizer.get_operators_difference(*pair) == {}
    assert optimizer.normalized_config.model_type == "bert"
