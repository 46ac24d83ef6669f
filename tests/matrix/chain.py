"""A case, run: the artifact made stage by stage, each stage once a run, and its answers beside those of PyTorch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import Case, parsed

from accel.artifact import Artifact
from accel.backends import registry
from accel.config import QuantizeConfig, SessionOptions
from accel.interfaces.cpu_features import cpu_flags
from accel.interfaces.task_registry import all_tasks, task_spec
from accel.models.base import model_class
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.stages.quantize import quantize
from accel.stages.validate import validate
from accel.testing.generators import GENERATORS, IMAGE_TOKEN
from accel.testing.models import VOCABULARY
from accel_plugins.pytorch.aotinductor.packages import remember
from tests.devices import placed

Tensors = dict[str, torch.Tensor]
Shared = Callable[..., Path]

FAMILY: Mapping[str, str] = {
    **dict.fromkeys((spec.name for spec in all_tasks() if not spec.generates), "bert"),
    **dict.fromkeys((spec.name for spec in all_tasks() if spec.modalities == ("audio",)), "wav2vec2"),
    "sentence-similarity": "distilbert",
    "image-classification": "vit",
    "zero-shot-image-classification": "clip",
    "object-detection": "yolos",
    "image-segmentation": "segformer",
    "depth-estimation": "glpn",
    "image-to-image": "swin2sr",
    "video-classification": "videomae",
    "zero-shot-object-detection": "owlvit",
    "mask-generation": "sam",
    "keypoint-matching": "efficientloftr",
    "zero-shot-audio-classification": "clap",
    "document-question-answering": "layoutlm",
    "table-question-answering": "tapas",
    "text-to-audio": "vits",
    "text-generation": "llama",
    # Not T5, whose tiny weights are so large that 8 bits change 40 % of its answers; here it is 4 %.
    "text2text-generation": "bart",
    "automatic-speech-recognition": "whisper",
    "image-to-text": "vit-gpt2",
    "image-text-to-text": "llava",
}
"""The family that stands for a task."""


_PIXELS: Mapping[str, tuple[int, int]] = {
    "image-classification": (32, 32),
    "object-detection": (64, 96),
    "image-segmentation": (64, 96),
    "depth-estimation": (64, 96),
    "image-to-image": (16, 16),
}


def inputs_of(task: str, *, rows: int = 3, seed: int = 0, size: tuple[int, int] | None = None) -> Tensors:
    """A batch for a tiny model of a task: texts of unequal lengths, padded as its pipeline pads them, images or speech.

    Args:
        task: Of the model.
        rows: How many.
        seed: Of what is drawn.
        size: Height and width of images, where the task's usual one is not taken.
    """
    draw = torch.Generator().manual_seed(seed)
    if task in _PIXELS:
        return {"pixel_values": torch.randn((rows, 3, *(size or _PIXELS[task])), generator=draw)}
    start = {"decoder_input_ids": torch.randint(4, VOCABULARY, (rows, 3), generator=draw)}
    if task == "keypoint-matching":
        return {"pixel_values": torch.rand((rows, 2, 3, 64, 96), generator=draw)}
    if task == "video-classification":
        return {"pixel_values": torch.randn((rows, 4, 3, 32, 32), generator=draw)}
    if FAMILY[task] == "wav2vec2":
        mask = torch.ones((rows, 900), dtype=torch.int64)
        for row in range(1, rows):
            mask[row, -100 * row :] = 0
        return {"input_values": torch.randn(mask.shape, generator=draw) * mask, "attention_mask": mask}
    if task == "automatic-speech-recognition":
        return {"input_features": torch.randn((rows, 80, 40), generator=draw), **start}
    if task == "image-to-text":
        return {"pixel_values": torch.randn((rows, 3, 32, 32), generator=draw), **start}
    if task == "mask-generation":
        points = 32 * torch.rand((rows, 4, 2, 2), generator=draw)
        labels = torch.randint(0, 2, points.shape[:-1], generator=draw)
        return {
            "pixel_values": torch.randn((rows, 3, 32, 32), generator=draw), "input_points": points, "input_labels": labels
        }  # fmt: skip
    if task in ("zero-shot-image-classification", "zero-shot-object-detection"):
        images = {"pixel_values": torch.randn((rows, 3, 32, 32), generator=draw)}
        # Any number beside images, or as many for each of them.
        count = rows + 1 if task == "zero-shot-image-classification" else 2 * rows
        texts = torch.randint(6, 100, (count, 10), generator=draw)
        return {"input_ids": texts, "attention_mask": torch.ones_like(texts), **images}
    if task == "zero-shot-audio-classification":
        sounds = {"input_features": torch.randn((rows, 1, 201, 16), generator=draw)}
        texts = torch.randint(6, 100, (rows + 1, 10), generator=draw)
        return {"input_ids": texts, "attention_mask": torch.ones_like(texts), **sounds}
    # Letters are fewer than words.
    ids = torch.randint(6, 30 if task == "text-to-audio" else 100, (rows, 10), generator=draw)
    mask = torch.ones_like(ids)
    # Decoders read on from the last token, so that they are padded in front of the first.
    for row in range(1, rows):
        padding = slice(0, row) if FAMILY[task] in ("llama", "llava") else slice(10 - 2 * row, 10)
        mask[row, padding] = 0
    if task == "image-text-to-text":
        images = torch.full((rows, 4), IMAGE_TOKEN)
        ids = torch.cat([ids[:, :5], images, ids[:, 5:]], dim=1)
        mask = torch.cat([mask[:, :5], torch.ones_like(images), mask[:, 5:]], dim=1)
        pixels = torch.randn((rows, 3, 16, 16), generator=draw)
        return {"input_ids": ids * mask, "attention_mask": mask, "pixel_values": pixels}
    feeds = {"input_ids": ids * mask, "attention_mask": mask}
    if task == "document-question-answering":
        corners, sizes = (torch.randint(0, 500, (rows, 10, 2), generator=draw) for _ in range(2))
        feeds["bbox"] = torch.cat([corners, corners + sizes], dim=-1)
    if task == "table-question-answering":
        feeds["token_type_ids"] = torch.randint(0, 2, (rows, 10, 7), generator=draw)
    if FAMILY[task] in ("bert", "layoutlm"):
        feeds["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=draw)
    if task == "multiple-choice":
        return {name: tensor.view(1, rows, -1) for name, tensor in feeds.items()}
    return {**feeds, **(start if task == "text2text-generation" else {})}


def image_size(case: Case) -> tuple[int, int] | None:
    """Of a graph that takes no other: in bfloat16 PyTorch's compiler (2.13) makes SegFormer for the usual size alone."""
    fixed = (case.task, case.exporter, case.dtype) == ("image-segmentation", "aotinductor", "bfloat16")
    return (64, 64) if fixed else None


def inputs_for(case: Case) -> Tensors:
    """The batch of a case."""
    return inputs_of(case.task, size=image_size(case))


def loaded(task: str, folder: Path) -> Any:
    """The PyTorch model of a folder."""
    return getattr(transformers, task_spec(task).auto_model).from_pretrained(folder).eval()


class Chains:
    """Makes what cases need, and remembers it.

    Args:
        shared: Folders that are made once for all processes (`tests/conftest.py`).
        tiny_folder, tiny_artifact, generator: Sources and exports that other tests have, too.
    """

    def __init__(
        self,
        shared: Shared,
        tiny_folder: Shared,
        tiny_artifact: Callable[..., Artifact],
        generator: Callable[..., Artifact],
    ) -> None:
        self._shared = shared
        self._folder = tiny_folder
        self._artifact = tiny_artifact
        self._generator = generator
        self._expected: dict[tuple[str, tuple[int, int] | None], tuple[Any, dict[str, torch.Tensor]]] = {}
        self._failed: dict[str, Exception] = {}
        self._valid: dict[str, Any] = {}

    def source(self, task: str) -> Path:
        """The PyTorch folder behind a task's cases."""
        family = FAMILY[task]
        if family in GENERATORS:
            self._generator(family)
            return self._shared(f"generator-{family}", _nothing)
        return self._folder(family, task)

    def expected(self, case: Case) -> tuple[Any, Tensors]:
        """The PyTorch model, and its outputs on `inputs_for` the case."""
        key = case.task, image_size(case)
        if key not in self._expected:
            model = loaded(case.task, self.source(case.task))
            with torch.inference_mode():
                outputs = dict(model(**inputs_for(case)))
            self._expected[key] = model, {k: v for k, v in outputs.items() if isinstance(v, torch.Tensor)}
        return self._expected[key]

    def rounding(self, case: Case) -> float:
        """How far PyTorch is off where it computes in a case's own dtype; 0 in float32."""
        if case.made_dtype == "float32":
            return 0.0
        _, expected = self.expected(case)
        dtype, feeds = getattr(torch, case.made_dtype), inputs_for(case)
        model = loaded(case.task, self.source(case.task)).to(dtype)
        with torch.inference_mode():
            found = dict(model(**{n: t.to(dtype) if t.is_floating_point() else t for n, t in feeds.items()}))
        return error_of(found, expected, kept_tokens(feeds))

    def exported(self, case: Case) -> Artifact:
        """The export of a case; those with defaults are shared with all tests."""
        family, how = FAMILY[case.task], parsed(case.capture)
        plain = not how and case.dtype == "float32"
        if plain and family in GENERATORS:
            return self._generator(family, case.exporter)
        if plain and case.exporter == "cpu":
            return self._artifact(family, case.task)
        if case.generates and case.dtype != "float32":
            # The large random weights of tiny generators let rounding grow beyond what an export accepts.
            how = {"atol": 100.0, **how}
        name = f"{family}-{case.task}-{case.exporter}" if plain else f"matrix-{_digest(case.exported)}"
        return self._made(
            name,
            lambda out: export(
                self.source(case.task), out, task=case.task, backend=case.exporter, format=case.format,
                dtype=case.dtype, **how,
            ),
        )  # fmt: skip

    def optimized(self, case: Case) -> Artifact:
        """Its export, optimized where the case says so."""
        start = self.exported(case)
        if not case.level:
            return start
        return self._made(
            f"matrix-{_digest(case.optimized)}",
            lambda out: optimize(
                start, out, level=case.level, backend=case.optimizer, atol=_atol(case),
                enable=(case.enable,) if case.enable else (),
            ),
        )  # fmt: skip

    def made(self, case: Case) -> Artifact:
        """The artifact that a case runs."""
        start = self.optimized(case)
        if not case.scheme:
            return start
        how: dict[str, Any] = {"scheme": case.scheme, **parsed(case.setting)}
        if case.quantizer == "openvino" and case.scheme == "weight-int4":
            # A block must divide the channels, of which tiny models have few.
            how = {"block_size": 16, **how}
        if "percentile" in how:
            how["calibration"] = "percentile"
        algorithms = ("gptq", "awq") if case.quantizer == "neural-compressor" else ("gptq",)
        needed = case.scheme.startswith("static") or how.get("algorithm") in algorithms or "scale_estimation" in how
        data = calibration(start) if needed else None
        return self._made(
            f"matrix-{_digest(case.made)}",
            lambda out: quantize(
                start, out, calibration=data, backend=case.quantizer, config=QuantizeConfig.from_dict(how),
                evaluate=(lambda artifact: 1.0) if "max_drop" in how else None,
            ),
        )  # fmt: skip

    def opened(self, case: Case, artifact: Artifact | Path, tmp_path: Path) -> Any:
        """The model of a case, by an artifact or a folder."""
        how, given = parsed(case.option), {}
        if "profile" in how:
            how["profile"] = str(tmp_path / "profile")
        if "provider" in how:
            given["provider_options"] = how.pop("provider")
        if how:
            given["session_options"] = SessionOptions.from_dict(how)
        cls = model_class(case.task)
        where = {"backend": case.runner, "device": placed(case.device)}
        if isinstance(artifact, Artifact):
            return cls(artifact, **where, **given)
        return cls.from_pretrained(artifact, **where, **given)

    def validated(self, case: Case, folder: Path) -> Any:
        """The library's own comparison with the source; options play no part in it."""
        key = _digest(case.made) + case.runner + case.device
        if key not in self._valid:
            self._valid[key] = validate(folder, backend=case.runner, device=placed(case.device))
        return self._valid[key]

    def _made(self, name: str, make: Callable[[Path], object]) -> Artifact:
        if name in self._failed:
            raise self._failed[name]
        try:
            artifact = Artifact.load(self._shared(name, make))
            if artifact.format == "pt2":
                # By another worker, it may be, whose home is another.
                for component in artifact.components:
                    remember(component)
            return artifact
        except Exception as error:
            self._failed[name] = error
            raise


def calibration(artifact: Artifact) -> list[Tensors]:
    """Two batches for its first graph, with every input that is no cache."""
    made = []
    for seed in (1, 2):
        feeds = inputs_of(artifact.task, seed=seed)
        ids = feeds.get("input_ids")
        if ids is not None:
            feeds["position_ids"] = torch.arange(ids.shape[1]).repeat(len(ids), 1)
            feeds["logits_to_keep"] = torch.arange(ids.shape[1])
        names = [spec.name for spec in artifact.components[0].inputs if spec.pair is None]
        made.append({name: feeds[name] for name in names})
    return made


def kept_tokens(feeds: Tensors) -> torch.Tensor | None:
    """Which tokens are no padding, where outputs have a row for each."""
    mask = feeds.get("attention_mask")
    return mask.bool() if mask is not None and "decoder_input_ids" not in feeds else None


def error_of(found: Mapping[str, Any], expected: Tensors, kept: torch.Tensor | None) -> float:
    """Mean absolute difference over real tokens, as a share of the mean absolute value; the worst output's."""
    worst = 0.0
    for name, wanted in expected.items():
        if name not in found or not wanted.is_floating_point():
            continue
        have, want = found[name].float().cpu(), wanted.float().cpu()
        assert have.shape == want.shape, name
        if kept is not None and want.shape[:2] == kept.shape:
            have, want = have[kept], want[kept]
        assert have.isfinite().all(), name
        worst = max(worst, float((have - want).abs().mean() / want.abs().mean()))
    return worst


# Shares of the mean answer. Sums in another order; ten bits of mantissa, or three digits; TF32 is in between.
_EXACT, _FLOAT16, _BFLOAT16 = 1e-4, 2e-2, 0.15
# Random weights are the hardest to round: a trained model loses a tenth of this.
_EIGHT_BITS, _FOUR_BITS = 0.3, 0.8


def tolerance(case: Case) -> float:
    """What rounding explains."""
    allowed = {"float32": _EXACT, "float16": _FLOAT16, "bfloat16": _BFLOAT16}
    found = max(allowed[case.made_dtype], allowed.get(parsed(case.option).get("compute_dtype", ""), 0.0))
    if case.level == "O3" or "tf32" in case.option:
        found = max(found, _FLOAT16)
    if "group_size" in case.option:
        # Activations are rounded to 8 bits when they meet compressed weights.
        found = max(found, _EIGHT_BITS if case.scheme else found)
    if convolves_roughly(case):
        found = max(found, _FLOAT16)
    if case.scheme:
        found += _FOUR_BITS if "int4" in case.scheme else _EIGHT_BITS
    if case.generates and case.made_dtype != "float32":
        # Their weights are large on purpose, so that rounding grows from layer to layer.
        found *= 5
    return found


def convolves_roughly(case: Case) -> bool:
    """Whether PyTorch convolves in TensorFloat-32, as it does on GPUs unless it is told otherwise."""
    on_gpu = case.runner in ("pytorch", "inductor") and case.device == "cuda"
    return on_gpu and "audio" in task_spec(case.task).modalities


def _atol(case: Case) -> float | None:
    return 100.0 if case.generates and (case.made_dtype != "float32" or case.level == "O3") else None


def missing_device(case: Case) -> str | None:
    """Why a case cannot run here."""
    if case.quantizer:
        maker = registry.probe(registry.describe(case.quantizer))
        if not maker.available and case.device != "cpu":
            # On the host everything that is declared is installed; a machine with a GPU may have less.
            return f"{case.quantizer} cannot run here: {'; '.join(map(str, maker.reasons))}"
    probe = registry.probe(registry.describe(case.runner))
    if any(device.type == case.device for device in probe.devices):
        return None
    have = ", ".join(map(str, probe.devices)) or "; ".join(map(str, probe.reasons))
    return f"{case.runner} has no device {case.device!r} here: {have}"


def misread_by_the_processor(case: Case, model: torch.nn.Module) -> str | None:
    """Why a right answer is not to be had here.

    On processors with AMX, oneDNN computes some convolutions in 16 bits wrongly, as far off as the answer is large (PyTorch 2.11,
    OpenVINO 2026.4): seen where the channels of a group are 2, 4, 8 or 16 and these times the kernel's width a multiple of 64. PyTorch's
    own error is accepted (`Chains.rounding`); in float16 it has none.

    Args:
        case: What runs.
        model: Its source.
    """
    if "amx_bf16" not in cpu_flags() or case.runner != "openvino" or case.made_dtype == "float32":
        return None
    for one in model.modules():
        if isinstance(one, torch.nn.Conv1d | torch.nn.Conv2d):
            channels = one.in_channels // one.groups
            if channels in (2, 4, 8, 16) and channels * one.kernel_size[-1] % 64 == 0:
                return f"oneDNN misreads {one} in 16 bits on this processor"
    return None


def _digest(case: Case) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', case.task)}-{hashlib.sha256(str(case).encode()).hexdigest()[:16]}"


def _nothing(folder: Path) -> None:
    raise AssertionError(f"{folder} was made before")
