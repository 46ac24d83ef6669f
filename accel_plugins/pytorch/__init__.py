"""PyTorch backends. `pytorch` runs transformers models unchanged and is the baseline of every benchmark."""

from dataclasses import replace

from accel.interfaces.specs import GENERATES, WEIGHTS, BackendSpec, Capability, OptionTrial

_FLOATS = ("float32", "float16", "bfloat16")
_DEVICES = ("cpu", "cuda")
_RUN = Capability(stage="run", consumes=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS, device_io=True, thread_safe=True)

SPEC = BackendSpec(
    name="pytorch",
    summary="PyTorch, which runs transformers models unchanged",
    extra="pytorch",
    impl="accel_plugins.pytorch.backend:PytorchBackend",
    # accel chooses this backend automatically only for folders with PyTorch weights. Folders with an ONNX graph have
    # another format.
    auto=True,
    requires=("torch", "transformers"),
    aliases=("torch", "eager"),
    distributions=("torch", "transformers"),
    recorded_options=("cuda_graph",),
    capabilities=(
        Capability(stage="prepare", devices=_DEVICES, schemes=("qat",)),
        Capability(stage="export", produces=WEIGHTS, devices=_DEVICES, dtypes=_FLOATS),
        _RUN,
    ),
)

INDUCTOR = BackendSpec(
    name="inductor",
    summary="PyTorch's compiler, which accelerates transformers models in place",
    extra="inductor",
    impl="accel_plugins.pytorch.inductor.backend:InductorBackend",
    requires=("torch", "transformers"),
    aliases=("torch.compile",),
    distributions=("torch", "transformers", "torchao"),
    tested=(("torchao", "0.15", "0.18"),),
    recorded_options=("quantization", "graphs", "cuda_graph", "packing", "freezing"),
    capabilities=(
        Capability(stage="prepare", devices=_DEVICES, dtypes=_FLOATS, schemes=("accelerate",)),
        replace(
            _RUN,
            excludes=(GENERATES,),
            trials=(OptionTrial("quantization", "int8"), OptionTrial("quantization", "float8", ("cuda",))),
        ),
        # Compiled decoding steps for decoder-only models. For other models that generate text, use
        # `accel.accelerate(model)`, which compiles them with the static KV cache of transformers.
        replace(_RUN, devices=("cuda",), tasks=("text-generation",)),
    ),
)

# Tasks whose models the backend cannot compile. For mask generation (SAM), the compiled mask decoder computes wrong
# masks if the number of prompt points varies (PyTorch 2.11 to 2.13).
_NOT_COMPILED = (GENERATES, "mask-generation")

AOTINDUCTOR = BackendSpec(
    name="aotinductor",
    summary="Packages of code compiled ahead of time by PyTorch's compiler (.pt2)",
    extra="pytorch",
    impl="accel_plugins.pytorch.aotinductor.backend:AotInductorBackend",
    # accel may choose this backend automatically, because no other backend runs packages of compiled code.
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
            # `accel tune` does not try this backend. It tries the backend `inductor`, which compiles for each input
            # size.
            searched=False,
        ),
        replace(_RUN, consumes="pt2", devices=("cpu",), excludes=_NOT_COMPILED),
    ),
)
