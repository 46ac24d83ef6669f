"""Run a case of the matrix: make its artifacts stage by stage, each only once in a test run, and compare its outputs
with PyTorch.
"""

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
from accel.testing.generative_models import GENERATORS
from accel.testing.tiny_batches import tiny_batch
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
    # T5 is not used for this task, because its tiny model has large weights: 8-bit weights change its outputs by 40 %,
    # and BART's outputs by 4 %.
    "text2text-generation": "bart",
    "automatic-speech-recognition": "whisper",
    "image-to-text": "vit-gpt2",
    "image-text-to-text": "llava",
}
"""Model family used for each task."""


def image_size(case: Case) -> tuple[int, int] | None:
    """Return a fixed image size for one case, and `None` for all other cases. In bfloat16, PyTorch's compiler (version
    2.13) compiles SegFormer correctly only for its default size.
    """
    fixed = (case.task, case.exporter, case.dtype) == ("image-segmentation", "aotinductor", "bfloat16")
    return (64, 64) if fixed else None


def torch_outputs(case: Case, model: torch.nn.Module, inputs: Tensors) -> Tensors:
    """Return the tensors that a PyTorch model computes. In a batch, transformers (5.23) mixes the matches of
    EfficientLoFTR's image pairs, so each pair runs alone.
    """
    alone = case.task == "keypoint-matching"
    batches = (
        [{n: t[i : i + 1] for n, t in inputs.items()} for i in range(len(inputs["pixel_values"]))]
        if alone
        else [inputs]
    )
    with torch.inference_mode():
        outputs = [dict(model(**batch)) for batch in batches]
    tensors = {
        name: [row_outputs[name] for row_outputs in outputs]
        for name, value in outputs[0].items()
        if isinstance(value, torch.Tensor)
    }
    return {name: torch.cat(values) if alone else values[0] for name, values in tensors.items()}


def loaded(task: str, folder: Path) -> Any:
    """Load the PyTorch model of a folder."""
    return getattr(transformers, task_spec(task).auto_model).from_pretrained(folder).eval()


class Chains:
    """Creator and cache of the artifacts and expected outputs of cases.

    Args:
        shared: Fixture for folders that are made once for all processes (`tests/conftest.py`).
        tiny_folder, tiny_artifact, generator: Fixtures for source folders and exports that other tests also use.
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
        self._tiny_artifact = tiny_artifact
        self._generator = generator
        self._expected: dict[tuple[str, tuple[int, int] | None], tuple[Any, dict[str, torch.Tensor]]] = {}
        self._failed: dict[str, Exception] = {}
        self._valid: dict[str, Any] = {}

    def source(self, task: str) -> Path:
        """Return the folder of the PyTorch model from which the cases of a task are exported."""
        family = FAMILY[task]
        if family in GENERATORS:
            self._generator(family)
            return self._shared(f"generator-{family}", _nothing)
        return self._folder(family, task)

    def inputs(self, case: Case) -> Tensors:
        """Return the input batch of a case."""
        config = transformers.AutoConfig.from_pretrained(self.source(case.task))
        return tiny_batch(case.task, config, size=image_size(case))

    def expected(self, case: Case) -> tuple[Any, Tensors]:
        """Return the PyTorch model of a case, and its outputs for the inputs of the case."""
        key = case.task, image_size(case)
        if key not in self._expected:
            model = loaded(case.task, self.source(case.task))
            self._expected[key] = model, torch_outputs(case, model, self.inputs(case))
        return self._expected[key]

    def rounding(self, case: Case) -> float:
        """Return the error of PyTorch in the data type of the case, compared with PyTorch in float32. The error is 0
        for float32.
        """
        if case.made_dtype == "float32":
            return 0.0
        _, expected = self.expected(case)
        dtype, feeds = getattr(torch, case.made_dtype), self.inputs(case)
        model = loaded(case.task, self.source(case.task)).to(dtype)
        outputs = torch_outputs(case, model, {n: t.to(dtype) if t.is_floating_point() else t for n, t in feeds.items()})
        return error_of(outputs, expected, kept_tokens(feeds))

    def exported(self, case: Case) -> Artifact:
        """Return the exported artifact of a case. All tests share the exports with default settings."""
        family, how = FAMILY[case.task], parsed(case.capture)
        plain = not how and case.dtype == "float32"
        if plain and family in GENERATORS:
            return self._generator(family, case.exporter)
        if plain and case.exporter == "cpu":
            return self._tiny_artifact(family, case.task)
        if case.generates and case.dtype != "float32":
            # Tiny generators have large random weights, so their rounding errors exceed the usual tolerance of an
            # export.
            how = {"atol": 100.0, **how}
        name = f"{family}-{case.task}-{case.exporter}" if plain else f"matrix-{_digest(case.exported)}"
        return self._saved(
            name,
            lambda out: export(
                self.source(case.task), out, task=case.task, backend=case.exporter, format=case.format,
                dtype=case.dtype, **how,
            ),
        )  # fmt: skip

    def optimized(self, case: Case) -> Artifact:
        """Return the exported artifact of a case. It is optimized if the case has an optimization level."""
        start = self.exported(case)
        if not case.level:
            return start
        return self._saved(
            f"matrix-{_digest(case.optimized)}",
            lambda out: optimize(
                start, out, level=case.level, backend=case.optimizer, atol=_atol(case),
                enable=(case.enable,) if case.enable else (),
            ),
        )  # fmt: skip

    def artifact(self, case: Case) -> Artifact:
        """Return the artifact that a case runs."""
        start = self.optimized(case)
        if not case.scheme:
            return start
        how: dict[str, Any] = {"scheme": case.scheme, **parsed(case.setting)}
        if case.quantizer == "openvino" and case.scheme == "weight-int4":
            # The block size must divide the number of channels, and tiny models have few channels.
            how = {"block_size": 16, **how}
        if "percentile" in how:
            how["calibration"] = "percentile"
        algorithms = ("gptq", "awq") if case.quantizer == "neural-compressor" else ("gptq",)
        needed = case.scheme.startswith("static") or how.get("algorithm") in algorithms or "scale_estimation" in how
        data = calibration(start) if needed else None
        return self._saved(
            f"matrix-{_digest(case.without_run)}",
            lambda out: quantize(
                start, out, calibration=data, backend=case.quantizer, config=QuantizeConfig.from_dict(how),
            ),
        )  # fmt: skip

    def opened(self, case: Case, artifact: Artifact | Path, tmp_path: Path) -> Any:
        """Open the model of a case from an artifact or a folder."""
        how, loading = parsed(case.option), {}
        if "profile" in how:
            how["profile"] = str(tmp_path / "profile")
        if "provider" in how:
            loading["provider_options"] = how.pop("provider")
        if how:
            loading["session_options"] = SessionOptions.from_dict(how)
        cls = model_class(case.task)
        where = {"backend": case.runner, "device": placed(case.device)}
        if isinstance(artifact, Artifact):
            return cls(artifact, **where, **loading)
        return cls.from_pretrained(artifact, **where, **loading)

    def validated(self, case: Case, folder: Path) -> Any:
        """Return the result of `accel.validate` for a case. The result is cached without the session options, because
        validation ignores them.
        """
        key = _digest(case.without_run) + case.runner + case.device
        if key not in self._valid:
            self._valid[key] = validate(folder, backend=case.runner, device=placed(case.device))
        return self._valid[key]

    def _saved(self, name: str, make: Callable[[Path], object]) -> Artifact:
        if name in self._failed:
            raise self._failed[name]
        try:
            artifact = Artifact.load(self._shared(name, make))
            if artifact.format == "pt2":
                # A pytest worker with another home folder may have made the package, so record the package as trusted
                # in this process.
                for component in artifact.components:
                    remember(component)
            return artifact
        except Exception as error:
            self._failed[name] = error
            raise


def calibration(artifact: Artifact) -> list[Tensors]:
    """Return two calibration batches for the first graph of an artifact, with every input except the KV cache."""
    config, batches = transformers.AutoConfig.from_pretrained(artifact.path), []
    for seed in (1, 2):
        feeds = tiny_batch(artifact.task, config, seed=seed)
        ids = feeds.get("input_ids")
        if ids is not None:
            feeds["position_ids"] = torch.arange(ids.shape[1]).repeat(len(ids), 1)
            feeds["logits_to_keep"] = torch.arange(ids.shape[1])
        names = [spec.name for spec in artifact.components[0].inputs if spec.pair is None]
        batches.append({name: feeds[name] for name in names})
    return batches


def kept_tokens(feeds: Tensors) -> torch.Tensor | None:
    """Return a mask of the tokens that are not padding, or `None` if the outputs have no value for each token."""
    mask = feeds.get("attention_mask")
    return mask.bool() if mask is not None and "decoder_input_ids" not in feeds else None


def error_of(actual: Mapping[str, Any], expected: Tensors, mask: torch.Tensor | None) -> float:
    """Return the largest relative error of all outputs: the mean absolute difference divided by the mean absolute
    value, without padding tokens.
    """
    worst = 0.0
    for name, reference in expected.items():
        if name not in actual or not reference.is_floating_point():
            continue
        actual_values, expected_values = actual[name].float().cpu(), reference.float().cpu()
        assert actual_values.shape == expected_values.shape, name
        if mask is not None and expected_values.shape[:2] == mask.shape:
            actual_values, expected_values = actual_values[mask], expected_values[mask]
        assert actual_values.isfinite().all(), name
        worst = max(worst, float((actual_values - expected_values).abs().mean() / expected_values.abs().mean()))
    return worst


# The tolerances are relative to the mean absolute output. The float32 tolerance allows for another order of additions.
# Float16 and TF32 have ten mantissa bits, and bfloat16 has seven.
_EXACT, _FLOAT16, _BFLOAT16 = 1e-4, 2e-2, 0.15
# Random weights are the hardest weights to quantize. A trained model has a tenth of this error.
_EIGHT_BITS, _FOUR_BITS = 0.3, 0.8


def tolerance(case: Case) -> float:
    """Return the relative error that rounding can cause in a case."""
    allowed = {"float32": _EXACT, "float16": _FLOAT16, "bfloat16": _BFLOAT16}
    limit = max(allowed[case.made_dtype], allowed.get(parsed(case.option).get("compute_dtype", ""), 0.0))
    if case.level == "O3" or "tf32" in case.option:
        limit = max(limit, _FLOAT16)
    if "group_size" in case.option:
        # Activations are rounded to 8 bits when a runtime multiplies them with compressed weights.
        limit = max(limit, _EIGHT_BITS if case.scheme else limit)
    if convolves_roughly(case):
        limit = max(limit, _FLOAT16)
    if case.scheme:
        limit += _FOUR_BITS if "int4" in case.scheme else _EIGHT_BITS
    if case.task == "keypoint-matching" and "int4" in case.scheme:
        # A matching score is a product of two softmaxes, so it amplifies the errors of the weights.
        limit *= 2
    if case.generates and case.made_dtype != "float32":
        # The random weights of tiny generators are large on purpose, so rounding errors grow from layer to layer.
        limit *= 5
    return limit


def convolves_roughly(case: Case) -> bool:
    """Return whether PyTorch computes the convolutions of a case in TensorFloat-32, which is its default on GPUs."""
    on_gpu = case.runner in ("pytorch", "inductor") and case.device == "cuda"
    return on_gpu and "audio" in task_spec(case.task).modalities


def _atol(case: Case) -> float | None:
    return 100.0 if case.generates and (case.made_dtype != "float32" or case.level == "O3") else None


def missing_device(case: Case) -> str | None:
    """Return the reason why a case cannot run on this machine, or `None`."""
    if case.quantizer:
        maker = registry.probe(registry.describe(case.quantizer))
        if not maker.available and case.device != "cpu":
            # For cases on the device `cpu`, all declared packages must be installed. For cases on other devices, the
            # machine may lack some packages.
            return f"the quantizer {case.quantizer} cannot run on this machine: {'; '.join(map(str, maker.reasons))}"
    probe = registry.probe(registry.describe(case.runner))
    if any(device.type == case.device for device in probe.devices):
        return None
    devices = ", ".join(map(str, probe.devices)) or "; ".join(map(str, probe.reasons))
    return f"the backend {case.runner} finds no device {case.device!r} on this machine; its devices are: {devices}"


def misread_by_the_processor(case: Case, model: torch.nn.Module) -> str | None:
    """Return the reason why this processor cannot compute the case correctly, or `None`.

    On processors with AMX, oneDNN computes some 16-bit convolutions incorrectly, with an error as large as the output
    (PyTorch 2.11, OpenVINO 2026.4). The error was observed if a group has 2, 4, 8 or 16 channels and the number of
    channels times the kernel width is a multiple of 64. `Chains.rounding` accounts for the same error in PyTorch, but
    in float16 PyTorch has no such error.

    Args:
        case: Case to run.
        model: Source model in PyTorch.
    """
    if "amx_bf16" not in cpu_flags() or case.runner != "openvino" or case.made_dtype == "float32":
        return None
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):
            channels = module.in_channels // module.groups
            if channels in (2, 4, 8, 16) and channels * module.kernel_size[-1] % 64 == 0:
                return f"oneDNN computes wrong results for {module} in 16 bits on this CPU"
    return None


def _digest(case: Case) -> str:
    return f"{re.sub('[^a-z0-9]+', '-', case.task)}-{hashlib.sha256(str(case).encode()).hexdigest()[:16]}"


def _nothing(folder: Path) -> None:
    raise AssertionError(f"{folder} was made before")
