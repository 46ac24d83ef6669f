"""Compatibility modules for scripts that were written for other libraries. Only the import lines of a script change.

In: the classes and arguments of another library. Out: calls of accel's public functions, and errors for classes and arguments that
accel does not support. The modules are `optimum` and `evaluate`.
"""
