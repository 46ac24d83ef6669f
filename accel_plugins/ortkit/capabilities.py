"""What this kit does to graphs, as specs declare it; imports nothing but `accel.interfaces.specs`."""

from accel.interfaces.specs import Capability, OptionTrial, SchemeSettings

ONNX_LAYOUTS = ("*.onnx", "onnx/*.onnx", "genai_config.json")
ONNX_FOLDERS = "accel_plugins.ortkit.foreign.reader:OnnxFolderReader"
"""Reader of ONNX folders of other tools; needs no ONNX Runtime."""
FLOATS = ("float32", "float16", "bfloat16")
_PAIRS = ("preset", "per_channel", "symmetric", "operators", "exclude", "calibration", "percentile")

NVIDIA = (
    Capability(
        stage="optimize",
        consumes="onnx",
        produces="onnx",
        devices=("cuda",),
        dtypes=FLOATS,
        schemes=("O1", "O2", "O3", "O4"),
    ),
    Capability(
        stage="quantize",
        consumes="onnx",
        produces="onnx",
        devices=("cuda",),
        dtypes=("float32", "float16"),
        schemes=("static-fp8", "static-int8"),
        settings=tuple(
            SchemeSettings(name, _PAIRS, (OptionTrial("calibration", "percentile", same_speed=True),))
            for name in ("static-fp8", "static-int8")
        ),
    ),
)
"""Rewriting and quantizing graphs for NVIDIA GPUs. Eight bits are computed in floating point by ONNX Runtime's CUDA provider,
and so slower: there they show the accuracy of what TensorRT computes in 8 bits.
"""
