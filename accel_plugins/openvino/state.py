"""What a decoder keeps as variables inside an OpenVINO graph, and a session's hold on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops
from openvino._offline_transformations import apply_make_stateful_transformation

from accel.artifact import Component, TensorSpec
from accel.errors import InputError
from accel.interfaces.description import StateDescription, kept_name
from accel.interfaces.protocols import Feeds, State
from accel.interfaces.session_contract import StepCheck, check_crop, check_drop, check_held, check_join, check_rows
from accel.interfaces.stepping import SingleTokens

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
    apply_make_stateful_transformation(model, dict(pairs))
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


class CompiledDecoder(Protocol):
    """What a state asks of its session."""

    @property
    def runtime(self) -> ov.CompiledModel:
        """The compiled model that calls go to now."""

    def renew(self, failed: ov.CompiledModel) -> None:
        """Compile again, unless another call has done so, behind a call of that model that failed."""


class OpenVinoState(StateDescription):
    """What is kept of one batch of sequences, in the variables of an infer request of their own.

    Args:
        session: Has the compiled model, which is another one after a call that failed.
        component: The decoder's graph.
        batch: Sequences.
    """

    def __init__(self, session: CompiledDecoder, component: Component, batch: int) -> None:
        check_rows(batch)
        self._session = session
        self._compiled = session.runtime
        self._component = component
        self._check_step = StepCheck(component)
        self._request = self._compiled.create_infer_request()
        super().__init__(batch)
        # The rows of the variables that the next call starts from.
        self._order = np.arange(batch, dtype=np.int32)
        self._outputs = {spec.name: spec for spec in component.outputs}
        # An encoder's keys and values, and for each row the first one with the same.
        names = [state.name for state in self._request.query_state()]
        self._encoded = [name for name in names if not _is_cache(name)]
        self._recurrent = any(_is_cache(name) and not _token_axis(name) for name in names)
        self._alike: np.ndarray | None = None

    def reorder(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was (`index: (rows,)` of integers); fewer or more rows than before are fine.

        Raises:
            InputError: Another number of rows, of a graph that keeps its encoder's keys and values: OpenVINO (2026.4) would
                compute later texts with this number of rows.
        """
        chosen = check_rows(self._batch, index)
        if self._length and self._encoded and chosen != list(range(self._batch)):
            if len(chosen) != self._batch:
                raise InputError(
                    f"The graph keeps its encoder's keys and values for {self._batch} rows, not {len(chosen)}.",
                    fix="begin a new cache with the rows wanted.",
                )
            self._move_encoded(chosen)
        self._order = self._order[chosen]
        self._batch = len(chosen)

    def _move_encoded(self, chosen: list[int]) -> None:
        """Put an encoder's keys and values in order, which a graph of another tool does not do; beams of one text have the same."""
        if self._alike is None or (self._alike[chosen] != self._alike).any():
            values = self._values()
            if self._alike is None:
                rows = [[values[name][row].tobytes() for name in self._encoded] for row in range(self._batch)]
                self._alike = np.array([rows.index(row) for row in rows])
            if (self._alike[chosen] != self._alike).any():
                self._set({name: values[name][chosen] for name in self._encoded})
                self._alike = self._alike[chosen]

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        check_crop(length, self._length, croppable=self._component.croppable)
        if not length:
            self._request.reset_state()
            self._order, self._alike = np.arange(self._batch, dtype=np.int32), None
        elif length < self._length:
            cut = {n: _shortened(n, value, length) for n, value in self._values().items() if _is_cache(n)}
            self._set(cut)
        self._length = length

    def join(self, other: State) -> None:
        """The rows of another state of the session behind these, the shorter ones moved to the right. Copies all variables.

        Raises:
            InputError: A graph that keeps its encoder's keys and values, whose number of rows cannot change.
        """
        check_join(self, other, same=getattr(other, "_session", None) is self._session)
        assert isinstance(other, OpenVinoState)
        if self._encoded:
            raise InputError(
                "The graph keeps its encoder's keys and values for the rows that it began with.",
                fix="begin a new cache with all rows wanted.",
            )
        length = max(self._length, other._length)
        mine, theirs = self._values(), other._values()
        self._set(
            {
                name: np.concatenate(
                    [
                        _behind(name, value[self._order], length - self._length),
                        _behind(name, theirs[name][other._order], length - other._length),
                    ]
                )
                for name, value in mine.items()
            }
        )
        self._batch, self._length = self._batch + other._batch, length
        self._order = np.arange(self._batch, dtype=np.int32)

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid. Copies all keys and values."""
        check_drop(columns, self._length)
        if columns:
            self._set(
                {
                    name: value.take(range(columns, self._length), axis)
                    for name, value in self._values().items()
                    if (axis := _token_axis(name))
                }
            )
            self._length -= columns

    def clone(self) -> OpenVinoState:
        """An independent copy."""
        copy = OpenVinoState(self._session, self._component, self._batch)
        if self._length:
            copy._set(self._values())
        copy._length, copy._order, copy._alike = self._length, self._order.copy(), self._alike
        return copy

    def run(self, tensors: Feeds, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute the outputs `names` for the next tokens, and keep their keys and values.

        Args:
            tensors: The graph's inputs `(batch, new, ...)`, contiguous, on the host, of the declared types.
            names: Outputs wanted.
        """
        new = self._check_step(tensors, self._batch, self._length)
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
        for state in self._request.query_state():
            axis = _token_axis(state.name)
            if axis and _is_cache(state.name):
                held = state.state
                sizes = [self._batch if i == 0 else 0 if i == axis else n for i, n in enumerate(held.shape)]
                state.state = ov.Tensor(held.element_type, sizes)

    def _infer(self, new: int) -> None:
        """Compute what is set, for so many tokens; a request that failed is no more asked."""
        try:
            self._request.infer()
        except RuntimeError:
            self._session.renew(self._compiled)
            self._move()
            raise
        self._length += new

    def _present_request(self) -> ov.InferRequest:
        """Of the session's present model."""
        if self._compiled is not self._session.runtime:
            self._move()
        return self._request

    def _move(self) -> None:
        """A request of the session's present model, with what was held before the call that failed, of this state or of another."""
        held = self._values() if self._length else {}
        self._compiled = self._session.runtime
        self._request = self._compiled.create_infer_request()
        self._set(
            {
                name: value.take(range(self._length), axis)
                if (axis := _token_axis(name)) and _is_cache(name)
                else value
                for name, value in held.items()
            }
        )

    def read(self) -> dict[str, torch.Tensor]:
        """Copies of what is held, as `kept_name` has it: keys and values `(batch, heads, tokens, size)`."""
        values = self._values() if self._length else {}
        return {_kept_name(name): torch.from_numpy(value[self._order]) for name, value in values.items()}

    def load(self, values: Mapping[str, torch.Tensor], length: int) -> None:
        """Hold these instead; as `read` returns them, for `length` tokens.

        Raises:
            InputError: Other names than the graph has, or other sizes than it was compiled for.
        """
        states = {_kept_name(state.name): state for state in self._request.query_state()}
        check_held(values, dict.fromkeys(states, (None, None)), self._batch, length)
        for name, state in states.items():
            value = values[name].detach().cpu().float().numpy().astype(state.state.data.dtype)
            state.state = ov.Tensor(np.ascontiguousarray(value))
        self._length, self._order = length, np.arange(self._batch, dtype=np.int32)

    def _values(self) -> dict[str, np.ndarray]:
        """Copies of the variables; rows as they are before the next call changes their order."""
        return {state.name: np.array(state.state.data) for state in self._request.query_state()}

    def _set(self, values: Mapping[str, np.ndarray]) -> None:
        for state in self._request.query_state():
            if state.name in values:
                state.state = ov.Tensor(np.ascontiguousarray(values[state.name]))


class OpenVinoSteps:
    """`accel.interfaces.protocols.TokenStep` of a state: what a graph reads is written in place, what it made is not copied.

    Args:
        state: Which `SingleTokens.fits`.
        feeds: The graph's inputs of the last call, checked, with one token a row.
        calls: How many come, at most.
        failed: Makes the error of a run that failed, from what was raised and the inputs' shapes.
    """

    def __init__(
        self,
        state: OpenVinoState,
        feeds: Feeds,
        calls: int,
        failed: Callable[[Exception, Mapping[str, tuple[int, ...]]], Exception],
    ) -> None:
        self._state, self._failed = state, failed
        self._inputs = SingleTokens(state._component, feeds, calls, _shared)
        self._request: ov.InferRequest | None = None

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits `(batch, vocabulary)` behind each row's next token."""
        state, inputs = self._state, self._inputs
        mask = inputs.write(tokens)
        request = state._present_request()
        if request is not self._request:
            for name, tensor in inputs.feeds.items():
                request.set_tensor(name, _shared(tensor))
            request.set_tensor(BEAM_INDEX, ov.Tensor(state._order))
            self._request = request
        if mask is not None:
            request.set_tensor(inputs.mask_name, mask)
        try:
            state._infer(1)
        except RuntimeError as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in inputs.feeds.items()}
            raise self._failed(error, shapes) from error
        logits: np.ndarray = request.get_tensor("logits").data[:, -1]
        return logits


def _shared(tensor: torch.Tensor) -> ov.Tensor:
    """OpenVINO's tensor over the memory of a torch tensor on the host."""
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _is_cache(variable: str) -> bool:
    """Whether a variable holds the keys and values of the tokens so far, by its name: ours, optimum-intel's, transformers'."""
    return "past" in variable


def _shortened(name: str, value: np.ndarray, length: int) -> np.ndarray:
    """The first tokens of keys and values `(batch, heads, tokens, size)`, or of an indexer's keys `(batch, tokens, size)`."""
    return value[:, :length] if "_indexer" in name else value[:, :, :length]


def _token_axis(name: str) -> int:
    """The axis of the tokens in a variable: of keys and values, or of an indexer's keys; 0 for a state of one size."""
    if "_indexer" in name:
        return 1
    return 2 if _kept_name(name).endswith((".key", ".value")) else 0


def _behind(name: str, value: np.ndarray, columns: int) -> np.ndarray:
    """A variable's tokens with so many columns in front."""
    axis = _token_axis(name)
    return np.pad(value, [(columns if axis and i == axis else 0, 0) for i in range(value.ndim)])


def _kept_name(variable: str) -> str:
    """A variable is called as the two tensors that it was made of, before and after a call."""
    return kept_name(variable.partition("present")[0])
