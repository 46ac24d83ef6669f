"""How far an artifact is from what it was made from: graphs run on reference cases, and compared within a tolerance."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.manifest import OWN_ROUNDING, Artifact
from ..artifact.tensors import TensorSpec
from ..backends.interfaces import Session
from ..errors import ValidationError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEPENDS_ON_ROWS = "depends on the other rows"
"""In the message of an export that is refused because an answer changes with the other rows of the batch."""
_KEPT = "logits_to_keep"
_OF_ITS_OWN = 3.0  # sums in another order may be off by as much as PyTorch's, and both to either side
_MOST_ROUNDING = 1e-2  # however much a model makes of little, more is not taken for rounding


def accepted_rounding(own: float) -> float:
    """What is accepted of a graph in float32, for each 1 of an output's scale, where PyTorch's own float32 is so far from float64."""
    return min(_OF_ITS_OWN * own, _MOST_ROUNDING)


def recorded_rounding(artifact: Artifact) -> float:
    """What is accepted by what an artifact's export measured; 0 where it did not need to."""
    return accepted_rounding(
        max((float(step.validation.get(OWN_ROUNDING, 0)) for step in artifact.manifest.steps), default=0.0)
    )


def compare_whole(
    session: Session, cases: list[capture.Case], atol: float | None, dtype: str, model: torch.nn.Module
) -> dict[str, Any]:
    """`compare` of a graph that is all of a model. Where it is above the tolerance in float32, PyTorch's own rounding is measured and
    recorded, and up to three times of that is accepted.

    Raises:
        ValidationError: An output is above that, too.
    """
    try:
        return compare(session, cases, atol, dtype)
    except ValidationError:
        own = capture.own_rounding(model, cases) if dtype == "float32" and atol is None else 0.0
        if not own:
            raise
        found = compare(session, cases, atol, dtype, rounding=accepted_rounding(own))
    logger.info(
        "float32 is %.2g off from float64 in PyTorch, and the graph %.2g from it", own, found["max_abs_difference"]
    )
    return {**found, OWN_ROUNDING: own}


def merged(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The comparisons of several graphs as one: the worst of them, and each under `components`."""
    if len(found) == 1:
        return next(iter(found.values()))
    worst = max(found.values(), key=lambda one: _share(one["max_abs_difference"], one["tolerance"]))
    return {**worst, "components": dict(found)}


def _share(difference: float, tolerance: float) -> float:
    """How much of what is accepted a difference takes, 1 for all of it."""
    return difference / tolerance if tolerance else float("inf") if difference else 0.0


def compare(
    session: Session, cases: list[capture.Case], atol: float | None, dtype: str, *, rounding: float = 0.0
) -> dict[str, Any]:
    """How far the outputs are from the expected ones over all cases, as the manifest records it; see `differences`.

    Raises:
        ValidationError: An output is above its tolerance.
    """
    found = differences(session, cases, atol, dtype, rounding=rounding)
    if not found["max_abs_difference"] <= found["tolerance"]:
        numbers = found["output"] in {spec.name for spec in session.outputs if spec.dtype.startswith(("int", "uint"))}
        raise ValidationError(
            f"The result differs from the original by {found['max_abs_difference']:.3g} in {found['output']!r} at "
            f"{found['worst']}; accepted is {found['tolerance']:.3g}.",
            fix="keep float32: these are numbers of what the model chose, which are right or wrong, and rounding decides."
            if numbers and dtype != "float32"
            else "pass a larger atol=... if this precision is enough; otherwise the result is wrong: report it.",
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


def differences(
    session: Session, cases: list[capture.Case], atol: float | None, dtype: str, *, rounding: float = 0.0
) -> dict[str, Any]:
    """What `compare` records, without a verdict: of the output that is furthest from what is accepted of it, the largest
    difference, where it was, and the tolerance.

    Each output has a tolerance of its own: logits in hundreds say nothing of boxes or embeddings beside them.

    Args:
        session: What ran the graph.
        cases: Inputs, and what is expected of them.
        atol: Accepted absolute difference of every output; by dtype and the output's scale when `None`.
        dtype: What the graph computes in.
        rounding: What is accepted at least for each 1 of an output's scale, where there is no `atol`.
    """
    wanted = {spec.name for spec in session.inputs if spec.pair is None}
    worst: dict[str, float] = {}
    where: dict[str, dict[str, int]] = {}
    scales: dict[str, float] = {}
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
            shapes.append(dict(case.sizes))
            for name, (difference, scale) in capture.differences_by_output(found, expected).items():
                scales[name] = max(scales.get(name, 0.0), scale)
                if difference > worst.get(name, -1.0):
                    worst[name], where[name] = difference, dict(case.sizes)
            case = case.then
    accepted = {
        name: max(capture.tolerance(atol, dtype, scale), rounding * max(1.0, scale) if atol is None else 0.0)
        for name, scale in scales.items()
    }
    furthest = max(worst, key=lambda name: (_share(worst[name], accepted[name]), worst[name]))
    return {
        "max_abs_difference": worst[furthest],
        "tolerance": accepted[furthest],
        "output": furthest,
        "worst": where[furthest],
        "shapes": shapes,
    }
