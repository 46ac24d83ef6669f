"""How far an artifact is from what it was made from: graphs run on reference cases, and compared within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.tensors import TensorSpec
from ..backends.interfaces import Session
from ..errors import ValidationError

if TYPE_CHECKING:
    import torch


_KEPT = "logits_to_keep"


def merged(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The comparisons of several graphs as one: the worst of them, and each under `components`."""
    if len(found) == 1:
        return next(iter(found.values()))
    worst = max(found.values(), key=lambda one: one["max_abs_difference"] / one["tolerance"])
    return {**worst, "components": dict(found)}


def compare(session: Session, cases: list[capture.Case], atol: float | None, dtype: str) -> dict[str, Any]:
    """Largest absolute difference from the expected outputs over all cases, as the manifest records it.

    Raises:
        ValidationError: It is above the tolerance.
    """
    found = differences(session, cases, atol, dtype)
    if not found["max_abs_difference"] <= found["tolerance"]:
        raise ValidationError(
            f"The result differs from the original by {found['max_abs_difference']:.3g} at {found['worst']}; "
            f"accepted is {found['tolerance']:.3g}.",
            fix="pass a larger atol=... if this precision is enough; otherwise the result is wrong: report it.",
        )
    return found


def _without_padding(
    values: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs with a row a token `(batch, sequence, ...)` as the rows of the tokens that are no padding.

    Nobody reads the others, and they are not defined: where a window slides over padding alone, nothing is left to attend
    to, and PyTorch's attention answers zeros, OpenVINO's the mean of all values.
    """
    mask = feeds.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return dict(values)
    by_token = {spec.name for spec in specs if tuple(spec.shape[:2]) == ("batch", "sequence")}
    return {
        name: value[mask.bool()] if name in by_token and value.shape[:2] == mask.shape else value
        for name, value in values.items()
    }


def differences(session: Session, cases: list[capture.Case], atol: float | None, dtype: str) -> dict[str, Any]:
    """What `compare` records, without a verdict: the largest difference, where it was, and the tolerance."""
    wanted = {spec.name for spec in session.inputs if spec.pair is None}
    worst, where, scale = -1.0, {}, 0.0
    shapes = []
    for first in progress.track(cases, "checking"):
        mask = first.feeds.get("attention_mask")
        if first.stateful and "attention_mask" not in wanted and mask is not None and not mask.all():
            # A decoder of another tool's that takes no padded prompts, and refuses them.
            continue
        state = session.new_state(first.sizes["batch"]) if first.stateful else None
        case: capture.Case | None = first
        while case is not None:
            found = session.run({n: t for n, t in case.feeds.items() if n in wanted}, state=state)
            if _KEPT in case.feeds and _KEPT not in wanted:
                # Graphs of other tools return the logits of all new tokens.
                found = {name: tensor.index_select(1, case.feeds[_KEPT]) for name, tensor in found.items()}
            if case.skip:
                found = {name: tensor[:, case.skip :] for name, tensor in found.items()}
            expected = case.expected
            if not case.stateful:
                found, expected = (_without_padding(v, session.outputs, case.feeds) for v in (found, expected))
            difference, size = capture.max_difference(found, expected)
            shapes.append(dict(case.sizes))
            scale = max(scale, size)
            if not difference <= worst:
                worst, where = difference, dict(case.sizes)
            case = case.then
    return {
        "max_abs_difference": worst,
        "tolerance": capture.tolerance(atol, dtype, scale),
        "worst": where,
        "shapes": shapes,
    }
