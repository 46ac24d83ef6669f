"""Tables and switches of transformers' exporters and of the tracer under them.

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


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Not to record the lines of Python behind each node, which `strip_provenance` would remove: up to a tenth of an export.

    Errors of a trace name the model's lines still. A PyTorch that has no such setting does not look at it.
    """
    from torch.fx import config

    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before  # type: ignore[attr-defined, unused-ignore]


@contextmanager
def with_conversions(conversions: Sequence[Any]) -> Iterator[None]:
    """transformers' converter for OpenVINO with further extensions in its table."""
    from transformers.exporters import exporter_openvino

    table = exporter_openvino._OV_CONVERSION_EXTENSIONS
    before = list(table)
    table.extend(conversions)
    try:
        yield
    finally:
        table[:] = before


@contextmanager
def weights_read_by_other_code() -> Iterator[None]:
    """transformers' converter puts zeros in the place of 16-bit weights of linear layers and embeddings, as these layers read what
    it kept. Code that reads a weight itself, as Whisper's decoder its positions, gets it in float32 instead of the zeros.
    """
    from transformers.exporters import utils

    fixes = utils._FX_PROGRAM_FIXES.setdefault("openvino", [])
    fixes.append(_put_weights_back)
    try:
        yield
    finally:
        fixes.remove(_put_weights_back)


def _put_weights_back(program: torch.export.ExportedProgram) -> None:
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    for spec in program.graph_signature.input_specs:
        if spec.target is None or spec.arg.name not in read:
            continue
        layer, dot, name = spec.target.rpartition(".")
        kept = program.state_dict.get(f"{layer}{dot}_16bit_{name}")
        if kept is not None:
            program.state_dict[spec.target] = torch.nn.Parameter(kept.detach().float(), requires_grad=False)


@contextmanager
def without_telemetry() -> Iterator[None]:
    """OpenVINO's converter reports each conversion to its vendor unless it believes that it runs in a CI job."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before
