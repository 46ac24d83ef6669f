"""Tests of model architectures that need special handling in a trace. Each test covers one cause of special handling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from accel import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForImageTextToText,
    ORTModelForQuestionAnswering,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
    export,
    pipeline,
    validate,
)
from accel.artifact import Artifact
from accel.capture import max_difference
from accel.errors import ExportError, InputError
from accel.testing.models import rescale

BACKENDS = ["cpu", pytest.param("openvino", marks=pytest.mark.thorough)]
_BART: dict[str, Any] = {
    "vocab_size": 120, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_labels": 3,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_LED = _BART | {"attention_window": [8], "max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 96}
_LONGFORMER: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "attention_window": [8, 8], "max_position_embeddings": 98, "num_labels": 2, "pad_token_id": 1, "sep_token_id": 2,
}  # fmt: skip


def build(architecture: str, **settings: Any) -> Any:
    """Return a model with the given settings and random weights, whose logits are of order 1."""
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    return rescale(cls(cls.config_class(**settings))).eval()


def worst(artifact: Any, original: Any, sizes: tuple[tuple[int, int], ...], ids: tuple[int, int] = (5, 100)) -> float:
    """Return the largest difference of a classifier's logits from PyTorch's, for the given pairs of batch size and
    sequence length.

    Every second row of each batch is padded.
    """
    model = ORTModelForSequenceClassification(artifact)
    pad = getattr(original.config, "pad_token_id", None) or 0
    end = original.config.eos_token_id if original.config.is_encoder_decoder else None
    largest = 0.0
    for batch, length in sizes:
        drawn = torch.randint(*ids, (batch, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(drawn)
        mask[1::2, (length + 1) // 2 :] = 0
        drawn[mask == 0] = pad
        if end is not None:
            drawn.scatter_(1, mask.sum(1, keepdim=True) - 1, end)
        with torch.inference_mode():
            expected = original(input_ids=drawn, attention_mask=mask).logits
        assert expected.abs().max() > 0.1
        largest = max(largest, float((model(input_ids=drawn, attention_mask=mask).logits - expected).abs().max()))
    return largest


# The exported graph may add float32 numbers in a different order, so results differ slightly.
TOLERANCE = 1e-4


def assert_same_answers(artifact: Artifact, original: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    model = ORTModelForImageClassification(artifact)
    for height, width in sizes:
        pixels = torch.randn((2, 3, height, width), generator=torch.Generator().manual_seed(height))
        with torch.inference_mode():
            expected = original(pixel_values=pixels).logits
        assert (model(pixel_values=pixels).logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_convolutional_models_accept_any_image_size(backend: str, tmp_path: Path) -> None:
    """Convolutional models accept any image size, so the exported graph must also accept any image size."""
    original = build(
        "ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3
    )
    artifact = export(original, tmp_path / "out", task="image-classification", backend=backend)
    assert artifact.component().inputs[0].shape == ("batch", 3, "height", "width")
    assert_same_answers(artifact, original, ((224, 224), (96, 64), (333, 95)))


@pytest.mark.thorough
def test_images_with_incomplete_patches(tmp_path: Path) -> None:
    """FocalNet pads images to whole patches at each stage. A graph that is traced with whole patches would crop the
    incomplete patches.
    """
    original = build(
        "FocalNetForImageClassification", image_size=64, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1],
        focal_levels=[2, 2], focal_windows=[3, 3], num_labels=3,
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="image-classification")
    assert_same_answers(artifact, original, ((64, 64), (68, 68), (61, 47)))


@pytest.mark.thorough
def test_xmod_graph_has_one_language_adapter(tmp_path: Path) -> None:
    """The exported graph of X-MOD contains only the adapter of the default language. The PyTorch model keeps the
    adapters of all languages.
    """
    languages = ["de_DE", "en_XX", "fr_XX"]
    original = build(
        "XmodForSequenceClassification", vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=96, num_labels=3, pad_token_id=1, languages=languages, default_language="en_XX",
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="text-classification")
    assert worst(artifact, original, ((1, 3), (2, 40))) <= TOLERANCE
    assert [*original.roberta.encoder.layer[1].output.adapter_modules] == languages


_TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


@pytest.mark.thorough
def test_image_indicator_tokens_of_ovis2(tmp_path: Path) -> None:
    """Ovis2's processor puts indicator tokens before and after an image. Their embeddings are in the visual embedding
    table, so the ids exceed the text vocabulary and the session must not check their range.
    """
    original = build(
        "Ovis2ForConditionalGeneration", text_config={"model_type": "qwen2", **_TEXT}, hidden_size=32, vocab_size=96,
        vision_config={**_VISION, "vocab_size": 20, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
        image_token_id=90, visual_indicator_token_ids=[91, 92, 93, 94, 95],
    )  # fmt: skip
    model = ORTModelForImageTextToText(export(original, tmp_path / "out", task="image-text-to-text"))
    ids = torch.randint(3, 80, (2, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 2:6] = 90
    for place, token in ((1, 91), (6, 93), (7, 95)):
        ids[:, place] = token
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.inference_mode():
        expected = original(**feeds).logits
    assert (model(**feeds).logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_bidirectional_image_attention_is_refused(tmp_path: Path) -> None:
    """The export of Gemma 3 raises an error: its processor returns `token_type_ids` for images, and image tokens attend
    in both directions.
    """
    original = build(
        "Gemma3ForConditionalGeneration", text_config={**_TEXT, "head_dim": 8}, vision_config=_VISION,
        image_token_id=90, image_token_index=90, mm_tokens_per_image=4, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    with pytest.raises(ExportError, match="bidirectional attention"):
        export(original, tmp_path / "out", task="image-text-to-text")


@pytest.mark.thorough
def test_image_size_fixed_by_the_trace(tmp_path: Path) -> None:
    """The model accepts any image size, but its trace fixes the size of the sample image, so the graph declares this
    size.
    """

    class Pooled(transformers.ResNetForImageClassification):  # type: ignore[misc]  # transformers is untyped here
        def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
            if pixel_values.shape[-1] == 256:
                pixel_values = pixel_values * 2
            return super().forward(pixel_values, **kwargs)

    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3)
    artifact = export(rescale(Pooled(config)).eval(), tmp_path / "out", task="image-classification")
    assert artifact.component().inputs[0].shape == ("batch", 3, 224, 224)


def test_graph_with_fixed_image_size_is_validated(tmp_path: Path) -> None:
    build(
        "ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3
    ).save_pretrained(tmp_path / "model")
    sample, axes = {"pixel_values": torch.randn(2, 3, 224, 224)}, {"pixel_values": {0: "batch"}}
    artifact = export(tmp_path / "model", tmp_path / "out", sample=sample, axes=axes)
    assert artifact.component().inputs[0].shape == ("batch", 3, 224, 224)
    assert validate(artifact).passed


def test_position_embeddings_fix_the_image_size(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact("vit", "image-classification")
    assert artifact.component().inputs[0].shape == ("batch", 3, 32, 32)


@pytest.mark.thorough
def test_bfloat16_arithmetic_in_a_float32_model(tmp_path: Path) -> None:
    """Falcon computes ALiBi positions in bfloat16, although ONNX Runtime's CPU provider cannot multiply in bfloat16."""
    original = build(
        "FalconForCausalLM", vocab_size=120, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=True,
        new_decoder_architecture=False, multi_query=False, bias=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="text-generation")
    # Use 600 tokens, because bfloat16 rounds the products of large positions.
    ids = torch.randint(5, 100, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = original(input_ids=ids).logits
    logits = ORTModelForCausalLM(artifact)(input_ids=ids).logits
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_of_different_sizes(backend: str, layers: int, tmp_path: Path) -> None:
    """In DeepSeek's latent attention, values and keys have different sizes. The model's second layer has experts."""
    original = build(
        "DeepseekV3ForCausalLM", vocab_size=120, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=192, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="text-generation", backend=backend)
    ids = torch.tensor([[0, 5, 6, 7, 8], [9, 10, 11, 12, 13]])
    rows = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    expected = original.generate(**rows, max_new_tokens=12, do_sample=False)
    assert torch.equal(ORTModelForCausalLM(artifact).generate(**rows, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.parametrize("length", [2, 12, 40])
def test_padding_to_whole_attention_windows(
    backend: str, length: int, shared: Callable[..., Path], tmp_path: Path
) -> None:
    """LED pads texts to a multiple of its attention window. If the text length is a multiple of the window, no padding
    is added.
    """
    original = build("LEDForConditionalGeneration", **_LED)
    folder = shared(f"led-{backend}", lambda out: export(original, out, task="text2text-generation", backend=backend))
    ids = torch.randint(5, 100, (2, length), generator=torch.Generator().manual_seed(length))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = original.generate(**rows, max_new_tokens=10, do_sample=False, eos_token_id=None)
    tokens = ORTModelForSeq2SeqLM(Artifact.load(folder)).generate(**rows, max_new_tokens=10, eos_token_id=None)
    assert torch.equal(tokens, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_global_attention(backend: str, beams: int, shared: Callable[..., Path]) -> None:
    """In LED's attention mask, a 2 marks tokens with global attention. One text of the batch is padded on the right,
    and the other text on the left.
    """
    original = build("LEDForConditionalGeneration", **_LED)
    folder = shared(f"led-{backend}", lambda out: export(original, out, task="text2text-generation", backend=backend))
    ids = torch.randint(5, 100, (3, 29), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 17:], mask[2, :9] = 0, 0
    mask[0, 0] = mask[0, 20] = mask[1, 3] = 2
    settings = {"max_new_tokens": 10, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    expected = original.generate(input_ids=ids, attention_mask=mask, **settings)
    tokens = ORTModelForSeq2SeqLM(Artifact.load(folder)).generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(tokens, expected)
    plain = original.generate(input_ids=ids, attention_mask=mask.clamp(max=1), **settings)
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.thorough
def test_global_attention_in_the_attention_mask(backend: str, tmp_path: Path) -> None:
    """Longformer's classifier gives the first token global attention, and a 2 in the attention mask gives other tokens
    global attention. A 3 in the mask is rejected.
    """
    original = build("LongformerForSequenceClassification", **_LONGFORMER)
    artifact = export(original, tmp_path / "out", task="text-classification", backend=backend)
    assert worst(artifact, original, ((1, 1), (3, 3), (2, 8), (3, 30))) <= TOLERANCE
    model = ORTModelForSequenceClassification(artifact)
    ids = torch.randint(5, 100, (3, 29), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    mask[:, 5:9] *= 2
    with torch.inference_mode():
        expected = original(input_ids=ids, attention_mask=mask).logits
    assert (model(input_ids=ids, attention_mask=mask).logits - expected).abs().max() <= TOLERANCE
    with pytest.raises(InputError):
        model(input_ids=ids, attention_mask=mask + 1)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "openvino", "pytorch"])
def test_question_tokens_have_global_attention(backend: str, tmp_path: Path) -> None:
    original = build("LongformerForQuestionAnswering", **_LONGFORMER)
    artifact = export(original, tmp_path / "out", task="question-answering", backend=backend)
    ids = torch.randint(5, 100, (3, 29), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    for row, question in enumerate((4, 9, 0)):
        ids[row, [question, question + 1, 12]] = original.config.sep_token_id
    with torch.inference_mode():
        expected = original(input_ids=ids, attention_mask=mask).start_logits
    start_logits = ORTModelForQuestionAnswering(artifact)(input_ids=ids, attention_mask=mask).start_logits
    assert (start_logits - expected).abs().max() <= TOLERANCE


@pytest.mark.thorough
def test_global_tokens_of_short_and_long_texts(tmp_path: Path) -> None:
    """LongT5 has one global token for each complete block of a text. A text that is shorter than a block has no global
    token.
    """
    original = build(
        "LongT5ForConditionalGeneration", vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1,
        num_heads=4, encoder_attention_type="transient-global", local_radius=7, global_block_size=4, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = ORTModelForSeq2SeqLM(export(original, tmp_path / "out", task="text2text-generation"))
    for length in (2, 4, 30):
        ids = torch.randint(5, 100, (2, length), generator=torch.Generator().manual_seed(length))
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = original.generate(**rows, max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert torch.equal(model.generate(**rows, max_new_tokens=10, eos_token_id=None), expected)


@pytest.mark.parametrize(
    ("architecture", "reason", "settings"),
    [
        (
            "FunnelForSequenceClassification",
            "turns the size of the axis 'sequence'",
            {"vocab_size": 120, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]},
        ),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_unsupported_architectures_are_refused_with_a_reason(
    architecture: str, reason: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=reason):
        export(build(architecture, **settings), tmp_path / "out", task="text-classification")
    assert not (tmp_path / "out").exists()


def test_model_that_branches_on_values_is_refused(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(ExportError, match="takes different branches for different tensor values"):
        export(Branch(), tmp_path / "out", task="custom", sample={"x": torch.ones(2, 3)}, axes={"x": {0: "batch"}})
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_sparse_attention_limits_the_text_length(tmp_path: Path) -> None:
    """BigBird uses full attention for short texts and sparse attention for long texts. The exported graph contains only
    full attention, so the session limits the text length.
    """
    original = build(
        "BigBirdForSequenceClassification", vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=96, attention_type="block_sparse", block_size=4,
        num_random_blocks=1, pad_token_id=0,
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="text-classification")
    assert artifact.component().max_sizes == {"sequence": 28}
    with pytest.raises(InputError, match="supports at most 28. The model computes longer texts in blocks"):
        ORTModelForSequenceClassification.from_pretrained(artifact.path)(input_ids=torch.ones(1, 29, dtype=torch.int64))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_encoder_only_checkpoint_of_encoder_decoder(family: str, tmp_path: Path) -> None:
    """Checkpoints of sentence-t5 and GTR contain only an encoder. `AutoModel` would also create a decoder with random
    weights.
    """
    original = build(
        f"{family}EncoderModel", vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, pad_token_id=0
    )
    original.save_pretrained(tmp_path / "model")
    opened = ORTModelForFeatureExtraction.from_pretrained(tmp_path / "model", export=True)
    ids = torch.randint(3, 120, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with torch.inference_mode():
        expected = original(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden = opened(input_ids=ids, attention_mask=mask).last_hidden_state
    assert float((hidden - expected)[mask.bool()].abs().max()) <= 1e-4


@pytest.mark.thorough
def test_perceiver_text_inputs(tmp_path: Path) -> None:
    original = build(
        "PerceiverForSequenceClassification", vocab_size=120, d_model=32, d_latents=32, num_latents=8, num_blocks=1,
        num_self_attends_per_block=1, num_self_attention_heads=4, num_cross_attention_heads=4,
        max_position_embeddings=96, num_labels=3,
    )  # fmt: skip
    artifact = export(original, tmp_path / "out", task="text-classification")
    assert [spec.name for spec in artifact.component().inputs] == ["input_ids", "attention_mask"]
    assert worst(artifact, original, ((1, 4), (3, 30))) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("head", "size"),
    [
        ("Fourier", 24),
        ("Learned", 32),
        ("ConvProcessing", 24),
    ],
)
def test_perceiver_image_size_depends_on_the_head(head: str, size: int, tmp_path: Path) -> None:
    """The Perceiver head with learned positions uses the image size in the config. The other heads use the processor's
    resize size, and not its crop size.
    """
    original = build(
        f"PerceiverForImageClassification{head}", image_size=32, d_model=32, d_latents=32, num_latents=8, num_blocks=1,
        num_self_attends_per_block=1, num_self_attention_heads=4, num_cross_attention_heads=1, num_labels=3,
    )  # fmt: skip
    folder = tmp_path / "weights"
    original.save_pretrained(folder)
    transformers.PerceiverImageProcessorPil(
        crop_size={"height": 28, "width": 28}, size={"height": size, "width": size}
    ).save_pretrained(folder)
    artifact = export(folder, tmp_path / "out")
    assert artifact.component().inputs[0].shape == ("batch", 3, size, size)
    picture = Image.new("RGB", (40, 30), "red")
    picture.paste("blue", (3, 5, 20, 20))
    expected = transformers.pipeline("image-classification", model=str(folder))(picture)
    results = pipeline("image-classification", model=str(artifact.path))(picture)
    assert [result["label"] for result in results] == [result["label"] for result in expected]
    assert results[0]["score"] == pytest.approx(expected[0]["score"], abs=TOLERANCE)


def test_bounding_boxes_from_0_to_1(tmp_path: Path) -> None:
    """BROS's bounding boxes are numbers from 0 to 1, and not indices of an embedding table. The model requires boxes."""
    original = build(
        "BrosForTokenClassification", vocab_size=120, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=96, num_labels=3,
    )  # fmt: skip
    model = ORTModelForTokenClassification(export(original, tmp_path / "out", task="token-classification"))
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    corners = torch.rand((2, 9, 2), generator=torch.Generator().manual_seed(1)) / 2
    boxes = torch.cat([corners, corners + 0.4], dim=-1)
    with torch.inference_mode():
        expected = original(input_ids=ids, bbox=boxes).logits
    assert (model(input_ids=ids, bbox=boxes).logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    with pytest.raises(InputError, match=r"inputs \['bbox'\] are missing") as error:
        model(input_ids=ids)
    assert "from 0 to 1" in error.value.fix
    with pytest.raises(InputError, match="The model accepts 0 to 1"):
        model(input_ids=ids, bbox=boxes * 1000)


def test_unsupported_speech_model_is_refused(tmp_path: Path) -> None:
    original = build(
        "Pop2PianoForConditionalGeneration", vocab_size=120, d_model=32, d_kv=8, d_ff=32, num_layers=1,
        num_decoder_layers=1, num_heads=4,
    )  # fmt: skip
    with pytest.raises(ExportError, match="and audio as input"):
        export(original, tmp_path / "out", task="automatic-speech-recognition")


def test_masked_scores_do_not_set_the_tolerance() -> None:
    """Splinter writes the smallest number of the data type at masked positions. If the tolerance were relative to this
    number, it would accept any output.
    """
    lowest = torch.finfo(torch.float32).min
    expected = {"logits": torch.tensor([1.0, lowest])}
    assert max_difference({"logits": torch.tensor([1.5, lowest])}, expected) == (0.5, 1.0)
    difference, _ = max_difference({"logits": torch.tensor([1.0, 2.0])}, expected)
    assert difference > 1e30
