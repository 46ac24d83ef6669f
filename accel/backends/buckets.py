"""Sequences padded up to one of a few lengths (buckets, with static shapes) or to a multiple (with dynamic ones).

Wrappers for every backend: they pad with the values that the specs name, run the session for that length, and cut the
result. Padding is masked, so results are those of the unpadded call; models for which the export found otherwise are
refused, and a length that differs from the unpadded call on the device at hand is not used (`forms`).
"""

from __future__ import annotations

import bisect
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..artifact.manifest import PADDING_DIFFERENCE, Artifact, Component
from ..capture.graph_forms import Form, FormChecks, FormVerdict, HasForms
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
    """Why an artifact's sequences cannot be padded; `None` where they can."""
    changed = max((float(step.validation.get(PADDING_DIFFERENCE, 0)) for step in artifact.manifest.steps), default=0.0)
    if changed > 0:
        return f"padding changes what this model answers (by {changed:.2g} of the largest value)"
    for component in artifact.components:
        if component.stateful:
            return f"{component.name!r} keeps a cache that would hold the padding"
        if not any(spec.role == "mask" and _AXIS in spec.shape for spec in component.inputs):
            return f"{component.name!r} takes no mask to hide the padding"
    return None


class _PaddedSession(BaseSession[Session], ABC):
    """A session whose calls are padded to lengths that a subclass chooses.

    Args:
        component: What the artifact says about it.
        described: A session of it.
        checks: Compares lengths with the unpadded call.
    """

    def __init__(self, component: Component, described: Session, checks: FormChecks) -> None:
        super().__init__(described, component, described.device, described.compute_dtype)
        self._taken = {spec.name: spec for spec in component.inputs}
        self._made = {spec.name: spec for spec in component.outputs}
        self._forms = checks
        self._masks = [spec.name for spec in component.inputs if spec.role == "mask" and len(spec.shape) == 2]

    @abstractmethod
    def _fitting(self, length: int, side: Side) -> int | None:
        """The length to pad to, at least `length`; `None` for a call as it is.

        Args:
            length: Of the call.
            side: Where its rows are padded already: with padding in front a model may answer by what it makes of that.
        """

    @abstractmethod
    def _session(self, size: int | None) -> Session:
        """What runs calls of that length, or as they are."""

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Pad, run, cut; see `Session.run`, also for the shapes."""
        if feeds.keys() != self._taken.keys():
            raise wrong_names(feeds, self._taken)
        for name, tensor in feeds.items():
            check_readable(name, tensor)
        # Before padding, which would hide a mask that is too short.
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
        raise InputError(f"None of {sorted(feeds)} has a sequence axis.")

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
    """A session that rounds the sequence up to the next bucket. Longer calls run with dynamic shapes."""

    def __init__(
        self,
        component: Component,
        buckets: Sequence[int],
        open_bucket: Callable[[int | None], Session],
        open_plain: Callable[[], Mapping[str, Session]],
        checks: Callable[[Session], FormChecks],
    ) -> None:
        self._buckets = tuple(buckets)
        self._name = component.name
        self._open = open_bucket
        self._open_plain = open_plain
        first = open_bucket(self._buckets[0])
        self._sessions: dict[int | None, Session] = {self._buckets[0]: first}
        super().__init__(component, first, checks(first))
        # Which buckets were found right here; asked for each when it is first needed.
        self._right: dict[tuple[int, Side], bool] = {}

    @classmethod
    def open_all(
        cls, artifact: Artifact, open_shapes: OpenShapes, buckets: Sequence[int], versions: Mapping[str, str]
    ) -> dict[str, Session]:
        """Every component of an artifact as a bucketed session; a bucket is opened when it is first needed.

        Args:
            artifact: What is run.
            open_shapes: Opens its components with fixed sizes for some axes, or with dynamic ones for `None`.
            buckets: Lengths, rising.
            versions: Of what runs it.
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
        """See `Session.run`. Buffers in `out` are not supported: their size is the bucket's."""
        if out is not None:
            raise InputError(
                "A bucketed session cannot write into given buffers.", fix="leave out=... or the buckets out."
            )
        return super().run(feeds, outputs=outputs, state=state)

    def _fitting(self, length: int, side: Side) -> int | None:
        position = bisect.bisect_left(self._buckets, length)
        bucket = self._buckets[position] if position < len(self._buckets) else None
        return bucket if bucket is not None and self._is_right(bucket, side) else None

    def _run_plain(self, feeds: Feeds) -> dict[str, torch.Tensor]:
        """One call with dynamic shapes; sessions that are opened for it alone are closed again."""
        if None in self._sessions:
            return self._sessions[None].run(feeds)
        opened = self._open_plain()
        try:
            return opened[self._name].run(feeds)
        finally:
            for session in opened.values():
                session.close()

    def _is_right(self, bucket: int, side: Side) -> bool:
        if (bucket, side) not in self._right:
            self._right[bucket, side] = self._verdict(bucket, side).passed
        return self._right[bucket, side]

    def _verdict(self, bucket: int, side: Side) -> FormVerdict:
        form = _form(f"bucket of {bucket}", max(1, bucket - 1), side)
        return self._forms.check(form, functools.partial(self._run_in, bucket), self._run_plain)

    def check_forms(self) -> list[FormVerdict]:
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
    """A session of dynamic shapes that meets fewer of them: sequences are padded to the next multiple of a length.

    For runtimes that compile kernels for each new shape, and whose kernels like round ones (docs/adr/0034-lengths-in-steps.md).
    """

    def __init__(self, component: Component, multiple: int, session: Session, checks: FormChecks) -> None:
        super().__init__(component, session, checks)
        self._multiple = multiple
        self._plain = session
        self._longest = component.max_sizes.get(_AXIS)
        self._right: dict[Side, bool] = {}

    @classmethod
    def open_all(
        cls, artifact: Artifact, sessions: Mapping[str, Session], multiple: int, versions: Mapping[str, str]
    ) -> dict[str, Session]:
        """An artifact's sessions, rounding."""
        return {
            c.name: cls(c, multiple, sessions[c.name], _checks(artifact, c, versions, sessions[c.name]))
            for c in artifact.components
        }

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """See `Session.run`. What is written into given buffers is not padded: their size is the call's."""
        if out is not None:
            return self._plain.run(feeds, outputs=outputs, out=out, state=state)
        return super().run(feeds, outputs=outputs, state=state)

    def _fitting(self, length: int, side: Side) -> int | None:
        size = -(-length // self._multiple) * self._multiple
        if size == length or (self._longest is not None and size > self._longest):
            return None
        if side not in self._right:
            self._right[side] = self._verdict(side).passed
        return size if self._right[side] else None

    def _verdict(self, side: Side) -> FormVerdict:
        size = self._multiple
        form = _form(f"multiples of {size}", size - 1, side)
        return self._forms.check(form, functools.partial(self._run_in, size), self._plain.run)

    def check_forms(self) -> list[FormVerdict]:
        """Compare a padded call with one that is not, and whatever forms the session has."""
        own = self._plain.check_forms() if isinstance(self._plain, HasForms) else []
        if self._longest is not None and self._multiple > self._longest:
            return own
        return [*own, *map(self._verdict, _SIDES)]

    def _session(self, size: int | None) -> Session:
        return self._plain

    def close(self) -> None:
        """Close the session."""
        self._plain.close()


def _form(name: str, length: int, side: Side) -> Form:
    """Padding behind rows that are padded on a side; two rows, of which one is."""
    return Form(
        name=name if side == "right" else f"{name}, padding in front", sizes={"batch": 2, _AXIS: length}, padding=side
    )


def _checks(artifact: Artifact, component: Component, versions: Mapping[str, str], session: Session) -> FormChecks:
    return FormChecks(
        artifact, component, device=session.device, compute_dtype=session.compute_dtype, versions=versions
    )
