"""Tests of video models: pipeline outputs are compared with PyTorch, and accuracy and calibration are tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import accel
from accel.artifact import Artifact
from accel.capture.video_samples import video_sample
from accel.errors import ExportError, InputError
from accel.testing.video_models import FRAMES, VIDEO_FAMILIES, tiny_video

TOLERANCE = 1e-3
TASK = "video-classification"
BACKENDS = ("cpu", "openvino", "pytorch")
FAMILIES = [pytest.param(name, marks=() if name == "videomae" else pytest.mark.thorough) for name in VIDEO_FAMILIES]


class FromGif:
    """Video processor that reads the first frames of a GIF file itself. With torchvision, transformers' video
    processors also read files themselves.
    """

    def __init__(self, images: Any) -> None:
        self._images = images

    def __call__(self, video: str, *, num_frames: int, return_tensors: str, **_: Any) -> Any:
        with Image.open(video) as file:
            frames = []
            for place in range(num_frames):
                file.seek(place)
                frames.append(file.convert("RGB"))
        return self._images([frames], return_tensors=return_tensors)


def original(folder: Path) -> Any:
    return transformers.AutoModelForVideoClassification.from_pretrained(folder).eval()


def processor_of(folder: Path) -> Any:
    return transformers.AutoImageProcessor.from_pretrained(folder)


def opened(family: str, backend: str, folder: Path, tiny_artifact: Callable[..., Artifact]) -> Any:
    source = folder if backend == "pytorch" else tiny_artifact(family, TASK)
    return accel.ORTModelForVideoClassification.from_pretrained(source, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_pipeline(
    family: str,
    backend: str,
    tiny_folder: Callable[..., Path],
    tiny_artifact: Callable[..., Artifact],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pipeline requires PyAV, although this video processor decodes files itself.
    monkeypatch.setattr("transformers.pipelines.video_classification.requires_backends", lambda *_: None)
    file = tmp_path / "video.gif"
    first, *rest = [Image.fromarray(frame) for frame in tiny_video(frames=FRAMES + 2)]
    first.save(file, save_all=True, append_images=rest)
    folder = tiny_folder(family, TASK)
    ours = opened(family, backend, folder, tiny_artifact)
    processors = {"image_processor": processor_of(folder), "video_processor": FromGif(processor_of(folder))}
    expected = transformers.pipeline(TASK, model=original(folder), **processors)(str(file))
    video = {"video_processor": processors["video_processor"]}
    for stock in (transformers.pipeline(TASK, model=ours, **processors), accel.pipeline(TASK, model=ours, **video)):
        results = stock(str(file))
        assert [result["label"] for result in results] == [result["label"] for result in expected]
        assert max(abs(a["score"] - b["score"]) for a, b in zip(results, expected, strict=True)) <= TOLERANCE
    assert ours.input_modalities == ("video",)


def rows_labelled_by(folder: Path, form: Callable[[np.ndarray], Any]) -> list[dict[str, Any]]:
    """Return videos that are labeled with PyTorch's prediction. The label of the last video is wrong."""
    model, processor = original(folder), processor_of(folder)
    rows = []
    for seed in range(4):
        video = tiny_video(seed=seed)
        with torch.inference_mode():
            label = int(model(**processor(list(video), return_tensors="pt")).logits.argmax())
        rows.append({"video": form(video), "label": label})
    rows[-1]["label"] = (rows[-1]["label"] + 1) % 3
    return rows


@pytest.mark.parametrize(
    "form",
    [lambda video: [Image.fromarray(frame) for frame in video], lambda video: video.tolist()],
    ids=["pictures", "arrays"],
)
def test_accuracy(form: Callable[[np.ndarray], Any], tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("videomae", TASK)
    report = accel.evaluate(folder, rows_labelled_by(folder, form), backend="pytorch")
    assert (report.metric, report.value) == ("accuracy", 0.75)


def test_videos_as_arrays_of_a_data_set(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("videomae", TASK)
    rows = rows_labelled_by(folder, lambda video: video)
    features = datasets.Features(
        {"frames": datasets.Array4D((FRAMES, 40, 60, 3), "uint8"), "label": datasets.Value("int64")}
    )
    data = datasets.Dataset.from_dict(
        {"frames": [row["video"] for row in rows], "label": [row["label"] for row in rows]}, features=features
    )
    assert accel.evaluate(folder, data, backend="pytorch").value == 0.75


def test_quantization_calibrated_with_videos(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder = tiny_folder("videomae", TASK)
    rows = rows_labelled_by(folder, lambda video: [Image.fromarray(frame) for frame in video])
    quantized = accel.quantize(
        tiny_artifact("videomae", TASK), tmp_path / "out", scheme="static-int8", calibration=rows
    )
    inputs = processor_of(folder)(list(tiny_video()), return_tensors="pt")
    with torch.inference_mode():
        expected = original(folder)(**inputs).logits
    logits = accel.ORTModelForVideoClassification(quantized)(**inputs).logits
    # Random weights are the worst case for quantization. The error of a trained model is a tenth of this limit.
    assert (logits - expected).abs().mean() <= 0.3 * expected.abs().mean()


def test_videos_with_too_few_frames_are_refused(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    artifact = tiny_artifact("videomae", TASK)
    few = [{"video": [Image.fromarray(frame) for frame in tiny_video(frames=2)], "label": 0}]
    with pytest.raises(InputError, match="pixel_values"):
        accel.evaluate(artifact.path, few)
    with pytest.raises(InputError, match="not a list of frames"):
        accel.evaluate(artifact.path, [{"video": [], "label": 0}, *few])


def test_model_with_unknown_number_of_frames_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = transformers.ViTConfig()  # type: ignore[assignment]
    with pytest.raises(ExportError, match="number of frames in its config is None"):
        video_sample(model, None)
