"""Forms of a graph are checked where they run, before their first answer.

A form is another way to compute what a graph says: without its padding, with lengths instead of a mask, padded to a
bucket. Whether it is right depends on the model, the kernels and the device, so it is compared there: at a shape that
makes it run, on rows of different lengths, with the plain form of the same graph. A form that differs is turned off and
named. What was found is remembered by artifact, device and versions, so that this costs two runs once.

A session that has forms asks `FormChecks.check` before it uses one, and offers all of them to `accel validate` by
`check_forms`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ..artifact.checksums import recall, remember
from ..errors import SessionError

if TYPE_CHECKING:
    import torch

    from ..artifact.manifest import Artifact, Component
    from ..interfaces.protocols import Feeds
    from ..interfaces.specs import DeviceSpec

    Tensors = Mapping[str, torch.Tensor]

logger = logging.getLogger(__name__)

_FILE = "forms.json"
_RELATIVE = {"float32": 1e-3, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 1e-1}
# Scales of activations are computed from what is padded, too: two forms of a right graph differ by that.
_QUANTIZED = 0.25
_ROWS = 4


def relative_tolerance(compute_dtype: str, *, quantized: bool = False) -> float:
    """What two ways to compute the same may differ by, as a share of the largest value.

    Args:
        compute_dtype: What the kernels compute in.
        quantized: Whether activations are quantized with scales of their own.
    """
    return _QUANTIZED if quantized else _RELATIVE.get(compute_dtype, _QUANTIZED)


Padding = Literal["none", "right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Another way to compute a graph.

    Attributes:
        name: For messages and reports: `packed`, `bucket of 128`.
        sizes: A size for each axis, such that this form is used; axes that are not named get a few rows.
        padding: On which side the rows of that shape are padded.
        context: What else decides its kernels, by name: a runtime's options.
    """

    name: str
    sizes: Mapping[str, int]
    padding: Padding
    context: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormVerdict:
    """What a comparison found.

    Attributes:
        form: The form's name.
        difference: Largest difference from the plain form over real tokens, as a share of the largest value.
        tolerance: What is accepted.
        error: Why the form could not be computed at all.
    """

    form: str
    difference: float
    tolerance: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the form may answer."""
        return self.error is None and self.difference <= self.tolerance


@runtime_checkable
class HasForms(Protocol):
    """A session that computes in several forms."""

    def check_forms(self) -> list[FormVerdict]:
        """Compare every form with the plain one, now."""


class FormChecks:
    """The verdicts on one component's forms on one device.

    Args:
        artifact: What is run.
        component: Which of its graphs.
        device: Where.
        compute_dtype: What its kernels compute in; decides the tolerance.
        versions: Of everything that computes.
    """

    def __init__(
        self,
        artifact: Artifact,
        component: Component,
        *,
        device: DeviceSpec,
        compute_dtype: str,
        versions: Mapping[str, str],
    ) -> None:
        self._component = component
        self._folder = artifact.path
        quantized = artifact.manifest.quantization is not None
        self.tolerance = relative_tolerance(compute_dtype, quantized=quantized)
        self._key = [artifact.digest, component.name, asdict(device), compute_dtype, dict(versions)]
        self._verdicts: dict[str, FormVerdict] = {}
        self._lock = threading.RLock()

    def check(self, form: Form, compute: Callable[[Feeds], Tensors], plain: Callable[[Feeds], Tensors]) -> FormVerdict:
        """Whether a form may answer. The first question compares it with the plain form, in one run of each; later ones cost a
        lookup.

        Args:
            form: The form and a shape that makes it run.
            compute: Runs a batch in that form; gives the outputs by name.
            plain: Runs it in the plain form.
        """
        with self._lock:
            verdict = self._verdicts.get(form.name) or self._recalled(form)
            if verdict is None:
                verdict = self._compared(form, compute, plain)
                remember(_FILE, {self._digest(form): asdict(verdict)})
            if form.name not in self._verdicts and not verdict.passed:
                logger.warning("%s", _warning(self._component.name, verdict))
            self._verdicts[form.name] = verdict
            return verdict

    def refuse(self, name: str, error: Exception) -> None:
        """Turn a form off that failed while it ran."""
        verdict = FormVerdict(
            form=name, difference=float("inf"), tolerance=self.tolerance, error=" ".join(str(error).split())[:300]
        )
        self._verdicts[name] = verdict
        logger.warning("%s", _warning(self._component.name, verdict))

    def _recalled(self, form: Form) -> FormVerdict | None:
        try:
            return FormVerdict(**recall(_FILE)[self._digest(form)])
        except (KeyError, TypeError):
            return None

    def _digest(self, form: Form) -> str:
        content = json.dumps([*self._key, asdict(form)], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _compared(
        self, form: Form, compute: Callable[[Feeds], Tensors], plain: Callable[[Feeds], Tensors]
    ) -> FormVerdict:
        feeds, kept = self._ragged(form)
        expected = plain(feeds)
        try:
            found = compute(feeds)
        except SessionError as error:
            return FormVerdict(form=form.name, difference=float("inf"), tolerance=self.tolerance, error=error.message)
        return FormVerdict(form=form.name, difference=self._difference(found, expected, kept), tolerance=self.tolerance)

    def _ragged(self, form: Form) -> tuple[Feeds, torch.Tensor | None]:
        """A batch of the form's shape, its rows from full to one token long, and which of its places are tokens:
        `(batch, sequence) bool`.
        """
        from .. import capture

        specs = [spec for spec in self._component.inputs if spec.pair is None]
        axes = {axis for spec in specs for axis in spec.shape if isinstance(axis, str)}
        sizes = {**dict.fromkeys(axes, _ROWS), **form.sizes}
        feeds = dict(capture.feeds_for(specs, sizes, seed=1, folder=self._folder))
        kept = None
        for spec in specs:
            if spec.role == "mask" and len(spec.shape) == 2:
                kept = _ragged_mask(tuple(feeds[spec.name].shape), form.padding)
                feeds[spec.name] = kept.to(feeds[spec.name].dtype)
        return feeds, kept

    def _difference(self, found: Tensors, expected: Tensors, kept: torch.Tensor | None) -> float:
        """Largest difference over real tokens, as a share of the largest expected value of its output."""
        import torch

        worst = 0.0
        for spec in self._component.outputs:
            if spec.name not in expected or not expected[spec.name].numel():
                continue
            if found[spec.name].shape != expected[spec.name].shape:
                return float("inf")
            one, other = found[spec.name].double().cpu(), expected[spec.name].double().cpu()
            if kept is not None and spec.shape[:2] == ("batch", "sequence"):
                one, other = one[kept], other[kept]
            same = (one == other) | (one.isnan() & other.isnan())
            gap = torch.where(same, torch.zeros_like(one), (one - other).abs()).nan_to_num(nan=float("inf")).max()
            finite = other[other.isfinite()]
            scale = float(finite.abs().max()) if finite.numel() else 1.0
            worst = max(worst, float(gap) / (scale or 1.0))
        return worst


def _ragged_mask(shape: tuple[int, ...], padding: Padding) -> torch.Tensor:
    """Rows from full to one token: `(batch, sequence) bool`."""
    import torch

    batch, sequence = shape
    if padding == "none":
        return torch.ones(batch, sequence, dtype=torch.bool)
    lengths = torch.linspace(sequence, 1, batch).round().long() if batch > 1 else torch.tensor([max(1, sequence - 1)])
    kept = torch.arange(sequence)[None, :] < lengths[:, None]
    return kept.flip(1) if padding == "left" else kept


def _warning(component: str, verdict: FormVerdict) -> str:
    if verdict.error is not None:
        return f"{component} is not computed in its form {verdict.form!r}, which fails here: {verdict.error}"
    return (
        f"{component} is not computed in its form {verdict.form!r}: here it is {verdict.difference:.2g} of the largest value "
        f"off ({verdict.tolerance:.2g} is accepted). Answers come from another form, which is right and slower."
    )
