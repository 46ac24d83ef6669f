"""The stages export, optimize, quantize and validate, and the resolution of models.

In: a model by path, Hub id or object. Out: a new artifact in a new folder, compared with its source. A new stage
is a module with one function of this shape. `prepare` is different: it changes a PyTorch model in memory.
"""
