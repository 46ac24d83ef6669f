"""A PyTorch model in, a prepared PyTorch model out: accelerated where it is, or made ready to be trained.

A way to prepare is a module with one public function: it makes its settings, a subclass of `PrepareConfig`, and hands them to
`dispatching`, which finds the backend that declares the scheme.
"""
