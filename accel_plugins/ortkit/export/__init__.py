"""PyTorch models to ONNX artifacts."""
