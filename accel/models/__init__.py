"""Models with the transformers interface: the `ORTModelFor...` classes and pipelines, built on open sessions.

In: a resolved model. Out: an object with the interface of a transformers model, including `generate`. This package contains base
classes and shared code; the class of each task is in `accel.tasks`.
"""
