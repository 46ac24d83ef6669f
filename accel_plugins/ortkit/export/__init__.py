"""Export of PyTorch models to ONNX artifacts."""
