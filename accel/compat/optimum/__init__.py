"""The names of `optimum.onnxruntime` and `optimum.intel`, over ours: a script changes its import line.

Names are imported when first used. The model classes are ours with Optimum's habits (`models`); optimizer and quantizers
translate settings and call our stages. A name that Optimum has and this module lacks says why when it is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import BackendUnavailableError

_MODULE_OF = {
    "AutoCalibrationConfig": "calibration",
    "AutoOptimizationConfig": "optimization",
    "AutoQuantizationConfig": "quantization",
    "CalibrationConfig": "calibration",
    "CalibrationMethod": "calibration",
    "get_device_for_provider": "providers",
    "get_provider_for_device": "providers",
    "OptimizationConfig": "optimization",
    "ORTConfig": "records",
    "ORTDecoderForSeq2Seq": "parts",
    "ORTEncoder": "parts",
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
    **dict.fromkeys(
        (
            "DECODER_MERGED_ONNX_FILE_PATTERN",
            "DECODER_ONNX_FILE_PATTERN",
            "DECODER_WITH_PAST_ONNX_FILE_PATTERN",
            "ENCODER_ONNX_FILE_PATTERN",
            "ONNX_DECODER_MERGED_NAME",
            "ONNX_DECODER_NAME",
            "ONNX_DECODER_WITH_PAST_NAME",
            "ONNX_ENCODER_NAME",
            "ONNX_FILE_PATTERN",
            "ONNX_WEIGHTS_NAME",
            "OV_DECODER_NAME",
            "OV_DECODER_WITH_PAST_NAME",
            "OV_ENCODER_NAME",
            "OV_XML_FILE_NAME",
        ),
        "constants",
    ),
}
# Task classes that Optimum names otherwise than we do.
_SAME_AS = {
    "ORTModelForPix2Struct": "ORTModelForVision2Seq",
    "OVModelForPix2Struct": "OVModelForVision2Seq",
    "OVModelForVisualCausalLM": "OVModelForImageTextToText",
    "OVModelForMultimodalLM": "OVModelForImageTextToText",
    "OVSamModel": "OVModelForMaskGeneration",
}
_DIFFUSION = "diffusion models are out of scope"
# Beginnings of names that Optimum has and we do not, and why.
_ABSENT = {
    "ORTDiffusionPipeline": _DIFFUSION,
    "ORTPipelineFor": _DIFFUSION,
    "ORTStableDiffusion": _DIFFUSION,
    "ORTLatentConsistency": _DIFFUSION,
    "ORTFlux": _DIFFUSION,
    "OVDiffusionPipeline": _DIFFUSION,
    "OVPipelineFor": _DIFFUSION,
    "OVStableDiffusion": _DIFFUSION,
    "OVLatentConsistency": _DIFFUSION,
    "OVFlux": _DIFFUSION,
    "OVLTX": _DIFFUSION,
    "OVSana": _DIFFUSION,
    "OVQwenImage": _DIFFUSION,
    "OVMixedQuantizationConfig": "one graph gets one scheme; 4 and 8 bits of weights are mixed by ratio=...",
    "OVPipelineQuantizationConfig": "all graphs of a model get one scheme",
    "OVCalibrationDataset": "calibration data are rows: pass a datasets.Dataset or a list of dictionaries",
    "OVSentenceTransformer": "sentence-transformers runs on OpenVINO itself: SentenceTransformer(..., backend='openvino')",
    "OVModelOpenCLIP": "open_clip's models are not transformers' ones",
    "OVModelForTextToSpeechSeq2Seq": "SpeechT5 writes its sound in steps; VITS is OVModelForTextToWaveform",
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
                f"Optimum's {name} has no counterpart here: {why}.", fix="see the guide 'Coming from Optimum'."
            )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
