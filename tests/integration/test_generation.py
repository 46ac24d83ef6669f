"""Tests of generating models: tokens equal transformers' tokens, there is one KV cache, and the weights are stored
once.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

import accel
from accel import ORTModelForCausalLM, quantize
from accel.artifact import Artifact
from accel.artifact.manifest import Manifest
from accel.capture import feeds_for
from accel.cli import app
from accel.errors import ConfigError, InputError
from accel.models.base import model_class
from accel.models.losses import computes_next_tokens_loss
from accel.testing.generative_models import GENERATORS, IMAGE_TOKEN, PATCH, save_generator, tiny_generator
from accel.testing.models import VOCABULARY, tiny_tokenizer

Artifacts = Callable[..., Artifact]
WORDS = [word for word, _ in sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])[10:80]]
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
}
# These encoder-decoders accept audio of any length. Each entry has the input name and the shape of the tests' input.
SOUNDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "moonshine": ("input_values", (3, 9011)),
    "speech-to-text": ("input_features", (3, 203, 20)),
}


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    """Return three rows of inputs: images, audio, or texts of different lengths. Padding is on the side that the
    model's pipeline uses.
    """
    task = GENERATORS[family][0]
    draw = torch.Generator().manual_seed(1)
    if family in SOUNDS:
        name, shape = SOUNDS[family]
        sounds, mask = torch.randn(shape, generator=draw), torch.ones(shape[:2], dtype=torch.int64)
        # Use lengths that are not multiples of the encoder's strides.
        mask[0, shape[1] // 2 + 3 :], mask[2, -shape[1] // 5 :] = 0, 0
        sounds[mask == 0] = 0
        return {name: sounds, "attention_mask": mask}
    if task == "automatic-speech-recognition":
        return {"input_features": torch.randn((3, 80, 40), generator=draw)}
    if family == "pix2struct":
        return dict(patch_processor()(pictures(), return_tensors="pt"))
    if task == "image-to-text":
        return {"pixel_values": torch.randn((3, 3, 32, 32), generator=draw)}
    ids = torch.randint(4, VOCABULARY, (3, 7), generator=draw)
    mask = torch.ones_like(ids)
    if task in ("text-generation", "image-text-to-text"):
        mask[0, :3], mask[2, :1] = 0, 0
    else:
        mask[0, 5:], mask[2, 6:] = 0, 0
    ids[mask == 0] = 0
    if task == "image-text-to-text":
        images = torch.full((3, 4), IMAGE_TOKEN)
        ids = torch.cat([ids[:, :4], images, ids[:, 4:]], dim=1)
        mask = torch.cat([mask[:, :4], torch.ones_like(images), mask[:, 4:]], dim=1)
        pixels = torch.randn((3, 3, 16, 16), generator=draw)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    return {"input_ids": ids, "attention_mask": mask}


def pictures() -> list[Image.Image]:
    """Return three images of different shapes. The image processor splits them into different numbers of patches."""
    draw = np.random.default_rng(0)
    shapes = ((30, 50, 3), (60, 20, 3), (40, 41, 3))
    return [Image.fromarray(draw.integers(0, 255, shape, dtype=np.uint8)) for shape in shapes]


def patch_processor(**settings: Any) -> Any:
    size = {"height": PATCH, "width": PATCH}
    return transformers.Pix2StructImageProcessorPil(patch_size=size, max_patches=20, **settings)


def opened(artifact: Artifact) -> Any:
    return model_class(artifact.task)(artifact)


# Tests that do not depend on graphs run with the `pytorch` backend in every test run, because an export takes seconds.
FOLDERS = ["pytorch", pytest.param("cpu", marks=pytest.mark.thorough)]


@pytest.fixture
def exported_folder(generator: Artifacts, shared: Callable[..., Path]) -> Callable[[str, str], Path]:
    """Return a function that returns a folder with the model of a family, in the format of a backend."""

    def get(family: str, backend: str) -> Path:
        if backend != "pytorch":
            return generator(family, backend).path
        return shared(f"generator-{family}", lambda folder: save_generator(folder, family))

    return get


# The list has one family for each kind of attention, position encoding and cache. Other families differ only in their
# layers.
USUAL = ("gemma3", "gpt2", "qwen3", "bart", "whisper", "lfm2")
FAMILIES = [pytest.param(name, marks=() if name in USUAL else pytest.mark.thorough) for name in GENERATORS]


HEARING = [pytest.param(name, marks=pytest.mark.thorough) for name in SOUNDS]


# The tiny mT5 is not tested on OpenVINO: it has large random weights, and OpenVINO's rounding error is 1.4e-4 of its
# logits. An export accepts only 1e-4.
ON_BACKENDS = [
    pytest.param(family, backend, marks=() if family in quick else pytest.mark.thorough)
    for backend, quick in (("cpu", USUAL), ("openvino", ("bart",)))
    for family in GENERATORS
    if (family, backend) != ("mt5", "openvino")
]


@pytest.mark.parametrize(("family", "backend"), ON_BACKENDS)
def test_tokens_equal_transformers(family: str, backend: str, generator: Artifacts) -> None:
    original, model = tiny_generator(family), opened(generator(family, backend))
    assert model.backend == backend
    rows = inputs_of(family)
    distinct_tokens: set[int] = set()
    for name, choices in CHOICES.items():
        for inputs in ({key: value[1:2] for key, value in rows.items()}, rows):
            torch.manual_seed(5)
            expected = original.generate(**inputs, max_new_tokens=24, **choices)
            torch.manual_seed(5)
            tokens = model.generate(**inputs, max_new_tokens=24, **choices)
            assert torch.equal(tokens, expected), (family, name, len(tokens))
            distinct_tokens |= set(expected.flatten().tolist())
    assert len(distinct_tokens) > 5, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_stop_strings_end_the_text_as_in_transformers(family: str, generator: Artifacts) -> None:
    original, model = tiny_generator(family), opened(generator(family))
    letters = sorted(ByteLevel.alphabet())
    tokens = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer, tokens.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens)
    lengths = set()
    for choices in CHOICES.values():
        for stop_strings in ("END", [letter for letter in letters[10:60] if letter.isascii()]):
            arguments = {
                **inputs_of(family),
                "max_new_tokens": 24,
                "tokenizer": tokenizer,
                "stop_strings": stop_strings,
            }
            torch.manual_seed(5)
            expected = original.generate(**arguments, **choices)
            torch.manual_seed(5)
            assert torch.equal(model.generate(**arguments, **choices), expected)
            lengths.add(expected.shape[1])
    assert len(lengths) > 1, "the stop strings change nothing"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "format", "dtype"),
    [
        ("whisper", "onnx", "float16"),
        ("bart", "onnx", "float16"),
        ("moonshine", "torch", "bfloat16"),
        ("moonshine", "onnx", "float16"),
        ("speech-to-text", "onnx", "float16"),
        ("marian", "onnx", "float16"),
        ("pix2struct", "onnx", "float16"),
    ],
)
def test_half_precision(family: str, format: str, dtype: str, shared: Callable[..., Path], tmp_path: Path) -> None:
    """A model in half precision also converts its audio input, and the constants with which the model's code compares
    its values.
    """
    folder = shared(f"generator-{family}", lambda folder: save_generator(folder, family))
    # The random weights are large and increase rounding errors, which would exceed the usual tolerance of an export.
    artifact = accel.export(
        folder, tmp_path / "half", task=GENERATORS[family][0], format=format, dtype=dtype, atol=100.0
    )
    rows = inputs_of(family)
    start = {"decoder_input_ids": torch.tensor([[2, 5, 6]] * len(next(iter(rows.values()))))}
    logits = opened(artifact)(**rows, **start).logits.float()
    expected = tiny_generator(family)(**rows, **start).logits
    assert (logits - expected).abs().max() <= (0.02 if dtype == "float16" else 0.1) * expected.abs().max()


@pytest.mark.parametrize("family", HEARING)
@pytest.mark.parametrize("choices", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=["greedy", "beam"])
def test_audio_models_generate_without_cache(family: str, choices: dict[str, Any], generator: Artifacts) -> None:
    original, model = tiny_generator(family), opened(generator(family))
    rows = inputs_of(family)
    expected = original.generate(**rows, max_new_tokens=12, **choices)
    assert torch.equal(model.generate(**rows, max_new_tokens=12, use_cache=False, **choices), expected)


@pytest.mark.parametrize("family", HEARING)
def test_audio_padding_reaches_the_decoder(family: str, generator: Artifacts) -> None:
    original, model = tiny_generator(family), opened(generator(family))
    rows = inputs_of(family)
    tokens = torch.tensor([[2, 5, 7]] * 3)
    expected = original(**rows, decoder_input_ids=tokens).logits
    outputs = model(**rows, decoder_input_ids=tokens)
    assert (outputs.logits - expected).abs().max() < 1e-3
    # The results are equal with precomputed encoder outputs and in a decoding step with a KV cache. The encoder outputs
    # and the cache contain the mask.
    encoded = model.get_encoder()(**rows)
    again = model(encoder_outputs=encoded, attention_mask=rows["attention_mask"], decoder_input_ids=tokens[:, :2])
    step = model(decoder_input_ids=tokens[:, 2:], past_key_values=again.past_key_values)
    assert (step.logits[:, -1] - expected[:, -1]).abs().max() < 1e-3
    unmasked = model(encoder_outputs=(encoded[0],), decoder_input_ids=tokens).logits
    assert (unmasked - expected)[0].abs().max() > 1e-2, "the padding changes nothing, which proves nothing"
    with pytest.raises(InputError, match="positions and no attention mask"):
        model(encoder_outputs=(encoded[0],), attention_mask=rows["attention_mask"], decoder_input_ids=tokens)


@pytest.mark.parametrize("family", HEARING)
def test_audio_without_mask_is_not_padded(family: str, generator: Artifacts) -> None:
    name, _ = SOUNDS[family]
    sounds = inputs_of(family)[name]
    expected = tiny_generator(family).generate(sounds, max_new_tokens=12)
    model = opened(generator(family))
    assert torch.equal(model.generate(sounds, max_new_tokens=12), expected)
    assert torch.equal(model.generate(**{name: sounds}, max_new_tokens=12), expected)


@pytest.mark.thorough
def test_audio_length_is_limited_by_positions(generator: Artifacts) -> None:
    artifact = generator("speech-to-text")
    # The encoder has one position for every four frames. There are 101 positions, because the padding position uses one
    # of the 102 rows of the table.
    assert artifact.component("encoder").max_sizes == {"frames": 404}
    model = opened(artifact)
    longest = torch.randn((1, 404, 20), generator=torch.Generator().manual_seed(3))
    expected = tiny_generator("speech-to-text").generate(longest, max_new_tokens=8)
    assert torch.equal(model.generate(longest, max_new_tokens=8), expected)
    with pytest.raises(InputError, match="404"):
        model.generate(torch.cat([longest, longest[:, :1]], dim=1), max_new_tokens=8)


@pytest.mark.thorough
def test_speech_pipeline_with_moonshine(generator: Artifacts) -> None:
    artifact = generator("moonshine")
    hear = accel.pipeline("automatic-speech-recognition", model=str(artifact.path))
    stock = transformers.pipeline(
        "automatic-speech-recognition", model=tiny_generator("moonshine"), tokenizer=hear.tokenizer,
        feature_extractor=hear.feature_extractor,
    )  # fmt: skip
    wave = np.random.default_rng(2).standard_normal(16000).astype(np.float32)
    settings = {"max_new_tokens": 10}
    assert hear(wave, generate_kwargs=settings) == stock(wave, generate_kwargs=settings)


def test_forward_returns_a_cache_that_continues(generator: Artifacts) -> None:
    model, original = opened(generator("llama")), tiny_generator("llama")
    ids = torch.randint(4, VOCABULARY, (1, 8))
    first = model(input_ids=ids[:, :5])
    second = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values)
    with torch.inference_mode():
        full_logits = original(input_ids=ids).logits
    assert (first.logits - full_logits[:, :5]).abs().max() <= 1e-4
    assert (second.logits - full_logits[:, 5:]).abs().max() <= 1e-4
    assert second.past_key_values.get_seq_length() == 8
    last = model(input_ids=ids, logits_to_keep=1).logits
    assert last.shape[1] == 1
    assert (last - full_logits[:, -1:]).abs().max() <= 1e-4


def test_generation_modes_equal_transformers(generator: Artifacts) -> None:
    model, original = opened(generator("llama")), tiny_generator("llama")
    rows = inputs_of("llama")
    row = {key: value[1:2] for key, value in rows.items()}
    modes: list[dict[str, Any]] = [
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "top_p": 0.9},
        {"prompt_lookup_num_tokens": 3},
    ]
    for choices in modes:
        torch.manual_seed(3)
        expected = original.generate(**row, max_new_tokens=15, **choices)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**row, max_new_tokens=15, **choices), expected), choices
    assistant = opened(generator("llama"))
    expected = original.generate(**row, max_new_tokens=15)
    assert torch.equal(model.generate(**row, max_new_tokens=15, assistant_model=assistant), expected)
    stopped = model.generate(**rows, max_new_tokens=15, eos_token_id=int(expected[0, 9]))
    assert torch.equal(stopped, original.generate(**rows, max_new_tokens=15, eos_token_id=int(expected[0, 9])))


@pytest.mark.thorough
def test_weights_are_stored_once(generator: Artifacts) -> None:
    for family in ("qwen3", "t5", "bart"):
        artifact = generator(family)
        weights = sum(parameter.numel() * 4 for parameter in tiny_generator(family).parameters())
        data = artifact.path / "model.onnx.data"
        # The tracer stores a second, transposed copy of small embedding tables for the output layer. Large tables are
        # stored once (measured: a Qwen model with 0.5 billion parameters needs 1.00 times its weights). The graph's
        # constants also need space.
        table = VOCABULARY * 64 * 4
        assert data.stat().st_size <= 1.05 * weights + table + 4096, family


def test_tied_output_layer_is_quantized(generator: Artifacts, tmp_path: Path) -> None:
    artifact = generator("qwen3")
    assert tiny_generator("qwen3").config.tie_word_embeddings
    small = quantize(artifact, tmp_path / "small", scheme="weight-int8", block_size=32)
    report = small.manifest.steps[-1].report
    assert report["embeddings"] == {"model.embed_tokens": 8}
    assert len(report["layers"]) == 2 * 7 + 2
    rows = inputs_of("qwen3")
    with torch.inference_mode():
        logits, original = opened(small)(**rows).logits, tiny_generator("qwen3")(**rows).logits
    real = rows["attention_mask"].bool()
    assert (logits - original)[real].abs().mean() < 0.08 * original[real].abs().mean()


@pytest.mark.parametrize("backend", FOLDERS)
def test_image_pipeline_with_encoder_decoder(
    backend: str, exported_folder: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The pipeline works as in transformers 4, with both of the task names that transformers 4 accepts for it."""
    folder = exported_folder("vit-gpt2", backend)
    model = accel.ORTModel.from_pretrained(folder, backend=backend)
    draw = np.random.default_rng(0)
    pictures = [Image.fromarray(draw.integers(0, 255, (40, 36, 3), dtype=np.uint8)) for _ in range(3)]
    pictures[0].save(tmp_path / "picture.png")
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=pictures, return_tensors="pt").pixel_values
    tokenizer, original = tiny_tokenizer(), tiny_generator("vit-gpt2")
    texts = tokenizer.batch_decode(original.generate(pixels, max_new_tokens=6), skip_special_tokens=True)
    assert len(set(texts)) > 1
    read = accel.pipeline("image-to-text", model=str(folder), backend=backend)
    assert read(str(tmp_path / "picture.png"), max_new_tokens=6) == [{"generated_text": texts[0]}]
    several = [[{"generated_text": text}] for text in texts]
    assert read(pictures, generate_kwargs={"max_new_tokens": 6}) == several
    assert read(pictures, batch_size=3, max_new_tokens=6) == several
    beams = read(pictures[0], max_new_tokens=6, generate_kwargs={"num_beams": 3, "num_return_sequences": 2})
    sequences = original.generate(pixels[:1], max_new_tokens=6, num_beams=3, num_return_sequences=2)
    assert beams == [{"generated_text": text} for text in tokenizer.batch_decode(sequences, skip_special_tokens=True)]
    for other in (
        accel.pipeline("image-text-to-text", model=str(folder), backend=backend),
        accel.pipeline("image-text-to-text", model=model),
    ):
        assert other.task == "image-to-text"
        assert other(pictures[0], max_new_tokens=6) == [{"generated_text": texts[0]}]
    with pytest.raises(ConfigError, match="accepts no prompt"):
        read(pictures[0], prompt="a photo of")
    with pytest.raises(ConfigError, match="twice"):
        read(pictures[0], max_new_tokens=6, generate_kwargs={"max_new_tokens": 7})
    with pytest.raises(ConfigError, match="temprature"):
        accel.pipeline("image-to-text", model=model, temprature=0.5)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.thorough
def test_padding_patches_depend_on_the_mask(masked: bool, generator: Artifacts) -> None:
    """Without an attention mask, Pix2Struct's encoder ignores padding patches, but its decoder attends to them."""
    original, model = tiny_generator("pix2struct"), opened(generator("pix2struct"))
    inputs = inputs_of("pix2struct")
    assert len(set(inputs["attention_mask"].sum(1).tolist())) > 1
    inputs = inputs if masked else {"flattened_patches": inputs["flattened_patches"]}
    ids = torch.tensor([[2, 5, 6], [2, 7, 8], [2, 9, 10]])
    with torch.inference_mode():
        expected = original(**inputs, decoder_input_ids=ids).logits
    assert (model(**inputs, decoder_input_ids=ids).logits - expected).abs().max() < 1e-4
    for choices in ({}, {"num_beams": 3}, {"use_cache": False}):
        tokens = model.generate(**inputs, max_new_tokens=12, **choices)
        assert torch.equal(tokens, original.generate(**inputs, max_new_tokens=12, **choices))


@pytest.mark.parametrize("backend", FOLDERS)
@pytest.mark.parametrize("place", [64.0, -1.0, float("nan")])
def test_patch_positions_out_of_range_are_refused(
    place: float, backend: str, exported_folder: Callable[[str, str], Path]
) -> None:
    """Row numbers of patches outside of the model's range are rejected, because runtimes handle invalid numbers in
    different ways.
    """
    model = accel.ORTModel.from_pretrained(exported_folder("pix2struct", backend), backend=backend)
    inputs = inputs_of("pix2struct")
    inputs["flattened_patches"][1, 2, 0] = place
    with pytest.raises(InputError, match="position embeddings only for 0 to 63"):
        model.generate(**inputs, max_new_tokens=4)


@pytest.mark.thorough
def test_default_number_of_patches_is_the_processors(generator: Artifacts) -> None:
    """The generated inputs have as many patches as the image processor makes. A benchmark with two patches would be
    useless.
    """
    artifact = generator("pix2struct")
    feeds = feeds_for(artifact.component("encoder").inputs, {"batch": 2}, seed=0, folder=artifact.path)
    assert feeds["flattened_patches"].shape == (2, 20, 2 + 3 * PATCH**2)
    places = feeds["flattened_patches"][0, :, :2]
    assert places.min() == 1
    assert len({tuple(place) for place in places.tolist()}) == 20
    assert not feeds["flattened_patches"][feeds["attention_mask"] == 0].any()


@pytest.mark.parametrize("backend", FOLDERS)
def test_image_pipeline_with_patches(backend: str, exported_folder: Callable[[str, str], Path]) -> None:
    tokens = tiny_generator("pix2struct").generate(**inputs_of("pix2struct"), max_new_tokens=6)
    expected = [[{"generated_text": text}] for text in tiny_tokenizer().batch_decode(tokens, skip_special_tokens=True)]
    read = accel.pipeline(model=str(exported_folder("pix2struct", backend)), backend=backend)
    assert read(pictures(), max_new_tokens=6) == expected
    assert read(pictures(), batch_size=3, max_new_tokens=6) == expected


@pytest.mark.parametrize("backend", FOLDERS)
def test_question_is_drawn_above_the_image(
    backend: str, exported_folder: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For visual question answering, Pix2Struct's image processor draws the question above the image, with a font from
    the Hub.
    """
    from transformers.models.pix2struct import image_processing_pil_pix2struct as processing

    headers = {"how many?": Image.new("RGB", (50, 20), "red"), "what?": Image.new("RGB", (50, 20), "blue")}
    monkeypatch.setattr(processing, "render_text", lambda text, **_: headers[text])
    processor, original = patch_processor(is_vqa=True), tiny_generator("pix2struct")
    model = accel.ORTModel.from_pretrained(exported_folder("pix2struct", backend), backend=backend)
    read = accel.pipeline(model=model, image_processor=processor)
    results = {}
    for question in headers:
        inputs = processor(pictures()[:1], header_text=question, return_tensors="pt")
        expected = tiny_tokenizer().decode(original.generate(**inputs, max_new_tokens=6)[0], skip_special_tokens=True)
        results[question] = read(pictures()[0], prompt=question, max_new_tokens=6)
        assert results[question] == [{"generated_text": expected}]
    with pytest.raises(ConfigError, match="no question was passed"):
        read(pictures()[0])


def test_zero_token_types_are_ignored(generator: Artifacts) -> None:
    """Token types of zeros are accepted and ignored. BERT's tokenizer returns token types for every
    `EncoderDecoderModel` with a BERT encoder.
    """
    model = opened(generator("bart"))
    ids = torch.tensor([[5, 6, 7, 8]])
    types = torch.zeros_like(ids)
    tokens = model.generate(input_ids=ids, token_type_ids=types, max_new_tokens=4)
    assert torch.equal(tokens, model.generate(input_ids=ids, max_new_tokens=4))
    types[0, 2:] = 1
    with pytest.raises(InputError, match="values other than 0"):
        model.generate(input_ids=ids, token_type_ids=types, max_new_tokens=4)


def test_computed_positions_have_no_limit(generator: Artifacts) -> None:
    """Models that compute their positions accept texts longer than `max_position_embeddings`, as in transformers."""
    ids = torch.randint(4, VOCABULARY, (1, 210), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = tiny_generator("llama")(input_ids=ids).logits
    assert (opened(generator("llama"))(input_ids=ids).logits - expected).abs().max() < 1e-3


def test_invalid_inputs_are_explained(generator: Artifacts) -> None:
    model: ORTModelForCausalLM = opened(generator("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(InputError, match="192 positions"):
        opened(generator("gpt2"))(input_ids=torch.ones((1, 200), dtype=torch.int64))
    for count in (0, -3):
        with pytest.raises(InputError, match="max_new_tokens"):
            model.generate(ids, max_new_tokens=count)
    with pytest.raises(InputError, match="past_key_values is a tuple"):
        model(input_ids=ids, past_key_values=((ids, ids),))
    other: ORTModelForCausalLM = opened(generator("qwen3"))
    with pytest.raises(InputError, match="another model"):
        model(input_ids=ids, past_key_values=other(input_ids=ids).past_key_values)
    cache = model(input_ids=ids).past_key_values
    with pytest.raises(InputError, match="inputs have 2 rows, but the KV cache has 1 rows"):
        model(input_ids=ids.repeat(2, 1), past_key_values=cache)
    with pytest.raises(InputError, match="has 2 columns"):
        model(input_ids=ids, attention_mask=torch.ones((1, 2), dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ConfigError, match="cache_implementation"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize(
    ("backend", "family", "most"),
    [
        ("cpu", "gpt2", 191),
        ("cpu", "llama", 2**31 - 1),
        ("openvino", "llama", 2**31 - 1),
        pytest.param("openvino", "gpt2", 191, marks=pytest.mark.thorough),
    ],
)
def test_invalid_positions_are_refused(family: str, most: int, backend: str, generator: Artifacts) -> None:
    """GPT-2 reads position embeddings from a table, so its range is limited. Llama computes any position from 0."""
    artifact = generator(family, backend)
    spec = next(spec for spec in artifact.component().inputs if spec.name == "position_ids")
    assert spec.bounds == (0, most)
    model, ids = opened(artifact), torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits
    for wrong in (-1, most + 1):
        with pytest.raises(
            InputError, match=f"'position_ids' contains the value {wrong}, but the model allows only 0 to {most}"
        ) as error:
            model(input_ids=ids, position_ids=torch.tensor([[0, 1, wrong]]))
        assert error.value.fix
    assert torch.equal(model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2]])).logits, expected)


def test_positions_of_older_artifacts_are_not_checked(generator: Artifacts) -> None:
    """The manifest of an older version contains no range for position ids, so the session does not check them."""
    artifact = generator("llama")
    component = artifact.component()
    inputs = tuple(replace(spec, bounds=None) for spec in component.inputs)
    earlier = replace(artifact.manifest, components=(replace(component, inputs=inputs),))
    read = Manifest.from_dict(json.loads(json.dumps(earlier.to_dict())), Path("accel.json"))
    ids = torch.tensor([[5, 6, 7]])
    outputs = opened(Artifact(artifact.path, read))(input_ids=ids, position_ids=torch.tensor([[-1, 0, 1]]))
    # Rotary attention depends only on distances between positions, so shifted positions give the same logits.
    assert (outputs.logits - opened(artifact)(input_ids=ids).logits).abs().max() < 1e-3


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_invalid_logits_to_keep_is_refused(backend: str, generator: Artifacts) -> None:
    model, ids = opened(generator("llama", backend)), torch.tensor([[5, 6, 7]])
    every = model(input_ids=ids).logits
    wrong = (-1, True, "1", 1.0, None, [1], torch.tensor(1), torch.tensor([3]), torch.tensor([-4]), torch.tensor([1.0]))
    for value in (*wrong, torch.tensor([], dtype=torch.int64)):
        with pytest.raises(InputError, match="logits_to_keep") as error:
            model(input_ids=ids, logits_to_keep=value)
        assert error.value.fix
    for count, cut in ((0, slice(None)), (np.int64(2), slice(1, None)), (9, slice(None))):
        assert (model(input_ids=ids, logits_to_keep=count).logits - every[:, cut]).abs().max() < 1e-4
    places = torch.tensor([0, -1])
    assert (model(input_ids=ids, logits_to_keep=places).logits - every[:, places]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "name"),
    [("whisper", "input_features"), pytest.param("vit-gpt2", "pixel_values", marks=pytest.mark.thorough)],
)
def test_invalid_audio_and_images_are_refused(family: str, name: str, generator: Artifacts) -> None:
    model, right = opened(generator(family)), inputs_of(family)[name]
    for value in (right.tolist(), right.long(), right[:0], right.to("meta"), "sound"):
        with pytest.raises(InputError, match=name) as error:
            model.generate(**{name: value}, max_new_tokens=2)
        assert error.value.fix
    expected = model.generate(right, max_new_tokens=2)
    assert np.array_equal(model.generate(**{name: right.numpy()}, max_new_tokens=2), expected.numpy())
    start = torch.zeros((len(right), 1), dtype=torch.int64)
    by_name = model(**{name: right}, decoder_input_ids=start).logits
    assert torch.equal(model(right, decoder_input_ids=start).logits, by_name), "first, as in its model's signature"
    for nothing in ("sound", 5, [[1]]):
        with pytest.raises(InputError):
            model(nothing, decoder_input_ids=start)
    if family == "whisper":
        with pytest.raises(InputError, match="computes word timestamps"):
            model.generate(right, return_timestamps=True, return_token_timestamps=True)


def test_encoder_outputs_with_and_without_mask(generator: Artifacts) -> None:
    """Without a mask, the decoder attends to all positions of the encoder, as in transformers."""
    original, model = tiny_generator("bart"), opened(generator("bart"))
    rows = inputs_of("bart")
    encoded = model.get_encoder()(**rows)
    start = torch.zeros((3, 1), dtype=torch.int64)
    for mask in (rows["attention_mask"], None):
        outputs = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=start)
        with torch.inference_mode():
            hidden = original.get_encoder()(**rows)
            expected = original(encoder_outputs=hidden, attention_mask=mask, decoder_input_ids=start)
        assert (outputs.logits - expected.logits).abs().max() <= 1e-3
    ids = rows["input_ids"][1:2]
    expected_tokens = original.generate(ids, max_new_tokens=6)
    assert torch.equal(model.generate(ids, max_new_tokens=6), expected_tokens)


def test_token_types_are_ignored_only_if_the_model_has_none(generator: Artifacts) -> None:
    ids = torch.tensor([[5, 6, 7]])
    types = torch.tensor([[0, 1, 1]])
    llama = opened(generator("llama"))
    assert torch.equal(llama(ids, token_type_ids=types).logits, llama(ids).logits)
    with pytest.raises(InputError, match="token_type_ids"):
        opened(generator("gpt2"))(ids, token_type_ids=types)


def test_labels_give_transformers_loss(generator: Artifacts) -> None:
    original, model = tiny_generator("llama"), opened(generator("llama"))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    inputs = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with torch.inference_mode():
        expected = original(ids, **inputs)
    outputs = model(ids, **inputs)
    assert torch.allclose(outputs.loss, expected.loss, atol=1e-4)
    assert list(outputs) == list(expected)
    assert model(ids).loss is None
    with pytest.raises(InputError, match="labels has shape"):
        model(ids, labels=ids[:, 1:])


@pytest.mark.parametrize(("config", "shifts"), [("GPT2Config", True), ("XLNetConfig", False), ("BartConfig", False)])
def test_only_next_token_losses_are_computed(config: str, shifts: bool) -> None:
    assert computes_next_tokens_loss(getattr(transformers, config)()) == shifts


def test_perplexity_equals_transformers(generator: Artifacts, tmp_path: Path) -> None:
    artifact, original, tokenizer = generator("llama"), tiny_generator("llama"), tiny_tokenizer()
    lines = [" ".join(WORDS[i : i + n]) for i, n in ((0, 5), (3, 30), (20, 12), (7, 1))]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    losses, tokens = 0.0, 0
    for line in lines:
        ids = tokenizer(line, return_tensors="pt").input_ids
        for window in ids.split(16, dim=1):
            if window.shape[1] > 1:
                with torch.inference_mode():
                    losses += float(original(window, labels=window).loss) * (window.shape[1] - 1)
                tokens += window.shape[1] - 1
    report = accel.evaluate(artifact, tmp_path / "lines.txt", max_length=16, against=True, processor=tokenizer)
    assert report.metric == "perplexity"
    assert report.scores["tokens"] == tokens
    assert report.value == pytest.approx(float(np.exp(losses / tokens)), rel=1e-4)
    assert report.comparison is not None
    assert abs(report.comparison.difference) < 1e-3 * report.value
    assert report.comparison.agreement == 1.0
    with pytest.raises(ConfigError, match="cannot measure the accuracy of the task .text2text-generation"):
        accel.evaluate(generator("bart"), tmp_path / "lines.txt", metric="perplexity", processor=tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(InputError, match="two tokens"):
        accel.evaluate(artifact, [{"text": WORDS[0]}], processor=tokenizer)


@pytest.mark.thorough
def test_decoders_are_quantized_within_a_perplexity_budget(generator: Artifacts, tmp_path: Path) -> None:
    lines = [{"text": " ".join(WORDS[i : i + 9])} for i in range(0, 60, 3)]
    quantized = quantize(generator("gpt2"), tmp_path / "out", data=lines, max_drop=20.0)
    report = quantized.manifest.steps[-1]
    assert report.validation["accuracy"]["metric"] == "perplexity"
    assert report.validation["accuracy"]["drop"] <= 20.0
    table = report.report["search"]["table"]
    assert {trial["scheme"] for trial in table} >= {"weight-int8", "weight-int4"}
    assert sum(trial["chosen"] for trial in table) == 1


def test_cache_is_cloned_cropped_and_reordered(generator: Artifacts) -> None:
    model: ORTModelForCausalLM = opened(generator("llama"))
    ids = torch.randint(4, VOCABULARY, (2, 9))
    cache = model(input_ids=ids[:, :6]).past_key_values
    copy = deepcopy(cache)
    with pytest.raises(InputError, match="is ambiguous"):
        copy.crop(4)
    copy.crop(-2)
    assert (cache.get_seq_length(), copy.get_seq_length()) == (6, 4)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(input_ids=ids.flip(0)[:, 6:7], past_key_values=cache).logits
    assert (swapped - model(input_ids=ids.flip(0)[:, :7], logits_to_keep=1).logits).abs().max() <= 1e-4
    resumed = model(input_ids=ids[:, 4:], past_key_values=copy).logits
    assert (resumed - model(input_ids=ids).logits[:, 4:]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "wrong",
    [{"position_ids": (1, 3)}, {"position_ids": (2, 1)}, {"attention_mask": (1, 3)}, {"attention_mask": (2, 2)}],
    ids=str,
)
def test_inconsistent_input_shapes_are_refused(generator: Artifacts, wrong: dict[str, tuple[int, int]]) -> None:
    model = opened(generator("gpt2"))
    inputs = {"input_ids": torch.full((2, 3), 5), "attention_mask": torch.ones(2, 3).long()}
    right = model(**inputs).logits
    with pytest.raises(InputError):
        model(**{**inputs, **{name: torch.ones(shape).long() for name, shape in wrong.items()}})
    assert torch.equal(model(**inputs).logits, right)


def test_images_in_a_prompt(generator: Artifacts, tmp_path: Path) -> None:
    artifact = generator("llava")
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(picture)
    command = ["generate", str(artifact.path), "--prompt", "where is my card", "--max-new-tokens", "6", "--json"]
    with_image = CliRunner().invoke(app, [*command, "--image", str(picture)])
    assert with_image.exit_code == 0, with_image.output
    processor = transformers.AutoProcessor.from_pretrained(artifact.path)
    encoded = processor(
        images=Image.open(picture), text=f"{processor.image_token}\nwhere is my card", return_tensors="pt"
    )
    feeds = {name: encoded[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    expected = tiny_generator("llava").generate(**feeds, max_new_tokens=6)[0, feeds["input_ids"].shape[1] :]
    printed = json.loads(with_image.stdout)
    assert printed["text"] == processor.tokenizer.decode(expected, skip_special_tokens=True)
    pipe = transformers.pipeline("image-text-to-text", model=opened(artifact), processor=processor)
    answer = pipe(images=Image.open(picture), text=f"{processor.image_token}\nwhere is my card", max_new_tokens=6)
    assert answer[0]["generated_text"].endswith(printed["text"])
    ours = accel.pipeline("image-text-to-text", model=artifact.path)
    again = ours(images=Image.open(picture), text=f"{processor.image_token}\nwhere is my card", max_new_tokens=6)
    assert again[0]["generated_text"] == answer[0]["generated_text"]
    model = opened(artifact)
    with pytest.raises(InputError, match="no input 'inputs_embeds'; its inputs are input_ids, pixel_values, "):
        model(inputs_embeds=torch.zeros((1, 2, 64)))
    with pytest.raises(InputError, match="pixel_values is a str"):
        model(input_ids=feeds["input_ids"], pixel_values="picture")
    with pytest.raises(InputError, match="8 image tokens, but 1 images need 4"):
        ids = torch.full((1, 8), IMAGE_TOKEN)
        model(input_ids=ids, pixel_values=feeds["pixel_values"])
    with pytest.raises(InputError, match="row 0 does not match complete images"):
        ids = torch.full((2, 8), IMAGE_TOKEN)
        ids[0, 6:] = ids[1, 2:] = 7
        model(input_ids=ids, pixel_values=feeds["pixel_values"].repeat(2, 1, 1, 1))
    text_alone = {name: feeds[name][:, -4:] for name in ("input_ids", "attention_mask")}
    expected = tiny_generator("llava").generate(**text_alone, max_new_tokens=6)
    assert torch.equal(model.generate(**text_alone, max_new_tokens=6), expected)


def test_generate_on_the_command_line(generator: Artifacts) -> None:
    folder = str(generator("llama").path)
    command = ["generate", folder, "--prompt", "where is my card", "--max-new-tokens", "6"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "6 new tokens" in shown.stderr
    printed = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert printed["new_tokens"] == 6
    assert printed["text"].strip() == shown.stdout.strip()
    refused = CliRunner().invoke(app, [*command, "--temperature", "0.5"])
    assert refused.exit_code == 2
    assert "--sample" in refused.stderr


def test_changed_generation_config_is_pickled_and_saved(generator: Artifacts, tmp_path: Path) -> None:
    model = ORTModelForCausalLM.from_pretrained(generator("llama").path)
    model.generation_config.max_new_tokens = 3
    assert pickle.loads(pickle.dumps(model)).generation_config.max_new_tokens == 3
    model.save_pretrained(tmp_path / "saved")
    assert ORTModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.max_new_tokens == 3


@pytest.mark.parametrize(
    "prompt",
    [[[5, 6]], torch.tensor([5, 6]), torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64), torch.ones(1, 2),
     torch.ones(1, 2, dtype=torch.complex64), torch.ones(1, 2, dtype=torch.bool), "words", 5],
)  # fmt: skip
def test_invalid_prompts_are_refused(prompt: Any, generator: Callable[..., Artifact]) -> None:
    for family in ("llama", "t5"):
        model: Any = accel.ORTModel.from_pretrained(generator(family))
        for call in (lambda model=model: model.generate(prompt), lambda model=model: model.generate(input_ids=prompt)):
            with pytest.raises(
                InputError, match="its shape must be|not a torch tensor|token ids must be integers"
            ) as error:
                call()
            assert error.value.fix
