"""The rewriter and the operators of onnxscript, under `torch.onnx`.

| name | seen in | public alternative |
|---|---|---|
| `onnxscript.rewriter.rules.common._no_op.rules`, patterns' `_target_pattern`, `_abs_tol`, `_rel_tol` | 0.7 | none |
| `onnxscript.rewriter._DEFAULT_REWRITE_RULES`, matchers' `_graph`, `_match`, `_current_node` | 0.7 | none |
| `torch.fx.experimental.proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT` | torch 2.13 | none |
| `onnxscript.TracedOnnxFunction.function_ir` as a property that is not cached | 0.7 | none |
"""

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


@functools.cache
def parse_operators_once() -> None:
    """Let onnxscript keep the signatures of its five hundred functions for PyTorch's operators.

    `torch.onnx` (2.12) asks for all of them with each graph, and onnxscript 0.7 parses their source each time: a tenth of the
    time of a small export.
    """
    from onnxscript import TracedOnnxFunction

    parse = TracedOnnxFunction.function_ir.fget
    assert parse is not None
    TracedOnnxFunction.function_ir = property(functools.cache(parse))


def release_traced_graphs() -> None:
    """Let the libraries let go of the graph that they looked at last, and with it of the model's weights.

    Each rule of onnxscript (0.7) keeps the graph that it was tried on, and `torch.export` (2.13) the nodes of its last trace, both
    for as long as the process runs.
    """
    from onnxscript import rewriter
    from torch.fx.experimental import proxy_tensor

    for rule in rewriter._DEFAULT_REWRITE_RULES:
        for kept in ("_graph", "_match", "_current_node"):
            vars(rule._matcher).pop(kept, None)
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
