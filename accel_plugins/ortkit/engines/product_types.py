"""Data types in which the matrix products and convolutions of a parsed TensorRT network compute.

The engine inspector reads a loaded engine, and TensorRT for RTX loads an engine only on a GPU. The parsed network is available
on every machine. Its types are binding, because the network is strongly typed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from accel.errors import SessionError

Products = Mapping[str, int]
"""Number of matrix products and convolutions by data type, such as `{"int8": 12, "float16": 3}`."""

_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM")
# These layers move values without changing them, so a quantized value stays quantized.
_MOVING = ("SHUFFLE", "IDENTITY", "SQUEEZE", "UNSQUEEZE", "SLICE")
_DEQUANTIZE = "DEQUANTIZE"
_WORDS = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "FP8": "float8_e4m3fn",
    "INT4": "int4",
    "FP4": "float4_e2m1fn",
}
_ONNX_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
_ONNX_MOVING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")


def network_products(network: Any) -> dict[str, int]:
    """Count the products of a parsed network by the type in which they compute.

    A product computes in 8 bits if all of its inputs come from `DequantizeLinear` layers of this type: the builder fuses these
    layers into the product.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    producers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    counts: Counter[str] = Counter()
    for layer in layers:
        if _kind(layer) in _PRODUCTS:
            # A convolution without a quantized filter has its filter in the layer, as no input.
            inputs = [layer.get_input(i) for i in range(min(layer.num_inputs, 2))]
            types = {_source_type(tensor, producers) for tensor in inputs if tensor is not None}
            counts[types.pop() if len(types) == 1 else _word(layer.get_output(0).dtype)] += 1
    return dict(sorted(counts.items()))


def _source_type(tensor: Any, producers: Mapping[str, Any]) -> str:
    """Return the type of a product's input: the quantized type if the input is dequantized, and its own type if not."""
    source = producers.get(tensor.name)
    while source is not None and _kind(source) in _MOVING:
        source = producers.get(source.get_input(0).name)
    if source is not None and _kind(source) == _DEQUANTIZE:
        return _word(source.get_input(0).dtype)
    return _word(tensor.dtype)


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _word(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2]
    return _WORDS.get(name, name.lower())


def quantized_products(model: ir.Model) -> dict[str, int]:
    """Count the products of an ONNX graph whose inputs all come from `DequantizeLinear` nodes, by the quantized type."""
    counts: Counter[str] = Counter()
    for graph in model.graphs():
        for node in graph:
            if node.op_type in _ONNX_PRODUCTS:
                types = {_onnx_source_type(value) for value in node.inputs[:2]}
                if len(types) == 1 and (word := types.pop()) is not None:
                    counts[word] += 1
    return dict(sorted(counts.items()))


def _onnx_source_type(value: ir.Value | None) -> str | None:
    """Return the quantized type from which a value is dequantized, or `None`."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _ONNX_MOVING:
        value = node.inputs[0]
        node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None or node.inputs[0].dtype is None:
        return None
    return {ir.DataType.INT8: "int8", ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn"}.get(node.inputs[0].dtype)


def check_products(products: Products, expected: Products, *, graph: str) -> None:
    """Check that a network computes every quantized product of its ONNX graph in the quantized type.

    Args:
        products: The products of the network, from `network_products`.
        expected: The quantized products of the ONNX graph, from `quantized_products`.
        graph: The name of the graph's file, for the error message.

    Raises:
        SessionError: The network computes fewer products in one of the types.
    """
    for word, count in expected.items():
        if products.get(word, 0) < count:
            have = ", ".join(f"{n} in {name}" for name, n in products.items()) or "none"
            raise SessionError(
                f"The graph {graph} has {count} products whose inputs are quantized to {word}, but the network that TensorRT parsed has "
                f"{products.get(word, 0)}: {have}.",
                fix="quantize the graph again with accel quantize --backend tensorrt, or report this graph in an issue.",
            )
