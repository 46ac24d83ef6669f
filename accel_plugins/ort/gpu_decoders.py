"""Layers of decoders in the form that ONNX Runtime's CUDA kernels compute with few launches."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common as passes

from .analysis import dims
from .attention import producer
from .graphs import MICROSOFT, nodes, replace_value, root_graph

_HEADS_FIRST = [0, 2, 1, 3]


def fuse_skip_rms_norms(model: ir.Model) -> int:
    """Residual sum and RMSNorm as `SkipSimplifiedLayerNormalization`."""
    count = 0
    for norm in nodes(model, "SimplifiedLayerNormalization"):
        add = producer(norm.inputs[0], "Add")
        sizes = dims(norm.outputs[0])
        if add is None or sizes is None or len(sizes) != 3 or any(output.uses() for output in norm.outputs[1:]):
            continue
        total = add.outputs[0]
        if any(dims(term) != sizes for term in add.inputs) or total.is_graph_output():
            continue
        shared = len(total.uses()) > 1
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            num_outputs=4 if shared else 1,
            domain=MICROSOFT,
            name=f"{norm.name}.skip",
        )
        fused.outputs[0].type, fused.outputs[0].shape = norm.outputs[0].type, norm.outputs[0].shape
        graph = root_graph(norm)
        # Where the sum was: it may be read before the normalisation stands in the graph.
        graph.insert_after(add, fused)
        replace_value(norm.outputs[0], fused.outputs[0])
        graph.remove(norm, safe=True)
        if shared:
            # Mean and inverse deviation are not computed at inference.
            for output in fused.outputs[1:3]:
                output.name = ""
            fused.outputs[3].type, fused.outputs[3].shape = total.type, total.shape
            replace_value(total, fused.outputs[3])
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    return count


def cancel_transposes(model: ir.Model) -> int:
    """`(batch, length, heads, depth)` to heads first and back, and the split and merge around that, left out."""
    count = 0
    for outer in nodes(model, "Transpose"):
        inner = producer(outer.inputs[0], "Transpose")
        if inner is None or any(list(n.attributes.get_ints("perm", [])) != _HEADS_FIRST for n in (inner, outer)):
            continue
        kept = inner.inputs[0]
        assert kept is not None
        replace_value(outer.outputs[0], kept)
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    for merge in nodes(model, "Reshape"):
        split = producer(merge.inputs[0], "Reshape")
        source = split.inputs[0] if split is not None else None
        if source is None or dims(source) is None or dims(source) != dims(merge.outputs[0]):
            continue
        replace_value(merge.outputs[0], source)
        count += 1
    passes.RemoveUnusedNodesPass()(model)
    return count
