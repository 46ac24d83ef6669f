"""Values inside a model: inputs and outputs of its layers with weights, for comparisons of two models layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ..artifact.manifest import Artifact
    from .protocols import OpenRequest


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer with weights: a matrix product, an embedding table or a normalization.

    Attributes:
        name: Name of the PyTorch module if it is known, else the name of the node. Names of several modules whose weights form one
            matrix are joined by `+`.
        kind: `linear`, `embedding` or `norm`.
        shape: Shape of the weight, `(inputs, outputs)`, `(rows, width)` or `(width,)`.
        bias: Whether the output of the layer includes a bias.
        weight: Function that returns the weight in float32, as the layer computes with it; `None` if it cannot be read.
        limit: Largest absolute value of the input that the layer represents; `None` without a fixed range (static quantization).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bias: bool
    weight: Callable[[], torch.Tensor | None]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class LayerValues:
    """Values of a call.

    Attributes:
        inputs: Input of each layer, by layer name.
        outputs: Output of each layer, by layer name.
        results: Outputs of the model.
    """

    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    results: Mapping[str, torch.Tensor] = field(default_factory=dict)


@runtime_checkable
class LayerTrace(Protocol):
    """A model whose layers can be observed."""

    @property
    def layers(self) -> Sequence[TracedLayer]:
        """The layers in the order of the computation."""

    def run(self, feeds: Mapping[str, torch.Tensor], replaced: LayerValues | None = None) -> LayerValues:
        """Run the model and return the values of its layers.

        Args:
            feeds: Inputs by name. Inputs that the model does not have are ignored.
            replaced: Values of another model. Layers in `inputs` read these inputs; readers of the layers in `outputs` read these
                outputs. The returned values are those before the replacement. So each layer, and the code between the layers,
                computes with the values of the other model, and a difference is an error of the other model in this place.

        Raises:
            SessionError: The model failed.
        """


@runtime_checkable
class TracingBackend(Protocol):
    """A backend that can return the values of layers."""

    def trace_layers(self, artifact: Artifact, request: OpenRequest) -> Mapping[str, LayerTrace]:
        """Open every component (graph) of the artifact with the values of its layers as outputs.

        The runtime does not fuse operators across these values, so an error of a fused kernel may not appear.

        Raises:
            SessionError: The runtime rejected the graph.
        """
