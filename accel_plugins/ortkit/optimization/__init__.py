"""Graph rewrites that make ONNX graphs faster, the table that lists them, and conversion to half precision."""
