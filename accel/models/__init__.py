"""Models with the transformers interface: the `ORTModelFor...` classes and pipelines, built on open sessions.

A model class opens a resolved model and gives it the interface of a transformers model, including `generate`. This package contains base
classes and shared code; the class of each task is in `accel.tasks`.
"""
