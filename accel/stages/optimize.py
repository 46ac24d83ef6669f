"""`accel.optimize`: a graph rewritten into a faster one, compared with its parent before the folder appears."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from .. import capture, progress
from ..artifact.manifest import Artifact, Component
from ..artifact.tensors import TensorSpec
from ..artifact.writing import check_output, staging
from ..backends import registry
from ..backends.plan import make_plan
from ..backends.sessions import open_plan
from ..config import OptimizeConfig, checked_arguments
from ..data.batches import calibration_batches
from ..errors import ValidationError
from ..interfaces.protocols import Optimizer, Session
from .graph_comparison import compare, merged, recorded_rounding, warn_of_size
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
    """Rewrite a graph into a faster one and compare it with its parent.

    Args:
        artifact: The artifact or its folder.
        out: Folder to make.
        calibration: Rows on which half precision is tried out: what leaves its range stays float32. A `datasets.Dataset`, a
            list of dictionaries, a CSV, JSON or Parquet file, the name of a data set on the Hub, or batches (dictionaries of
            tensors, text as `(batch, sequence)`). Random inputs when `None`.
        calibration_split: Its split.
        columns: Its column by use, where that cannot be inferred.
        backend: Who optimizes; the owner of the artifact's format when `None`.
        config: How; its fields may also be given as keyword arguments (`level="O3"`).
        **settings: Fields of `OptimizeConfig`.

    Raises:
        ConfigError: Calibration data at a level that has no use for it.
        InputError: Calibration data without rows, or whose columns do not map.
        BackendUnavailableError: Nobody optimizes this format here.
        OptimizeError: It failed.
        ValidationError: The result differs from its parent by more than the tolerance.
    """
    artifact = artifact_of(artifact)
    config = OptimizeConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    target = check_output(out, artifact.path)
    spec = registry.owner("optimize", artifact.format, backend, scheme=config.level, domains=artifact.domains)
    optimizer: Optimizer = registry.worker(spec, "optimize")
    batches = None
    if calibration is not None:
        batches = calibration_batches(
            artifact, calibration, columns=columns, split=calibration_split, inputs=_processed(artifact.components[0])
        )
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"optimizing ({config.level})", 0, 2)
        made = optimizer.optimize(artifact, config=config, calibration=batches, out=folder)
        progress.report("comparing with the parent", 1, 2)
        validation = _compare_with_parent(artifact, made, config)
        report = dict(made.manifest.steps[-1].report)
        if batches is not None:
            report["calibration"] = dict(batches.record)
        made = made.with_step(
            report=report,
            seconds=round(time.perf_counter() - started, 2),
            validation=validation,
            parent=artifact.digest,
        )
    progress.report("optimized", 2, 2)
    made = Artifact(target, made.manifest)
    warn_of_size(artifact, made, "Use its input where size matters, or a lower level.")
    return made


def _processed(component: Component) -> list[TensorSpec]:
    """The inputs that a tokenizer or image processor makes; a decoder's other ones follow from them."""
    return [spec for spec in component.inputs if spec.pair is None and spec.name not in _DECODING]


def _compare_with_parent(parent: Artifact, made: Artifact, config: OptimizeConfig) -> dict[str, Any]:
    """Run both on the same inputs of several shapes.

    Raises:
        ValidationError: They differ by more than the tolerance.
    """
    cases = _parent_cases(parent)
    # A graph in 16 bits rounds as such a graph does, whatever the level. PyTorch's own half precision is up to 1.4 % of an encoder's
    # largest hidden state off (a small BART).
    rounding = 2e-2 if config.level in ("O3", "O4") else recorded_rounding(parent)
    opened = open_plan(make_plan(made))
    try:
        return merged(
            {
                name: compare(session, cases[name], config.atol, made.dtype, rounding=rounding)
                for name, session in opened.sessions.items()
            }
        )
    except ValidationError as error:
        raise ValidationError(
            f"After optimizing at {config.level}: {error.message}", fix="use a lower level, or disable fusions."
        ) from error
    finally:
        opened.close()


def _parent_cases(parent: Artifact) -> dict[str, list[capture.Case]]:
    """Inputs of several shapes for every graph of an artifact, and what it answers."""
    opened = open_plan(make_plan(parent))
    try:
        cases: dict[str, list[capture.Case]] = {}
        for component in parent.components:
            session = opened.sessions[component.name]
            # A decoder without a cache computes all tokens again, which its session's state holds.
            continued = component.stateful or component.continues == "none"
            make = _continued_case if continued else _single_case
            shapes = [(1, 3), (3, 40), (1, 40), (3, 3), (2, 1)]
            cases[component.name] = [make(parent, component, session, shape, seed) for seed, shape in enumerate(shapes)]
        return cases
    finally:
        opened.close()


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
    """Several tokens, and one more behind them in the same state."""
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
            # What the encoder said stays the same.
            feeds |= {name: calls[0][1][name] for name in feeds if name.startswith(("cross.", "encoder_"))}
        calls.append((sizes, feeds, session.run(feeds, outputs=("logits",), state=state)))
    last = capture.Case(*calls[1], stateful=True)
    return capture.Case(*calls[0], stateful=True, then=last)
