"""The backends that ship with `accel`, one folder each. The folder `ort` is not a backend: the ONNX Runtime backends
share its code.
"""
