"""KV cache and other decoder state in variables of an OpenVINO graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops

from accel.artifact import Component, TensorSpec
from accel.errors import InputError
from accel.interfaces.io_binding_steps import BoundSteps
from accel.interfaces.protocols import Feeds
from accel.interfaces.session import BaseSession
from accel.interfaces.state import State, kept_name

from .upstream import make_stateful

if TYPE_CHECKING:
    from .session import OpenVinoSession

BEAM_INDEX = "beam_idx"


def fold_cache(model: ov.Model, pairs: Mapping[str, str], specs: Sequence[TensorSpec]) -> None:
    """Turn the KV cache inputs and outputs of a graph into variables of the graph.

    Each variable is read through a `Gather` with the new input `beam_idx: (batch,) int32`, so that beams are reordered
    without another copy. OpenVINO's CPU plugin fuses this pattern with the attention after it and writes new tokens in
    place.

    Args:
        model: A graph with KV cache inputs and outputs; it is changed in place.
        pairs: Cache output name by cache input name.
        specs: The inputs; they give the fixed axes of the cache.
    """
    _restore_broadcasts(model)
    tokens = next(port for port in model.inputs if port.any_name not in pairs)
    beams = ops.parameter([-1], ov.Type.i32, name=BEAM_INDEX)
    beams.output(0).get_tensor().set_names({BEAM_INDEX})
    model.add_parameters([beams])
    # The dynamic axis after the batch axis is the token axis. Its size is 0 at the start.
    shapes = {s.name: [n if isinstance(n, int) else None for n in s.shape[1:]] for s in specs if s.name in pairs}
    for name in pairs:
        port = model.input(name)
        # The converter makes all axes dynamic if only a loop reads the tensor.
        port.get_node().set_partial_shape(ov.PartialShape([-1, *(-1 if n is None else n for n in shapes[name])]))
        readers = port.get_target_inputs()
        chosen = ops.gather(port, beams, ops.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()
    make_stateful(model, pairs)
    batch = ops.gather(ops.shape_of(tokens, output_type="i64"), ops.constant(np.array([0], np.int64)), ops.constant(0))
    # This value is zero, computed as a difference. From a constant 0, the CPU plugin would infer that the cache always
    # stays empty.
    nothing = ops.subtract(batch, batch)
    by_variable = {f"{name}{pairs[name]}": shapes[name] for name in pairs}
    for node in model.get_ops():
        if node.get_type_name() != "ReadValue":
            continue
        sizes = [
            nothing if n is None else ops.constant(np.array([n], np.int64)) for n in by_variable[node.get_variable_id()]
        ]
        empty = ops.broadcast(
            ops.constant(0.0, dtype=node.get_output_element_type(0)), ops.concat([batch, *sizes], axis=0)
        )
        node.set_arguments([empty])
    model.validate_nodes_and_infer_types()


def _restore_broadcasts(model: ov.Model) -> None:
    """Use a bidirectional `Broadcast` to repeat keys and values for grouped queries.

    transformers' exporter (5.23) broadcasts to a computed shape, which OpenVINO's CPU plugin (2026.4) does not
    recognize. The plugin then copies the cache in each step and computes attention in four operators. A model of 0.5
    billion parameters then runs at half the speed with 2,048 tokens of context.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Broadcast" or node.get_attributes().get("mode") != "numpy":
            continue
        source, shape = node.input_value(0), node.input_value(1).get_node()
        if shape.get_type_name() == "Select" and source.get_node().get_type_name() == "Unsqueeze":
            restored = ops.broadcast(source, shape.input_value(1), broadcast_spec="BIDIRECTIONAL")
            node.output(0).replace(restored.output(0))
    model.validate_nodes_and_infer_types()


class OpenVinoState(State):
    """Decoder state of one batch, in the variables of its own infer request.

    Args:
        session: The session. It replaces its compiled model after a failed call.
        component: The decoder component.
        batch: Number of rows of the batch.
    """

    session: OpenVinoSession

    def __init__(self, session: OpenVinoSession, component: Component, batch: int) -> None:
        super().__init__(session, component, batch)
        self._compiled = session.runtime
        self._request = self._compiled.create_infer_request()
        # Order in which the next call reads the rows of the variables.
        self._order = np.arange(batch, dtype=np.int32)
        names = self.loaded_names()
        # `_encoded`: variables with an encoder's keys and values. `_alike`: for each row of the batch, the first row
        # with equal encoder values.
        self._encoded = [name for name in names if not _is_cache(name)]
        self._recurrent = any(_is_cache(name) and not self.growing_axis(name) for name in names)
        self._alike: np.ndarray | None = None
        # With encoder variables, OpenVINO (2026.4) would compute later texts with a wrong number of rows.
        self.joinable = not self._encoded

    def loaded_names(self) -> list[str]:
        """Return the cache input names of the variables. The name of a variable begins with the name of its input."""
        return list(self._variables())

    def growing_axis(self, name: str) -> int | None:
        """Return the token axis of a variable, or `None` if it has no token axis.

        The token axis is 2 for keys and values `(batch, heads, tokens, size)`, and 1 for the keys of an indexer.
        """
        if not _is_cache(name):
            return None
        if "_indexer" in name:
            return 1
        # In graphs of other tools, every variable contains keys or values, and the names of the variables are different.
        return 2 if self.component.croppable or kept_name(name).endswith((".key", ".value")) else None

    def _variables(self) -> dict[str, Any]:
        return {state.name.partition("present")[0]: state for state in self._request.query_state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the variables by cache input name, with their rows in the current order."""
        tensors = {}
        for name, variable in self._variables().items():
            values, axis = variable.state.data, self.growing_axis(name)
            tensor = torch.from_numpy(values[self._order] if _is_cache(name) else values.copy())
            # A failed call may have added tokens to some variables.
            tensors[name] = tensor.narrow(axis, 0, self._length) if axis else tensor
        return tensors

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the variables; the keys are cache input names."""
        for name, variable in self._variables().items():
            tensor = tensors[name].cpu()
            values = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            variable.state = ov.Tensor(np.ascontiguousarray(values.astype(variable.state.data.dtype, copy=False)))
            self._order = np.arange(len(values), dtype=np.int32)

    def clear(self) -> None:
        """Reset the variables to their initial values."""
        self._request.reset_state()
        self._order, self._alike = np.arange(self._batch, dtype=np.int32), None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Reorder the rows of the batch: the next call reads row `rows[i]` as row `i`.

        Raises:
            InputError: The number of rows changes, but the graph stores the keys and values of its encoder.
        """
        if not self._length:
            self._order = np.arange(len(rows), dtype=np.int32)
            return
        if self._encoded:
            if len(rows) != self._batch:
                raise InputError(
                    f"The cache has {self._batch} rows, which cannot be changed to {len(rows)}, because the graph stores its "
                    "encoder's keys and values for each row.",
                    fix="start with a new cache that has the required number of rows.",
                )
            self._move_encoded(list(rows))
        self._order = self._order[list(rows)]

    def _move_encoded(self, rows: list[int]) -> None:
        """Reorder the stored keys and values of the encoder, because graphs that other tools exported do not reorder
        them.

        Nothing is copied if the values of the rows are equal, as for beams of one text.
        """
        if self._alike is not None and (self._alike[rows] == self._alike).all():
            return
        variables = self._variables()
        values = {name: np.array(variables[name].state.data) for name in self._encoded}
        if self._alike is None:
            rows_as_bytes = [[value[row].tobytes() for value in values.values()] for row in range(self._batch)]
            self._alike = np.array([rows_as_bytes.index(row) for row in rows_as_bytes])
        if (self._alike[rows] != self._alike).any():
            for name, value in values.items():
                variables[name].state = ov.Tensor(np.ascontiguousarray(value[rows]))
            self._alike = self._alike[rows]

    def run(self, tensors: Feeds, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` for the next tokens and add their keys and values to the state.

        Args:
            tensors: The graph's inputs `(batch, new, ...)`: contiguous CPU tensors of the declared types.
            names: Names of the outputs to return.
        """
        new = self.check_step(tensors, self._batch, self._length)
        request = self._present_request()
        if self._recurrent and not self._length:
            self._begin()
        for name, tensor in tensors.items():
            request.set_tensor(name, ov.Tensor(tensor.numpy(), shared_memory=True))
        request.set_tensor(BEAM_INDEX, ov.Tensor(self._order))
        self._infer(new)
        self._order = np.arange(self._batch, dtype=np.int32)
        return {name: torch.from_numpy(request.get_tensor(name).data.copy()) for name in names}

    def _begin(self) -> None:
        """Store empty keys and values before the first call.

        Without this step, graphs that also have recurrent states may start with the tokens of another request of the
        same compiled model (OpenVINO 2026.4; Kimi Linear, Bailing).
        """
        for name, variable in self._variables().items():
            if axis := self.growing_axis(name):
                values = variable.state
                sizes = [self._batch if i == 0 else 0 if i == axis else n for i, n in enumerate(values.shape)]
                variable.state = ov.Tensor(values.element_type, sizes)

    def _infer(self, new: int) -> None:
        """Compute `new` tokens. If the request fails, it is replaced by a new one."""
        try:
            self._request.infer()
        except RuntimeError:
            self.session.renew(self._compiled)
            self._move()
            raise
        self._length += new

    def _present_request(self) -> ov.InferRequest:
        """Return the infer request, after moving the state to the session's current compiled model if needed."""
        if self._compiled is not self.session.runtime:
            self._move()
        return self._request

    def _move(self) -> None:
        """Move the state to a new infer request of the session's current compiled model.

        If a call failed, the new request has the variables from before the call.
        """
        tensors = self.tensors() if self._length else {}
        self._compiled = self.session.runtime
        self._request = self._compiled.create_infer_request()
        if tensors:
            self.store(tensors)


class OpenVinoDecodingSteps(BoundSteps):
    """Decoding steps of a state: inputs are written in place, and the logits are not copied."""

    def __init__(self, session: BaseSession[Any], state: OpenVinoState, feeds: Feeds, calls: int) -> None:
        super().__init__(session, state, feeds, calls)
        self._state = state
        self._request: ov.InferRequest | None = None

    def bound(self, mask: torch.Tensor) -> ov.Tensor:
        """Return an OpenVINO tensor that shares the mask's memory."""
        return _shared(mask)

    def compute(self, mask: Any) -> np.ndarray:
        """Run one decoding step and return its logits; see `BoundSteps.compute`."""
        state = self._state
        request = state._present_request()
        if request is not self._request:
            for name, tensor in self.feeds.items():
                request.set_tensor(name, _shared(tensor))
            request.set_tensor(BEAM_INDEX, ov.Tensor(state._order))
            self._request = request
        if mask is not None:
            request.set_tensor(self.mask_name, mask)
        state._infer(1)
        logits: np.ndarray = request.get_tensor("logits").data[:, -1]
        return logits


def _shared(tensor: torch.Tensor) -> ov.Tensor:
    """Return an OpenVINO tensor that shares the memory of a PyTorch CPU tensor."""
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _is_cache(variable: str) -> bool:
    """Return whether a variable contains keys and values of earlier tokens. The name of the variable shows this, in
    exports of `accel`, optimum-intel and transformers.
    """
    return "past" in variable
