"""Faults that are planted in copies of artifacts: each has a known place and cause."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from accel.artifact import Artifact, with_files
from accel.artifact.probe_file import PROBES

QUERY = "bert.encoder.layer.1.attention.self.query"
DENSE = "bert.encoder.layer.0.intermediate.dense"
OUTPUT = "bert.encoder.layer.0.output.dense"
NORM = "bert.encoder.layer.0.output.LayerNorm"
Edit = Callable[[ir.Model], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        name: Name of the fault.
        edit: Function that changes the graph.
        causes: Accepted classes of the cause.
        place: Text in the place of the cause.
    """

    name: str
    edit: Edit
    causes: tuple[str, ...]
    place: str


def plant(source: Path, folder: Path, edit: Edit, *, probes: bool = True) -> Artifact:
    """Copy an artifact, change its graph, and record the changed file, as another tool that writes graphs would.

    With `probes=False`, the copy has no probes.
    """
    shutil.copytree(source, folder)
    artifact = Artifact.load(folder)
    model = ir.load(artifact.file())
    edit(model)
    for weight in model.graph.initializers.values():
        if weight.const_value is not None:
            weight.const_value = ir.tensor(weight.const_value.numpy().copy(), name=weight.name)
    for path in folder.glob("*.data"):
        path.unlink()
    ir.save(model, artifact.file())
    if not probes:
        (folder / PROBES).unlink(missing_ok=True)
    components = with_files(folder, artifact.components, [[artifact.components[0].file]])
    return Artifact.create(folder, dataclasses.replace(artifact.manifest, components=components))


def node_of(model: ir.Model, module: str) -> ir.Node:
    """Return the node that reads the weight of a module."""
    return next(
        node
        for node in model.graph
        if node.metadata_props.get("accel.module") == module
        or (node.op_type == "LayerNormalization" and str(node.inputs[1].name) == f"{module}.weight")  # type: ignore[union-attr]
    )


def change_weight(module: str, change: Callable[[np.ndarray], np.ndarray], position: int = 1) -> Edit:
    """Return an edit of a weight, `(inputs, outputs)` for matrix products, without changes of other readers."""

    def edit(model: ir.Model) -> None:
        node = node_of(model, module)
        value = node.inputs[0 if node.op_type == "Gather" else position]
        assert value is not None
        assert value.const_value is not None
        name = f"{value.name}.changed"
        new = ir.Value(name=name, const_value=ir.tensor(change(value.const_value.numpy().copy()), name=name))
        model.graph.register_initializer(new)
        node.replace_input_with(0 if node.op_type == "Gather" else position, new)

    return edit


def change_bias(module: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Return an edit of the bias of a linear layer."""

    def edit(model: ir.Model) -> None:
        value = model.graph.initializers[f"{module}.bias"]
        assert value.const_value is not None
        value.const_value = ir.tensor(change(value.const_value.numpy().copy()), name=value.name)

    return edit


def swap_weights(first: str, second: str) -> Edit:
    """Return an edit that exchanges the weights of two layers."""

    def edit(model: ir.Model) -> None:
        nodes = [node_of(model, name) for name in (first, second)]
        a, b = (node.inputs[1] for node in nodes)
        nodes[0].replace_input_with(1, b)
        nodes[1].replace_input_with(1, a)

    return edit


def replace_activation(operator: str, **attributes: object) -> Edit:
    """Return an edit of all GELU nodes."""

    def edit(model: ir.Model) -> None:
        for node in [node for node in model.graph if node.op_type == "Gelu"]:
            new = ir.node(operator, list(node.inputs), attributes=attributes)  # type: ignore[arg-type]
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [new], list(node.outputs), list(new.outputs)
            )

    return edit


def without_mask(model: ir.Model) -> None:
    """Ignore the mask: all tokens are visible."""
    cast = next(
        node for node in model.graph if node.op_type == "Cast" and node.inputs[0] is model.graph.inputs[_mask(model)]
    )
    users = list(cast.outputs[0].uses())
    after = ir.node("Or", [cast.outputs[0], _true(model)])
    model.graph.insert_after(cast, after)
    for use in users:
        use.node.replace_input_with(use.idx, after.outputs[0])


def _mask(model: ir.Model) -> int:
    return [value.name for value in model.graph.inputs].index("attention_mask")


def _true(model: ir.Model) -> ir.Value:
    value = ir.Value(name="always", const_value=ir.tensor(np.array(True), name="always"))
    model.graph.register_initializer(value)
    return value


def insert_after(module: str, operator: str, operand: float | None = None) -> Edit:
    """Return an edit that applies an operator to the output of a normalization or of a product without bias."""

    def edit(model: ir.Model) -> None:
        node = node_of(model, module)
        value = node.outputs[0]
        inputs = [value]
        if operand is not None:
            name = f"operand.{module}"
            constant = ir.Value(name=name, const_value=ir.tensor(np.array(operand, np.float32), name=name))
            model.graph.register_initializer(constant)
            inputs.append(constant)
        users = list(value.uses())
        new = ir.node(operator, inputs)
        model.graph.insert_after(node, new)
        for use in users:
            use.node.replace_input_with(use.idx, new.outputs[0])

    return edit


def rounded_to(module: str, dtype: ir.DataType) -> Edit:
    """Return an edit that rounds the input of a product to half precision, and its weight."""

    def edit(model: ir.Model) -> None:
        node = node_of(model, module)
        for position in (0, 1):
            value = node.inputs[position]
            assert value is not None
            down = ir.node("Cast", [value], attributes={"to": dtype})
            up = ir.node("Cast", [down.outputs[0]], attributes={"to": ir.DataType.FLOAT})
            model.graph.insert_before(node, [down, up])
            node.replace_input_with(position, up.outputs[0])

    return edit


def clipped(module: str, limit: float) -> Edit:
    """Return an edit that quantizes the input of a product to 8 bits with a range that is too small."""

    def edit(model: ir.Model) -> None:
        node = node_of(model, module)
        scale = ir.Value(
            name="small.scale", const_value=ir.tensor(np.array(limit / 127, np.float32), name="small.scale")
        )
        zero = ir.Value(name="small.zero", const_value=ir.tensor(np.array(0, np.int8), name="small.zero"))
        for value in (scale, zero):
            model.graph.register_initializer(value)
        quantized = ir.node("QuantizeLinear", [node.inputs[0], scale, zero])
        back = ir.node("DequantizeLinear", [quantized.outputs[0], scale, zero])
        model.graph.insert_before(node, [quantized, back])
        node.replace_input_with(0, back.outputs[0])

    return edit


def other_token(model: ir.Model) -> None:
    """Let the pooler read the last token instead of the first."""
    pooled = next(node for node in model.graph if node.metadata_props.get("accel.module") == "bert.pooler")
    last = ir.Value(name="last", const_value=ir.tensor(np.array(-1, np.int64), name="last"))
    model.graph.register_initializer(last)
    pooled.replace_input_with(1, last)


def other_positions(model: ir.Model) -> None:
    """Read the position embeddings two rows later."""
    node = node_of(model, "bert.embeddings.position_embeddings")
    two = ir.Value(name="two", const_value=ir.tensor(np.array(2, np.int64), name="two"))
    model.graph.register_initializer(two)
    later = ir.node("Add", [node.inputs[1], two])
    model.graph.insert_before(node, later)
    node.replace_input_with(1, later.outputs[0])


def other_epsilon(model: ir.Model) -> None:
    """Use a large epsilon in a normalization."""
    node_of(model, NORM).attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.1)


def no_scale(model: ir.Model) -> None:
    """Leave the scale of the attention out: the factors of queries and keys become 1."""
    factors = [node.inputs[1] for node in model.graph if node.op_type == "Mul" and node.outputs[0].shape is not None]
    for value in {id(v): v for v in factors if v is not None and v.const_value is not None}.values():
        assert value.const_value is not None
        if value.const_value.size == 1 and 0 < float(value.const_value.numpy().reshape(())) < 1:
            value.const_value = ir.tensor(np.ones_like(value.const_value.numpy()), name=value.name)


def _swap_columns(weight: np.ndarray) -> np.ndarray:
    weight[:, [0, 1]] = weight[:, [1, 0]]
    return weight


def _one_wrong(weight: np.ndarray) -> np.ndarray:
    weight[3, 5] += 4 * np.abs(weight).max()
    return weight


def _scaled_column(weight: np.ndarray) -> np.ndarray:
    weight[:, 2] *= 1.5
    return weight


def _rounded(weight: np.ndarray) -> np.ndarray:
    step = np.abs(weight).max() / 7
    return (np.round(weight / step) * step).astype(weight.dtype)


def bert_faults() -> Iterator[Fault]:
    """Yield faults for the float32 export of a BERT classifier."""
    noise = np.random.default_rng(0)
    for words, operator, attributes in (
        ("tanh-GELU", "Gelu", {"approximate": "tanh"}), ("ReLU", "Relu", {}), ("tanh", "Tanh", {}), ("no activation", "Identity", {}),
    ):  # fmt: skip
        yield Fault(words, replace_activation(operator, **attributes), ("activation",), OUTPUT)
    yield Fault("swapped columns", change_weight(QUERY, _swap_columns), ("weights",), QUERY)
    yield Fault("transposed weight", change_weight(QUERY, lambda w: w.T.copy()), ("weights",), QUERY)
    yield Fault("scaled weight", change_weight(DENSE, lambda w: w * np.float32(1.1)), ("scale",), DENSE)
    yield Fault("scaled column", change_weight(DENSE, _scaled_column), ("scale",), DENSE)
    yield Fault("negated weight", change_weight(DENSE, np.negative), ("weights",), DENSE)
    yield Fault("zero weight", change_weight(DENSE, np.zeros_like), ("weights",), DENSE)
    yield Fault(
        "random weight",
        change_weight(DENSE, lambda w: noise.normal(0, w.std(), w.shape).astype(w.dtype)),
        ("weights",),
        DENSE,
    )
    yield Fault("wrong weight", change_weight(DENSE, _one_wrong), ("weights",), DENSE)
    yield Fault("reversed rows", change_weight(DENSE, lambda w: w[::-1].copy()), ("weights",), DENSE)
    yield Fault("4-bit weight", change_weight(DENSE, _rounded), ("rounded weights",), DENSE)
    yield Fault(
        "weights of another layer", swap_weights(QUERY, QUERY.replace("layer.1", "layer.0")), ("weights",), "self.query"
    )
    yield Fault("no bias", change_bias(DENSE, np.zeros_like), ("bias",), DENSE)
    yield Fault("another bias", change_bias(DENSE, lambda b: b[::-1].copy()), ("bias",), DENSE)
    yield Fault("ignored mask", without_mask, ("mask",), "attention.output.dense")
    yield Fault("last token", other_token, ("pooling",), "pooler")
    yield Fault("shifted positions", other_positions, ("positions",), "position_embeddings")
    yield Fault("another epsilon", other_epsilon, ("normalization",), NORM)
    yield Fault("no attention scale", no_scale, ("attention scale",), "attention.output.dense")
    yield Fault("bfloat16 product", rounded_to(DENSE, ir.DataType.BFLOAT16), ("half precision",), DENSE)
    yield Fault("saturated input", clipped(DENSE, 1.0), ("saturation",), DENSE)
    yield Fault(
        "scaled normalization", insert_after(NORM, "Mul", 1.02), ("scale", "operation"), "layer.1.attention.self"
    )
    yield Fault(
        "overflow",
        change_weight(DENSE, lambda w: w * np.float32(np.inf)),
        ("weights", "range of half precision"),
        DENSE,
    )
    yield Fault(
        "swapped tokens",
        change_weight("bert.embeddings.word_embeddings", lambda w: w[::-1].copy()), ("weights",), "word_embeddings",
    )  # fmt: skip
