"""Private and version-dependent names of transformers, torch and onnxscript, and what those libraries print while they work."""
