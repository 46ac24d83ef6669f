"""Access to private and version-dependent names of transformers, torch and onnxscript, and control of their output.

Each function has a name that does not change, and calls the feature of the installed library version, whatever its name in
that version.
"""
