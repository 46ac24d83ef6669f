"""Capture of a PyTorch model as a graph, with `transformers.exporters`. No other package of accel calls these exporters.

In: a transformers folder, a folder with a PEFT adapter, or a module. Out: a graph with named axes, and reference outputs of the
PyTorch model, with which accel compares the outputs of the graph.

`load_source` loads a model for a task. `Source.sample` makes the inputs of the trace. `capture_onnx` and `capture_openvino` trace the
model, and repair a wrong trace or raise an error. `reference_cases` and `max_difference` compare the graph with the PyTorch model on
other shapes. A trace runs the model on sample inputs, and may be correct only for similar inputs. For example, the exporter removes a
mask that contains only ones from decoder graphs, and makes an axis of size 1 a constant. So the samples have at least two rows,
different sizes for different axes, and padding in the mask.
"""

from ..interfaces.tracing_wrapper import Tensors as Tensors
from ..interfaces.tracing_wrapper import unwrapped as unwrapped
from ..upstream.cache_names import CACHE_NAME as CACHE_NAME
from ..upstream.cache_names import CACHE_NAMES as CACHE_NAMES
from ..upstream.cache_names import cache_argument as cache_argument
from ..upstream.onnx_exporter import prepare_rewriter as prepare_rewriter
from ..upstream.onnx_exporter import write_export_manifest as write_export_manifest
from ..upstream.output_silencing import quiet as quiet
from .cached_attention import FusedAttention as FusedAttention
from .export_source import Source as Source
from .external_weight_reads import read_by_other_code as read_by_other_code
from .generation_graphs import encoder_output as encoder_output
from .generation_graphs import split as split
from .gguf_models import gguf_folder as gguf_folder
from .global_state_lock import one_thread_at_a_time as one_thread_at_a_time
from .graph_names import MODULE as MODULE
from .graph_names import drop_unused_inputs as drop_unused_inputs
from .graph_names import feeds_for as feeds_for
from .graph_names import graph_name as graph_name
from .graph_names import graph_specs as graph_specs
from .graph_names import usual_sizes_in as usual_sizes_in
from .mapped_memory_release import release_pages as release_pages
from .prompt_cases import cases_by_part as cases_by_part
from .quantized_linears import BLOCK_LINEAR as BLOCK_LINEAR
from .quantized_linears import INTEGER_LINEAR as INTEGER_LINEAR
from .quantized_linears import OPERATOR_DOMAIN as OPERATOR_DOMAIN
from .quantized_linears import BlockLinear as BlockLinear
from .quantized_linears import IntegerLinear as IntegerLinear
from .quantized_linears import QuantizationAwareLayer as QuantizationAwareLayer
from .quantized_linears import QuantizedLinear as QuantizedLinear
from .quantized_linears import needs_float_weights as needs_float_weights
from .quantized_linears import pack as pack
from .quantized_linears import quantized_layers as quantized_layers
from .quantized_linears import save_quantized as save_quantized
from .quantized_linears import unpack as unpack
from .quantized_linears import with_record as with_record
from .recurrence import DELTA_RECURRENCE as DELTA_RECURRENCE
from .recurrence import RECURRENCE as RECURRENCE
from .recurrence import RECURRENCE_DOMAIN as RECURRENCE_DOMAIN
from .reference_cases import INTEGERS as INTEGERS
from .reference_cases import Case as Case
from .reference_cases import differences_by_output as differences_by_output
from .reference_cases import max_difference as max_difference
from .reference_cases import named_tensors as named_tensors
from .reference_cases import own_rounding as own_rounding
from .reference_cases import padding_difference as padding_difference
from .reference_cases import reference as reference
from .reference_cases import reference_cases as reference_cases
from .reference_cases import tolerance as tolerance
from .samples import IMAGE_AXES as IMAGE_AXES
from .samples import pad_id as pad_id
from .samples import with_special_tokens as with_special_tokens
from .sound_samples import AXIS_STEPS as AXIS_STEPS
from .source_loader import base_of_adapter as base_of_adapter
from .source_loader import code_elsewhere as code_elsewhere
from .source_loader import load_source as load_source
from .source_loader import modes_kept as modes_kept
from .static_embeddings import is_static_folder as is_static_folder
from .static_embeddings import load_static as load_static
from .static_embeddings import static_folder as static_folder
from .streamed_weights import ModelWeight as ModelWeight
from .streamed_weights import StreamedWeight as StreamedWeight
from .streamed_weights import StreamedWeights as StreamedWeights
from .streamed_weights import StreamingError as StreamingError
from .streamed_weights import WeightReader as WeightReader
from .streamed_weights import empty_weight as empty_weight
from .streamed_weights import weights_loaded as weights_loaded
from .tracer import capture_onnx as capture_onnx
from .tracer import capture_openvino as capture_openvino
from .tracer import capture_program as capture_program
from .tracer import first_lines as first_lines
