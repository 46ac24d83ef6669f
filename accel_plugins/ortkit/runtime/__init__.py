"""Sessions and decoder states for ONNX Runtime, and access to its values and devices."""
