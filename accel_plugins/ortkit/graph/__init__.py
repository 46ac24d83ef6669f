"""Functions that read, edit, write and analyze the graphs of ONNX artifacts."""
