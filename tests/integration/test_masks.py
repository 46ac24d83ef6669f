"""Tests of SAM: the masks of the pipeline are compared with PyTorch's, and the model is called with points."""

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
"""Backends of the tests. Exporting two graphs takes most of the time, so the fast tests run only on PyTorch."""
FAMILIES = ["sam", pytest.param("sam-hq", marks=pytest.mark.thorough)]


class WithoutTorchvision(transformers.SamImageProcessorPil):  # type: ignore[misc]
    """The PIL image processor of SAM without its last step, which removes overlapping masks and requires torchvision."""

    def filter_masks(self, masks: Any, scores: Any, size: Any, box: Any, *options: Any) -> Any:
        # The base class would convert a list of tensors to a tensor, which PyTorch cannot do. Convert the box sides to
        # floats first.
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
def test_transformers_pipeline(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder(family, TASK)
    ours, processor = opened(family, backend, folder, tiny_artifact), processor_of(folder)
    # The thresholds are low because random models give low scores. The 40 points fill one batch of 25 points and a part
    # of a second batch.
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
        outputs = stock(picture(60, 80), **options)
        assert differs(outputs["scores"], expected["scores"]) <= TOLERANCE
        assert len(outputs["masks"]) == len(expected["masks"])
        # The box corners are whole pixels of masks. Mask values near the threshold may be rounded to different pixels.
        assert (outputs["bounding_boxes"] == expected["bounding_boxes"]).float().mean() > 0.95


def prompts(folder: Path) -> dict[str, torch.Tensor]:
    """Return inputs with two images, three masks for each image, and two points for each mask: one inside the mask and
    one outside of it.
    """
    inputs = processor_of(folder)([picture(60, 80), picture(96, 64)], return_tensors="pt")
    points = torch.rand((2, 3, 2, 2), generator=torch.Generator().manual_seed(0)) * 30
    return {**inputs, "input_points": points, "input_labels": torch.tensor([1, 0]).expand(2, 3, 2).contiguous()}


@pytest.mark.parametrize("backend", ON)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_with_points(
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
    embeddings = dict(zip(names, embedded if isinstance(embedded, tuple) else (embedded,), strict=False))
    points = {name: read[name] for name in ("input_points", "input_labels")}
    assert differs(dict(ours(**embeddings, **points)), expected) <= TOLERANCE
    arrays = ours(**{name: value.numpy() for name, value in read.items()})
    assert isinstance(arrays.pred_masks, np.ndarray)
    assert differs(torch.from_numpy(arrays.pred_masks), expected["pred_masks"]) <= TOLERANCE
    with torch.inference_mode():
        inside = theirs(pixel_values=read["pixel_values"], input_points=read["input_points"]).iou_scores
    assert differs(ours(pixel_values=read["pixel_values"], input_points=read["input_points"])[0], inside) <= TOLERANCE


def test_invalid_inputs_are_refused(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    folder = tiny_folder("sam", TASK)
    model, inputs = opened("sam", "pytorch", folder, tiny_artifact), prompts(folder)
    pixels, points = inputs["pixel_values"], inputs["input_points"]
    for arguments, message in (
        ({"pixel_values": pixels, "input_boxes": torch.zeros(2, 3, 4)}, "input_boxes is not supported"),
        (
            {"pixel_values": pixels, "input_points": points, "multimask_output": False},
            "multimask_output=False is not supported",
        ),
        ({"pixel_values": pixels}, "input_points is missing"),
        ({"input_points": points}, "both missing"),
        ({"pixel_values": pixels[:1], "input_points": points}, "points for 2 images, but 1"),
    ):
        with pytest.raises(InputError, match=message):
            model(**arguments)
    with pytest.raises(ConfigError, match="cannot measure the accuracy of the task .mask-generation"):
        accel.evaluate(model, [{"image": picture(60, 80), "mask": picture(60, 80)}])


def test_other_models_are_refused(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ExportError, match="cannot export a ViTModel for the task"):
        accel.export(model, tmp_path / "out", task=TASK)
