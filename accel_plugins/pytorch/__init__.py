"""PyTorch itself: transformers models as they are, the baseline of every measurement."""

from accel.backends.specs import WEIGHTS, BackendSpec, Capability

_FLOATS = ("float32", "float16", "bfloat16")
_DEVICES = ("cpu", "cuda")

SPEC = BackendSpec(
    name="pytorch",
    summary="PyTorch running transformers models as they are",
    extra="pytorch",
    impl="accel_plugins.pytorch.backend:PytorchBackend",
    # Folders that hold a graph are not in its format, so it is chosen for PyTorch's own alone.
    auto=True,
    requires=("torch", "transformers"),
    aliases=("torch", "eager"),
    distributions=("torch", "transformers"),
    recorded_options=("compile", "cuda_graph"),
    capabilities=(
        Capability(stage="prepare", devices=_DEVICES, schemes=("qat",)),
        Capability(stage="export", produces=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS),
        Capability(stage="run", consumes=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS, device_io=True, thread_safe=True),
    ),
)
