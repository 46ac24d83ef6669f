"""PyTorch model to graph: the only contact with `transformers.exporters`.

In: a transformers folder, an adapter or a module. Out: a graph with named axes, and what PyTorch answers to compare it with.

`load_source` reads a model for a task, `Source.sample` makes the inputs it is traced with, `capture_onnx` (or
`capture_openvino`) traces it and repairs or refuses what the trace got wrong, and `reference_cases` with
`max_difference` compare the result with the model on other shapes. A trace follows one set of inputs, and what it did
not see it cannot keep: an all-ones mask is dropped from decoder graphs, and an axis of size 1 becomes a constant. So the
samples are ours: two rows or more, unequal sizes, and padding in the mask.
"""

from ..interfaces.wrapper import Tensors, unwrapped
from ..upstream.cache_names import CACHE_NAME, CACHE_NAMES, cache_argument
from ..upstream.library_output import quiet
from ..upstream.onnx_exporter import make_rewrites_exact
from .cached_attention import FusedAttention
from .generation_graphs import encoder_output, split
from .graph_names import (
    drop_unused_inputs,
    feeds_for,
    graph_name,
    graph_specs,
    usual_sizes_in,
)
from .mapped_memory import release_pages
from .process_lock import one_thread_at_a_time
from .prompt_cases import cases_by_part
from .quantized_linears import (
    BLOCK_LINEAR,
    INTEGER_LINEAR,
    OPERATOR_DOMAIN,
    BlockLinear,
    IntegerLinear,
    QuantizedLinear,
    Trained,
    needs_float_weights,
    pack,
    quantized_layers,
    replace_layer,
    save_quantized,
    unpack,
    with_record,
)
from .recurrence import DELTA_RECURRENCE, RECURRENCE, RECURRENCE_DOMAIN
from .reference_cases import (
    INTEGERS,
    Case,
    differences_by_output,
    max_difference,
    named_tensors,
    own_rounding,
    padding_difference,
    reference,
    reference_cases,
    tolerance,
)
from .samples import IMAGE_AXES, pad_id, with_special_tokens
from .sound_samples import AXIS_STEPS
from .source import Source
from .source_loader import base_of_adapter, code_elsewhere, load_source, modes_kept
from .tracer import capture_onnx, capture_openvino, capture_program, first_lines
from .weight_readers import read_by_other_code

__all__ = [
    "AXIS_STEPS",
    "BLOCK_LINEAR",
    "CACHE_NAME",
    "CACHE_NAMES",
    "DELTA_RECURRENCE",
    "IMAGE_AXES",
    "INTEGERS",
    "INTEGER_LINEAR",
    "OPERATOR_DOMAIN",
    "RECURRENCE",
    "RECURRENCE_DOMAIN",
    "BlockLinear",
    "Case",
    "FusedAttention",
    "IntegerLinear",
    "QuantizedLinear",
    "Source",
    "Tensors",
    "Trained",
    "base_of_adapter",
    "cache_argument",
    "capture_onnx",
    "capture_openvino",
    "capture_program",
    "cases_by_part",
    "code_elsewhere",
    "differences_by_output",
    "drop_unused_inputs",
    "encoder_output",
    "feeds_for",
    "first_lines",
    "graph_name",
    "graph_specs",
    "load_source",
    "make_rewrites_exact",
    "max_difference",
    "modes_kept",
    "named_tensors",
    "needs_float_weights",
    "one_thread_at_a_time",
    "own_rounding",
    "pack",
    "pad_id",
    "padding_difference",
    "quantized_layers",
    "quiet",
    "read_by_other_code",
    "reference",
    "reference_cases",
    "release_pages",
    "replace_layer",
    "save_quantized",
    "split",
    "tolerance",
    "unpack",
    "unwrapped",
    "usual_sizes_in",
    "with_record",
    "with_special_tokens",
]
