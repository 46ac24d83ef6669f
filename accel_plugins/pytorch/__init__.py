"""PyTorch itself: transformers models as they are, the baseline of every measurement."""

from accel.interfaces.specs import GENERATES, WEIGHTS, BackendSpec, Capability, OptionTrial

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
    recorded_options=("cuda_graph",),
    capabilities=(
        Capability(stage="prepare", devices=_DEVICES, schemes=("qat",)),
        Capability(stage="export", produces=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS),
        Capability(stage="run", consumes=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS, device_io=True, thread_safe=True),
    ),
)

INDUCTOR = BackendSpec(
    name="inductor",
    summary="PyTorch's compiler: transformers models accelerated where they are",
    extra="inductor",
    impl="accel_plugins.pytorch.inductor.backend:InductorBackend",
    requires=("torch", "transformers"),
    aliases=("torch.compile",),
    distributions=("torch", "transformers", "torchao"),
    tested=(("torchao", "0.15", "0.18"),),
    recorded_options=("quantization", "graphs", "cuda_graph", "packing", "freezing"),
    capabilities=(
        Capability(stage="prepare", devices=_DEVICES, dtypes=_FLOATS, schemes=("accelerate",)),
        Capability(
            stage="run",
            consumes=WEIGHTS,
            devices=_DEVICES,
            dtypes=_FLOATS,
            excludes=(GENERATES,),
            trials=(OptionTrial("quantization", "int8"), OptionTrial("quantization", "float8", ("cuda",))),
            device_io=True,
            thread_safe=True,
        ),
        # Steps of a decoder; what else generates, `accel.accelerate(model)` compiles over transformers' static cache.
        Capability(
            stage="run",
            consumes=WEIGHTS,
            devices=("cuda",),
            dtypes=_FLOATS,
            tasks=("text-generation",),
            device_io=True,
            thread_safe=True,
        ),
    ),
)

# Of points whose number varies the compiled mask decoder makes other masks (PyTorch 2.11 to 2.13).
_NOT_COMPILED = (GENERATES, "mask-generation")

AOTINDUCTOR = BackendSpec(
    name="aotinductor",
    summary="packages of code that PyTorch's compiler made once (.pt2)",
    extra="pytorch",
    impl="accel_plugins.pytorch.aotinductor.backend:AotInductorBackend",
    # Nothing else runs its format.
    auto=True,
    requires=("torch", "transformers"),
    aliases=("pt2", "aoti"),
    distributions=("torch", "transformers"),
    capabilities=(
        Capability(
            stage="export",
            produces="pt2",
            dtypes=_FLOATS,
            excludes=_NOT_COMPILED,
            # The backend `inductor` runs what the compiler makes of each size.
            searched=False,
        ),
        Capability(
            stage="run",
            consumes="pt2",
            dtypes=_FLOATS,
            excludes=_NOT_COMPILED,
            device_io=True,
            thread_safe=True,
        ),
    ),
)
