"""Which execution provider runs which nodes of a session: a provider that is listed may have taken nothing.

ONNX Runtime lists a provider as active once its library has loaded, and runs every node that it does not take on the CPU,
without a word. It can be told to record the assignment, which is read here.
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
# onnxruntime_session_options_config_keys.h: kOrtSessionOptionsRecordEpGraphAssignmentInfo
_RECORD = "session.record_ep_graph_assignment_info"
# Operators that nearly all of a transformer's arithmetic is in, with their fused and quantized kin: QLinearMatMul,
# MatMulNBits, FusedConv, GroupQueryAttention, ... The rest of a graph is cheap, or is about shapes and belongs on the CPU.
_MATERIAL = re.compile(r"MatMul|Gemm|Conv|Attention|Einsum|MoE$|^(LSTM|GRU|RNN)$")
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Assignment:
    """The nodes of a session by the provider that runs them, as ONNX Runtime partitioned the graph.

    Counted before the provider fuses what it took, and after constants were folded.

    Attributes:
        provider: The provider that was asked for.
        operators: Number of nodes by operator, by provider.
    """

    provider: str
    operators: Mapping[str, Mapping[str, int]]

    @property
    def nodes(self) -> int:
        """Nodes of the graph."""
        return sum(sum(counts.values()) for counts in self.operators.values())

    @property
    def taken(self) -> int:
        """Nodes that the provider runs."""
        return sum(self.operators.get(self.provider, {}).values())

    @property
    def left_to_cpu(self) -> int:
        """Nodes that run on the CPU although another provider was asked for."""
        return 0 if self.provider == CPU else sum(self.operators.get(CPU, {}).values())

    @property
    def material_on_cpu(self) -> Mapping[str, int]:
        """Of those left to the CPU, the ones with the arithmetic (matrix products, convolutions, attention), by operator."""
        return {} if self.provider == CPU else _material(self.operators.get(CPU, {}))

    @property
    def useless(self) -> bool:
        """Whether the provider took none of the arithmetic; of a graph without any, no node."""
        if not self.nodes:
            return False
        if any(_material(counts) for counts in self.operators.values()):
            return not _material(self.operators.get(self.provider, {}))
        return not self.taken


def _material(counts: Mapping[str, int]) -> dict[str, int]:
    return {operator: count for operator, count in counts.items() if _MATERIAL.search(operator)}


def record(options: ort.SessionOptions, provider: str) -> None:
    """Have ONNX Runtime note the assignment of a session to be opened. The CPU provider takes everything: nothing to note."""
    if provider != CPU and hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry(_RECORD, "1")


def assignment_of(session: ort.InferenceSession, provider: str) -> Assignment | None:
    """What was noted of an open session; `None` where nothing was: on the CPU, and by an ONNX Runtime without that entry."""
    if provider == CPU or not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    operators: dict[str, Counter[str]] = {}
    for subgraph in session.get_provider_graph_assignment_info():
        counts = operators.setdefault(subgraph.ep_name, Counter())
        counts.update(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in subgraph.get_nodes())
    return Assignment(provider, operators)


def check_assignment(session: ort.InferenceSession, provider: str, name: str) -> None:
    """Check that a provider does what it was asked for.

    What is left to the CPU is logged, and warned of once where it is arithmetic.

    Args:
        session: An open session whose options went through `record`.
        provider: The provider that was asked for.
        name: The graph, for messages.

    Raises:
        BackendUnavailableError: Another provider is active, or this one took none of the arithmetic.
    """
    active = session.get_providers()[0]
    if active != provider:
        raise BackendUnavailableError(
            f"ONNX Runtime runs {name} on {active} although {provider} was asked for: its libraries did not load.",
            fix="run `accel doctor`.",
        )
    found = assignment_of(session, provider)
    if found is None:
        return
    if found.useless:
        who = ", ".join(other for other in found.operators if other != provider)
        raise BackendUnavailableError(
            f"{provider} took {found.taken} of the {found.nodes} nodes of {name} and none of its arithmetic; "
            f"{who or 'nobody'} would run it.",
            fix="use the backend cpu for this graph, or a graph with the operators, types and (where the provider needs "
            "them) fixed shapes that the provider has kernels for; `accel doctor` shows what this machine has.",
        )
    if found.left_to_cpu:
        logger.info(
            "%s: %s took %d of %d nodes; %d run on the CPU", name, provider, found.taken, found.nodes, found.left_to_cpu
        )
    if found.material_on_cpu:
        most = sorted(found.material_on_cpu.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]
        _warn(name, provider, ", ".join(f"{count} {operator}" for operator, count in most), found.left_to_cpu)


@functools.lru_cache(maxsize=1024)
def _warn(name: str, provider: str, operators: str, left: int) -> None:
    """Once a graph: shape buckets open the same one several times."""
    logger.warning(
        "%s has no kernels for part of %s: %s run on the CPU, of %d nodes there, and their tensors are copied to and fro. "
        "A graph of another precision, or one optimized for another backend (accel optimize --backend ...), may fit.",
        provider, name, operators, left,
    )  # fmt: skip
