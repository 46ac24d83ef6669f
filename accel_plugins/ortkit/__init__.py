"""Shared parts of the backends that use ONNX Runtime, including third-party backends.

The package is not a backend itself: it has no spec and no entry point. A backend for another execution provider needs
`provider` and a spec. It chooses graph rewrites and schemes from the tables in `optimization` and `quantization`, which
name the targets that they apply to.
"""
