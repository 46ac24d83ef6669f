"""Replacement of `optimum.onnxruntime` and `optimum.intel`, implemented by accel. Only the import lines of a script change.

The package has the same public names as the two packages of Optimum, and imports a name when it is used for the first time. The model
classes are accel classes with Optimum's behaviour (see `models`). The optimizer and the quantizers convert Optimum's settings and call
accel's functions. Importing a class that accel does not support raises an error with the reason.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import BackendUnavailableError
from . import constants

_MODULE_OF = {
    "AutoCalibrationConfig": "calibration",
    "AutoOptimizationConfig": "optimization",
    "AutoQuantizationConfig": "quantization",
    "CalibrationConfig": "calibration",
    "CalibrationMethod": "calibration",
    "get_device_for_provider": "providers",
    "get_provider_for_device": "providers",
    "OptimizationConfig": "optimization",
    "ORTConfig": "ort_config",
    "ORTDecoderForSeq2Seq": "graph_parts",
    "ORTEncoder": "graph_parts",
    "ORTModel": "models",
    "ORTOptimizer": "optimization",
    "ORTQuantizableOperator": "quantization",
    "ORTQuantizer": "quantization",
    "OVConfig": "openvino",
    "OVModel": "models",
    "OVQuantizationConfig": "openvino",
    "OVQuantizer": "openvino",
    "OVWeightQuantizationConfig": "openvino",
    "pipeline": "models",
    "QuantFormat": "quantization",
    "QuantizationConfig": "quantization",
    "QuantizationMode": "quantization",
    "QuantType": "quantization",
    **dict.fromkeys((name for name in vars(constants) if name.isupper()), "constants"),
}
# Maps names of model classes in Optimum to the names of the same classes in accel, if the names differ.
_SAME_AS = {
    "ORTModelForPix2Struct": "ORTModelForVision2Seq",
    "OVModelForPix2Struct": "OVModelForVision2Seq",
    "OVModelForVisualCausalLM": "OVModelForImageTextToText",
    "OVModelForMultimodalLM": "OVModelForImageTextToText",
    "OVSamModel": "OVModelForMaskGeneration",
}
_DIFFUSION_MODELS = ("DiffusionPipeline", "PipelineFor", "StableDiffusion", "LatentConsistency", "Flux")
_DIFFUSION = "accel does not support diffusion models"
# Reasons why accel does not provide a class of Optimum, by the start of the class name.
_ABSENT = {
    **dict.fromkeys((f"ORT{name}" for name in _DIFFUSION_MODELS), _DIFFUSION),
    **dict.fromkeys((f"OV{name}" for name in (*_DIFFUSION_MODELS, "LTX", "Sana", "QwenImage")), _DIFFUSION),
    "OVMixedQuantizationConfig": "accel quantizes each graph with one scheme; ratio=... mixes 4-bit and 8-bit weights",
    "OVPipelineQuantizationConfig": "accel quantizes all graphs of a model with the same scheme",
    "OVCalibrationDataset": "calibration data can be a datasets.Dataset or a list of dictionaries, without a special class",
    "OVSentenceTransformer": "sentence-transformers can use OpenVINO directly: SentenceTransformer(..., backend='openvino')",
    "OVModelOpenCLIP": "accel supports only models of transformers, and open_clip is another library",
    "OVModelForTextToSpeechSeq2Seq": "accel does not support SpeechT5; for VITS, use OVModelForTextToWaveform",
}


def _task_classes() -> list[str]:
    import accel

    ours = [name.removeprefix("ORT") for name in accel.__all__ if name.startswith("ORTModelFor")]
    return [f"{kind}{name}" for kind in ("ORT", "OV") for name in ours]


__all__ = sorted([*_MODULE_OF, *_SAME_AS, *_task_classes()])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'models')}")
        value = globals()[name] = getattr(module, _SAME_AS.get(name, name))
        return value
    for beginning, why in _ABSENT.items():
        if name.startswith(beginning):
            raise BackendUnavailableError(
                f"accel.compat.optimum does not provide Optimum's {name}: {why}.",
                fix="read the guide 'Coming from Optimum' (docs/guides/from-optimum.md).",
            )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
