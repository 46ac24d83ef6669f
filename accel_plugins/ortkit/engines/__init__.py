"""Engines of NVIDIA's TensorRT libraries: building from ONNX graphs, precision, and running without ONNX Runtime.

`libraries` is the table of what differs between `tensorrt` and `tensorrt_rtx`.
"""
