"""Rewritten variants ("forms") of an ONNX graph that are faster on a GPU and correct for some attention masks."""
