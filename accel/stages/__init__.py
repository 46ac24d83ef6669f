"""The stages export, optimize, quantize and validate, and the resolution of models.

In: a model by path, Hub id or object. Out: a new artifact in a new folder, compared with its source. Each
stage is a module with one public function that takes such a model and returns such an artifact. `prepare` is different: it
changes a PyTorch model in memory.
"""
