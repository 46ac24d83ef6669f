"""Check that `accel serve` and `accel deploy triton` use the same tensor names for texts in the Open Inference
Protocol.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel.serving.http.text_tensors import input_sizes
from accel.serving.operations import all_operations

GOLDEN = Path(__file__).parents[1] / "triton" / "golden"
TYPES = {"TYPE_STRING": "BYTES", "TYPE_FP32": "FP32", "TYPE_INT64": "INT64"}
TASKS = {
    "rank": "text-ranking",
    "text-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "embed": "sentence-similarity",
}
MODEL: Any = SimpleNamespace(
    config=SimpleNamespace(num_labels=3, id2label=dict(enumerate("abc"))),
    artifact=SimpleNamespace(components=[SimpleNamespace(outputs=[])]),
)


def front(task: str) -> dict[str, dict[str, str]]:
    """Return the required inputs and the outputs of the Triton model that accepts texts, with their types."""
    configs = json.loads((GOLDEN / f"onnxruntime-cpu.{task}.json").read_text(encoding="utf-8"))
    lines = "\n".join(next(config for config in configs.values() if any("TYPE_STRING" in line for line in config)))
    declared: dict[str, dict[str, str]] = {"input": {}, "output": {}}
    for kind, block in re.findall(r"^(input|output) \{\n(.*?)^\}", lines, flags=re.MULTILINE | re.DOTALL):
        named = dict(re.findall(r"^  (name|data_type|optional): \"?(\w+)", block, flags=re.MULTILINE))
        if "optional" not in named:
            declared[kind][named["name"]] = TYPES[named["data_type"]]
    return declared


@pytest.mark.parametrize("name", TASKS)
def test_both_servers_use_the_same_tensors(name: str) -> None:
    operation, golden = all_operations()[name], front(TASKS[name])
    assert dict.fromkeys(input_sizes(operation), "BYTES") == golden["input"]
    assert {name: kind for name, (kind, _) in operation.tensor_outputs(MODEL).items()} == golden["output"]


def test_every_operation_with_text_tensors_is_compared() -> None:
    assert {name for name, operation in all_operations().items() if operation.tensor_outputs(MODEL)} == set(TASKS)
