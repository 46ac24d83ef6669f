"""Shape buckets: pad the `sequence` axis up to one of a few lengths, so that a runtime may compile static shapes.

One wrapper for every backend: it pads with the values that the specs name, runs the session opened for that length, and
cuts the result. Padding is masked, so results are those of the unpadded call; models for which the export found
otherwise are refused, and a bucket that differs from dynamic shapes on the device at hand is not used (`forms`).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..artifact.manifest import PADDING_DIFFERENCE, Artifact, Component
from ..errors import ConfigError, InputError
from .checks import ShapeCheck, check_readable, no_state, wrong_names
from .description import SessionDescription
from .forms import Form, FormChecks, FormVerdict
from .interfaces import Feeds, Names, Session, State

if TYPE_CHECKING:
    import torch

OpenShapes = Callable[[Mapping[str, int] | None], Mapping[str, Session]]
_AXIS = "sequence"


class BucketedSession(SessionDescription):
    """A session that rounds the sequence up to the next bucket. Longer calls run with dynamic shapes."""

    def __init__(
        self,
        component: Component,
        buckets: Sequence[int],
        open_bucket: Callable[[int | None], Session],
        open_plain: Callable[[], Mapping[str, Session]],
        checks: Callable[[Session], FormChecks],
    ) -> None:
        if component.stateful:
            raise ConfigError(
                f"Buckets pad the sequence, and {component.name!r} keeps a cache that would hold the padding.",
                fix="leave buckets out.",
            )
        if not any(spec.role == "mask" for spec in component.inputs):
            raise ConfigError(
                f"Buckets pad the sequence, and {component.name!r} takes no mask to hide the padding.",
                fix="leave buckets out.",
            )
        self._buckets = tuple(buckets)
        self._name = component.name
        self._open = open_bucket
        self._open_plain = open_plain
        self._first = open_bucket(self._buckets[0])
        self._sessions: dict[int | None, Session] = {self._buckets[0]: self._first}
        super().__init__(component.inputs, component.outputs, self._first.device, self._first.compute_dtype)
        self._taken = {spec.name: spec for spec in component.inputs}
        self._made = {spec.name: spec for spec in component.outputs}
        self._check_shapes = ShapeCheck(component.inputs)
        self._forms = checks(self._first)
        # Which buckets were found right here; asked for each when it is first needed.
        self._right: dict[int, bool] = {}

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
        changed = max(
            (float(step.validation.get(PADDING_DIFFERENCE, 0)) for step in artifact.manifest.steps), default=0.0
        )
        if changed > 0:
            raise ConfigError(
                f"Buckets pad the sequence, and padding changes what this model answers (by {changed:.2g} of the largest value).",
                fix="leave buckets out.",
            )
        opened: dict[int | None, Mapping[str, Session]] = {}

        def open_bucket(name: str, bucket: int | None) -> Session:
            if bucket not in opened:
                opened[bucket] = open_shapes(None if bucket is None else {_AXIS: bucket})
            return opened[bucket][name]

        def checks(component: Component, session: Session) -> FormChecks:
            return FormChecks(
                artifact, component, device=session.device, compute_dtype=session.compute_dtype, versions=versions
            )

        return {
            c.name: cls(
                c,
                buckets,
                functools.partial(open_bucket, c.name),
                functools.partial(open_shapes, None),
                functools.partial(checks, c),
            )
            for c in artifact.components
        }

    def run(
        self, feeds: Feeds, *, outputs: Names | None = None, out: Feeds | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        """Pad, run, cut; see `Session.run`, also for the shapes. Buffers in `out` are not supported: their size is the bucket's."""
        if out is not None:
            raise InputError(
                "A bucketed session cannot write into given buffers.", fix="leave out=... or the buckets out."
            )
        if feeds.keys() != self._taken.keys():
            raise wrong_names(feeds, self._taken)
        for name, tensor in feeds.items():
            check_readable(name, tensor)
        # Before padding, which would hide a mask that is too short.
        self._check_shapes(tuple([tuple(feeds[name].shape) for name in self._taken]))
        length = self._length(feeds)
        position = bisect.bisect_left(self._buckets, length)
        bucket = self._buckets[position] if position < len(self._buckets) else None
        if bucket is not None and not self._is_right(bucket):
            bucket = None
        return self._run_in(bucket, feeds, outputs=outputs, state=state)

    def _run_in(
        self, bucket: int | None, feeds: Feeds, *, outputs: Sequence[str] | None = None, state: State | None = None
    ) -> dict[str, torch.Tensor]:
        length = self._length(feeds)
        if bucket is not None and bucket != length:
            feeds = {name: self._padded(name, tensor, bucket) for name, tensor in feeds.items()}
        result = self._session(bucket).run(feeds, outputs=outputs, state=state)
        if bucket is None or bucket == length:
            return result
        return {name: self._cut(name, tensor, length) for name, tensor in result.items()}

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

    def _is_right(self, bucket: int) -> bool:
        if bucket not in self._right:
            self._right[bucket] = self._verdict(bucket).passed
        return self._right[bucket]

    def _verdict(self, bucket: int) -> FormVerdict:
        form = Form(name=f"bucket of {bucket}", sizes={"batch": 2, _AXIS: max(1, bucket - 1)}, padding="right")
        return self._forms.check(form, functools.partial(self._run_in, bucket), self._run_plain)

    def check_forms(self) -> list[FormVerdict]:
        """Compare every bucket with dynamic shapes."""
        return [self._verdict(bucket) for bucket in self._buckets]

    def _session(self, bucket: int | None) -> Session:
        if bucket not in self._sessions:
            self._sessions[bucket] = self._open(bucket)
        return self._sessions[bucket]

    def _length(self, feeds: Feeds) -> int:
        for name, spec in self._taken.items():
            if _AXIS in spec.shape and name in feeds:
                return int(feeds[name].shape[spec.shape.index(_AXIS)])
        raise InputError(f"None of {sorted(feeds)} has a sequence axis.")

    def _padded(self, name: str, tensor: torch.Tensor, bucket: int) -> torch.Tensor:
        from torch.nn.functional import pad

        spec = self._taken.get(name)
        if spec is None or _AXIS not in spec.shape:
            return tensor
        axis = spec.shape.index(_AXIS)
        amount = [0, 0] * (tensor.ndim - axis - 1) + [0, bucket - int(tensor.shape[axis])]
        return pad(tensor, amount, value=spec.pad_value)

    def _cut(self, name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
        spec = self._made[name]
        return tensor.narrow(spec.shape.index(_AXIS), 0, length) if _AXIS in spec.shape else tensor

    def new_state(self, batch: int) -> State:
        """Bucketed sessions keep no state."""
        raise no_state()

    def close(self) -> None:
        """Close the sessions of all buckets."""
        for session in self._sessions.values():
            session.close()
