"""Graphs with ONNX Runtime's attention for decoders, as onnxruntime-genai's builder makes them."""
from __future__ import annotations
from pathlib import Path
from typing import Any

def takes_right_padding_alone(model: Any) -> bool:
    return any(n.op_type == "GroupQueryAttention" for n in model.graph.node)

def with_mask(model: Any, where: Path) -> Any:
    return model
