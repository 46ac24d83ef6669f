"""Compatibility modules for scripts that were written for other libraries. Only the import lines of a script change.

A module provides the classes and arguments of another library, and calls accel's public functions. It raises an error for a class or
an argument that accel does not support. The modules are `optimum` and `evaluate`.
"""
