"""Spec of a toy backend, which runs `torch.export` programs with PyTorch. It imports only the interface modules."""

from accel.interfaces.specs import BackendSpec, Capability

SPEC = BackendSpec(
    name="toy",
    summary="PyTorch running torch.export programs (a template for your own backend)",
    extra="accel-toy",
    impl="accel_toy.backend:ToyBackend",
    requires=("torch",),
    capabilities=(
        Capability(stage="export", produces="torch_program"),
        Capability(stage="run", consumes="torch_program", thread_safe=True),
    ),
)
