"""Compatibility modules for scripts written for other libraries: only the import line of a script changes.

In: another library's classes and arguments. Out: calls of accel's public functions, and errors if there is no
equivalent. Each library has a package or module here, such as `optimum` and `evaluate`.
"""
