"""Backend that runs ONNX graphs with ONNX Runtime on the CPU."""

from accel.interfaces.specs import GENERATES, BackendSpec, Capability, OptionTrial, SchemeSettings

from ..ortkit.capabilities import ONNX_FOLDERS, ONNX_LAYOUTS, ONNX_WRITERS

# bfloat16 is missing because ONNX Runtime has no CPU kernels for it.
_DTYPES = ("float32", "float16", "int8")
_COMMON = ("preset", "symmetric", "operators", "exclude")
# Larger blocks of 4-bit weights lose some accuracy, but are faster: in Qwen2-0.5B, a decoding step of the layers takes
# 20 % less time, and the prompt takes 30 % less time.
_BLOCKS = (OptionTrial("block_size", 128, tasks=(GENERATES,)),)

SPEC = BackendSpec(
    name="cpu",
    summary="ONNX Runtime on the CPU",
    extra="onnxruntime",
    impl="accel_plugins.cpu.backend:CpuBackend",
    priority=10,
    auto=True,
    requires=("onnxruntime",),
    aliases=("CPUExecutionProvider", "onnxruntime", "ort"),
    distributions=("onnxruntime",),
    tested=(("onnxruntime", "1.30", "1.32"),),
    conflicts=(("onnxruntime", "onnxruntime-gpu"),),
    native_options="onnxruntime.SessionOptions",
    layouts=ONNX_LAYOUTS,
    folder_reader=ONNX_FOLDERS,
    written_layouts=ONNX_WRITERS,
    capabilities=(
        Capability(
            stage="export", produces="onnx", dtypes=("float32", "float16"), schemes=("weight-int8", "weight-int4")
        ),
        Capability(
            stage="optimize",
            consumes="onnx",
            produces="onnx",
            dtypes=("float32", "float16"),
            schemes=("O1", "O2", "O3", "O4"),
        ),
        Capability(
            stage="quantize",
            consumes="onnx",
            produces="onnx",
            schemes=("dynamic-int8", "static-int8", "weight-int8", "weight-int4"),
            settings=(
                SchemeSettings("dynamic-int8", (*_COMMON, "per_channel")),
                SchemeSettings(
                    "static-int8",
                    (*_COMMON, "per_channel", "calibration", "percentile", "format", "smooth_quant"),
                    (OptionTrial("calibration", "percentile", same_speed=True),),
                ),
                SchemeSettings("weight-int8", (*_COMMON, "block_size"), _BLOCKS),
                SchemeSettings("weight-int4", (*_COMMON, "block_size", "algorithm", "ratio"), _BLOCKS),
            ),
        ),
        Capability(stage="run", consumes="onnx", dtypes=_DTYPES, thread_safe=True),
    ),
)
