"""Shared parts of the backends that use ONNX Runtime, including third-party backends.

The package itself is not a backend: it has no spec and no entry point. A backend for another execution provider needs a
spec and a subclass of `provider.ProviderBackend`. The backend chooses graph rewrites from the table in `optimization`
and quantization schemes from the table in `quantization`. Each table lists the kinds of kernels that an entry is for.
"""
