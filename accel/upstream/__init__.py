"""Access to private and version-dependent names of transformers, torch and onnxscript, and control of their output.

In: calls with stable names. Out: the features of the installed library versions. Each function has a stable name and
hides how the installed version of the library names the feature.
"""
