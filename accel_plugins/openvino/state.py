"""A decoder's state as variables inside an OpenVINO graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops

from accel.artifact import Component, TensorSpec
from accel.errors import InputError
from accel.interfaces.bound_steps import BoundSteps
from accel.interfaces.protocols import Feeds
from accel.interfaces.session import BaseSession
from accel.interfaces.state import State, StateOwner, kept_name

from .upstream import make_stateful

BEAM_INDEX = "beam_idx"


def fold_cache(model: ov.Model, pairs: Mapping[str, str], specs: Sequence[TensorSpec]) -> None:
    """Make inputs and outputs that are the same tensors, before and after a call, variables of the graph.

    Each is read through a `Gather` by the new input `beam_idx: (batch,) int32`, so that beams change places without a copy
    of their own. OpenVINO's CPU plugin fuses this form with the attention behind it and writes new tokens in place.

    Args:
        model: With inputs and outputs for the cache; changed in place.
        pairs: Output by input.
        specs: Of the inputs: which axes of a tensor that is kept have one size.
    """
    _restore_broadcasts(model)
    tokens = next(port for port in model.inputs if port.any_name not in pairs)
    beams = ops.parameter([-1], ov.Type.i32, name=BEAM_INDEX)
    beams.output(0).get_tensor().set_names({BEAM_INDEX})
    model.add_parameters([beams])
    # The axis behind the batch's that varies is that of the tokens: none at first.
    shapes = {s.name: [n if isinstance(n, int) else None for n in s.shape[1:]] for s in specs if s.name in pairs}
    for name in pairs:
        port = model.input(name)
        # The converter leaves all of them open where nothing but a loop reads the tensor.
        port.get_node().set_partial_shape(ov.PartialShape([-1, *(-1 if n is None else n for n in shapes[name])]))
        readers = port.get_target_inputs()
        chosen = ops.gather(port, beams, ops.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()
    make_stateful(model, pairs)
    batch = ops.gather(ops.shape_of(tokens, output_type="i64"), ops.constant(np.array([0], np.int64)), ops.constant(0))
    # Written as a difference: of a constant 0 the CPU plugin concludes that the cache stays empty.
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
    """Repeat keys and values for grouped queries by a bidirectional `Broadcast` again.

    transformers' exporter (5.23) writes it as one to a computed shape, which OpenVINO's CPU plugin (2026.4) does not
    recognise: it then copies the cache at each step and computes attention in four operators (2,048 tokens of context halve
    the speed of a 0.5-billion-parameter model).
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Broadcast" or node.get_attributes().get("mode") != "numpy":
            continue
        source, shape = node.input_value(0), node.input_value(1).get_node()
        if shape.get_type_name() == "Select" and source.get_node().get_type_name() == "Unsqueeze":
            restored = ops.broadcast(source, shape.input_value(1), broadcast_spec="BIDIRECTIONAL")
            node.output(0).replace(restored.output(0))
    model.validate_nodes_and_infer_types()


class CompiledDecoder(StateOwner, Protocol):
    """The session of a state."""

    @property
    def runtime(self) -> ov.CompiledModel:
        """The compiled model that calls go to now."""

    def renew(self, failed: ov.CompiledModel) -> None:
        """Compile again, unless another call has done so, after a call of that model failed."""


class OpenVinoState(State):
    """The state of one batch of sequences, in the variables of an infer request of its own.

    Args:
        session: Has the compiled model, which is another one after a call that failed.
        component: The decoder's graph.
        batch: Sequences.
    """

    session: CompiledDecoder

    def __init__(self, session: CompiledDecoder, component: Component, batch: int) -> None:
        super().__init__(session, component, batch)
        self._compiled = session.runtime
        self._request = self._compiled.create_infer_request()
        # The rows of the variables that the next call starts from.
        self._order = np.arange(batch, dtype=np.int32)
        names = self.loaded_names()
        # An encoder's keys and values, and for each row the first row with the same.
        self._encoded = [name for name in names if not _is_cache(name)]
        self._recurrent = any(_is_cache(name) and not self.growing_axis(name) for name in names)
        self._alike: np.ndarray | None = None
        # OpenVINO (2026.4) would compute later texts with another number of rows.
        self.joinable = not self._encoded

    def loaded_names(self) -> list[str]:
        """The cache inputs that the variables were: a variable is called as its tensors before and after a call."""
        return list(self._variables())

    def growing_axis(self, name: str) -> int | None:
        """The axis of tokens of a variable: of keys and values `(batch, heads, tokens, size)`, or of an indexer's keys."""
        if not _is_cache(name):
            return None
        if "_indexer" in name:
            return 1
        # Graphs of other tools name keys and values differently; they keep nothing else.
        return 2 if self.component.croppable or kept_name(name).endswith((".key", ".value")) else None

    def _variables(self) -> dict[str, Any]:
        return {state.name.partition("present")[0]: state for state in self._request.query_state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the variables, their rows in order."""
        held = {}
        for name, variable in self._variables().items():
            values, axis = variable.state.data, self.growing_axis(name)
            tensor = torch.from_numpy(values[self._order] if _is_cache(name) else values.copy())
            # A call that failed may have left more tokens.
            held[name] = tensor.narrow(axis, 0, self._length) if axis else tensor
        return held

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the variables."""
        for name, variable in self._variables().items():
            tensor = tensors[name].cpu()
            values = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            variable.state = ov.Tensor(np.ascontiguousarray(values.astype(variable.state.data.dtype, copy=False)))
            self._order = np.arange(len(values), dtype=np.int32)

    def clear(self) -> None:
        """Reset the variables."""
        self._request.reset_state()
        self._order, self._alike = np.arange(self._batch, dtype=np.int32), None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let the next call read row `rows[i]` as row `i`.

        Raises:
            InputError: Another number of rows, of a graph that keeps its encoder's keys and values.
        """
        if not self._length:
            self._order = np.arange(len(rows), dtype=np.int32)
            return
        if self._encoded:
            if len(rows) != self._batch:
                raise InputError(
                    f"The graph keeps its encoder's keys and values for {self._batch} rows, not {len(rows)}.",
                    fix="begin a new cache with the rows wanted.",
                )
            self._move_encoded(list(rows))
        self._order = self._order[list(rows)]

    def _move_encoded(self, rows: list[int]) -> None:
        """Put an encoder's keys and values in order, which a graph of another tool does not do; beams of one text have the same."""
        if self._alike is not None and (self._alike[rows] == self._alike).all():
            return
        variables = self._variables()
        values = {name: np.array(variables[name].state.data) for name in self._encoded}
        if self._alike is None:
            found = [[value[row].tobytes() for value in values.values()] for row in range(self._batch)]
            self._alike = np.array([found.index(row) for row in found])
        if (self._alike[rows] != self._alike).any():
            for name, value in values.items():
                variables[name].state = ov.Tensor(np.ascontiguousarray(value[rows]))
            self._alike = self._alike[rows]

    def run(self, tensors: Feeds, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` for the next tokens, and keep their keys and values.

        Args:
            tensors: The graph's inputs `(batch, new, ...)`, contiguous, on the host, of the declared types.
            names: Outputs wanted.
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
        """Let the keys and values hold no tokens, in so many words: beside recurrent states OpenVINO (2026.4) may begin with the tokens
        of another request of the compiled model (Kimi Linear's and Bailing's).
        """
        for name, variable in self._variables().items():
            if axis := self.growing_axis(name):
                held = variable.state
                sizes = [self._batch if i == 0 else 0 if i == axis else n for i, n in enumerate(held.shape)]
                variable.state = ov.Tensor(held.element_type, sizes)

    def _infer(self, new: int) -> None:
        """Compute what is set, for so many tokens; a request that failed is no more asked."""
        try:
            self._request.infer()
        except RuntimeError:
            self.session.renew(self._compiled)
            self._move()
            raise
        self._length += new

    def _present_request(self) -> ov.InferRequest:
        """Of the session's present model."""
        if self._compiled is not self.session.runtime:
            self._move()
        return self._request

    def _move(self) -> None:
        """A request of the session's present model, with what was held before the call that failed, of this state or of another."""
        held = self.tensors() if self._length else {}
        self._compiled = self.session.runtime
        self._request = self._compiled.create_infer_request()
        if held:
            self.store(held)


class OpenVinoSteps(BoundSteps):
    """Steps of a state: a graph's inputs are written in place, its logits are not copied."""

    def __init__(self, session: BaseSession[Any], state: OpenVinoState, feeds: Feeds, calls: int) -> None:
        super().__init__(session, state, feeds, calls)
        self._state = state
        self._request: ov.InferRequest | None = None

    def bound(self, mask: torch.Tensor) -> ov.Tensor:
        """OpenVINO's tensor over a mask."""
        return _shared(mask)

    def compute(self, mask: Any) -> np.ndarray:
        """Run the call; see `BoundSteps.compute`."""
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
    """OpenVINO's tensor over the memory of a torch tensor on the host."""
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _is_cache(variable: str) -> bool:
    """Whether a variable holds the keys and values of the tokens so far, by its name: ours, optimum-intel's, transformers'."""
    return "past" in variable
