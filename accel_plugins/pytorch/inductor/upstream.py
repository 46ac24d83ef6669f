"""Private base classes of PyTorch's compiler. Private functions are in `accel_plugins.pytorch.upstream`.

Tested with torch 2.11 to 2.15; tests/backends/test_inductor_products.py compiles with a graph pass of this package.

| name | reason | public alternative |
|---|---|---|
| `torch._inductor.custom_graph_pass.CustomGraphPass`, `get_hash_for_files` | graph pass with a version for the compiler's cache | none |
"""

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "get_hash_for_files"]
