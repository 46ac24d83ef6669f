"""How far an artifact is from what it was made from: graphs run on reference cases, and compared within a tolerance."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.manifest import OWN_ROUNDING, ROW_DIFFERENCE, Artifact
from ..artifact.tensors import TensorSpec
from ..errors import SessionError, ValidationError
from ..interfaces.protocols import Session

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEPENDS_ON_ROWS = "depends on the other rows"
"""In the message of an export that is refused because an answer changes with the other rows of the batch."""
_KEPT = "logits_to_keep"
_OF_ITS_OWN = 3.0  # sums in another order may be off by as much as PyTorch's, and both to either side
_LARGER = 1.01
_MOST_ROUNDING = 1e-2  # however much a model makes of little, more is not taken for rounding


def warn_of_size(parent: Artifact, made: Artifact, fix: str) -> None:
    """Warn where a stage's result has more bytes than its input, by more than 1 %.

    A rewritten graph may have a few more nodes than its parent, next to the same weights.
    """
    if made.bytes > _LARGER * parent.bytes:
        logger.warning(
            "%s is larger than its input: %s bytes, from %s. %s", made.path, f"{made.bytes:,}", f"{parent.bytes:,}", fix
        )


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


def check_rows(
    sessions: Mapping[str, Session],
    cases: Mapping[str, list[capture.Case]],
    found: Mapping[str, Any],
    atol: float | None,
    dtype: str,
    model: torch.nn.Module,
) -> dict[str, Any]:
    """What was found of an artifact's graphs, with the largest difference between rows of a batch and the same rows alone.

    As in `compare_whole`, PyTorch's own rounding is measured only where it is needed.

    Raises:
        ValidationError: A row alone differs from the row in the batch by more than the tolerance.
    """
    config: Any = getattr(model, "config", None)

    def largest(own: float) -> float:
        rounding = accepted_rounding(own)
        return max(
            compare_rows(session, cases[name], config, atol, dtype, rounding=rounding)
            for name, session in sessions.items()
        )

    own = float(found.get(OWN_ROUNDING, 0.0))
    try:
        return {**found, ROW_DIFFERENCE: largest(own)}
    except ValidationError:
        whole = len(sessions) == 1 and not any(case.stateful for some in cases.values() for case in some)
        measured = whole and not own and dtype == "float32" and atol is None
        own = capture.own_rounding(model, [case for some in cases.values() for case in some]) if measured else 0.0
        if not own:
            raise
        return {**found, ROW_DIFFERENCE: largest(own), OWN_ROUNDING: own}


def compare_rows(
    session: Session,
    cases: Sequence[capture.Case],
    config: Any,
    atol: float | None,
    dtype: str,
    *,
    rounding: float = 0.0,
) -> float:
    """Compare rows of a batch with the same rows alone: the answer to a row must not depend on the other rows.

    The rows are those of the largest batch among the cases, with special tokens put in. A state is followed to its end.

    Args:
        session: What runs the graph.
        cases: Reference cases of the graph; what is expected of them is not read.
        config: The transformers config, which names the special tokens.
        atol: See `differences`.
        dtype: See `differences`.
        rounding: See `differences`.

    Returns:
        The largest difference; 0 for a graph without a batch.

    Raises:
        ValidationError: A row alone differs from the row in the batch by more than the tolerance.
    """
    axes = {spec.name: spec.shape.index("batch") for spec in session.inputs if "batch" in spec.shape}
    names = {spec.name for spec in session.inputs if spec.pair is None}
    case: capture.Case | None = max(cases, key=lambda one: (one.sizes.get("batch", 1), one.sizes.get("sequence", 0)))
    count = case.sizes.get("batch", 1) if case is not None and axes else 1
    states = [session.new_state(1) if case is not None and case.stateful else None for _ in range(count)]
    state = session.new_state(count) if states[0] is not None else None
    largest, feeds = 0.0, capture.with_special_tokens(case.feeds, config) if case is not None else {}
    while case is not None and count > 1:
        batch = {name: tensor for name, tensor in feeds.items() if name in names}
        rows = [
            {name: tensor.narrow(axes[name], i, 1) if name in axes else tensor for name, tensor in batch.items()}
            for i in range(count)
        ]
        alone = [session.run(row, state=kept) for row, kept in zip(rows, states, strict=True)]
        try:
            found = session.run(batch, state=state)
        except SessionError as error:
            raise _dependent(f"rows that are answered alone fail in a batch of {count}: {error.message}") from error
        expected = _stacked(alone, found)
        found = {name: found[name] for name in expected}
        if case.stateful:
            found, expected = ({n: t[:, case.skip :] for n, t in some.items()} for some in (found, expected))
        else:
            found, expected = (_without_padding(some, session.outputs, feeds) for some in (found, expected))
        for name, (difference, scale) in capture.differences_by_output(found, expected).items():
            accepted = _accepted(scale, atol, dtype, rounding)
            if not difference <= accepted:
                raise _dependent(
                    f"{name!r} changes by {difference:.3g} where a row is alone; accepted is {accepted:.3g}"
                )
            largest = max(largest, difference)
        case = case.then
        feeds = case.feeds if case is not None else {}
    return largest


def _stacked(
    alone: Sequence[Mapping[str, torch.Tensor]], together: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs of rows alone as a batch would have them. An output whose size depends on the data, or on the number of texts for an
    image, cannot be compared and is left out.
    """
    import torch

    found = {}
    for name, value in together.items():
        rows = [row[name] for row in alone]
        if rows[0].shape == value.shape:
            found[name] = rows[0]  # without an axis of rows: the texts beside images
            continue
        for axis in range(value.ndim):
            shapes = {
                (*row.shape[:axis], len(rows), *row.shape[axis + 1 :])
                for row in rows
                if row.shape[axis : axis + 1] == (1,)
            }
            if shapes == {tuple(value.shape)}:
                found[name] = torch.cat(rows, dim=axis)
                break
    return found


def _accepted(scale: float, atol: float | None, dtype: str, rounding: float) -> float:
    """The accepted absolute difference of an output of a scale."""
    return max(capture.tolerance(atol, dtype, scale), rounding * max(1.0, scale) if atol is None else 0.0)


def _dependent(what: str) -> ValidationError:
    return ValidationError(
        f"The answer to a row {DEPENDS_ON_ROWS} of its batch: {what}.",
        fix="run the model in PyTorch, one row at a time; and report the architecture.",
    )


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


def _check_outputs(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that there is something to compare with: as many outputs, of the same shapes.

    Raises:
        ValidationError: An output is missing, or has another shape.
    """
    missing = [name for name in expected if name not in found]
    if missing and len(found) < len(expected):
        raise ValidationError(
            f"The result has no output {', '.join(map(repr, missing))}; it has {', '.join(map(repr, found))}.",
            fix="compare it with the model that it was made from, or export that again with the same task.",
        )
    by_order = dict(zip(expected, found.values(), strict=False)) if missing else found
    for name, values in expected.items():
        if by_order[name].shape != values.shape:
            raise ValidationError(
                f"The output {name!r} has the shape {tuple(by_order[name].shape)}; the original's has {tuple(values.shape)}.",
                fix="compare it with the model that it was made from, or export that again with the same task.",
            )


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

    Raises:
        ValidationError: An output is missing, or has another shape than expected.
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
            _check_outputs(found, expected)
            for name, (difference, scale) in capture.differences_by_output(found, expected).items():
                scales[name] = max(scales.get(name, 0.0), scale)
                if difference > worst.get(name, -1.0):
                    worst[name], where[name] = difference, dict(case.sizes)
            case = case.then
    accepted = {name: _accepted(scale, atol, dtype, rounding) for name, scale in scales.items()}
    furthest = max(worst, key=lambda name: (_share(worst[name], accepted[name]), worst[name]))
    return {
        "max_abs_difference": worst[furthest],
        "tolerance": accepted[furthest],
        "output": furthest,
        "worst": where[furthest],
        "shapes": shapes,
    }
