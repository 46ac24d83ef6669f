"""Imports of the libraries that every process needs, without the runtimes of backends. The fork server runs this module once."""

import importlib

from ..upstream.output_silencing import hush_imports

hush_imports()
for _name in ("torch", "transformers.generation", "transformers.modeling_utils", "accel.capture", "accel.models.base"):
    importlib.import_module(_name)
