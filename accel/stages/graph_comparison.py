"""Compare the outputs of graphs with those of their source on reference cases, within a tolerance."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import capture, progress
from ..artifact.manifest import OWN_ROUNDING, ROW_DIFFERENCE, Artifact
from ..artifact.tensor_specs import TensorSpec
from ..errors import SessionError, ValidationError
from ..interfaces.protocols import Session

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEPENDS_ON_ROWS = "depends on the other rows"
"""Text in the error for an exported model whose outputs for a row depend on the other rows of the batch."""
_KEPT = "logits_to_keep"
# Accepted ratio between the difference of the graph and PyTorch's own rounding error. A different order of summation causes
# errors of the same size, with either sign.
_OF_ITS_OWN = 3.0
_LARGER = 1.01
_MOST_ROUNDING = 1e-2  # largest relative difference that is accepted as a rounding error


def warn_of_size(parent: Artifact, result: Artifact, fix: str) -> None:
    """Warn if the result of a stage is over 1 % larger than its input.

    A rewritten graph may have a few more nodes than its input, with the same weights.
    """
    if result.bytes > _LARGER * parent.bytes:
        logger.warning(
            "%s is larger than its input artifact: %s bytes instead of %s bytes. %s",
            result.path,
            f"{result.bytes:,}",
            f"{parent.bytes:,}",
            fix,
        )


def accepted_rounding(pytorch_rounding: float) -> float:
    """Return the accepted difference of a float32 graph, relative to an output's scale. `pytorch_rounding` is the rounding error of
    PyTorch itself.
    """
    return min(_OF_ITS_OWN * pytorch_rounding, _MOST_ROUNDING)


def recorded_rounding(artifact: Artifact) -> float:
    """Return the relative difference to accept, derived from the rounding error that the export recorded; 0 without a record."""
    return accepted_rounding(
        max((float(step.validation.get(OWN_ROUNDING, 0)) for step in artifact.manifest.steps), default=0.0)
    )


def compare_with_model(
    sessions: Mapping[str, Session],
    cases: Mapping[str, list[capture.Case]],
    atol: float | None,
    dtype: str,
    model: torch.nn.Module,
) -> dict[str, Any]:
    """Compare every graph of an artifact with its PyTorch model, and rows of a batch with the same rows run alone.

    If a float32 graph exceeds the tolerance, the rounding error of PyTorch itself is measured and recorded, and
    differences up to three times this error are accepted.

    Args:
        sessions: The sessions of the graphs, by component.
        cases: Reference cases by component, with the expected outputs of the model.
        atol: Accepted absolute difference of every output; chosen by dtype and the output's scale when `None`.
        dtype: Data type used for computation.
        model: The PyTorch model.

    Returns:
        The record of the comparison for the manifest.

    Raises:
        ValidationError: An output differs by more than the tolerance, or a row of a batch differs from the same row run
            alone.
    """
    config: Any = getattr(model, "config", None)

    def compared(pytorch_rounding: float) -> dict[str, Any]:
        rounding = accepted_rounding(pytorch_rounding)
        comparison = merged(
            {name: compare(session, cases[name], atol, dtype, rounding=rounding) for name, session in sessions.items()}
        )
        rows = (
            compare_rows(session, cases[name], config, atol, dtype, rounding=rounding)
            for name, session in sessions.items()
        )
        return {**comparison, ROW_DIFFERENCE: max(rows)}

    try:
        return compared(0.0)
    except ValidationError:
        every = [case for some in cases.values() for case in some]
        measurable = len(sessions) == 1 and dtype == "float32" and atol is None
        pytorch_rounding = (
            capture.own_rounding(model, every) if measurable and not any(case.stateful for case in every) else 0.0
        )
        if not pytorch_rounding:
            raise
        result = compared(pytorch_rounding)
    logger.info(
        "PyTorch in float32 differs from PyTorch in float64 by %.2g of the output scale; the graph differs by at most %.2g",
        pytorch_rounding,
        result["max_abs_difference"],
    )
    return {**result, OWN_ROUNDING: pytorch_rounding}


def compare_rows(
    session: Session,
    cases: Sequence[capture.Case],
    config: Any,
    atol: float | None,
    dtype: str,
    *,
    rounding: float = 0.0,
) -> float:
    """Compare rows of a batch with the same rows run alone. The outputs for a row must not depend on the other rows.

    The rows come from the largest batch among the cases, with special tokens inserted. For a graph with a state, all
    calls are compared.

    Args:
        session: The session of the graph.
        cases: Reference cases of the graph; their expected outputs are not used.
        config: The transformers config, for the ids of special tokens.
        atol: Accepted absolute difference of every output; chosen by dtype and the output's scale when `None`.
        dtype: Data type used for computation.
        rounding: Smallest accepted difference relative to an output's scale, used when `atol` is `None`.

    Returns:
        The largest difference; 0 for a graph without a batch axis.

    Raises:
        ValidationError: A row run alone differs from the same row of the batch by more than the tolerance.
    """
    axes = {spec.name: spec.shape.index("batch") for spec in session.inputs if "batch" in spec.shape}
    names = {spec.name for spec in session.inputs if spec.pair is None}
    case: capture.Case | None = max(
        cases, key=lambda candidate: (candidate.sizes.get("batch", 1), candidate.sizes.get("sequence", 0))
    )
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
        alone = [session.run(row, state=row_state) for row, row_state in zip(rows, states, strict=True)]
        try:
            outputs = session.run(batch, state=state)
        except SessionError as error:
            raise _dependent(
                f"rows that run alone without error fail in a batch of {count} rows: {error.message}"
            ) from error
        expected = _stacked(alone, outputs)
        outputs = {name: outputs[name] for name in expected}
        if case.stateful:
            outputs, expected = ({n: t[:, case.skip :] for n, t in some.items()} for some in (outputs, expected))
        else:
            outputs, expected = (_without_padding(some, session.outputs, feeds) for some in (outputs, expected))
        for name, (difference, scale) in capture.differences_by_output(outputs, expected).items():
            accepted = _accepted(scale, atol, dtype, rounding)
            if not difference <= accepted:
                raise _dependent(
                    f"the output {name!r} of a row changes by {difference:.3g} if the row runs alone, and at most {accepted:.3g} "
                    "is accepted"
                )
            largest = max(largest, difference)
        case = case.then
        feeds = case.feeds if case is not None else {}
    return largest


def _stacked(
    alone: Sequence[Mapping[str, torch.Tensor]], together: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Combine outputs of single rows into a batch.

    Outputs whose size depends on the data, or on the number of texts per image, cannot be compared and are left out.
    """
    import torch

    combined = {}
    for name, value in together.items():
        rows = [row[name] for row in alone]
        if rows[0].shape == value.shape:
            combined[name] = rows[0]  # the output has no batch axis, such as text embeddings of an image-text model
            continue
        for axis in range(value.ndim):
            shapes = {
                (*row.shape[:axis], len(rows), *row.shape[axis + 1 :])
                for row in rows
                if row.shape[axis : axis + 1] == (1,)
            }
            if shapes == {tuple(value.shape)}:
                combined[name] = torch.cat(rows, dim=axis)
                break
    return combined


def _accepted(scale: float, atol: float | None, dtype: str, rounding: float) -> float:
    """Return the accepted absolute difference of an output with the given scale."""
    return max(capture.tolerance(atol, dtype, scale), rounding * max(1.0, scale) if atol is None else 0.0)


def _dependent(detail: str) -> ValidationError:
    return ValidationError(
        f"The output for a row {DEPENDS_ON_ROWS} of its batch: {detail}.",
        fix="run the model with PyTorch and one row per call, and report the model architecture as an issue.",
    )


def merged(comparisons: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge the comparisons of several graphs into one record.

    The record has the fields of the graph with the largest difference, and all comparisons under the key `components`.
    """
    if len(comparisons) == 1:
        return next(iter(comparisons.values()))
    worst = max(
        comparisons.values(), key=lambda comparison: _share(comparison["max_abs_difference"], comparison["tolerance"])
    )
    return {**worst, "components": dict(comparisons)}


def _share(difference: float, tolerance: float) -> float:
    """Return a difference relative to its tolerance."""
    return difference / tolerance if tolerance else float("inf") if difference else 0.0


def compare(
    session: Session, cases: list[capture.Case], atol: float | None, dtype: str, *, rounding: float = 0.0
) -> dict[str, Any]:
    """Compare a graph's outputs with the expected outputs over all cases. Return the record for the manifest.

    Raises:
        ValidationError: The difference of an output exceeds its tolerance.
    """
    comparison = differences(session, cases, atol, dtype, rounding=rounding)
    if not comparison["max_abs_difference"] <= comparison["tolerance"]:
        integers = comparison["output"] in {
            spec.name for spec in session.outputs if spec.dtype.startswith(("int", "uint"))
        }
        raise ValidationError(
            f"The output {comparison['output']!r} of the new graph differs from the original by {comparison['max_abs_difference']:.3g} for "
            f"inputs of the sizes {comparison['worst']}. At most {comparison['tolerance']:.3g} is accepted.",
            fix="use float32. This output contains indices that the model chooses, and rounding changes the choice."
            if integers and dtype != "float32"
            else "if this precision is enough for you, pass a larger atol=... Otherwise report the wrong result as an issue.",
        )
    return comparison


def _without_padding(
    values: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], feeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the outputs without padding tokens. Only outputs of shape `(batch, sequence, ...)` are changed.

    Outputs at padding tokens are undefined. If a sliding window contains only padding, PyTorch's attention returns
    zeros there, and OpenVINO's attention returns the mean of all values.
    """
    mask = feeds.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return dict(values)
    by_token = {spec.name for spec in specs if tuple(spec.shape[:2]) == ("batch", "sequence")}
    return {
        name: value[mask.bool()] if name in by_token and value.shape[:2] == mask.shape else value
        for name, value in values.items()
    }


def _check_outputs(outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that all expected outputs exist and have the expected shapes.

    Raises:
        ValidationError: An output is missing, or has another shape.
    """
    missing = [name for name in expected if name not in outputs]
    if missing and len(outputs) < len(expected):
        raise ValidationError(
            f"The graph has no output {', '.join(map(repr, missing))}. Its outputs are {', '.join(map(repr, outputs))}.",
            fix="compare the graph with the model from which it was exported, or export the model again with the same task.",
        )
    by_order = dict(zip(expected, outputs.values(), strict=False)) if missing else outputs
    for name, values in expected.items():
        if by_order[name].shape != values.shape:
            raise ValidationError(
                f"The output {name!r} of the graph has the shape {tuple(by_order[name].shape)}, but the output of the original "
                f"model has the shape {tuple(values.shape)}.",
                fix="compare the graph with the model from which it was exported, or export the model again with the same task.",
            )


def differences(
    session: Session, cases: list[capture.Case], atol: float | None, dtype: str, *, rounding: float = 0.0
) -> dict[str, Any]:
    """Return the largest difference between the outputs of a graph and the expected outputs, as the record for the manifest.

    Unlike `compare`, this function does not raise if the difference exceeds the tolerance. The record names the output and
    the input sizes with the largest difference relative to its tolerance.

    Each output has its own tolerance, so large logits do not hide errors of bounding boxes or embeddings.

    Args:
        session: The session of the graph.
        cases: Inputs and expected outputs.
        atol: Accepted absolute difference of every output; chosen by dtype and the output's scale when `None`.
        dtype: Data type used for computation.
        rounding: Smallest accepted difference relative to an output's scale, used when `atol` is `None`.

    Raises:
        ValidationError: An output is missing, or does not have the expected shape.
    """
    input_names = {spec.name for spec in session.inputs if spec.pair is None}
    worst: dict[str, float] = {}
    where: dict[str, dict[str, int]] = {}
    scales: dict[str, float] = {}
    shapes = []
    for first in progress.track(cases, "comparing outputs"):
        mask = first.feeds.get("attention_mask")
        if first.stateful and "attention_mask" not in input_names and mask is not None and not mask.all():
            # Skip padded prompts: some decoders of other tools have no attention mask.
            continue
        state = session.new_state(first.sizes["batch"]) if first.stateful else None
        case: capture.Case | None = first
        while case is not None:
            outputs = session.run({n: t for n, t in case.feeds.items() if n in input_names}, state=state)
            if _KEPT in case.feeds and _KEPT not in input_names:
                # Graphs of other tools return logits for all new tokens, so select the compared tokens.
                outputs = {name: tensor.index_select(1, case.feeds[_KEPT]) for name, tensor in outputs.items()}
            if case.skip:
                outputs = {name: tensor[:, case.skip :] for name, tensor in outputs.items()}
            expected = case.expected
            if not case.stateful:
                outputs, expected = (_without_padding(v, session.outputs, case.feeds) for v in (outputs, expected))
            shapes.append(dict(case.sizes))
            _check_outputs(outputs, expected)
            for name, (difference, scale) in capture.differences_by_output(outputs, expected).items():
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
