"""Pad sequences to one of a few lengths (buckets, with static shapes) or to a multiple of a length (with dynamic
shapes).

The classes wrap the sessions of any backend. They pad the inputs with the values in the input specs, run the session for
the padded length, and cut the outputs. The attention mask hides the padding, so the outputs equal the outputs of the
unpadded call. Models whose export measured a difference are refused. A padded length is not used if its outputs differ on
the device of the session (see `FastPathVerifier`).
"""

from __future__ import annotations

import bisect
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from ..artifact.manifest import PADDING_DIFFERENCE, Artifact, Component
from ..capture.fast_path_verification import FastPath, FastPathComparison, FastPathVerifier, SessionWithFastPaths
from ..errors import InputError
from ..interfaces.protocols import Feeds, Names, Session
from ..interfaces.session import BaseSession
from ..interfaces.session_contract import check_readable, wrong_names
from ..interfaces.state import State

if TYPE_CHECKING:
    import torch

OpenShapes = Callable[[Mapping[str, int] | None], Mapping[str, Session]]
Side = Literal["right", "left"]
_SIDES: tuple[Side, ...] = ("right", "left")
_AXIS = "sequence"


def why_unpadded(artifact: Artifact) -> str | None:
    """Return the reason why an artifact's sequences cannot be padded; `None` if they can."""
    changed = max((float(step.validation.get(PADDING_DIFFERENCE, 0)) for step in artifact.manifest.steps), default=0.0)
    if changed > 0:
        return f"padding changes the outputs of this model (by {changed:.2g} times the largest output value)"
    for component in artifact.components:
        if component.stateful:
            return f"the KV cache of the graph {component.name!r} would contain the padding tokens"
        if not any(spec.role == "mask" and _AXIS in spec.shape for spec in component.inputs):
            return f"the graph {component.name!r} has no attention mask input to mask the padding"
    return None


class _PaddedSession(BaseSession[Session], ABC):
    """A session that pads each call to a length chosen by a subclass.

    Args:
        component: The component of the artifact.
        described: A session of the component, for its specs and device.
        checks: Compares padded calls with unpadded calls.
    """

    _form: ClassVar[str]
    """Prefix of the names under which the results of comparing padded with unpadded calls are cached."""

    def __init__(self, component: Component, described: Session, checks: FastPathVerifier) -> None:
        super().__init__(described, component, described.device, described.compute_dtype)
        self._taken = {spec.name: spec for spec in component.inputs}
        self._made = {spec.name: spec for spec in component.outputs}
        self._forms = checks
        # Result of the check of each padded length and side. A length is checked before its first use.
        self._right: dict[tuple[int, Side], bool] = {}
        self._masks = [spec.name for spec in component.inputs if spec.role == "mask" and len(spec.shape) == 2]

    @abstractmethod
    def _fitting(self, length: int, side: Side) -> int | None:
        """Return the padded length, at least `length`; `None` for no padding.

        Args:
            length: Sequence length of the call.
            side: Side on which the rows of the call are already padded. Left padding may change the outputs of some
                models.
        """

    @abstractmethod
    def _session(self, size: int | None) -> Session:
        """Return the session for calls of a padded length; for unpadded calls when `None`."""

    @abstractmethod
    def _run_plain(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        """Run one call without padding."""

    def _is_right(self, size: int, side: Side) -> bool:
        if (size, side) not in self._right:
            self._right[size, side] = self._verdict(size, side).passed
        return self._right[size, side]

    def _verdict(self, size: int, side: Side) -> FastPathComparison:
        """Compare a padded call with the unpadded call. The batch has two rows, one of them already padded on the given
        side.
        """
        name = f"{self._form} of {size}{'' if side == 'right' else ', padding in front'}"
        form = FastPath(name=name, sizes={"batch": 2, _AXIS: max(1, size - 1)}, padding=side)
        return self._forms.check(form, functools.partial(self._run_in, size), self._run_plain)

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Pad the inputs, run the session and cut the outputs. Arguments as in `Session.run`."""
        if feeds.keys() != self._taken.keys():
            raise wrong_names(feeds, self._taken)
        for name, tensor in feeds.items():
            check_readable(name, tensor)
        # Check the shapes before padding, because padding would hide a mask that is too short.
        self._check_shapes(tuple([tuple(feeds[name].shape) for name in self._taken]))
        side: Side = "right" if all(bool(feeds[name][:, 0].all()) for name in self._masks) else "left"
        return self._run_in(self._fitting(self._length(feeds), side), feeds, outputs=outputs, state=state)

    def _run_in(
        self, size: int | None, feeds: Feeds, *, outputs: Sequence[str] | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        length = self._length(feeds)
        if size is not None and size != length:
            feeds = {name: self._padded(name, tensor, size) for name, tensor in feeds.items()}
        result = self._session(size).run(feeds, outputs=outputs, state=state)
        if size is None or size == length:
            return result
        return {name: self._cut(name, tensor, length) for name, tensor in result.items()}

    def _length(self, feeds: Feeds) -> int:
        for name, spec in self._taken.items():
            if _AXIS in spec.shape and name in feeds:
                return int(feeds[name].shape[spec.shape.index(_AXIS)])
        raise InputError(f"None of the inputs {sorted(feeds)} has a sequence axis.")

    def _padded(self, name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
        from torch.nn.functional import pad

        spec = self._taken.get(name)
        if spec is None or _AXIS not in spec.shape:
            return tensor
        axis = spec.shape.index(_AXIS)
        amount = [0, 0] * (tensor.ndim - axis - 1) + [0, size - int(tensor.shape[axis])]
        return pad(tensor, amount, value=spec.pad_value)

    def _cut(self, name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
        spec = self._made[name]
        return tensor.narrow(spec.shape.index(_AXIS), 0, length) if _AXIS in spec.shape else tensor


class BucketedSession(_PaddedSession):
    """A session that pads the sequence to the next bucket. Longer calls run with dynamic shapes."""

    _form = "bucket"

    def __init__(
        self,
        component: Component,
        buckets: Sequence[int],
        open_bucket: Callable[[int | None], Session],
        open_plain: Callable[[], Mapping[str, Session]],
        checks: Callable[[Session], FastPathVerifier],
    ) -> None:
        self._buckets = tuple(buckets)
        self._name = component.name
        self._open = open_bucket
        self._open_plain = open_plain
        first = open_bucket(self._buckets[0])
        self._sessions: dict[int | None, Session] = {self._buckets[0]: first}
        super().__init__(component, first, checks(first))

    @classmethod
    def open_all(
        cls, artifact: Artifact, open_shapes: OpenShapes, buckets: Sequence[int], versions: Mapping[str, str]
    ) -> dict[str, Session]:
        """Open every component of an artifact as a bucketed session. The session of a bucket is opened at its first
        use.

        Args:
            artifact: The artifact.
            open_shapes: Opens the components with fixed sizes for some axes, or with dynamic shapes for `None`.
            buckets: Sequence lengths in increasing order.
            versions: Versions of the runtime.
        """
        opened: dict[int | None, Mapping[str, Session]] = {}

        def open_bucket(name: str, bucket: int | None) -> Session:
            if bucket not in opened:
                opened[bucket] = open_shapes(None if bucket is None else {_AXIS: bucket})
            return opened[bucket][name]

        return {
            c.name: cls(
                c,
                buckets,
                functools.partial(open_bucket, c.name),
                functools.partial(open_shapes, None),
                functools.partial(_checks, artifact, c, versions),
            )
            for c in artifact.components
        }

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Run a padded call, as `Session.run`. Buffers in `out` raise an error, because outputs have the size of the
        bucket.
        """
        if out is not None:
            raise InputError(
                "A session with buckets cannot write outputs into buffers (out=...), because its outputs have the size of the "
                "bucket.",
                fix="remove out=..., or remove the buckets from SessionOptions.",
            )
        return super().run(feeds, outputs=outputs, state=state)

    def _fitting(self, length: int, side: Side) -> int | None:
        position = bisect.bisect_left(self._buckets, length)
        bucket = self._buckets[position] if position < len(self._buckets) else None
        return bucket if bucket is not None and self._is_right(bucket, side) else None

    def _run_plain(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        """Run one call with dynamic shapes. Sessions that are opened only for this call are closed afterwards."""
        if None in self._sessions:
            return self._sessions[None].run(feeds)
        sessions = self._open_plain()
        try:
            return sessions[self._name].run(feeds)
        finally:
            for session in sessions.values():
                session.close()

    def check_forms(self) -> list[FastPathComparison]:
        """Compare every bucket with dynamic shapes."""
        return [self._verdict(bucket, side) for bucket in self._buckets for side in _SIDES]

    def _session(self, size: int | None) -> Session:
        if size not in self._sessions:
            self._sessions[size] = self._open(size)
        return self._sessions[size]

    def close(self) -> None:
        """Close the sessions of all buckets."""
        for session in self._sessions.values():
            session.close()


class RoundedSession(_PaddedSession):
    """A session with dynamic shapes that pads sequences to a multiple of a length, so that fewer different shapes
    occur.

    For runtimes that compile kernels for each new shape and are faster at round lengths
    (docs/adr/0034-padded-lengths.md).
    """

    _form = "multiples"

    def __init__(self, component: Component, multiple: int, session: Session, checks: FastPathVerifier) -> None:
        super().__init__(component, session, checks)
        self._multiple = multiple
        self._plain = session
        self._longest = component.max_sizes.get(_AXIS)

    @classmethod
    def open_all(
        cls, artifact: Artifact, sessions: Mapping[str, Session], multiple: int, versions: Mapping[str, str]
    ) -> dict[str, Session]:
        """Wrap the sessions of an artifact."""
        return {
            c.name: cls(c, multiple, sessions[c.name], _checks(artifact, c, versions, sessions[c.name]))
            for c in artifact.components
        }

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Pad the inputs and run the session, with the arguments of `Session.run`. If the caller passes output buffers, the
        inputs are not padded, because the buffers have
        the size of the call.
        """
        if out is not None:
            return self._plain.run(feeds, outputs=outputs, out=out, state=state)
        return super().run(feeds, outputs=outputs, state=state)

    def _fitting(self, length: int, side: Side) -> int | None:
        size = -(-length // self._multiple) * self._multiple
        if size == length or (self._longest is not None and size > self._longest):
            return None
        return size if self._is_right(self._multiple, side) else None

    def _run_plain(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        return self._plain.run(feeds)

    @property
    def plain(self) -> Session:
        """The session without padding."""
        return self._plain

    def check_forms(self) -> list[FastPathComparison]:
        """Compare a padded call with an unpadded call, and check the forms of the wrapped session."""
        verdicts = self._plain.check_forms() if isinstance(self._plain, SessionWithFastPaths) else []
        if self._longest is not None and self._multiple > self._longest:
            return verdicts
        return [*verdicts, *(self._verdict(self._multiple, side) for side in _SIDES)]

    def _session(self, size: int | None) -> Session:
        return self._plain

    def close(self) -> None:
        """Close the session."""
        self._plain.close()


def _checks(
    artifact: Artifact, component: Component, versions: Mapping[str, str], session: Session
) -> FastPathVerifier:
    return FastPathVerifier(
        artifact, component, device=session.device, compute_dtype=session.compute_dtype, versions=versions
    )
