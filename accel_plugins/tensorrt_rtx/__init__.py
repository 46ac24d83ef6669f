"""Backend for TensorRT for RTX: ONNX graphs with ONNX Runtime's plugin provider, and engines built on any machine."""

from dataclasses import replace

from accel.interfaces.specs import GENERATES, BackendSpec, Capability

from ..ortkit.capabilities import NVIDIA, ONNX_FOLDERS, ONNX_LAYOUTS

FORMAT = "tensorrt_rtx"
# Computation in bfloat16 is left out, because an export is checked on a CPU, and ONNX Runtime has no CPU kernels for it.
_DTYPES = ("float32", "float16")
_DOMAINS = ("",)

SPEC = BackendSpec(
    name="tensorrt-rtx",
    summary="TensorRT for RTX on NVIDIA RTX GPUs (ONNX Runtime's plugin provider, or engines built on any machine)",
    extra="tensorrt-rtx",
    impl="accel_plugins.tensorrt_rtx.backend:TensorrtRtxBackend",
    priority=14,
    # Not selected automatically: the library selects kernels on the GPU, so results differ between GPUs.
    auto=False,
    requires=("onnxruntime", "tensorrt_rtx_bindings"),
    aliases=("NvTensorRTRTXExecutionProvider", "trt-rtx"),
    distributions=("onnxruntime", "onnxruntime-ep-nv-tensorrt-rtx-cu13", "tensorrt-rtx-cu13-libs"),
    tested=(("onnxruntime", "1.30", "1.32"), ("tensorrt-rtx-cu13-libs", "1.7", "1.8")),
    layouts=ONNX_LAYOUTS,
    folder_reader=ONNX_FOLDERS,
    capabilities=(
        Capability(stage="export", produces="onnx", devices=("cuda",), dtypes=_DTYPES),
        Capability(
            stage="export",
            consumes="onnx",
            produces=FORMAT,
            devices=("cuda",),
            dtypes=_DTYPES,
            options=("capabilities", "profile"),
            # An engine has no KV cache. Decoders run as ONNX graphs, for which the provider builds an engine.
            excludes=(GENERATES,),
            searched=False,
        ),
        # `ProviderBackend` reads the options of the first capability for this stage.
        Capability(
            stage="run",
            consumes="onnx",
            devices=("cuda",),
            dtypes=(*_DTYPES, "int8"),
            domains=_DOMAINS,
            # https://github.com/NVIDIA/TensorRT-RTX-EP-ABI, version 0.5
            options=(
                "device_id",
                "enable_cuda_graph",
                "nv_detailed_build_log",
                "nv_dump_subgraphs",
                "nv_max_shared_mem_size",
                "nv_max_workspace_size",
                "nv_op_types_to_exclude",
                "nv_weight_streaming_budget",
                "profile",
            ),
            thread_safe=True,
        ),
        Capability(stage="run", consumes=FORMAT, devices=("cuda",), dtypes=(*_DTYPES, "int8"), device_io=True),
        *(
            replace(capability, dtypes=_DTYPES) if capability.stage == "optimize" else capability
            for capability in NVIDIA
        ),
    ),
)
