"""Packages of compiled code: a model through PyTorch's compiler once, and opened without compiling ever after."""
