"""Import the libraries that every process needs, and no runtime; processes are forked from one that did this."""

import importlib

from ..upstream.library_output import hush_imports

hush_imports()
for _name in ("torch", "transformers.generation", "transformers.modeling_utils", "accel.capture", "accel.models.base"):
    importlib.import_module(_name)
