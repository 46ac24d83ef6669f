"""Attention of tokens whose mask hides all tokens, in models that answer from a token found by its id (CLIP's end of text)."""

from __future__ import annotations

import openvino as ov
import openvino.opset13 as operators

_ATTENTION = "ScaledDotProductAttention"


def zero_hidden_tokens(model: ov.Model) -> None:
    """Make attention return zeros for tokens whose mask hides all tokens, as PyTorch's does; OpenVINO's averages all tokens.

    In a causal model that is a masked token before which all tokens are masked. Its result is read only where a model takes its answer
    from that token; other models keep their operators.
    """
    if not _finds_by_id(model):
        return
    for node in model.get_ops():
        if node.get_type_name() != _ATTENTION or node.get_input_size() < 4:
            continue
        mask, result = node.input_value(3), node.output(0)
        if mask.get_element_type() != ov.Type.boolean:
            # As transformers' exporter writes a mask of booleans: nothing, or a large negative number.
            chooses = mask.get_node()
            if chooses.get_type_name() != "Select":
                continue
            mask = chooses.input_value(0)
        seeing = operators.reduce_logical_or(mask, operators.constant([-1]), keep_dims=True)
        readers = result.get_target_inputs()
        zero = operators.convert_like(operators.constant(0.0), result)
        chosen = operators.select(seeing, result, zero).output(0)
        for reader in readers:
            reader.replace_source_output(chosen)
    model.validate_nodes_and_infer_types()


def _finds_by_id(model: ov.Model) -> bool:
    """Whether the place of the largest id, or of one that equals another, is looked for."""
    return any(node.get_type_name() == "TopK" and _is_ids(node.input_value(0).get_node()) for node in model.get_ops())


def _is_ids(node: ov.Node) -> bool:
    while node.get_type_name() in ("Convert", "Equal", "Reshape"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Parameter" and "input_ids" in node.output(0).get_names()
