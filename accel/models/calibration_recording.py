"""Inputs of each graph of an encoder-decoder, recorded during generation to calibrate the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from ..artifact.manifest import Artifact
from ..backends.plan import make_plan
from ..errors import QuantizeError
from ..interfaces.protocols import Feeds, Session
from .base import ORTModel
from .encoder_decoder import EncoderDecoder

# Enough tokens to calibrate value ranges: a decoder's values do not grow with the position.
_NEW_TOKENS = 32
_NEW_AXIS = "sequence"


class PartCalibrationBatches:
    """Batches of an encoder-decoder's inputs, and the inputs of each of its graphs, recorded while `generate` runs over all batches.

    Args:
        artifact: An encoder-decoder model.
        batches: Inputs of the encoder; they can be iterated several times.
        new_tokens: Maximum number of tokens generated per row.

    Attributes:
        record: Description of the data rows, for the manifest.
    """

    def __init__(self, artifact: Artifact, batches: Iterable[Feeds], new_tokens: int = _NEW_TOKENS) -> None:
        self.record: dict[str, Any] = getattr(batches, "record", {})
        self._artifact, self._batches, self._new_tokens = artifact, batches, new_tokens

    def __iter__(self) -> Iterator[Feeds]:
        return iter(self._batches)

    @cached_property
    def parts(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """Recorded batches by component name. One decoder batch contains all decoder tokens of one call of `generate`."""
        model = ORTModel.from_plan(make_plan(self._artifact))
        assert isinstance(model, EncoderDecoder), "only encoder-decoders have parts to record"
        try:
            return inputs_by_part(model, self._batches, self._new_tokens)
        finally:
            model.close()


def inputs_by_part(
    model: EncoderDecoder, batches: Iterable[Feeds], new_tokens: int
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Generate from the batches and record the inputs of each graph, by component name.

    Raises:
        QuantizeError: The model cannot generate from these inputs.
    """
    recorders: dict[str, _Recorder] = {}

    def around(name: str, session: Session) -> Session:
        recorders[name] = _Recorder(session)
        return recorders[name]  # the recorder forwards all other attributes to the session

    model.watch(around)
    # One position of the decoder is used by its start token.
    most_new_tokens = model.artifact.component("decoder").max_sizes.get("total", new_tokens + 1) - 1
    for batch in batches:
        try:
            model.generate(**batch, max_new_tokens=min(new_tokens, most_new_tokens), do_sample=False, num_beams=1)
        except ValueError as error:
            raise QuantizeError(
                f"The model's generate() failed on the calibration data: {error}",
                fix="call model.generate(...) on one row of the calibration data, and correct the model's generation_config.json.",
            ) from error
    return {name: recorder.batches() for name, recorder in recorders.items()}


class _Recorder:
    """Wrapper of a session that records the inputs of every call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls: list[tuple[object, dict[str, torch.Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, feeds: Feeds, *, state: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
        """Record the inputs and run the session."""
        # Keep a reference to the state, so that its `id` is not reused by a later state.
        self._calls.append((state, {name: tensor.clone() for name, tensor in feeds.items()}))
        return self._session.run(feeds, state=state, **settings)

    def steps(self, feeds: Feeds, state: Any, *, calls: int) -> None:
        """Return `None`, so that the decoder calls `run` for every token; the faster loop of a session cannot be recorded."""

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Return one batch per call. Calls that continue the same state are concatenated along the token axis."""
        groups: list[list[dict[str, torch.Tensor]]] = []
        last: object = None
        for state, feeds in self._calls:
            if state is None or state is not last:
                groups.append([])
            groups[-1].append(feeds)
            last = state
        axes = {spec.name: spec.shape.index(_NEW_AXIS) for spec in self._session.inputs if _NEW_AXIS in spec.shape}
        return [_joined(calls, axes) for calls in groups]


def _joined(calls: list[dict[str, torch.Tensor]], axes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    if len(calls) == 1:
        return calls[0]
    return {
        name: torch.cat([feeds[name] for feeds in calls], axes[name]) if name in axes else value
        for name, value in calls[-1].items()
    }
