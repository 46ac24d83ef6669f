"""Check of the execution provider that runs the nodes of a session.

ONNX Runtime lists a provider as active as soon as the provider's library has loaded. Nodes that the provider does not
support run on the CPU without a message, even if these are all nodes of the graph. ONNX Runtime can record which
provider runs each node; this module reads the record.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import onnxruntime as ort

from accel.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
# ONNX Runtime's header onnxruntime_session_options_config_keys.h defines this key as
# kOrtSessionOptionsRecordEpGraphAssignmentInfo.
_RECORD = "session.record_ep_graph_assignment_info"
# These operators do nearly all of a transformer's arithmetic. The pattern includes fused and quantized variants, for
# example QLinearMatMul, MatMulNBits, FusedConv and GroupQueryAttention. Other operators are cheap, or compute shapes on
# the CPU.
_MATERIAL = re.compile(r"MatMul|Gemm|Conv|Attention|Einsum|MoE$|^(LSTM|GRU|RNN)$")
_NAMED = 4


@dataclass(frozen=True, slots=True)
class ProviderAssignment:
    """The nodes of a session by execution provider, as ONNX Runtime partitioned the graph.

    Nodes are counted after constant folding, and before the provider fuses the nodes that it runs.

    Attributes:
        provider: The requested provider.
        operators: For each provider, the number of nodes by operator type.
    """

    provider: str
    operators: Mapping[str, Mapping[str, int]]

    @property
    def nodes(self) -> int:
        """Number of nodes of the graph."""
        return sum(sum(counts.values()) for counts in self.operators.values())

    @property
    def on_provider(self) -> int:
        """Number of nodes that the requested provider runs."""
        return sum(self.operators.get(self.provider, {}).values())

    @property
    def left_to_cpu(self) -> int:
        """Number of nodes that run on the CPU although another provider was requested."""
        return 0 if self.provider == CPU else sum(self.operators.get(CPU, {}).values())

    @property
    def material_on_cpu(self) -> Mapping[str, int]:
        """Number of arithmetic nodes (matrix products, convolutions, attention) that run on the CPU, by operator type."""
        return {} if self.provider == CPU else _material(self.operators.get(CPU, {}))

    @property
    def useless(self) -> bool:
        """Whether the provider runs none of the arithmetic nodes; for a graph without arithmetic, whether it runs no node."""
        if not self.nodes:
            return False
        if any(_material(counts) for counts in self.operators.values()):
            return not _material(self.operators.get(self.provider, {}))
        return not self.on_provider


def _material(counts: Mapping[str, int]) -> dict[str, int]:
    return {operator: count for operator, count in counts.items() if _MATERIAL.search(operator)}


def record(options: ort.SessionOptions, provider: str) -> None:
    """Make ONNX Runtime record which provider runs each node of a session that is opened with these options.

    For the CPU provider, the options stay unchanged, because the CPU provider runs every node.
    """
    if provider != CPU and hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry(_RECORD, "1")


def assignment_of(session: ort.InferenceSession, provider: str) -> ProviderAssignment | None:
    """Return the recorded assignment of nodes to providers of an open session.

    Return `None` for the CPU provider, and if this version of ONNX Runtime cannot record the assignment.
    """
    if provider == CPU or not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    operators: dict[str, Counter[str]] = {}
    for subgraph in session.get_provider_graph_assignment_info():
        counts = operators.setdefault(subgraph.ep_name, Counter())
        counts.update(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in subgraph.get_nodes())
    return ProviderAssignment(provider, operators)


def check_assignment(session: ort.InferenceSession, provider: str, name: str) -> None:
    """Check that the requested provider runs the graph's arithmetic.

    The number of nodes that run on the CPU is logged. If arithmetic nodes run on the CPU, a warning is logged, once for
    each graph.

    Args:
        session: An open session whose options were passed to `record`.
        provider: The requested provider.
        name: The name of the graph, for messages.

    Raises:
        BackendUnavailableError: Another provider is active, or the requested provider runs none of the arithmetic.
    """
    active = session.get_providers()[0]
    if active != provider:
        raise BackendUnavailableError(
            f"ONNX Runtime runs the graph {name} with {active} instead of the requested {provider}, because the libraries of {provider} "
            "could not be loaded.",
            fix="run `accel doctor`, which shows the missing libraries.",
        )
    assignment = assignment_of(session, provider)
    if assignment is None:
        return
    if assignment.useless:
        other_runners = ", ".join(other for other in assignment.operators if other != provider)
        raise BackendUnavailableError(
            f"The execution provider {provider} can run only {assignment.on_provider} of the {assignment.nodes} nodes of the graph {name}, "
            "and none of the graph's matrix products, convolutions or attention nodes"
            f"{f'. ONNX Runtime would run these nodes with {other_runners}' if other_runners else ''}.",
            fix="use the backend cpu for this graph. Or export a graph with operators, data types and fixed shapes that the execution "
            "provider supports.",
        )
    if assignment.left_to_cpu:
        logger.info(
            "%s: %s runs %d of %d nodes; %d nodes run on the CPU",
            name,
            provider,
            assignment.on_provider,
            assignment.nodes,
            assignment.left_to_cpu,
        )
    if assignment.material_on_cpu:
        most = sorted(assignment.material_on_cpu.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
        _warn(name, provider, ", ".join(f"{count} {operator}" for operator, count in most), assignment.left_to_cpu)


@functools.lru_cache(maxsize=1024)
def _warn(name: str, provider: str, operators: str, left: int) -> None:
    """Log a warning about arithmetic on the CPU, only once for the same arguments.

    Sessions with shape buckets open the same graph several times.
    """
    logger.warning(
        "%s has no kernels for some nodes of %s. The nodes %s run on the CPU (%d nodes in all), and their tensors are copied "
        "between the device and the CPU. Fix: try a graph of another data type, or a graph that was optimized for this "
        "backend (accel optimize --backend ...).",
        provider, name, operators, left,
    )  # fmt: skip
