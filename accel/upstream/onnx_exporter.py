"""The rewriter and the operators of onnxscript, which `torch.onnx` uses.

| name | seen in | public alternative |
|---|---|---|
| `onnxscript.rewriter.rules.common._no_op.rules`, patterns' `_target_pattern`, `_abs_tol`, `_rel_tol` | 0.7 | none |
| `onnxscript.rewriter._DEFAULT_REWRITE_RULES`, matchers' `_graph`, `_match`, `_current_node` | 0.7 | none |
| rules' `try_rewrite` and `_target_pattern.output_nodes` | 0.7 | none |
| `torch.fx.experimental.proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT` | torch 2.13 | none |
| `onnxscript.TracedOnnxFunction.function_ir` as a property that is not cached | 0.7 | none |
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any


@functools.cache
def prepare_rewriter() -> None:
    """Make onnxscript's rewrite rules exact and fast. Call this before its optimizer runs.

    The rules of onnxscript 0.7 remove `x + y` for numbers `y` up to 1e-8, and `x * y` for numbers `y` from 0.99999 to 1.00001.
    They remove the epsilon of an RMSNorm with the value 1e-8 (Helium). Padding tokens, whose embeddings are zero, then become
    NaN. The rules now remove only exactly 0 and 1.

    onnxscript 0.7 tries each of its 46 rules at each node, and one of the rules reads the whole graph at each node. A rule is
    now tried only at nodes with the operator type of its result.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if hasattr(value, "_abs_tol"):
                    value._abs_tol = value._rel_tol = 0.0
    for rule in rewriter._DEFAULT_REWRITE_RULES:
        operator = rule._target_pattern.output_nodes[0].op_type
        rule.try_rewrite = functools.partial(_try_at, operator, rule.try_rewrite)


def _try_at(operator: str, try_rewrite: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
    return try_rewrite(model, graph, node, **options) if node.op_type == operator else None


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


def write_export_manifest(exported: Any, folder: Path) -> None:
    """Write the manifest and the configs that `ExportedModel.save_pretrained` writes, without the graphs."""
    from transformers.exporters.base import EXPORT_MANIFEST_FILE, EXPORT_SCHEMA_VERSION

    components = {
        name: {"file": f"{name}.onnx", "metadata": dataclasses.asdict(component.metadata)}
        for name, component in exported.components.items()
    }
    manifest = {
        "schema_version": EXPORT_SCHEMA_VERSION,
        "export_format": str(exported.export_format),
        "components": components,
    }
    (folder / EXPORT_MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for config in (exported.config, exported.generation_config):
        if config is not None:
            config.save_pretrained(folder)
