"""Traces a model, names its axes, and refuses what the trace got wrong."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import ExportConfig
from ..errors import ExportError
from ..interfaces.family_registry import family_of
from ..interfaces.task_registry import task_spec
from ..interfaces.wrapper import unwrapped
from ..upstream.exporter_tables import (
    weights_read_by_other_code,
    with_conversions,
    without_stack_traces,
    without_telemetry,
)
from ..upstream.library_output import quiet
from ..upstream.onnx_exporter import make_rewrites_exact, parse_operators_once, release_traced_graphs
from ..upstream.symbolic_sizes import DATA_DEPENDENT, formula
from .graph_names import graph_name, rename_axes, strip_provenance
from .graph_repairs import divide_sizes, keep_padding, round_to_bfloat16
from .process_lock import one_thread_at_a_time
from .quantized_linears import symbolic_layers
from .recurrence import recurrent
from .samples import IMAGE_AXES, resize
from .source import Source
from .traced_functions import steady_answers, traceable

if TYPE_CHECKING:
    import onnx_ir
    from torch.export import ExportedProgram
    from transformers.exporters import ExportedModel


@one_thread_at_a_time()
def capture_onnx(source: Source, config: ExportConfig) -> tuple[onnx_ir.Model, ExportedModel]:
    """Trace a model into an ONNX graph with named axes.

    Takes 4 to 20 s for encoders. The weights in the graph are the model's own memory, not a copy.

    Returns:
        The graph, and what transformers' exporter made (its manifest is kept beside ours).

    Raises:
        ExportError: The trace failed, or fixed an axis that must vary.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    make_rewrites_exact()
    parse_operators_once()
    settings = OnnxConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source), opset_version=config.opset)
    try:
        with recurrent(source.model, symbolic=True), symbolic_layers():
            exported = _traced(source, lambda: OnnxExporter().export(source.model, dict(source.example), settings))
    finally:
        release_traced_graphs()
    graph = exported.program
    _name_axes(graph, source)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        value.name = graph_name(str(value.name))
    strip_provenance(graph)
    divide_sizes(graph)
    keep_padding(graph)
    if source.dtype != "bfloat16":
        round_to_bfloat16(graph)
    return graph, exported


# What torch.export (2.12) says of an axis that the model's code turned into a number.
_CONSTANT = re.compile(
    r"L\['(?:kwargs'\]\[')?(?P<name>\w+)'\]\.size\(\)\[(?P<position>\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((?P<size>\d+)\)"
)
# ResNet's, ConvNeXt's and SegFormer's traces have up to 11 and take seconds. Swin pads each stage to whole windows: 29 in its
# second stage, 61 in its third, and minutes for each further operation.
_MOST_OPERATIONS = 20
# What torch.export calls a size that depends on data, such as how many points there are in an image.
_DATA_SIZE = re.compile(r"u\d+\Z")


@one_thread_at_a_time()
def capture_program(source: Source) -> ExportedProgram:
    """Trace a model into a `torch.export` program with the same inputs and axes as `capture_onnx`.

    For backends that convert such programs themselves.

    Raises:
        ExportError: The trace failed.
    """
    from transformers.exporters import DynamoConfig, DynamoExporter

    settings = DynamoConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source))
    exported = _traced(source, lambda: DynamoExporter().export(source.model, dict(source.example), settings))
    program: ExportedProgram = exported.program
    return program


@one_thread_at_a_time()
def capture_openvino(source: Source, conversions: Sequence[Any] = ()) -> ExportedModel:
    """Trace a model into an OpenVINO graph with the same inputs and axes as `capture_onnx`.

    The weights in the graph are the model's own memory: write the graph before the model goes.

    Args:
        source: What to trace.
        conversions: OpenVINO's extensions for operators of ours.

    Returns:
        What transformers' exporter made; its `program` is an `openvino.Model`, whose axes have no names.

    Raises:
        ExportError: The trace failed, or fixed an axis that must vary.
    """
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    settings = OpenVINOConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source), stateful=False)
    with without_telemetry(), with_conversions(conversions), weights_read_by_other_code(), recurrent(source.model):
        exported = _traced(source, lambda: OpenVINOExporter().export(source.model, dict(source.example), settings))
    for port in exported.program.inputs:
        for position, axis in source.axes.get(port.any_name, {}).items():
            dimension = port.partial_shape[position]
            if dimension.is_static:
                raise _fixed_axis(source, axis, port.any_name, dimension.get_length())
    return exported


def _traced(source: Source, trace: Callable[[], Any]) -> Any:
    """What a tracer makes; of a model that branches on its data, with branches that its inputs do not change.

    Raises:
        ExportError: The trace failed.
    """

    def attempt(answers: Sequence[bool]) -> Any:
        with (
            quiet(),
            traceable(answers),
            replaced(source.model),
            _without_cache(source),
            _simple_sizes(source),
            without_stack_traces(),
        ):
            return trace()

    # Tracing runs foreign model code, which may raise anything.
    try:
        return attempt(())
    except ExportError:
        raise
    except Exception as error:
        answers = _answers(source) if isinstance(error, DATA_DEPENDENT) else ()
        if not answers:
            raise _trace_error(source, error) from error
    try:
        return attempt(answers)
    except Exception as error:
        raise _trace_error(source, error) from error


@contextmanager
def replaced(model: torch.nn.Module) -> Iterator[None]:
    """The model with the replacements of its family, and its own attributes again afterwards."""
    inner: Any = unwrapped(model)
    with ExitStack() as stack:
        for owner, name, value in family_of(getattr(inner, "config", None)).replacements(inner):
            # Modules in a module are attributes that `vars` does not show.
            if name in vars(owner) or name in vars(owner).get("_modules", ()):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def _answers(source: Source) -> tuple[bool, ...]:
    """What the model asks its data and always hears the same; nothing where it cannot run."""

    def call(seed: int) -> object:
        with quiet(), torch.inference_mode():
            return source.model(**resize(source.example, {}, {}, source.config, seed))

    try:
        return steady_answers([lambda: call(1), lambda: call(2)])
    # Foreign model code again.
    except Exception:  # noqa: BLE001
        return ()


class _SimpleSizes(TorchFunctionMode):
    """Ends a trace whose sizes become long formulas of an image's height and width."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self._architecture = architecture
        self._seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and look at the size of what it makes."""
        made = func(*args, **(kwargs or {}))
        for size in made.shape if isinstance(made, torch.Tensor) else ():
            expression = formula(size) if isinstance(size, torch.SymInt) else None
            if expression is None or expression in self._seen:
                continue
            self._seen.add(expression)
            if expression.count_ops() > _MOST_OPERATIONS:
                raise ExportError(
                    f"A trace of {self._architecture} with images of any size takes too long: sizes in it are formulas of more "
                    f"than {_MOST_OPERATIONS} operations.",
                    fix="export it for images of one size: pass sample={...} and axes={...} without height and width.",
                )
        return made


def _simple_sizes(source: Source) -> Any:
    """Where images may have any size, such a watch over the trace."""
    varied = {axis for named in source.axes.values() for axis in named.values()}
    return _SimpleSizes(source.architecture) if set(IMAGE_AXES) <= varied else nullcontext()


@contextmanager
def _without_cache(source: Source) -> Iterator[None]:
    """A decoder that classifies or embeds returns its keys and values as well, which nobody reads."""
    changed: list[Any] = []
    if not task_spec(source.task).generates:
        # Of an encoder-decoder, the decoder has a config of its own.
        configs = (getattr(module, "config", None) for module in (source, *source.model.modules()))
        found = {id(config): config for config in configs if getattr(config, "use_cache", False)}
        changed = list(found.values())
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _fixed_axis(source: Source, axis: str, name: str, size: int) -> ExportError:
    return ExportError(
        f"The trace of {source.architecture} fixed the axis {axis!r} of {name!r} to {size}.",
        fix="the model's code compares this size with a constant; leave the axis out of axes=... to accept it.",
    )


def _dynamic_shapes(source: Source) -> dict[str, dict[int, Any]]:
    """Every declared axis as `Dim.DYNAMIC`: the trace fails rather than fixing it."""
    return {name: dict.fromkeys(source.axes.get(name, {}), torch.export.Dim.DYNAMIC) for name in source.example}


def _trace_error(source: Source, error: Exception) -> ExportError:
    if isinstance(error, DATA_DEPENDENT):
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "modeling" in frame.filename]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return ExportError(
            f"{source.architecture} decides by the values of its tensors what to compute{where}; a graph computes the same for "
            "all values.",
            fix="run it with backend='pytorch'.",
        )
    constant = _CONSTANT.search(str(error))
    if constant is not None:
        name, position, size = constant["name"], int(constant["position"]), int(constant["size"])
        axis = source.axes.get(name, {}).get(position, str(position))
        return ExportError(
            f"{source.architecture} computes with the number that the axis {axis!r} of {name!r} has in the trace ({size}): the "
            "graph would serve this size alone.",
            fix="run it with backend='pytorch', or pass sample={...} and axes={...} without this axis for a graph of one size.",
        )
    return ExportError(
        f"{source.architecture} cannot be traced: {type(error).__name__}: {first_lines(error)}",
        fix="run again with --verbose (or the `accel` logger at DEBUG) to see what upstream says.",
    )


def first_lines(error: Exception, count: int = 12) -> str:
    """The first lines of an error that say something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:count])


def _name_axes(model: onnx_ir.Model, source: Source) -> None:
    """Give the declared axes their names everywhere in the graph; drop inputs that nothing reads.

    One axis that the trace gave two symbols (a mask's rows beside the ids') becomes one again by its name. An axis
    that became a constant, or two axes that became one, are errors of the trace that cannot be repaired here.
    """
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for position, axis in source.axes.get(str(value.name), {}).items():
            assert value.shape is not None
            size = value.shape[position]
            if isinstance(size, int):
                raise _fixed_axis(source, axis, str(value.name), size)
            symbol = str(size)
            if names.setdefault(symbol, axis) != axis:
                raise ExportError(
                    f"The trace of {source.architecture} made one axis of {names[symbol]!r} and {axis!r}.",
                    fix="pass a sample in which these sizes differ.",
                )
    declared = task_spec(source.task).outputs
    for value in model.graph.outputs:
        for size, axis in zip(value.shape or (), declared.get(str(value.name), ()), strict=False):
            if _DATA_SIZE.match(str(size)):
                names.setdefault(str(size), axis)
    rename_axes(model, names)
