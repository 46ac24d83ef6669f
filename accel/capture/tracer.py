"""Trace a model, name the axes of the resulting graph, and raise an error if the trace made a variable axis a constant."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import ExportConfig
from ..errors import ExportError
from ..interfaces.family_registry import family_of
from ..interfaces.task_registry import task_spec
from ..interfaces.tracing_wrapper import unwrapped
from ..upstream.exporter_tables import (
    weights_read_by_other_code,
    with_conversions,
    without_stack_traces,
    without_telemetry,
)
from ..upstream.onnx_decomposition import decomposed_in_place
from ..upstream.onnx_exporter import parse_operators_once, prepare_rewriter, release_traced_graphs
from ..upstream.output_silencing import quiet
from ..upstream.replaced_attributes import replaced_attributes
from ..upstream.symbolic_sizes import DATA_DEPENDENT, formula
from .custom_operator_forms import symbolic_operators
from .export_source import Source
from .global_state_lock import one_thread_at_a_time
from .graph_names import graph_name, rename_axes, strip_provenance
from .graph_repairs import divide_sizes, keep_padding, round_to_bfloat16
from .recurrence import recurrent
from .samples import IMAGE_AXES
from .torch_function_replacements import traceable

if TYPE_CHECKING:
    import onnx_ir
    from torch.export import ExportedProgram
    from transformers.exporters import ExportedModel


@one_thread_at_a_time()
def capture_onnx(source: Source, config: ExportConfig) -> tuple[onnx_ir.Model, ExportedModel]:
    """Trace a model into an ONNX graph with named axes.

    The trace takes 4 to 20 s for encoders on a CPU. The graph and the model share the weights in memory.

    Returns:
        The graph, and the result of transformers' exporter. The result contains a manifest, which the caller stores next to accel's
        manifest.

    Raises:
        ExportError: The trace failed, or made a variable axis a constant.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    prepare_rewriter()
    parse_operators_once()
    settings = OnnxConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source), opset_version=config.opset)
    with recurrent(source.model), symbolic_operators(), decomposed_in_place():
        exported = _traced(source, lambda: OnnxExporter().export(source.model, dict(source.example), settings))
    graph = exported.program
    _name_axes(graph, source)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        value.name = graph_name(str(value.name))
    strip_provenance(graph, source.model)
    divide_sizes(graph)
    keep_padding(graph)
    if source.dtype != "bfloat16":
        round_to_bfloat16(graph)
    return graph, exported


# Matches the error of torch.export (2.12) about an axis that the model's code made a constant.
_CONSTANT = re.compile(
    r"L\['(?:kwargs'\]\[')?(?P<name>\w+)'\]\.size\(\)\[(?P<position>\d+)\] as dynamic but your code specialized it to be a "
    r"constant \((?P<size>\d+)\)"
)
# Largest accepted number of operations in the formula of a tensor size. ResNet, ConvNeXt and SegFormer have up to 11 operations, and their
# traces take seconds. Swin pads the image in each stage and has 29 operations in the second stage. Its trace would take many minutes.
_MOST_OPERATIONS = 20
# Matches torch.export's symbols for sizes that depend on data, such as the number of keypoints in an image.
_DATA_SIZE = re.compile(r"u\d+\Z")


@one_thread_at_a_time()
def capture_program(source: Source) -> ExportedProgram:
    """Trace a model into a `torch.export` program with the same inputs and axes as in `capture_onnx`.

    Backends that convert such programs themselves use this function.

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
    """Trace a model into an OpenVINO graph with the same inputs and axes as in `capture_onnx`.

    The graph and the model share the weights in memory. So the caller must write the graph to files before it releases the model.

    Args:
        source: The model to trace.
        conversions: OpenVINO extensions that convert accel's custom operators.

    Returns:
        The result of transformers' exporter. Its `program` is an `openvino.Model` whose axes have no names.

    Raises:
        ExportError: The trace failed, or made a variable axis a constant.
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
    """Run a tracer while all functions are replaced that a trace cannot follow.

    Raises:
        ExportError: The trace failed.
    """
    try:
        with (
            quiet(),
            traceable(),
            replaced(source.model),
            _without_cache(source),
            _simple_sizes(source),
            without_stack_traces(),
            _without_garbage_collection(),
        ):
            return trace()
    except ExportError:
        raise
    # The model's own code may raise any exception.
    except Exception as error:
        raise _trace_error(source, error) from error
    finally:
        release_traced_graphs()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector within the block.

    A trace creates millions of objects and deletes few of them, so the collector would use a seventh of the time to find almost nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def replaced(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Apply the replacements of the model's family while the context is open."""
    inner: Any = unwrapped(model)
    return replaced_attributes(family_of(getattr(inner, "config", None)).replacements(inner))


class _SizeFormulaCheck(TorchFunctionMode):
    """Raise an error in a trace if a tensor size becomes a long formula of the image's height and width."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self._architecture = architecture
        self._seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and check the sizes of its result."""
        result = func(*args, **(kwargs or {}))
        for size in result.shape if isinstance(result, torch.Tensor) else ():
            expression = formula(size) if isinstance(size, torch.SymInt) else None
            if expression is None or expression in self._seen:
                continue
            self._seen.add(expression)
            if expression.count_ops() > _MOST_OPERATIONS:
                raise ExportError(
                    f"The trace of {self._architecture} with a variable image size was stopped, because it would take too long: "
                    f"tensor sizes became formulas of more than {_MOST_OPERATIONS} operations.",
                    fix="export the model for one image size: pass sample={...}, and leave the names 'height' and 'width' out of "
                    "axes={...}.",
                )
        return result


def _simple_sizes(source: Source) -> Any:
    """Return a context that limits the length of size formulas, for models that accept images of any size."""
    varied = {axis for named in source.axes.values() for axis in named.values()}
    return _SizeFormulaCheck(source.architecture) if set(IMAGE_AXES) <= varied else nullcontext()


def _without_cache(source: Source) -> AbstractContextManager[None]:
    """Disable the KV cache of models that do not generate text, because the graph would return a cache that no caller reads."""
    if task_spec(source.task).generates:
        return nullcontext()
    # The encoder and the decoder of a model may have separate configs, so all configs are changed.
    configs = (getattr(module, "config", None) for module in source.model.modules())
    caching = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    return replaced_attributes((config, "use_cache", False) for config in caching.values())


def _fixed_axis(source: Source, axis: str, name: str, size: int) -> ExportError:
    return ExportError(
        f"The trace of {source.architecture} fixed the axis {axis!r} of the input {name!r} to the size {size}, because the model's code "
        "compares this size with a constant.",
        fix="leave this axis out of axes=..., if the graph may accept only this size.",
    )


def _dynamic_shapes(source: Source) -> dict[str, dict[int, Any]]:
    """Mark every named axis as `Dim.DYNAMIC`, so that the trace fails if the model's code makes the axis a constant."""
    return {name: dict.fromkeys(source.axes.get(name, {}), torch.export.Dim.DYNAMIC) for name in source.example}


def _trace_error(source: Source, error: Exception) -> ExportError:
    if isinstance(error, DATA_DEPENDENT):
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "modeling" in frame.filename]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return ExportError(
            f"{source.architecture} cannot be exported, because its code takes different branches for different tensor values{where}. "
            "A graph has only one branch.",
            fix="run the model with backend='pytorch'.",
        )
    constant = _CONSTANT.search(str(error))
    if constant is not None:
        name, position, size = constant["name"], int(constant["position"]), int(constant["size"])
        axis = source.axes.get(name, {}).get(position, str(position))
        return ExportError(
            f"The code of {source.architecture} turns the size of the axis {axis!r} of the input {name!r} into the constant {size}, so "
            "the graph would accept only this size.",
            fix="run the model with backend='pytorch', or pass sample={...} and leave this axis out of axes={...} to export a graph for "
            "this size only.",
        )
    return ExportError(
        f"torch.export or transformers failed to trace {source.architecture}: {type(error).__name__}: {first_lines(error)}",
        fix="run the command with --verbose, or set the logger 'accel' to DEBUG, to see the messages of torch.export and transformers.",
    )


def first_lines(error: Exception, count: int = 12) -> str:
    """Return the first non-empty lines of an error message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:count])


def _name_axes(model: onnx_ir.Model, source: Source) -> None:
    """Replace torch.export's symbols for variable axes by the names of the axes, in the complete graph.

    If the trace used two symbols for one axis (such as the batch axis of the token ids and of the mask), both get the same name.

    Raises:
        ExportError: The trace made a named axis a constant, or used one symbol for two named axes.
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
                    f"The trace of {source.architecture} merged the axes {names[symbol]!r} and {axis!r} into one axis.",
                    fix=f"pass a sample={{...}} in which the axes {names[symbol]!r} and {axis!r} have different sizes.",
                )
    declared = task_spec(source.task).outputs
    for value in model.graph.outputs:
        for size, axis in zip(value.shape or (), declared.get(str(value.name), ()), strict=False):
            if _DATA_SIZE.match(str(size)):
                names.setdefault(str(size), axis)
    rename_axes(model, names)
