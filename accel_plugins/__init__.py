"""Backends that ship with `accel`, one folder each. `ort` is what the ONNX Runtime backends share, not a backend."""
