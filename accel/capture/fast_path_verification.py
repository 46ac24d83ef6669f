"""Checks of faster ways to compute a graph, on the user's device, before they are used for the first time.

A form (`FastPath`) is another way to compute the same graph: without padding, with lengths instead of a mask, or padded to a bucket. A
form may be correct for one model, kernel or device and wrong for another. So accel compares each form with the plain form of the same
graph. The comparison uses a shape for which the form is used, and rows of different lengths. If the results differ, accel disables the
form and logs a warning. The verdict is cached by artifact, device and package versions, so accel compares each form (two runs) only once.

A session with forms calls `FastPathVerifier.check` before it uses a form. `accel validate` calls `check_forms` to compare all forms.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from ..artifact.checksums import recall, remember
from ..errors import SessionError
from .graph_names import feeds_for
from .reference_cases import differences_by_output

if TYPE_CHECKING:
    from ..artifact.manifest import Artifact, Component
    from ..interfaces.protocols import Feeds
    from ..interfaces.specs import DeviceSpec


logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]

_FILE = "forms.json"
_RELATIVE = {"float32": 1e-3, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 1e-1}
# Quantized graphs compute the scales of activations from all values, including padding. So two correct forms can differ by this fraction
# of the largest value.
_QUANTIZED = 0.25
_ROWS = 4


def relative_tolerance(compute_dtype: str, *, quantized: bool = False) -> float:
    """Return the accepted difference between two ways to compute the same outputs, relative to the largest value.

    Args:
        compute_dtype: Data type used for computation.
        quantized: Whether activations are quantized with scales computed at run time.
    """
    return _QUANTIZED if quantized else _RELATIVE.get(compute_dtype, _QUANTIZED)


Padding = Literal["none", "right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """An alternative way to compute a graph.

    Attributes:
        name: Name of the form in messages and reports: `packed`, `bucket of 128`.
        sizes: Axis sizes of the test batch, for which the session uses this form. Axes that are not listed have the size 4.
        padding: The side on which the rows of the test batch are padded.
        context: Further settings that decide which kernels run, by name, such as options of the runtime.
    """

    name: str
    sizes: Mapping[str, int]
    padding: Padding
    context: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPathComparison:
    """Result of the comparison of a form with the plain form.

    Attributes:
        form: Name of the form.
        difference: Largest difference between the outputs of the two forms at positions that are not padding, relative to the largest
            value.
        tolerance: Largest accepted difference.
        error: Error message if the form failed, else `None`.
    """

    form: str
    difference: float
    tolerance: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the form may be used, because its results are correct."""
        return self.error is None and self.difference <= self.tolerance


@runtime_checkable
class SessionWithFastPaths(Protocol):
    """A session that can compute its graph in several forms."""

    def check_forms(self) -> list[FastPathComparison]:
        """Compare every form with the plain form, and return the verdicts."""


class FastPathVerifier:
    """Results of the checks whether faster forms (alternative ways to compute one graph) are accurate on one device.

    Args:
        artifact: The artifact that is run.
        component: The component (graph) of the artifact.
        device: The device on which the graph runs.
        compute_dtype: Data type in which the kernels compute. It determines the tolerance.
        versions: Versions of the packages that compute the graph, by package name.
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
        self._verdicts: dict[str, FastPathComparison] = {}
        self._lock = threading.RLock()

    def check(
        self, form: FastPath, compute: Callable[[Feeds], Tensors], plain: Callable[[Feeds], Tensors]
    ) -> FastPathComparison:
        """Return the verdict on a form. The first call runs the form and the plain form once. Later calls return the stored verdict.

        Args:
            form: The form, and a shape for which the session uses the form.
            compute: Function that runs a batch in this form and returns the outputs by name.
            plain: Function that runs a batch in the plain form and returns the outputs by name.
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
        """Disable a form that failed during a run."""
        verdict = FastPathComparison(
            form=name, difference=float("inf"), tolerance=self.tolerance, error=" ".join(str(error).split())[:300]
        )
        self._verdicts[name] = verdict
        logger.warning("%s", _warning(self._component.name, verdict))

    def _recalled(self, form: FastPath) -> FastPathComparison | None:
        try:
            return FastPathComparison(**recall(_FILE)[self._digest(form)])
        except (KeyError, TypeError):
            return None

    def _digest(self, form: FastPath) -> str:
        content = json.dumps([*self._key, asdict(form)], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _compared(
        self, form: FastPath, compute: Callable[[Feeds], Tensors], plain: Callable[[Feeds], Tensors]
    ) -> FastPathComparison:
        feeds, mask = self._ragged(form)
        expected = plain(feeds)
        try:
            outputs = compute(feeds)
        except SessionError as error:
            return FastPathComparison(
                form=form.name, difference=float("inf"), tolerance=self.tolerance, error=error.message
            )
        difference = self._difference(outputs, expected, mask)
        return FastPathComparison(form=form.name, difference=difference, tolerance=self.tolerance)

    def _ragged(self, form: FastPath) -> tuple[Feeds, torch.Tensor | None]:
        """Return a batch for a form, and the padding mask of the batch. The rows have different lengths, the shortest has one token.

        The padding mask is `(batch, sequence) bool` with True for tokens, or `None` if the graph has no mask input.
        """
        specs = [spec for spec in self._component.inputs if spec.pair is None]
        axes = {axis for spec in specs for axis in spec.shape if isinstance(axis, str)}
        sizes = {**dict.fromkeys(axes, _ROWS), **form.sizes}
        feeds = dict(feeds_for(specs, sizes, seed=1, folder=self._folder))
        mask = None
        for spec in specs:
            if spec.role == "mask" and len(spec.shape) == 2:
                mask = _ragged_mask(tuple(feeds[spec.name].shape), form.padding)
                feeds[spec.name] = mask.to(feeds[spec.name].dtype)
        return feeds, mask

    def _difference(self, actual: Tensors, expected: Tensors, mask: torch.Tensor | None) -> float:
        """Return the largest difference at positions that are not padding, relative to the largest expected value of each output."""
        by_token = {spec.name for spec in self._component.outputs if spec.shape[:2] == ("batch", "sequence")}

        def without_padding(name: str, value: torch.Tensor) -> torch.Tensor:
            covered = mask is not None and name in by_token and value.shape[:2] == mask.shape
            return value.cpu()[mask] if covered else value

        results, references = ({n: without_padding(n, v) for n, v in outputs.items()} for outputs in (actual, expected))
        each = differences_by_output(results, references).values()
        return max((worst / (scale or 1.0) for worst, scale in each), default=0.0)


def _ragged_mask(shape: tuple[int, ...], padding: Padding) -> torch.Tensor:
    """Return a padding mask `(batch, sequence) bool`. The first row has no padding, and the last row has one token."""
    batch, sequence = shape
    if padding == "none":
        return torch.ones(batch, sequence, dtype=torch.bool)
    lengths = torch.linspace(sequence, 1, batch).round().long() if batch > 1 else torch.tensor([max(1, sequence - 1)])
    mask = torch.arange(sequence)[None, :] < lengths[:, None]
    return mask.flip(1) if padding == "left" else mask


def _warning(component: str, verdict: FastPathComparison) -> str:
    rest = f"accel disabled the faster way {verdict.form!r} to compute the graph {component!r}"
    if verdict.error is not None:
        return f"{rest}, and computes the graph in the normal, slower way. The faster way failed on this machine: {verdict.error}"
    return (
        f"{rest}, and computes the graph in the normal, slower way. On this machine, the results of the faster way differ by "
        f"{verdict.difference:.2g} of the largest value; the accepted difference is {verdict.tolerance:.2g}."
    )
