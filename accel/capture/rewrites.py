"""What the libraries under the trace rewrite, held to what is exact."""

from __future__ import annotations

import functools


@functools.cache
def make_rewrites_exact() -> None:
    """Let onnxscript drop `x + 0` and `x * 1` for 0 and 1 alone.

    Its rules take any number up to 1e-8 for 0 and up to 1.00001 for 1 (onnxscript 0.7). That removes the epsilon of an
    RMSNorm (Helium's is 1e-8), which makes NaN of padding, whose embeddings are zeros. Call it before its optimizer runs.
    """
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if hasattr(value, "_abs_tol"):
                    value._abs_tol = value._rel_tol = 0.0
