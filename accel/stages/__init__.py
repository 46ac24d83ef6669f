"""Artifact in, artifact out: what a model is resolved to, and the stages export, optimize, quantize and validate.

In: whatever the user named. Out: a new artifact in a new folder, compared with what it was made from. A new stage is a
module with one function of that shape. `prepare` is a stage before all: it changes a PyTorch model that its user keeps.
"""
