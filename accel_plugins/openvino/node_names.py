"""Names of nodes that do not depend on the graphs which a process created before.

OpenVINO numbers all nodes of a process, and a node without a name is called after its type and number, such as `Constant_12`.
"""

from __future__ import annotations

import re

import openvino as ov

_NUMBERED = re.compile(r"(\w+)_(\d+)")


def last_number() -> int:
    """Return the number of the newest node of this process."""
    return int(ov.op.Parameter(ov.Type.f32, ov.PartialShape([])).get_name().rpartition("_")[2])


def count_from(model: ov.Model, last: int) -> None:
    """Let the numbers in names of nodes after the node `last` begin with 1, as in a new process."""
    model.set_friendly_name("Model0")
    for node in model.get_ops():
        numbered = _NUMBERED.fullmatch(node.get_friendly_name())
        if numbered is not None and int(numbered[2]) > last:
            node.set_friendly_name(f"{numbered[1]}_{int(numbered[2]) - last}")


def count_new_nodes(model: ov.Model, last: int) -> None:
    """Number the nodes after the node `last` that have no name in the order of the graph, after the largest number in a name."""
    nodes, largest = [], 0
    for node in model.get_ordered_ops():
        numbered = _NUMBERED.fullmatch(node.get_friendly_name())
        if numbered is not None and int(numbered[2]) > last and node.get_name() == numbered[0]:
            nodes.append(node)
        elif numbered is not None:
            largest = max(largest, int(numbered[2]))
    for number, node in enumerate(nodes, start=largest + 1):
        node.set_friendly_name(f"{node.get_type_name()}_{number}")
