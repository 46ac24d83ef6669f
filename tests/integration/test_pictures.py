"""Tests of image models in pipelines: outputs are compared with PyTorch, on every backend that can run the models."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import accel
from accel.artifact import Artifact
from accel.capture.source_loader import loader_for
from accel.errors import ConfigError, InputError
from accel.interfaces.task_registry import task_spec
from accel.models.base import model_class
from accel.stages.export import export
from accel.testing.audio_models import save_sound_model
from accel.testing.document_models import save_document_model
from accel.testing.generative_models import tiny_generator
from accel.testing.image_models import PICTURES, tiny_picture_model, tiny_processor
from accel.testing.video_models import save_video_model

TOLERANCE = 1e-3
"""Largest accepted difference of scores, of boxes as fractions of the image, and of depths relative to the largest depth."""
QUICK = ("clip",)
"""Families in the fast tests, because exports take most of the time. CLIP reads images and texts."""
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
    for name, (task, *_) in PICTURES.items()
    # Skip three tasks: image-to-image has no pipeline in transformers, `test_masks` tests mask generation, and keypoint
    # matching reads pairs of images.
    if task not in ("image-to-image", "mask-generation", "keypoint-matching")
]
BACKENDS = ("cpu", "openvino", "pytorch")
OPTIONS: Mapping[str, list[dict[str, Any]]] = {
    "zero-shot-image-classification": [{"candidate_labels": ["my card", "cash", "a bank in london"]}],
    # Random models give low scores, so the threshold is zero.
    "object-detection": [{"threshold": 0.0}],
    "zero-shot-object-detection": [{"candidate_labels": ["my card", "cash. a bank?"], "threshold": 0.0}],
    "image-segmentation": [
        {"subtask": "semantic"},
        {"threshold": 0.0, "mask_threshold": 0.1, "overlap_mask_area_threshold": 0.0},
    ],
}


def picture(height: int, width: int, seed: int = 0) -> Any:
    """Draw an image of colored patches. Resizing random pixels to a smaller size would average them to gray."""
    patches = np.random.default_rng(seed).integers(0, 255, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return Image.fromarray(patches.repeat(8, 0).repeat(8, 1)[:height, :width])


def processors(folder: Path) -> dict[str, Any]:
    """Return the processors (image processor and tokenizer) that a pipeline needs in addition to a model."""
    loaded = {"image_processor": transformers.AutoImageProcessor.from_pretrained(folder)}
    if (folder / "tokenizer.json").is_file():
        loaded["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder)
    return loaded


def original(folder: Path, task: str) -> Any:
    """Load the PyTorch model of a folder."""
    loader = loader_for(task_spec(task), transformers.AutoConfig.from_pretrained(folder))
    return loader.from_pretrained(folder).eval()


def differs(actual: Any, expected: Any) -> float:
    """Return the largest difference between two pipeline outputs, or infinity if labels or shapes differ."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        return max((differs(actual[name], value) for name, value in expected.items()), default=0.0)
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        return max((differs(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)
    if isinstance(expected, Image.Image):
        a, b = (np.asarray(array).astype(float) for array in (actual, expected))
        return differs(torch.from_numpy(a), torch.from_numpy(b)) if expected.mode != "L" else float((a != b).mean())
    if isinstance(expected, torch.Tensor):
        return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
    if isinstance(expected, bool | str) or expected is None:
        return 0.0 if actual == expected else float("inf")
    if isinstance(expected, int):
        # The box corners are rounded to whole pixels, so they may differ by one pixel.
        return 0.0 if abs(actual - expected) <= 1 else float("inf")
    return abs(actual - expected)


def opened(family: str, backend: str, folder: Path, artifact: Callable[[], Artifact]) -> Any:
    cls: Any = model_class(PICTURES[family][0])
    return cls.from_pretrained(folder if backend == "pytorch" else artifact(), backend=backend)


@pytest.mark.parametrize(
    "make",
    [
        tiny_picture_model,
        tiny_processor,
        tiny_generator,
        lambda family: save_document_model(Path("unused"), family),
        lambda family: save_sound_model(Path("unused"), family),
        lambda family: save_video_model(Path("unused"), family),
    ],
)
def test_unknown_family_of_tiny_models_is_refused(make: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="no tiny model of the family 'unknown'"):
        make("unknown")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_pipeline(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    task = PICTURES[family][0]
    folder = tiny_folder(family, task)
    ours = opened(family, backend, folder, lambda: tiny_artifact(family, task))
    images = [picture(60, 80), picture(96, 64, seed=1)]
    theirs = original(folder, task)
    components = processors(folder)
    reference = transformers.pipeline(task, model=theirs, **components)
    for stock in (transformers.pipeline(task, model=ours, **components), accel.pipeline(task, model=ours)):
        for options in OPTIONS.get(task, [{}]):
            expected = [reference(image, **options) for image in images]
            assert any(expected), "there is something to compare"
            assert differs([stock(image, **options) for image in images], expected) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_image_to_image(backend: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """The output image equals the PyTorch model's output without the padding that the processor adds. transformers 5
    has no image-to-image pipeline to compare with.
    """
    folder, task, image = tiny_folder("swin2sr", "image-to-image"), "image-to-image", picture(20, 30)
    with torch.inference_mode():
        inputs = processors(folder)["image_processor"](image, return_tensors="pt")
        expected = original(folder, task)(**inputs).reconstruction[0, :, :40, :60].clamp(0, 1).numpy()
    shape = inputs["pixel_values"].shape
    assert shape[2:] == (24, 32)
    if backend != "pytorch":
        sample = {"pixel_values": torch.zeros(2, *shape[1:])}
        export(folder, tmp_path / "out", backend=backend, sample=sample, axes={"pixel_values": {0: "batch"}})
        folder = tmp_path / "out"
    output = accel.pipeline(task, model=folder, backend=backend)(image)
    assert output.size == (60, 40)
    assert np.abs(np.asarray(output) / 255 - expected.transpose(1, 2, 0)).max() <= 0.5 / 255 + TOLERANCE


FREE = ("detr", "yolos", "segformer", "maskformer", "glpn")


@pytest.mark.parametrize("family", [case for case in FAMILIES if case.values[0] in FREE])
def test_models_with_any_image_size(family: str, tiny_artifact: Callable[..., Artifact]) -> None:
    shape = tiny_artifact(family, PICTURES[family][0]).component().inputs[0].shape
    assert shape == ("batch", 3, "height", "width")


@pytest.mark.thorough
def test_padded_images_in_one_batch(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    """For a batch with a pixel mask, the detector returns the same outputs as PyTorch returns for each image alone."""
    folder, task = tiny_folder("detr", "object-detection"), "object-detection"
    model = accel.ORTModelForObjectDetection(tiny_artifact("detr", task))
    inputs = processors(folder)["image_processor"]([picture(60, 80), picture(96, 64)], return_tensors="pt")
    assert not inputs["pixel_mask"].all()
    with torch.inference_mode():
        expected = original(folder, task)(**inputs)
    outputs = model(**inputs)
    assert (outputs.logits - expected.logits).abs().max() <= TOLERANCE
    assert (outputs.pred_boxes - expected.pred_boxes).abs().max() <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_texts_for_each_image(
    backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    task = "zero-shot-object-detection"
    folder = tiny_folder("owlvit", task)
    model = opened("owlvit", backend, folder, lambda: tiny_artifact("owlvit", task))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    texts = [["my card", "cash", "a bank in london"], ["a phone", "my old pin", "good"]]
    inputs = processor(text=texts, images=[picture(60, 80), picture(96, 64)], return_tensors="pt")
    with torch.inference_mode():
        expected = original(folder, task)(**inputs)
    outputs = model(**inputs)
    assert outputs.logits.shape == (2, 16, 3)
    assert differs(dict(outputs), {name: expected[name] for name in ("logits", "pred_boxes")}) <= TOLERANCE
    inputs["pixel_values"] = inputs["pixel_values"].repeat(2, 1, 1, 1)
    with pytest.raises(InputError, match="6 texts for 4 images"):
        model(**inputs)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param("efficientloftr", "cpu", marks=pytest.mark.thorough),
        pytest.param("efficientloftr", "openvino", marks=pytest.mark.thorough),
        ("efficientloftr", "pytorch"),
        ("superglue", "pytorch"),
        ("lightglue", "pytorch"),
        pytest.param("superglue", "cpu", marks=pytest.mark.thorough),
        pytest.param("superglue", "openvino", marks=pytest.mark.thorough),
        pytest.param("lightglue", "cpu", marks=pytest.mark.thorough),
        pytest.param("lightglue", "openvino", marks=pytest.mark.thorough),
    ],
)
def test_keypoint_matching(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    task = "keypoint-matching"
    folder = tiny_folder(family, task)
    ours = opened(family, backend, folder, lambda: tiny_artifact(family, task))
    theirs, components = original(folder, task), processors(folder)
    reference = transformers.pipeline(task, model=theirs, **components)
    pair = [picture(60, 80), picture(60, 80)]
    expected = reference(pair)
    assert len(expected) > 2
    for stock in (transformers.pipeline(task, model=ours, **components), accel.pipeline(task, model=ours)):
        results = stock(pair)
        assert differs([dict(match) for match in results], [dict(match) for match in expected]) <= TOLERANCE
    pixels = components["image_processor"]([pair, pair[::-1]], return_tensors="pt")["pixel_values"]
    # In a batch, transformers (5.23) mixes the matches of EfficientLoFTR's pairs, so each pair runs alone.
    with torch.inference_mode():
        matches = [theirs(pixel_values=pixels[i : i + 1]).matches for i in range(len(pixels))]
    assert torch.equal(ours(pixel_values=pixels).matches, torch.cat(matches))


def faint(contrast: float, seed: int = 0) -> Any:
    """Return an image with low contrast."""
    return Image.blend(Image.new("RGB", (80, 60)), picture(60, 80, seed), contrast)


def tell_pictures_apart(matcher: Any, single: torch.Tensor) -> None:
    """Set the matcher's weights and thresholds so that the tests cover different cases.

    SuperPoint then finds different numbers of points in different images, and one point in `single`. Each layer of
    LightGlue is the last computed layer for at least one image pair, and LightGlue drops points before its last layer.
    """
    torch.manual_seed(0)
    detector = matcher.keypoint_detector
    for layer in detector.modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
            torch.nn.init.normal_(layer.bias, std=0.1)
    decoder = detector.keypoint_decoder
    with torch.inference_mode():
        scores = decoder._get_pixel_scores(detector.encoder(single[:, :1])[0])[0, 4:, 4:]
    decoder.keypoint_threshold = float(scores.flatten().topk(2).values.mean())
    matcher.config.keypoint_detector_config.keypoint_threshold = decoder.keypoint_threshold
    for layer in getattr(matcher, "token_confidence", ()):
        layer.token.weight.data.normal_(0, 6)
        layer.token.bias.data.fill_(2.5)
    for layer in getattr(matcher, "match_assignment_layers", ()):
        layer.matchability.weight.data.normal_(0, 1)
        # With smaller weights, all descriptors would be almost equal, and rounding errors would decide the matches.
        layer.final_projection.weight.data.normal_(0, 2)
    if hasattr(matcher, "token_confidence"):
        matcher.config.depth_confidence = matcher.depth_confidence = 0.9
        matcher.config.width_confidence = matcher.width_confidence = 0.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("superglue", "cpu"),
        ("superglue", "openvino"),
        ("lightglue", "openvino"),
        ("lightglue", "cpu"),
    ],
)
def test_different_numbers_of_keypoints(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    """The images have more points than SuperPoint keeps, fewer points, one point, and no point."""
    task = "keypoint-matching"
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(family, task), folder)
    theirs, processor = original(folder, task), processors(folder)["image_processor"]
    single, black = faint(0.3), Image.new("RGB", (80, 60))
    tell_pictures_apart(theirs, processor([single, single], return_tensors="pt")["pixel_values"][0, :1])
    theirs.save_pretrained(folder)
    ours = opened(family, backend, folder, lambda: export(folder, tmp_path / "graph"))
    pairs = [
        [faint(1.0), faint(1.0)],
        [faint(1.0, seed=1), faint(1.0, seed=2)],
        [faint(0.35), faint(1.0)],
        [faint(0.5, seed=1), single],
        [single, single],
        [single, black],
        [black, black],
    ]
    numbers, layers, alone = set(), set(), []
    for pair in pairs:
        inputs = processor([pair], return_tensors="pt")
        with torch.inference_mode():
            expected = theirs(**inputs)
        outputs = ours(**inputs)
        valid, matched = expected.mask > 0, expected.matches >= 0
        numbers |= set(expected.mask.sum(-1).flatten().tolist())
        layers |= set(expected.get("prune", valid)[valid].tolist())
        assert torch.equal(outputs.mask, expected.mask)
        assert torch.equal(outputs.matches[valid], expected.matches[valid].to(torch.int64))
        assert torch.allclose(outputs.keypoints, expected.keypoints, atol=TOLERANCE)
        assert torch.allclose(
            outputs.matching_scores[valid & matched], expected.matching_scores[valid & matched], atol=TOLERANCE
        )
        alone.append(outputs.matches[0])
    assert numbers >= {0, 1, 20}
    if family == "lightglue":
        assert len(layers) > 1
        # If the pairs of a batch stop at different layers, transformers returns the matches in another order or fails.
        # Compare with pairs that are computed alone.
        together = ours(**processor(pairs, return_tensors="pt"))
        for row, matches in zip(together.matches, alone, strict=True):
            assert torch.equal(row[:, : matches.shape[1]], matches)
            assert (row[:, matches.shape[1] :] == -1).all()


@pytest.mark.thorough
def test_pixel_mask_is_optional(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForObjectDetection(tiny_artifact("detr", "object-detection"))
    pixels = torch.randn((2, 3, 64, 96), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = original(tiny_folder("detr", "object-detection"), "object-detection")(pixels)
    assert (model(pixels).logits - expected.logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("cpu", marks=pytest.mark.thorough)])
def test_image_features(backend: str, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    torch.manual_seed(0)
    transformers.ViTModel(config).eval().save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    components = processors(tmp_path / "model")
    theirs = transformers.pipeline(
        "image-feature-extraction", model=transformers.ViTModel.from_pretrained(tmp_path / "model"), **components
    )
    ours = accel.pipeline("image-feature-extraction", model=tmp_path / "model", backend=backend)
    assert np.abs(np.asarray(ours(picture(40, 50))) - np.asarray(theirs(picture(40, 50)))).max() <= TOLERANCE


def test_model_class_names_of_optimum() -> None:
    assert accel.ORTModelForSemanticSegmentation is accel.ORTModelForImageSegmentation
    assert task_spec("semantic-segmentation").name == "image-segmentation"


def test_image_with_one_channel_is_gray(tiny_folder: Callable[..., Path]) -> None:
    enlarge = accel.pipeline("image-to-image", tiny_folder("swin2sr", "image-to-image"), backend="pytorch")
    values = torch.linspace(0, 1, 12).reshape(1, 1, 3, 4)
    image = enlarge.postprocess({"reconstruction": values, "size": [(3, 4)]})
    assert (image.mode, image.size) == ("L", (4, 3))
    np.testing.assert_array_equal(np.asarray(image), (values[0, 0] * 255).round().numpy())
