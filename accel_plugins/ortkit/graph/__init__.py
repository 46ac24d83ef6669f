"""Reading, editing and writing the graphs of ONNX artifacts, and what can be known of them without running."""
