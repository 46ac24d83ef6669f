"""`accel.optimize`: rewrite a graph into a faster graph, and compare both graphs before the output folder is created."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from .. import capture, progress
from ..artifact.atomic_folder_writing import check_output, staging
from ..artifact.manifest import Artifact, Component
from ..artifact.tensor_specs import TensorSpec
from ..backends.plan import make_plan
from ..backends.sessions import open_plan
from ..backends.stage_backend_selection import plan_stage
from ..config import OptimizeConfig, checked_arguments
from ..data.batches import calibration_batches
from ..errors import ValidationError
from ..interfaces.protocols import Optimizer, Session
from .graph_comparison import compare, merged, recorded_rounding, warn_of_size
from .probe_recording import inherit_probes
from .resolution import artifact_of

_DECODING = ("position_ids", "logits_to_keep")

logger = logging.getLogger(__name__)


@checked_arguments(artifact=(Artifact, str, os.PathLike), config=OptimizeConfig)
def optimize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: Any = None,
    calibration_split: str | None = None,
    columns: Mapping[str, str] | None = None,
    backend: str | None = None,
    config: OptimizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Rewrite a graph into a faster graph, and compare it with the original graph.

    Args:
        artifact: The artifact or its folder.
        out: The output folder.
        calibration: Rows that test half precision: operators whose values exceed its range stay in float32. A
            `datasets.Dataset`, a list of dictionaries, a CSV, JSON or Parquet file, the name of a data set on the Hub, or
            batches (dictionaries of tensors, text of shape `(batch, sequence)`). Random inputs when `None`.
        calibration_split: The split of the calibration data set.
        columns: The column name for each use, if it cannot be inferred.
        backend: The backend that optimizes. When `None`, the default backend for the artifact's format.
        config: Settings; its fields may also be passed as keyword arguments (`level="O3"`).
        **settings: Fields of `OptimizeConfig`.

    Raises:
        ConfigError: The level does not use calibration data.
        InputError: The calibration data has no rows, or its columns cannot be mapped.
        BackendUnavailableError: No installed backend optimizes this format.
        OptimizeError: The optimization failed.
        ValidationError: The result differs from the original graph by more than the tolerance.
    """
    artifact = artifact_of(artifact)
    config = OptimizeConfig.merged(config, settings)
    target = check_output(out, artifact.path)
    plan = plan_stage("optimize", artifact.format, backend, scheme=config.level, domains=artifact.domains)
    optimizer: Optimizer = plan.worker()
    batches = None
    if calibration is not None:
        batches = calibration_batches(
            artifact, calibration, columns=columns, split=calibration_split, inputs=_processed(artifact.components[0])
        )
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"optimizing ({config.level})", 0, 2)
        result = optimizer.optimize(artifact, config=config, calibration=batches, out=folder)
        progress.report("comparing with the input artifact", 1, 2)
        validation = _compare_with_parent(artifact, result, config)
        result = inherit_probes(result, artifact)
        report = dict(result.manifest.steps[-1].report)
        if batches is not None:
            report["calibration"] = dict(batches.record)
        result = result.with_step(
            report=report,
            seconds=round(time.perf_counter() - started, 2),
            validation=validation,
            parent=artifact.digest,
        )
    progress.report("optimized", 2, 2)
    result = Artifact(target, result.manifest)
    warn_of_size(artifact, result, "If size matters, use the input artifact, or optimize with a lower level.")
    return result


def _processed(component: Component) -> list[TensorSpec]:
    """Return the inputs of a graph that a tokenizer or image processor makes. The decoder inputs `position_ids` and
    `logits_to_keep` are left out, because they are derived from the other inputs.
    """
    return [spec for spec in component.inputs if spec.pair is None and spec.name not in _DECODING]


def _compare_with_parent(parent: Artifact, result: Artifact, config: OptimizeConfig) -> dict[str, Any]:
    """Compare the optimized artifact with its parent on the same inputs of several shapes.

    Raises:
        ValidationError: The outputs differ by more than the tolerance.
    """
    cases = parent_cases(parent)
    # Half precision in PyTorch itself changes an encoder's hidden states by up to 1.4 % of the largest (a small BART).
    approximate = config.level in ("O3", "O4") or result.dtype != parent.dtype
    rounding = 2e-2 if approximate else recorded_rounding(parent)
    sessions = open_plan(make_plan(result), few_calls=True, exact=True)
    try:
        return merged(
            {
                name: compare(session, cases[name], config.atol, result.dtype, rounding=rounding)
                for name, session in sessions.sessions.items()
            }
        )
    except ValidationError as error:
        raise ValidationError(
            f"Optimization at level {config.level} changed the outputs of the graph. {error.message}",
            fix="use a lower level, or disable fusions with disable=...",
        ) from error
    finally:
        sessions.close()


def parent_cases(parent: Artifact) -> dict[str, list[capture.Case]]:
    """Return test inputs of several shapes for every graph of an artifact, with the outputs of this artifact as expected outputs."""
    sessions = open_plan(make_plan(parent), few_calls=True, exact=True)
    try:
        cases: dict[str, list[capture.Case]] = {}
        for component in parent.components:
            session = sessions.sessions[component.name]
            # A decoder without a KV cache can also continue a text, because the session's state stores all tokens.
            continued = component.stateful or component.continues == "none"
            make = _continued_case if continued else _single_case
            shapes = [(1, 3), (3, 40), (1, 40), (3, 3), (2, 1)]
            cases[component.name] = [make(parent, component, session, shape, seed) for seed, shape in enumerate(shapes)]
        return cases
    finally:
        sessions.close()


def _single_case(
    parent: Artifact, component: Component, session: Session, shape: tuple[int, int], seed: int
) -> capture.Case:
    batch, sequence = shape
    limit = component.max_sizes.get("sequence", sequence)
    sizes = {"batch": batch, "sequence": min(sequence, limit), "choices": 2}
    feeds = capture.feeds_for(component.inputs, sizes, seed=seed, folder=parent.path)
    return capture.Case(sizes, feeds, session.run(feeds))


def _continued_case(
    parent: Artifact, component: Component, session: Session, shape: tuple[int, int], seed: int
) -> capture.Case:
    """Return a case with a first call of several tokens, and a second call of one token with the same state."""
    import torch

    batch, sequence = shape
    stateless = [spec for spec in component.inputs if spec.pair is None]
    state = session.new_state(batch)
    calls: list[tuple[dict[str, int], capture.Tensors, capture.Tensors]] = []
    for new in (sequence, 1):
        past = state.length
        sizes = {"batch": batch, "sequence": new, "total": past + new, "kept": 1, "encoder_sequence": 6}
        feeds = capture.feeds_for(stateless, sizes, seed=seed, folder=parent.path)
        if "attention_mask" in feeds:
            feeds["attention_mask"] = torch.ones((batch, past + new), dtype=feeds["attention_mask"].dtype)
        if "position_ids" in feeds:
            feeds["position_ids"] = torch.arange(past, past + new).expand(batch, new).contiguous()
        if "logits_to_keep" in feeds:
            feeds["logits_to_keep"] = torch.tensor([new - 1])
        if calls:
            # Use the encoder outputs of the first call again, because they do not change.
            feeds |= {name: calls[0][1][name] for name in feeds if name.startswith(("cross.", "encoder_"))}
        calls.append((sizes, feeds, session.run(feeds, outputs=("logits",), state=state)))
    last = capture.Case(*calls[1], stateful=True)
    return capture.Case(*calls[0], stateful=True, then=last)
