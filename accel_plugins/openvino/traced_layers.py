"""Layers of an OpenVINO graph with the values before and after them (`accel.interfaces.layer_traces`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
import torch

from accel.artifact import Artifact, Component
from accel.errors import SessionError
from accel.interfaces.layer_traces import LayerValues, TracedLayer

from .runtime import READ_ERRORS, core, one_line, read_model

_NUMBER = re.compile(r"(linear|embedding)_(\d+)/")


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    kind: str
    shape: tuple[int, ...]
    bias: bool
    before: Any  # ov.Output of the value before the layer and its quantization
    after: Any
    weight: Any  # ov.Output of the weight as the layer reads it
    turned: bool
    order: tuple[str, int]


class OpenVinoLayerTrace:
    """An OpenVINO graph that returns the values of its matrix products and embedding tables, on the CPU.

    Args:
        artifact: The artifact.
        component: The component of the graph.
        settings: Properties of the compiled model.
    """

    def __init__(self, artifact: Artifact, component: Component, settings: Mapping[str, Any]) -> None:
        self._component = component
        self._model = read_model(artifact, component)
        self._settings = dict(settings)
        self._found = _layers(self._model)
        self.layers: Sequence[TracedLayer] = [
            TracedLayer(layer.name, layer.kind, layer.shape, layer.bias, partial(self._weight, layer))
            for layer in self._found
        ]
        self._compiled: Any = None

    def run(self, feeds: Mapping[str, torch.Tensor], replaced: LayerValues | None = None) -> LayerValues:
        """Run the graph; see `LayerTrace.run`. Values of another model are not supported, so the graph cannot be the reference.

        Raises:
            SessionError: The runtime failed, or `replaced` is not `None`.
        """
        if replaced is not None:
            raise SessionError(
                "accel cannot compute the layers of an OpenVINO graph with the values of another model.",
                fix="compare the graph with a PyTorch model or with an ONNX artifact.",
            )
        results = [result.input_value(0) for result in self._model.get_results()]
        requested = [*(layer.before for layer in self._found), *(layer.after for layer in self._found)]
        if self._compiled is None:
            outputs = [ov.op.Result(output) for output in requested]
            model = ov.Model(
                [*self._model.get_results(), *outputs], list(self._model.get_sinks()), self._model.get_parameters()
            )
            try:
                self._compiled = core().compile_model(model, "CPU", self._settings)
            except READ_ERRORS as error:
                raise SessionError(
                    f"OpenVINO cannot compile {self._component.file} with the values of its layers: {one_line(error)}",
                    fix="compare the ONNX artifact of the same model.",
                ) from error
        names = {name for port in self._compiled.inputs for name in port.get_names()}
        request = self._compiled.create_infer_request()
        dtypes = {spec.name: spec.dtype for spec in self._component.inputs}
        request.infer(
            {n: t.cpu().numpy().astype(dtypes.get(n, t.numpy().dtype)) for n, t in feeds.items() if n in names}
        )
        values = [
            torch.from_numpy(np.array(request.get_output_tensor(i).data)) for i in range(len(results) + len(requested))
        ]
        outputs_by_name = {
            next(
                (spec.name for spec in self._component.outputs if spec.name in output.get_names()), f"output.{i}"
            ): values[i]
            for i, output in enumerate(results)
        }
        inner = values[len(results) :]
        count = len(self._found)
        return LayerValues(
            {layer.name: value for layer, value in zip(self._found, inner[:count], strict=True)},
            {layer.name: value for layer, value in zip(self._found, inner[count:], strict=True)},
            outputs_by_name,
        )

    def _weight(self, layer: _Layer) -> torch.Tensor | None:
        """Return the weight as the layer reads it, computed from the constants of the graph."""
        try:
            compiled = core().compile_model(
                ov.Model([ov.op.Result(layer.weight)], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
            )
            array = compiled.create_infer_request().infer({})[0]
        except READ_ERRORS:
            return None
        weight = torch.from_numpy(np.array(array, np.float32)).reshape(tuple(layer.weight.get_shape()))
        return weight.T if layer.turned else weight


def _layers(model: ov.Model) -> list[_Layer]:
    """Return the layers in the order in which PyTorch called them, if the names of the nodes contain it."""
    layers = []
    for position, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        named = _NUMBER.search(node.get_friendly_name())
        order = (named[1], int(named[2])) if named else ("", position)
        if kind == "MatMul" and _is_constant(node.input_value(1)) and len(node.input_value(1).get_partial_shape()) == 2:
            weight, turned = node.input_value(1), bool(node.get_attributes().get("transpose_b"))
            shape = tuple(weight.get_shape())[:: -1 if turned else 1]
            after, bias = _with_bias(node.output(0))
            layers.append(
                _Layer(
                    node.get_friendly_name(),
                    "linear",
                    shape,
                    bias,
                    _before(node.input_value(0)),
                    after,
                    weight,
                    turned,
                    order,
                )
            )
        elif kind == "Gather" and _is_constant(node.input_value(0)) and not _is_constant(node.input_value(1)):
            table = node.input_value(0)
            if len(table.get_partial_shape()) == 2 and table.get_element_type().is_real():
                layers.append(
                    _Layer(
                        node.get_friendly_name(), "embedding", tuple(table.get_shape()), False, node.input_value(1),
                        node.output(0), table, False, order,
                    )
                )  # fmt: skip
    return sorted(layers, key=lambda layer: layer.order)


def _is_constant(output: Any, depth: int = 12) -> bool:
    node = output.get_node()
    if node.get_type_name() == "Constant":
        return True
    return (
        depth > 0 and bool(node.inputs()) and all(_is_constant(v.get_source_output(), depth - 1) for v in node.inputs())
    )


def _before(output: Any) -> Any:
    """Return the value before the quantization of an activation."""
    node = output.get_node()
    while node.get_type_name() == "FakeQuantize" or (
        node.get_type_name() == "Multiply"
        and _is_constant(node.input_value(1))
        and node.input_value(0).get_node().get_type_name() == "FakeQuantize"
    ):
        output = node.input_value(0)
        node = output.get_node()
    return output


def _with_bias(output: Any) -> tuple[Any, bool]:
    targets = list(output.get_target_inputs())
    if len(targets) == 1:
        node = targets[0].get_node()
        if node.get_type_name() == "Add" and any(_is_constant(v.get_source_output()) for v in node.inputs()):
            return node.output(0), True
    return output, False
