"""SAM: the stock pipeline's masks beside those of PyTorch, and points given to the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_pictures import TOLERANCE, differs, picture

import accel
from accel.artifact import Artifact
from accel.errors import ConfigError, ExportError, InputError

TASK = "mask-generation"
ON = [*(pytest.param(backend, marks=pytest.mark.thorough) for backend in ("cpu", "openvino")), "pytorch"]
"""Exporting two graphs takes longest."""
FAMILIES = ["sam", pytest.param("sam-hq", marks=pytest.mark.thorough)]


class WithoutTorchvision(transformers.SamImageProcessorPil):  # type: ignore[misc]
    """The PIL processor, whose last step alone needs torchvision: of boxes that overlap, only the best is kept. Here all of them are."""

    def filter_masks(self, masks: Any, scores: Any, size: Any, box: Any, *options: Any) -> Any:
        # torch makes no tensor of a list of tensors, which this processor asks it for.
        return super().filter_masks(masks, scores, size, [float(side) for side in box], *options)

    def post_process_for_mask_generation(
        self, all_masks: Any, all_scores: torch.Tensor, all_boxes: torch.Tensor, crops_nms_thresh: float
    ) -> Any:
        order = all_scores.argsort(descending=True, stable=True)
        masks = [all_masks[i]["counts"] for i in order]
        return masks, all_scores[order], [all_masks[i] for i in order], all_boxes[order]


def processor_of(folder: Path) -> WithoutTorchvision:
    return WithoutTorchvision.from_pretrained(folder)


def original(folder: Path) -> Any:
    return transformers.AutoModelForMaskGeneration.from_pretrained(folder).eval()


def opened(family: str, backend: str, folder: Path, tiny_artifact: Callable[..., Artifact]) -> Any:
    source = folder if backend == "pytorch" else tiny_artifact(family, TASK)
    return accel.ORTModelForMaskGeneration.from_pretrained(source, backend=backend)


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_pipeline(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder(family, TASK)
    ours, processor = opened(family, backend, folder, tiny_artifact), processor_of(folder)
    # Random models are sure of nothing. 40 points are a batch and a part of one.
    options = {
        "points_per_batch": 25, "pred_iou_thresh": -100.0, "stability_score_thresh": 0.0, "points_per_crop": 6,
        "output_bboxes_mask": True, "stability_score_offset": 0,
    }  # fmt: skip
    reference = transformers.pipeline(TASK, model=original(folder), image_processor=processor)
    expected = reference(picture(60, 80), **options)
    assert len(expected["scores"]) > 25
    for stock in (
        transformers.pipeline(TASK, model=ours, image_processor=processor),
        accel.pipeline(TASK, model=ours, image_processor=processor),
    ):
        found = stock(picture(60, 80), **options)
        assert differs(found["scores"], expected["scores"]) <= TOLERANCE
        assert len(found["masks"]) == len(expected["masks"])
        # Corners are whole pixels of masks, of which a few are as good as on the border.
        assert (found["bounding_boxes"] == expected["bounding_boxes"]).float().mean() > 0.95


def prompts(folder: Path) -> dict[str, torch.Tensor]:
    """Two images, three masks each, two points for each mask, one of them outside of what is meant."""
    inputs = processor_of(folder)([picture(60, 80), picture(96, 64)], return_tensors="pt")
    points = torch.rand((2, 3, 2, 2), generator=torch.Generator().manual_seed(0)) * 30
    return {**inputs, "input_points": points, "input_labels": torch.tensor([1, 0]).expand(2, 3, 2).contiguous()}


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("family", FAMILIES)
def test_points(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder(family, TASK)
    ours, theirs, inputs = opened(family, backend, folder, tiny_artifact), original(folder), prompts(folder)
    read = {name: inputs[name] for name in ("pixel_values", "input_points", "input_labels")}
    with torch.inference_mode():
        expected = {name: theirs(**read)[name] for name in ("iou_scores", "pred_masks")}
    assert differs(dict(ours(**inputs)), expected) <= TOLERANCE
    embedded = ours.get_image_embeddings(read["pixel_values"])
    names = ("image_embeddings", "intermediate_embeddings")
    given = dict(zip(names, embedded if isinstance(embedded, tuple) else (embedded,), strict=False))
    points = {name: read[name] for name in ("input_points", "input_labels")}
    assert differs(dict(ours(**given, **points)), expected) <= TOLERANCE
    arrays = ours(**{name: value.numpy() for name, value in read.items()})
    assert isinstance(arrays.pred_masks, np.ndarray)
    assert differs(torch.from_numpy(arrays.pred_masks), expected["pred_masks"]) <= TOLERANCE
    with torch.inference_mode():
        inside = theirs(pixel_values=read["pixel_values"], input_points=read["input_points"]).iou_scores
    assert differs(ours(pixel_values=read["pixel_values"], input_points=read["input_points"])[0], inside) <= TOLERANCE


def test_what_is_refused(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    folder = tiny_folder("sam", TASK)
    model, inputs = opened("sam", "pytorch", folder, tiny_artifact), prompts(folder)
    pixels, points = inputs["pixel_values"], inputs["input_points"]
    for given, message in (
        ({"pixel_values": pixels, "input_boxes": torch.zeros(2, 3, 4)}, "nothing of input_boxes"),
        ({"pixel_values": pixels, "input_points": points, "multimask_output": False}, "multimask_output=False"),
        ({"pixel_values": pixels}, "No input_points"),
        ({"input_points": points}, "only one"),
        ({"pixel_values": pixels[:1], "input_points": points}, "2 images came, and 1"),
    ):
        with pytest.raises(InputError, match=message):
            model(**given)
    with pytest.raises(ConfigError, match="cannot measure mask-generation"):
        accel.evaluate(model, [{"image": picture(60, 80), "mask": picture(60, 80)}])


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_optimized_and_quantized(
    backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    """Both graphs are."""
    inputs, artifact = prompts(tiny_folder("sam", TASK)), tiny_artifact("sam", TASK)
    scheme = {"cpu": "dynamic-int8", "openvino": "weight-int8"}[backend]
    expected = accel.ORTModelForMaskGeneration(artifact)(**inputs).pred_masks
    optimized = accel.optimize(artifact, tmp_path / "optimized", backend=backend)
    assert differs(accel.ORTModelForMaskGeneration(optimized)(**inputs).pred_masks, expected) <= TOLERANCE
    quantized = accel.quantize(artifact, tmp_path / "quantized", backend=backend, scheme=scheme)
    model = accel.ORTModelForMaskGeneration(quantized, backend=backend)
    found = model(**inputs).pred_masks
    assert 0 < (found - expected).abs().mean() <= 0.3 * expected.abs().mean()
    assert [one.name for one in quantized.components] == ["image_encoder", "mask_decoder"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_for_openvino(family: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """The export compares itself with PyTorch."""
    artifact = accel.export(tiny_folder(family, TASK), tmp_path / "out", backend="openvino")
    assert artifact.task == TASK
    assert artifact.component("mask_decoder").inputs[-1].shape[:3] == ("batch", "points", "each")


@pytest.mark.thorough
def test_saved_and_loaded(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    model, inputs = accel.ORTModelForMaskGeneration(tiny_artifact("sam", TASK)), prompts(tiny_folder("sam", TASK))
    model.save_pretrained(tmp_path / "saved")
    again = accel.ORTModel.from_pretrained(tmp_path / "saved")
    assert type(again) is accel.ORTModelForMaskGeneration
    assert torch.equal(again(**inputs).pred_masks, model(**inputs).pred_masks)


def test_other_models_are_refused(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ExportError, match="does not know the parts of a ViTModel"):
        accel.export(model, tmp_path / "out", task=TASK)
