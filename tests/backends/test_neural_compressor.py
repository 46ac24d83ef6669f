"""Intel Neural Compressor: the scales and integers that it computes are stored unchanged in models and graphs."""

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
from accel.stages.adoption import weights_of
from accel.stages.export import load_source
from accel.stages.quantize import quantize
from accel.stages.resolution import resolve
from accel.testing.generators import save_generator
from accel.tuning.candidates import Space
from accel_plugins.neural_compressor.upstream import library, mapped
from accel_plugins.neural_compressor.weights import check_algorithm

BACKEND = "neural-compressor"


@pytest.fixture(autouse=True)
def _quiet_torchao(recwarn: pytest.WarningsRecorder) -> None:
    """Ignore warnings that torchao raises at its import."""


def rows(count: int = 6, *, types: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        ids = torch.randint(6, 100, (2, 5 + index), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if types:
            made[-1]["token_type_ids"] = torch.zeros_like(ids)
    return made


@pytest.fixture(scope="session")
def made(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    folder, kept = tmp_path_factory.mktemp("compressed"), dict[str, Artifact]()

    def get(scheme: str, algorithm: str = "rtn") -> Artifact:
        name = f"{scheme}-{algorithm}"
        if name not in kept:
            settings: dict[str, Any] = {} if scheme == "static-int8" else {"block_size": 16, "algorithm": algorithm}
            kept[name] = quantize(
                tiny_folder(), folder / name, backend=BACKEND, scheme=scheme, calibration=rows(), **settings
            )
        return kept[name]

    return get


def layers_of(artifact: Artifact) -> dict[str, Any]:
    resolved = resolve(artifact.path, weights=True)
    return dict(quantized_layers(load_source(resolved, accel.ExportConfig()).model))


def test_static_scales_and_integers_are_its_own(
    made: Callable[..., Artifact], tiny_folder: Callable[..., Path]
) -> None:
    """The integer layers have the same integers as Neural Compressor's graph computes from their scales."""
    artifact = made("static-int8")
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
        # Symmetric 8-bit scale: the largest absolute weight divided by 127.5.
        assert torch.allclose(layer.scale, weight.abs().amax(1) / 127.5, rtol=1e-5)


def test_packed_weights_are_its_own_to_the_last_bit(
    tiny_folder: Callable[..., Path], made: Callable[..., Artifact]
) -> None:
    from neural_compressor.torch.algorithms.weight_only.modules import INCWeightOnlyLinear
    from neural_compressor.torch.quantization import RTNConfig, convert, prepare

    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_folder()).eval()
    theirs = convert(prepare(model, RTNConfig(bits=4, group_size=16, use_sym=False)), use_optimum_format=False)
    packed = {name: one for name, one in theirs.named_modules() if isinstance(one, INCWeightOnlyLinear)}
    ours = layers_of(made("weight-int4"))
    assert packed.keys() == ours.keys()
    for name, layer in packed.items():
        assert torch.equal(layer.recover(), ours[name].dequantized())


def test_layers_whose_weights_other_code_reads_stay_in_float(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """wav2vec2's x-vector head reads the weights of its linear layers directly, so these layers are not quantized."""
    folder = tiny_folder("wav2vec2", "audio-xvector")
    made = quantize(folder, tmp_path / "out", backend=BACKEND, scheme="weight-int8")
    assert made.manifest.quantization is not None
    assert set(made.manifest.quantization.excluded) == {f"tdnn.{i}.kernel" for i in range(5)}
    sounds = torch.randn((2, 1200), generator=torch.Generator().manual_seed(0))
    original = transformers.AutoModelForAudioXVector.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = original(sounds).embeddings
    found = accel.ORTModelForAudioXVector(made, backend="pytorch")(sounds).embeddings
    assert (found - expected).norm() <= 0.05 * expected.norm()


def test_a_folder_of_transformers_is_quantized_as_it_is(made: Callable[..., Artifact]) -> None:
    manifest = made("static-int8").manifest
    assert (manifest.format, manifest.steps[-1].backend) == ("torch", BACKEND)
    assert manifest.quantization is not None
    assert manifest.quantization.calibration == {"method": "minmax", "n": 12, "seed": 0}


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"scheme": "weight-int4", "algorithm": "hqq"}, ConfigError, "not offered"),
        ({"scheme": "weight-int4", "algorithm": "gptq"}, QuantizeError, "calibration data"),
        ({"scheme": "static-int8"}, QuantizeError, "calibration data"),
        ({"scheme": "static-int8", "smooth_quant": 0.5}, ConfigError, "no use for smooth_quant"),
        ({"scheme": "weight-int4", "exclude": ("clasifier",)}, ConfigError, "Did you mean 'classifier'"),
        ({"scheme": "static-int8", "calibration": "rows.csv"}, ConfigError, "is a str, not batches"),
        ({"scheme": "weight-int4", "exclude": ("re:(",)}, ConfigError, "no regular expression"),
        (
            {"scheme": "weight-int4", "algorithm": "awq", "block_size": 128, "calibration": rows()},
            ConfigError,
            "does not divide",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    tiny_folder: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        quantize(tiny_folder(), tmp_path / "out", backend=BACKEND, **settings)


def test_an_algorithm_for_texts_refuses_images(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    images = [{"pixel_values": torch.rand(1, 3, 32, 32)}]
    with pytest.raises(QuantizeError, match="with ids of tokens, and this one takes pixel_values"):
        quantize(
            tiny_folder("vit", "image-classification"), tmp_path / "out",
            backend=BACKEND, scheme="weight-int4", algorithm="awq", block_size=16, calibration=images,
        )  # fmt: skip


def test_an_algorithm_without_its_package_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuantizeError, match="auto-round, which is not installed"):
        check_algorithm(accel.QuantizeConfig(scheme="weight-int4", algorithm="autoround"), calibrated=True)


def test_doctor_says_which_algorithms_are_missing() -> None:
    probe = registry.probe(registry.describe(BACKEND))
    assert probe.available
    assert {"hqq", "smooth_quant"} <= {reason.code for reason in probe.reasons}
    assert all(reason.remedy for reason in probe.reasons)


def test_tune_exports_what_it_quantized() -> None:
    space = Space(task="text-classification", device=None, backends=None, half_exports=False, calibrated=True)
    torch_export = next(recipe for recipe in space.exports() if recipe.format == "torch")
    offered = space.quantizations(torch_export, "float32")
    ours = [str(recipe) for recipe in offered if BACKEND in str(recipe)]
    assert "torch float32 > neural-compressor static-int8 > onnx" in ours
    assert all(recipe.quantizes and recipe.format != "torch" for recipe in offered)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_generators_keep_their_packed_weights(family: str, algorithm: str, tmp_path: Path) -> None:
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
    """Text rows, as the command line passes them, are tokenized for calibration. In each batch some rows are padded and
    others are not.
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
def test_each_row_has_its_own_mask_and_no_padding(algorithm: str, tmp_path: Path) -> None:
    """Integers do not depend on how rows are batched: padded batches give the same result as single rows."""
    spare = ("model.layers.1.mlp.up_proj",)
    folder = save_generator(tmp_path / "mistral", "mistral")
    # Short and long rows alternate.
    alone = [{name: tensor[i : i + 1] for name, tensor in long_rows()[n].items()} for i in (0, 1) for n in (0, 2, 1, 3)]
    settings: dict[str, Any] = {"backend": BACKEND, "scheme": "weight-int4", "algorithm": algorithm, "block_size": 16}
    found = [
        layers_of(quantize(folder, tmp_path / name, calibration=batches, exclude=spare, **settings))
        for name, batches in (("alone", alone), ("padded", padded_pairs(alone)))
    ]
    assert len(found[0]) == 14 - len(spare)
    assert not set(spare) & found[0].keys()
    for name, layer in found[0].items():
        assert torch.equal(layer.packed, found[1][name].packed)
        assert torch.equal(layer.scales, found[1][name].scales)


def long_rows() -> list[dict[str, torch.Tensor]]:
    """Return batches of different lengths. Some rows are longer than Mistral's sliding window of 16 tokens, so that
    only they need a mask.
    """
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(6, 100, (2, length), generator=generator) for length in (5, 9, 24, 40)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in made]


def padded_pairs(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Combine each two consecutive rows into a batch; the shorter row is padded on the left."""
    made = []
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        width = max(one["input_ids"].shape[1], other["input_ids"].shape[1])
        made.append(
            {
                name: torch.cat(
                    [torch.nn.functional.pad(row[name], (width - row[name].shape[1], 0)) for row in (one, other)]
                )
                for name in one
            }
        )
    return made


@pytest.mark.parametrize(
    ("family", "algorithm", "why"),
    [
        ("gemma3", "gptq", "block 1 of the model's 2 is called with something else"),
        ("gemma3", "awq", "block 1 of the model's 2 is called with something else"),
        ("gpt2", "gptq", "Conv1D"),
        ("llama", "teq", "no norm"),
    ],
)
def test_models_that_an_algorithm_would_run_in_another_way_are_refused(
    family: str, algorithm: str, why: str, tmp_path: Path
) -> None:
    folder = save_generator(tmp_path / family, family)
    with pytest.raises(QuantizeError, match=why):
        quantize(
            folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", algorithm=algorithm, block_size=16,
            calibration=long_rows(),
        )  # fmt: skip


def test_blocks_that_run_again_find_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ runs each block many times. It must do so without a KV cache, or a block would attend to results of its
    earlier runs.
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
    with_cache = [(id(one), id(cache)) for one, cache in calls if cache is not None]
    assert len(with_cache) == len(set(with_cache)) < len(calls) - 30


def test_rounding_reads_no_weights_from_the_file(tmp_path: Path) -> None:
    """Weight names in the file may differ from names in the model, as for GPT-NeoX's output layer."""
    folder = save_generator(tmp_path / "gpt-neox", "gpt-neox")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", block_size=16)
    assert len(layers_of(artifact)) == 8


def test_weights_that_were_one_are_one_again(tmp_path: Path) -> None:
    """GPT-2 shares one weight between embedding and output layer. The quantizer splits it, and the weight is shared
    again afterwards.
    """
    folder = save_generator(tmp_path / "gpt2", "gpt2")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int4", block_size=16)
    model: Any = load_source(resolve(artifact.path, weights=True), accel.ExportConfig()).model
    model = getattr(model, "unwrapped", model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert quantized_layers(model)


@pytest.mark.parametrize("scheme", ["weight-int8", "weight-int4"])
def test_a_table_of_tokens_keeps_its_numbers(scheme: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """BERT's output head is quantized and shares its weight with the token embeddings, which must not change."""
    folder = tiny_folder("bert", "fill-mask")
    artifact = quantize(folder, tmp_path / "q", backend=BACKEND, scheme=scheme, block_size=16)
    model: Any = load_source(resolve(artifact.path, weights=True), accel.ExportConfig()).model
    original = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert "cls.predictions.decoder" in quantized_layers(model)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    ids = torch.arange(6, 30).view(2, 12)
    with torch.inference_mode():
        expected = original(ids).logits
    found = accel.ORTModelForMaskedLM(artifact, backend="pytorch")(input_ids=ids).logits
    assert (found - expected).norm() <= {"weight-int8": 0.05, "weight-int4": 0.3}[scheme] * expected.norm()


@pytest.mark.thorough
def test_blocks_are_read_where_the_width_is_lost_on_the_way(tmp_path: Path) -> None:
    """A BART model in blocks can be exported: OpenVINO's converter does not infer the last axis after the reshape in
    BART's attention.
    """
    folder = save_generator(tmp_path / "bart", "bart")
    made = quantize(folder, tmp_path / "q", backend=BACKEND, scheme="weight-int8", block_size=16)
    artifact = accel.export(made.path, tmp_path / "ir", backend="openvino")
    ids = torch.arange(6, 18).view(2, 6)
    feeds = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    models = [
        accel.ORTModelForSeq2SeqLM(one, backend=backend) for one, backend in ((made, "pytorch"), (artifact, "openvino"))
    ]
    plain, found = (model(**feeds).logits for model in models)
    assert (found - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.ones((1, 4), dtype=torch.int64)}, "has ids, and none of what the model takes"),
        ({"input_ids": [[5, 6, 7]]}, "is a list, no tensor"),
    ],
    ids=["names", "lists"],
)
def test_calibration_data_that_is_none(
    batch: dict[str, Any], message: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(QuantizeError, match=message):
        quantize(tiny_folder(), tmp_path / "q", backend=BACKEND, scheme="static-int8", calibration=[batch])


def test_it_computes_on_the_host_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neural Compressor computes on the CPU even if there is a GPU. With a GPU, GPTQ had its layers on the GPU and its
    rows on the CPU.
    """
    library()
    from neural_compressor.torch.utils import auto_accelerator

    monkeypatch.delenv("INC_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(auto_accelerator.CUDA_Accelerator, "is_available", staticmethod(lambda: True))
    known = auto_accelerator.accelerator_registry.registered_accelerators
    monkeypatch.setitem(known, "cuda", (auto_accelerator.CUDA_Accelerator, auto_accelerator.PRIORITY_CUDA))
    auto_accelerator.auto_detect_accelerator.cache_clear()
    assert auto_accelerator.auto_detect_accelerator().name() == "cuda"
    with mapped("a recipe", "no way"):
        assert auto_accelerator.auto_detect_accelerator().name() == "cpu"
    assert auto_accelerator.auto_detect_accelerator().name() == "cuda"
    auto_accelerator.auto_detect_accelerator.cache_clear()


def test_a_later_batch_that_the_model_does_not_take_is_named(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
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
