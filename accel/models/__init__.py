"""The transformers face: `ORTModelFor…` classes and pipelines over open sessions.

In: a resolved model. Out: an object with the interface of a transformers model, `generate` included. Models of one graph
are a few lines in `encoders`; those that generate have their own modules, and pipelines that transformers lacks theirs.
"""
