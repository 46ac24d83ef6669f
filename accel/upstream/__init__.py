"""Private and version-dependent names of transformers, torch and onnxscript, and the output of those libraries while they work.

In: what the engine needs of a library. Out: a function with a stable name, whatever the installed version calls it.
"""
