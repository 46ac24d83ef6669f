"""Capabilities that the backends for ONNX Runtime declare in their specs.

This module imports only `accel.interfaces.specs`, so that a spec can be read without an import of ONNX Runtime.
"""

from accel.interfaces.specs import Capability, OptionTrial, SchemeSettings

ONNX_LAYOUTS = ("*.onnx", "onnx/*.onnx", "genai_config.json")
ONNX_FOLDERS = "accel_plugins.ortkit.foreign.reader:OnnxFolderReader"
"""Import path of the reader for ONNX folders that other tools wrote; the reader does not need ONNX Runtime."""
ONNX_WRITERS = (
    ("transformers.js", "accel_plugins.ortkit.layouts.onnx_folders:TransformersJsWriter"),
    ("optimum", "accel_plugins.ortkit.layouts.onnx_folders:OptimumWriter"),
    ("model-package", "accel_plugins.ortkit.layouts.model_package:ModelPackageWriter"),
)
"""Layouts of other libraries, with the import path of the class that writes each layout."""
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
"""Capabilities to rewrite and quantize graphs for NVIDIA GPUs.

ONNX Runtime's CUDA provider computes 8-bit graphs in floating point, so they are slower there. Use them to measure the
accuracy that TensorRT reaches when it computes in 8 bits.
"""
