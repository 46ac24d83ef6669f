"""Sessions and states over ONNX Runtime, and how its values and devices are reached."""
