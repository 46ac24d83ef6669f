"""Attention of fully masked tokens, for models that read their output at the token with a certain id, such as CLIP's
end-of-text token.
"""

from __future__ import annotations

import openvino as ov
import openvino.opset13 as operators

_ATTENTION = "ScaledDotProductAttention"


def zero_hidden_tokens(model: ov.Model) -> None:
    """Make attention return zeros for fully masked tokens, as PyTorch does. OpenVINO's attention returns the average of
    all tokens.

    In a causal model, fully masked tokens are the padding at the start of a row. Their results matter only if the model
    may read its output at such a token. The graphs of other models are not changed.
    """
    if not _finds_by_id(model):
        return
    for node in model.get_ops():
        if node.get_type_name() != _ATTENTION or node.get_input_size() < 4:
            continue
        mask, result = node.input_value(3), node.output(0)
        if mask.get_element_type() != ov.Type.boolean:
            # transformers' exporter converts a boolean mask to 0 or a large negative number with a Select operator.
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
    """Return whether the model searches `input_ids` for the largest id or for a given id."""
    return any(node.get_type_name() == "TopK" and _is_ids(node.input_value(0).get_node()) for node in model.get_ops())


def _is_ids(node: ov.Node) -> bool:
    while node.get_type_name() in ("Convert", "Equal", "Reshape"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Parameter" and "input_ids" in node.output(0).get_names()
