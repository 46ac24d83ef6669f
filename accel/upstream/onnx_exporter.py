"""The rewriter and the operators of onnxscript, which `torch.onnx` uses.

| name | seen in | public alternative |
|---|---|---|
| `onnxscript.rewriter.rules.common._no_op.rules`, patterns' `_target_pattern`, `_abs_tol`, `_rel_tol` | 0.7 | none |
| `onnxscript.rewriter._DEFAULT_REWRITE_RULES`, matchers' `_graph`, `_match`, `_current_node` | 0.7 | none |
| `torch.fx.experimental.proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT` | torch 2.13 | none |
| `onnxscript.TracedOnnxFunction.function_ir` as a property that is not cached | 0.7 | none |
"""

from __future__ import annotations

import functools
import sys


@functools.cache
def make_rewrites_exact() -> None:
    """Make onnxscript remove `x + 0` and `x * 1` only for exactly 0 and 1. Call this before its optimizer runs.

    The rules of onnxscript 0.7 also accept numbers up to 1e-8 as 0, and numbers up to 1.00001 as 1. They remove the epsilon of
    an RMSNorm with the value 1e-8 (Helium). Padding tokens, whose embeddings are zero, then become NaN.
    """
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if hasattr(value, "_abs_tol"):
                    value._abs_tol = value._rel_tol = 0.0


@functools.cache
def parse_operators_once() -> None:
    """Make onnxscript cache the signatures of its five hundred functions for PyTorch's operators.

    `torch.onnx` (2.12) reads the signatures of all functions for each graph, and onnxscript 0.7 parses the source code of the
    functions each time. The cache saves a tenth of the time of a small export.
    """
    from onnxscript import TracedOnnxFunction

    parse = TracedOnnxFunction.function_ir.fget
    assert parse is not None
    TracedOnnxFunction.function_ir = property(functools.cache(parse))


def release_traced_graphs() -> None:
    """Release the last graph that onnxscript and torch processed, and the model's weights in it.

    Without this call, each rewrite rule of onnxscript 0.7 references the last graph that it was tried on, and `torch.export`
    (2.13) references the nodes of its last trace, until the process ends.
    """
    from torch.fx.experimental import proxy_tensor

    # The rewriter is imported only by exports to ONNX.
    if rewriter := sys.modules.get("onnxscript.rewriter"):
        for rule in rewriter._DEFAULT_REWRITE_RULES:
            for attribute in ("_graph", "_match", "_current_node"):
                vars(rule._matcher).pop(attribute, None)
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
