"""Explain where two models part: the layer, the error that each layer makes and carries, the cause, and the effect of remedies.

In: an artifact, and a PyTorch model or another artifact. Out: an `Explanation`. `layer_errors` pairs the layers of the two models and
compares their values; `causes` names the cause of an error; `remedies` measures changes that reduce it.
"""
