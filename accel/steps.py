"""The stages that read one artifact and write another: `optimize`, `quantize`; and `validate`, which writes nothing.

Each stage writes into a temporary folder, compares the result with its parent, and moves the folder into place only when
it passes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import capture, exporting, progress, registry
from .artifact import Artifact, Component, check_output, staging
from .config import ExportConfig, OptimizeConfig, QuantizeConfig
from .errors import ArtifactNotFoundError, ConfigError, OptimizeError, QuantizeError, ValidationError
from .hub import HubOptions, locate
from .interfaces import Evaluate, Session
from .sessions import open_artifact

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How far an artifact is from the PyTorch model.

    Attributes:
        passed: Whether the largest difference is within the tolerance.
        max_abs_difference: Over all outputs and shapes.
        tolerance: What was accepted.
        shapes: Sizes that were compared.
        backend: What ran the artifact.
    """

    passed: bool
    max_abs_difference: float
    tolerance: float
    shapes: tuple[Mapping[str, int], ...]
    backend: str


def validate(
    artifact: Artifact | str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | torch.nn.Module | None = None,
    backend: str | None = None,
    device: str | None = None,
    atol: float | None = None,
    hub: HubOptions | None = None,
) -> Validation:
    """Compare an artifact with the PyTorch model it was made from, on five shapes with padded rows.

    Args:
        artifact: The artifact or its folder.
        against: The PyTorch model; the recorded source when `None`.
        backend: What runs the artifact.
        device: Where.
        atol: Accepted absolute difference; by dtype when `None`.
        hub: How to reach a source on the Hub.

    Raises:
        ArtifactNotFoundError: The source is not to be found.
        IntegrityError: A file of the artifact is damaged.
    """
    if atol is not None and atol <= 0:
        raise ConfigError(f"atol is {atol}.", fix="use a number above 0.")
    artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    hub = hub or HubOptions()
    manifest = artifact.manifest
    if against is None:
        if manifest.source is None:
            raise ArtifactNotFoundError(f"{artifact.path} does not say what it was made from.", fix="pass against=...")
        against = manifest.source.id
        hub = replace(hub, revision=manifest.source.revision)
    import torch

    location = against if isinstance(against, torch.nn.Module) else locate(against, hub, want_graph=False)
    recorded = next((step.config for step in manifest.steps if step.stage == "export"), {})
    config = ExportConfig.from_dict(recorded) if recorded else ExportConfig()
    source = capture.load_source(location, task=artifact.task, config=config, hub=hub)
    progress.report("computing reference outputs", 0, 2)
    cases = capture.cases_by_part(source)
    opened = open_artifact(artifact, backend=backend, device=device)
    progress.report("comparing", 1, 2)
    try:
        found = exporting.merged(
            {
                name: exporting.differences(session, cases[name], atol, artifact.dtype)
                for name, session in opened.sessions.items()
            }
        )
    finally:
        for session in opened.sessions.values():
            session.close()
    progress.report("compared", 2, 2)
    return Validation(
        passed=found["max_abs_difference"] <= found["tolerance"],
        max_abs_difference=found["max_abs_difference"],
        tolerance=found["tolerance"],
        shapes=tuple(found["shapes"]),
        backend=opened.backend.name,
    )


def optimize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    backend: str | None = None,
    config: OptimizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Rewrite a graph into a faster one and compare it with its parent.

    Args:
        artifact: The artifact or its folder.
        out: Folder to make.
        backend: Who optimizes; the owner of the artifact's format when `None`.
        config: How; its fields may also be given as keyword arguments (`level="O3"`).
        **settings: Fields of `OptimizeConfig`.

    Raises:
        BackendUnavailableError: Nobody optimizes this format here.
        OptimizeError: It failed.
        ValidationError: The result differs from its parent by more than the tolerance.
    """
    artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    config = OptimizeConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    target = check_output(out, artifact.path)
    spec = registry.owner("optimize", artifact.format, backend, scheme=config.level)
    optimizer = registry.load(spec).optimizer()
    if optimizer is None:
        raise OptimizeError(f"The backend {spec.name!r} has no optimizer.", fix="leave backend=... out.")
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"optimizing ({config.level})", 0, 2)
        made = optimizer.optimize(artifact, config=config, out=folder)
        progress.report("comparing with the parent", 1, 2)
        validation = _compare_with_parent(artifact, made, config)
        made = made.with_step(
            seconds=round(time.perf_counter() - started, 2), validation=validation, parent=artifact.digest
        )
    progress.report("optimized", 2, 2)
    return Artifact(target, made.manifest)


def _compare_with_parent(parent: Artifact, made: Artifact, config: OptimizeConfig) -> dict[str, Any]:
    """Run both on the same inputs of several shapes.

    Raises:
        ValidationError: They differ by more than the tolerance.
    """
    cases = _parent_cases(parent)
    loose = config.level in ("O3", "O4")
    values = [value for some in cases.values() for case in some for value in case.expected.values()]
    scale = max((float(value.abs().max()) for value in values), default=1.0)
    # A graph in 16 bits rounds as such a graph does, whatever the level.
    accepted = max(1e-2 * max(1.0, scale) if loose else 0.0, capture.tolerance(None, made.dtype, scale))
    atol = config.atol if config.atol is not None else accepted
    opened = open_artifact(made)
    try:
        return exporting.merged(
            {
                name: exporting.compare(session, cases[name], atol, made.dtype)
                for name, session in opened.sessions.items()
            }
        )
    except ValidationError as error:
        raise ValidationError(
            f"After optimizing at {config.level}: {error.message}", fix="use a lower level, or disable fusions."
        ) from error
    finally:
        for session in opened.sessions.values():
            session.close()


def _parent_cases(parent: Artifact) -> dict[str, list[capture.Case]]:
    """Inputs of several shapes for every graph of an artifact, and what it answers."""
    opened = open_artifact(parent)
    try:
        cases: dict[str, list[capture.Case]] = {}
        for component in parent.components:
            session = opened.sessions[component.name]
            make = _continued_case if component.stateful else _single_case
            shapes = [(1, 3), (3, 40), (1, 40), (3, 3), (2, 1)]
            cases[component.name] = [make(parent, component, session, shape, seed) for seed, shape in enumerate(shapes)]
        return cases
    finally:
        for opened_session in opened.sessions.values():
            opened_session.close()


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
        feeds["attention_mask"] = torch.ones_like(feeds["attention_mask"])
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


def quantize(
    artifact: Artifact | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
    evaluate: Evaluate | None = None,
    backend: str | None = None,
    config: QuantizeConfig | None = None,
    **settings: Any,
) -> Artifact:
    """Rewrite a graph into one with fewer bits.

    Args:
        artifact: The artifact or its folder.
        out: Folder to make.
        calibration: Batches of inputs, for schemes that need activation ranges. Its attribute `record`, where it has
            one, says in the manifest what was read.
        evaluate: A measure of an artifact, higher is better, for backends that search with it (`max_drop=`).
        backend: Who quantizes; the owner of the artifact's format when `None`.
        config: How; its fields may also be given as keyword arguments (`scheme="static-int8"`).
        **settings: Fields of `QuantizeConfig`.

    Raises:
        BackendUnavailableError: Nobody quantizes this format with this scheme here.
        QuantizeError: It failed, the artifact is quantized already, or calibration data is missing.
    """
    artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    config = QuantizeConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    target = check_output(out, artifact.path)
    if artifact.manifest.quantization is not None:
        raise QuantizeError(
            f"{artifact.path} is quantized already ({artifact.manifest.quantization.scheme}).",
            fix="quantize the artifact that it was made from.",
        )
    spec = registry.owner("quantize", artifact.format, backend, scheme=config.scheme)
    quantizer = registry.load(spec).quantizer()
    if quantizer is None:
        raise QuantizeError(f"The backend {spec.name!r} has no quantizer.", fix="leave backend=... out.")
    started = time.perf_counter()
    with staging(target) as folder:
        progress.report(f"quantizing ({config.scheme})", 0, 1)
        watched = None if calibration is None else _Watched(calibration)
        made = quantizer.quantize(artifact, config=config, calibration=watched, evaluate=evaluate, out=folder)
        made = _with_calibration(made, calibration if watched is not None and watched.used else None)
        made = made.with_step(seconds=round(time.perf_counter() - started, 2), parent=artifact.digest)
    progress.report("quantized", 1, 1)
    return Artifact(Path(target), made.manifest)


class _Watched:
    """Calibration batches that remember whether the quantizer read them."""

    def __init__(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self.used = False
        self._batches = batches

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self.used = True
        return iter(self._batches)


def _with_calibration(made: Artifact, calibration: object) -> Artifact:
    """The artifact with a record of the calibration data that was read, where the data tells what it is, beside what the
    quantizer says about it.
    """
    record = getattr(calibration, "record", None)
    quantization = made.manifest.quantization
    if record is None or quantization is None:
        return made
    recorded = replace(quantization, calibration={**(quantization.calibration or {}), **record})
    return Artifact.create(made.path, replace(made.manifest, quantization=recorded))
