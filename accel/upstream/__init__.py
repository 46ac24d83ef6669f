"""Access to private and version-dependent names of transformers, torch and onnxscript, and control of their output.

In: calls of functions whose names do not change. Out: the features of the installed library versions. Each function hides how
the installed version of the library names a feature.
"""
