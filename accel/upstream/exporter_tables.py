"""Tables and settings of transformers' exporters and of torch's tracer.

| name | seen in | public alternative |
|---|---|---|
| `transformers.exporters.exporter_openvino._OV_CONVERSION_EXTENSIONS` | 5.23, 5.24 | none: `OpenVINOConfig` takes no extensions |
| `transformers.exporters.utils._FX_PROGRAM_FIXES`, and tensors called `_16bit_NAME` | 5.23, 5.24 | none |
| `torch.fx.config.do_not_emit_stack_traces` | torch 2.12 | none |
| the environment variable `CI`, which OpenVINO's converter reads | 2026.4 | none |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .replaced_attributes import replaced_attributes


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Trace a model within the block without recording Python stack traces for the nodes. This saves up to a tenth of the
    export time.

    accel removes the stack traces from exported graphs in any case (`strip_provenance`). Errors of the tracer still show the
    lines of the model's code. Versions of PyTorch before 2.12 do not have this setting.
    """
    from torch.fx import config

    name = "do_not_emit_stack_traces"
    with replaced_attributes([(config, name, True)] if hasattr(config, name) else []):
        yield


@contextmanager
def with_conversions(conversions: Sequence[Any]) -> Iterator[None]:
    """Add conversion extensions to the table of transformers' OpenVINO exporter within the block."""
    from transformers.exporters import exporter_openvino

    table = [*exporter_openvino._OV_CONVERSION_EXTENSIONS, *conversions]
    with replaced_attributes([(exporter_openvino, "_OV_CONVERSION_EXTENSIONS", table)]):
        yield


@contextmanager
def weights_read_by_other_code() -> Iterator[None]:
    """During an OpenVINO export, restore 16-bit weights that are read by code outside of their layer.

    transformers' exporter replaces 16-bit weights of linear layers and embeddings by zeros, because the layers read a separate
    copy. Code that reads such a weight directly (positions in Whisper's decoder) gets it in float32 instead of zeros.
    """
    from transformers.exporters import utils

    fixes = utils._FX_PROGRAM_FIXES
    ours = {**fixes, "openvino": [*fixes.get("openvino", ()), _put_weights_back]}
    with replaced_attributes([(utils, "_FX_PROGRAM_FIXES", ours)]):
        yield


def _put_weights_back(program: torch.export.ExportedProgram) -> None:
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    for spec in program.graph_signature.input_specs:
        if spec.target is None or spec.arg.name not in read:
            continue
        layer, dot, name = spec.target.rpartition(".")
        weight = program.state_dict.get(f"{layer}{dot}_16bit_{name}")
        if weight is not None:
            program.state_dict[spec.target] = torch.nn.Parameter(weight.detach().float(), requires_grad=False)


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Prevent OpenVINO's converter from sending telemetry: it sends no telemetry if the environment variable `CI` is set."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before
