"""What the ONNX Runtime backends share: the ONNX exporter and the session. Not a backend itself."""
