"""What backends on ONNX Runtime are built from, ours and others'. Not a backend: it has no spec and no entry point.

A backend for another execution provider needs `provider` and a spec; what its kernels want is chosen from `optimization`
and `quantization`, whose tables name it as a target.
"""
