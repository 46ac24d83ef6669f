"""Tests of the `neural-compressor` backend: models and graphs contain exactly the scales and integers that Intel Neural
Compressor computes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("neural_compressor", reason="the extra neural-compressor is not installed")
pytest.importorskip("accelerate", reason="the extra neural-compressor is not installed")

import accel
from accel.artifact import Artifact
from accel.backends import registry
from accel.capture import CACHE_NAME, quantized_layers
from accel.errors import ConfigError, QuantizeError
from accel.stages.checked_export import load_source
from accel.stages.foreign_folders import weights_of
from accel.stages.quantize import quantize
from accel.stages.resolution import resolve
from accel.testing.generative_models import save_generator
from accel.tuning.candidates import SearchSpace
from accel_plugins.neural_compressor.upstream import library, mapped
from accel_plugins.neural_compressor.weights import check_algorithm

BACKEND = "neural-compressor"


@pytest.fixture(autouse=True)
def _quiet_torchao(recwarn: pytest.WarningsRecorder) -> None:
    """Ignore the warnings that importing torchao raises."""


def rows(count: int = 6, *, types: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        ids = torch.randint(6, 100, (2, 5 + index), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if types:
            batches[-1]["token_type_ids"] = torch.zeros_like(ids)
    return batches


@pytest.fixture(scope="session")
def quantized_artifact(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Artifact]:
    folder, artifacts = tmp_path_factory.mktemp("compressed"), dict[str, Artifact]()

    def get(scheme: str, algorithm: str = "rtn") -> Artifact:
        name = f"{scheme}-{algorithm}"
        if name not in artifacts:
            settings: dict[str, Any] = {} if scheme == "static-int8" else {"block_size": 16, "algorithm": algorithm}
            artifacts[name] = quantize(
                tiny_folder(), folder / name, backend=BACKEND, scheme=scheme, calibration=rows(), **settings
            )
        return artifacts[name]

    return get


def layers_of(artifact: Artifact) -> dict[str, Any]:
    resolved = resolve(artifact.path, weights=True)
    return dict(quantized_layers(load_source(resolved, accel.ExportConfig()).model))


def test_static_scales_and_integers_equal_neural_compressors(
    quantized_artifact: Callable[..., Artifact], tiny_folder: Callable[..., Path]
) -> None:
    """The integer layers contain the same integers as the graph that Neural Compressor computes from the same scales."""
    artifact = quantized_artifact("static-int8")
    layers = layers_of(artifact)
    assert set(artifact.manifest.steps[-1].report["layers"]) == set(layers)
    assert {layer.x_zero.dtype for layer in layers.values()} == {torch.uint8}
    float_model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_folder())
    for name, layer in layers.items():
        weight = float_model.get_submodule(name).weight.detach()
        expected = torch.ops.quantized_decomposed.quantize_per_channel(
            weight, layer.scale, layer.zero.long(), 0, -128, 127, torch.int8
        )
        assert torch.equal(layer.weight, expected)
        # The symmetric 8-bit scale is the largest absolute weight divided by 127.5.
        assert torch.allclose(layer.scale, weight.abs().amax(1) / 127.5, rtol=1e-5)


def test_packed_weights_equal_neural_compressors(
    tiny_folder: Callable[..., Path], quantized_artifact: Callable[..., Artifact]
) -> None:
    from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear
    from neural_compressor.torch.quantization import RTNConfig, convert, prepare

    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_folder()).eval()
    theirs = convert(prepare(model, RTNConfig(bits=4, group_size=16, use_sym=False)), use_optimum_format=False)
    packed = {name: module for name, module in theirs.named_modules() if isinstance(module, INCWeightOnlyLinear)}
    ours = layers_of(quantized_artifact("weight-int4"))
    assert packed.keys() == ours.keys()
    for name, layer in packed.items():
        assert torch.equal(layer.recover(), ours[name].dequantized())


def test_layers_whose_weights_are_read_directly_stay_in_float(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """The x-vector head of wav2vec2 reads the weights of its linear layers directly, so the quantizer keeps these
    layers in floating point.
    """
    folder = tiny_folder("wav2vec2", "audio-xvector")
    quantized = quantize(folder, tmp_path / "out", backend=BACKEND, scheme="weight-int8")
    assert quantized.manifest.quantization is not None
    assert set(quantized.manifest.quantization.excluded) == {f"tdnn.{i}.kernel" for i in range(5)}
    sounds = torch.randn((2, 1200), generator=torch.Generator().manual_seed(0))
    original = transformers.AutoModelForAudioXVector.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = original(sounds).embeddings
    embeddings = accel.ORTModelForAudioXVector(quantized, backend="pytorch")(sounds).embeddings
    assert (embeddings - expected).norm() <= 0.05 * expected.norm()


def test_transformers_folder_is_quantized_directly(quantized_artifact: Callable[..., Artifact]) -> None:
    manifest = quantized_artifact("static-int8").manifest
    assert (manifest.format, manifest.steps[-1].backend) == ("torch", BACKEND)
    assert manifest.quantization is not None
    assert manifest.quantization.calibration == {"method": "minmax", "n": 12, "seed": 0}


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"scheme": "weight-int4", "algorithm": "hqq"}, ConfigError, "not available"),
        ({"scheme": "weight-int4", "algorithm": "gptq"}, QuantizeError, "calibration data"),
        ({"scheme": "static-int8"}, QuantizeError, "calibration data"),
        ({"scheme": "static-int8", "smooth_quant": 0.5}, ConfigError, "does not use the setting smooth_quant"),
        ({"scheme": "weight-int4", "exclude": ("clasifier",)}, ConfigError, "Did you mean 'classifier'"),
        ({"scheme": "static-int8", "calibration": "rows.csv"}, ConfigError, "calibration is a str"),
        ({"scheme": "weight-int4", "exclude": ("re:(",)}, ConfigError, "not a valid regular expression"),
        (
            {"scheme": "weight-int4", "algorithm": "awq", "block_size": 128, "calibration": rows()},
            ConfigError,
            "does not divide",
        ),
    ],
)
def test_unsupported_settings_are_refused(
    tiny_folder: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        quantize(tiny_folder(), tmp_path / "out", backend=BACKEND, **settings)


def test_text_algorithm_refuses_images(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    images = [{"pixel_values": torch.rand(1, 3, 32, 32)}]
    with pytest.raises(QuantizeError, match="with token ids, but this model has the inputs pixel_values"):
        quantize(
            tiny_folder("vit", "image-classification"), tmp_path / "out",
            backend=BACKEND, scheme="weight-int4", algorithm="awq", block_size=16, calibration=images,
        )  # fmt: skip


def test_algorithm_without_its_package_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuantizeError, match="auto-round, which is not installed"):
        check_algorithm(accel.QuantizeConfig(scheme="weight-int4", algorithm="autoround"), calibrated=True)


def test_doctor_lists_missing_algorithms() -> None:
    probe = registry.probe(registry.describe(BACKEND))
    assert probe.available
    assert {"hqq", "smooth_quant"} <= {reason.code for reason in probe.reasons}
    assert all(reason.remedy for reason in probe.reasons)


def test_tune_exports_quantized_models() -> None:
    space = SearchSpace(task="text-classification", device=None, backends=None, half_exports=False, calibrated=True)
    torch_export = next(recipe for recipe in space.exports() if recipe.format == "torch")
    offered = space.quantizations(torch_export, "float32")
    ours = [str(recipe) for recipe in offered if BACKEND in str(recipe)]
    assert "torch float32 > neural-compressor static-int8 > onnx" in ours
    assert all(recipe.quantizes and recipe.format != "torch" for recipe in offered)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_generators_keep_packed_weights(family: str, algorithm: str, tmp_path: Path) -> None:
    folder = save_generator(tmp_path / family, family)
    batches = rows(types=False)
    artifact = quantize(
        folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", algorithm=algorithm, block_size=16,
        calibration=batches if algorithm != "rtn" else None,
    )  # fmt: skip
    graph = accel.export(artifact.path, tmp_path / "onnx")
    model = accel.ORTModelForCausalLM.from_pretrained(graph.path)
    ids = batches[0]["input_ids"][:1]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    assert weights_of(resolve(folder, weights=True)).bytes > artifact.bytes


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["awq", "gptq"])
def test_generators_are_calibrated_with_texts(algorithm: str, tmp_path: Path) -> None:
    """The quantizer tokenizes text rows for calibration, as the command line passes them. In each batch, some rows are
    padded and other rows are not.
    """
    folder = save_generator(tmp_path / "llama", "llama")
    texts = [{"text": text} for text in ("where is my card and my phone", "help", "i lost my phone and cannot pay")]
    artifact = accel.quantize(
        folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", algorithm=algorithm, block_size=16,
        calibration=texts * 4,
    )  # fmt: skip
    assert artifact.manifest.quantization is not None
    assert artifact.manifest.quantization.calibration is not None
    graph = accel.export(artifact.path, tmp_path / "onnx")
    model = accel.ORTModelForCausalLM.from_pretrained(graph.path)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize("algorithm", [pytest.param("gptq", marks=pytest.mark.thorough), "awq"])
def test_calibration_result_is_independent_of_batching(algorithm: str, tmp_path: Path) -> None:
    """The integers do not depend on the batches of the calibration rows: padded batches give the same integers as
    single rows.
    """
    spare = ("model.layers.1.mlp.up_proj",)
    folder = save_generator(tmp_path / "mistral", "mistral")
    # Put short and long rows in alternating order.
    alone = [{name: tensor[i : i + 1] for name, tensor in long_rows()[n].items()} for i in (0, 1) for n in (0, 2, 1, 3)]
    settings: dict[str, Any] = {"backend": BACKEND, "scheme": "weight-int4", "algorithm": algorithm, "block_size": 16}
    layers = [
        layers_of(quantize(folder, tmp_path / name, calibration=batches, exclude=spare, **settings))
        for name, batches in (("alone", alone), ("padded", padded_pairs(alone)))
    ]
    assert len(layers[0]) == 14 - len(spare)
    assert not set(spare) & layers[0].keys()
    for name, layer in layers[0].items():
        assert torch.equal(layer.packed, layers[1][name].packed)
        assert torch.equal(layer.scales, layers[1][name].scales)


def long_rows() -> list[dict[str, torch.Tensor]]:
    """Return batches of different sequence lengths. Some rows are longer than Mistral's sliding window of 16 tokens, so
    only these rows need an attention mask.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids = [torch.randint(6, 100, (2, length), generator=generator) for length in (5, 9, 24, 40)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in token_ids]


def padded_pairs(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Combine each two consecutive rows into one batch. The shorter row is padded on the left."""
    padded = []
    for first, other in zip(rows[::2], rows[1::2], strict=True):
        width = max(first["input_ids"].shape[1], other["input_ids"].shape[1])
        padded.append(
            {
                name: torch.cat(
                    [torch.nn.functional.pad(row[name], (width - row[name].shape[1], 0)) for row in (first, other)]
                )
                for name in first
            }
        )
    return padded


@pytest.mark.parametrize(
    ("family", "algorithm", "why"),
    [
        ("gemma3", "gptq", "calls block 1 of 2 with other arguments"),
        ("gemma3", "awq", "calls block 1 of 2 with other arguments"),
        ("gpt2", "gptq", "Conv1D"),
        ("llama", "teq", "normalization layers"),
    ],
)
def test_models_unsupported_by_an_algorithm_are_refused(family: str, algorithm: str, why: str, tmp_path: Path) -> None:
    folder = save_generator(tmp_path / family, family)
    with pytest.raises(QuantizeError, match=why):
        quantize(
            folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", algorithm=algorithm, block_size=16,
            calibration=long_rows(),
        )  # fmt: skip


def test_repeated_blocks_use_no_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ runs each transformer block many times. The quantizer disables the KV cache, because a block would otherwise
    attend to keys and values of its earlier runs.
    """
    block = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    original, calls = block.forward, list[tuple[Any, Any]]()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((self, kwargs.get(CACHE_NAME)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(block, "forward", forward)
    quantize(
        save_generator(tmp_path / "llama", "llama"), tmp_path / "q", backend=BACKEND, scheme="weight-int4",
        algorithm="awq", block_size=16, calibration=long_rows(),
    )  # fmt: skip
    with_cache = [(id(called_block), id(cache)) for called_block, cache in calls if cache is not None]
    assert len(with_cache) == len(set(with_cache)) < len(calls) - 30


def test_rounding_reads_weights_from_the_model(tmp_path: Path) -> None:
    """Quantization works although weight names in the file differ from weight names in the model, as for the output
    layer of GPT-NeoX.
    """
    folder = save_generator(tmp_path / "gpt-neox", "gpt-neox")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", block_size=16)
    assert len(layers_of(artifact)) == 8


def test_tied_weights_are_tied_after_quantization(tmp_path: Path) -> None:
    """GPT-2 shares one weight between the embedding and the output layer. The quantizer separates the two layers, and
    shares the weight again in the saved model.
    """
    folder = save_generator(tmp_path / "gpt2", "gpt2")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", block_size=16)
    model: Any = load_source(resolve(artifact.path, weights=True), accel.ExportConfig()).model
    model = getattr(model, "unwrapped", model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert quantized_layers(model)


@pytest.mark.parametrize("scheme", ["weight-int8", "weight-int4"])
def test_token_embeddings_are_unchanged_by_quantized_output_head(
    scheme: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """BERT's quantized output head shares its weight with the token embeddings. The token embeddings stay unchanged."""
    folder = tiny_folder("bert", "fill-mask")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme=scheme, block_size=16)
    model: Any = load_source(resolve(artifact.path, weights=True), accel.ExportConfig()).model
    original = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert "cls.predictions.decoder" in quantized_layers(model)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    ids = torch.arange(6, 30).view(2, 12)
    with torch.inference_mode():
        expected = original(ids).logits
    logits = accel.ORTModelForMaskedLM(artifact, backend="pytorch")(input_ids=ids).logits
    assert (logits - expected).norm() <= {"weight-int8": 0.05, "weight-int4": 0.3}[scheme] * expected.norm()


@pytest.mark.thorough
def test_openvino_converts_blocks_after_unknown_reshape(tmp_path: Path) -> None:
    """A BART model with weights quantized in blocks can be exported to OpenVINO. OpenVINO's converter cannot infer the
    size of the last axis after the reshape in BART's attention.
    """
    folder = save_generator(tmp_path / "bart", "bart")
    quantized = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int8", block_size=16)
    artifact = accel.export(quantized.path, tmp_path / "ir", backend="openvino")
    ids = torch.arange(6, 18).view(2, 6)
    feeds = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    models = [
        accel.ORTModelForSeq2SeqLM(variant, backend=backend)
        for variant, backend in ((quantized, "pytorch"), (artifact, "openvino"))
    ]
    plain, converted = (model(**feeds).logits for model in models)
    assert (converted - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.ones((1, 4), dtype=torch.int64)}, "has the inputs ids, but the model needs"),
        ({"input_ids": [[5, 6, 7]]}, "is a list, but it must be a tensor"),
    ],
    ids=["names", "lists"],
)
def test_invalid_calibration_data_raises(
    batch: dict[str, Any], message: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(QuantizeError, match=message):
        quantize(tiny_folder(), tmp_path / "q", backend=BACKEND, scheme="static-int8", calibration=[batch])


def test_neural_compressor_runs_on_cpu_despite_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neural Compressor computes on the CPU even if the machine has a GPU. With a GPU, GPTQ put its layers on the GPU
    and its rows on the CPU, and failed.
    """
    library()
    from neural_compressor.torch.utils import auto_accelerator

    monkeypatch.delenv("INC_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(auto_accelerator.CUDA_Accelerator, "is_available", staticmethod(lambda: True))
    registered = auto_accelerator.accelerator_registry.registered_accelerators
    monkeypatch.setitem(registered, "cuda", (auto_accelerator.CUDA_Accelerator, auto_accelerator.PRIORITY_CUDA))
    auto_accelerator.auto_detect_accelerator.cache_clear()
    assert auto_accelerator.auto_detect_accelerator().name() == "cuda"
    with mapped("a recipe", "no way"):
        assert auto_accelerator.auto_detect_accelerator().name() == "cpu"
    assert auto_accelerator.auto_detect_accelerator().name() == "cuda"
    auto_accelerator.auto_detect_accelerator.cache_clear()


def test_error_names_the_invalid_later_batch(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    right = {
        "input_ids": torch.ones((1, 4), dtype=torch.int64),
        "attention_mask": torch.ones((1, 4), dtype=torch.int64),
    }
    wrong = {**right, "input_ids": right["input_ids"] * 99_999}
    with pytest.raises(
        QuantizeError, match=r"with a batch of the calibration data \(input_ids of \(1, 4\), .*: IndexError"
    ):
        quantize(
            tiny_folder(), tmp_path / "out", backend=BACKEND, scheme="static-int8", calibration=[right, right, wrong]
        )
    assert not (tmp_path / "out").exists()
