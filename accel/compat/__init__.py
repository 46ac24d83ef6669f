"""Words of other libraries, over ours: a script that was written for one changes an import line.

In: another library's classes and arguments. Out: calls of our public functions, and errors where there is no counterpart.
Each library has a folder or a module here; the next one's goes beside `optimum` and `evaluate`.
"""
