"""Probes: a few inputs of an artifact with PyTorch's outputs, stored in its folder (`probes.safetensors`, under 100 KB).

An export is compared with PyTorch where it is made. It may run on another processor, driver or runtime. With the probes, accel can
compare it again where it runs, without PyTorch's weights.

`make_probes` selects reference cases. Of each output it stores at most a few thousand values, at random positions that are not
padding. Inputs with many floating-point values (images, audio) are numbers that can be computed again exactly (`Noise`). Inputs that
another graph of the artifact computes, such as the keys and values of the cross-attention, are computed by that graph.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..artifact.manifest import Artifact, Component
from ..artifact.probe_file import METADATA as TOKENS
from ..artifact.probe_file import PROBES
from ..errors import IntegrityError, SessionError
from ..interfaces.protocols import Session
from .export_source import Source
from .noise import MOST_STORED, Noise
from .patch_samples import PATCHES
from .reference_cases import Case, differences_by_output, reference

logger = logging.getLogger(__name__)

_METADATA = "accel"
_VERSION = 1
_BYTES = 60_000  # stored values and positions of all outputs together
_MOST_VALUES = 2048  # stored values of an output
_MOST_BYTES = 100_000
_TINY = 64  # inputs of fewer values are always stored
_KEPT = "logits_to_keep"
# The decoder graphs of other tools read the encoder's output under another name.
_ALIASES = {"encoder_hidden_states": "last_hidden_state"}

Inputs = Mapping[str, torch.Tensor | Noise]


@dataclass(frozen=True, slots=True)
class ExpectedValues:
    """Some values of an output.

    Attributes:
        shape: Shape of the complete output.
        positions: `(values,) int32`, indices into the flattened output.
        values: `(values,)`, PyTorch's values at these indices.
    """

    shape: tuple[int, ...]
    positions: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call of a graph.

    Attributes:
        feeds: Inputs by name.
        sources: Inputs of other graphs of the artifact, by component. Their outputs are inputs of this call that are too large to store.
        expected: PyTorch's outputs by name.
    """

    feeds: Inputs
    sources: Mapping[str, Inputs]
    expected: Mapping[str, ExpectedValues]


@dataclass(frozen=True, slots=True)
class GraphProbe:
    """Calls of one graph; if it is stateful, they continue the same state."""

    component: str
    stateful: bool
    batch: int
    calls: tuple[ProbeCall, ...]


@dataclass(frozen=True, slots=True)
class OutputError:
    """Difference between an output and PyTorch's.

    Attributes:
        largest: Largest absolute difference, relative to the largest expected value. For integers, the fraction of different values.
        rms: Root mean square of the difference, relative to that of the expected values.
        integers: Whether the output contains integers.
    """

    largest: float
    rms: float
    integers: bool = False


@dataclass(frozen=True, slots=True)
class Probes:
    """The probes of an artifact, and its errors where it was made.

    Attributes:
        probes: The probes.
        measured: Errors by output, `component/output`.
        conditions: Processor, versions and settings of the measurement.
        tokens: Texts and their token ids, if the artifact has a tokenizer.
        files: Graph file of each component. Another graph in the same folder, such as a quantized one, has no probes.
    """

    probes: tuple[GraphProbe, ...]
    measured: Mapping[str, OutputError] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, Any] | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def make_probes(
    components: Sequence[Component], cases: Mapping[str, Sequence[Case]], parts: Sequence[Source] = ()
) -> tuple[GraphProbe, ...]:
    """Select probes from reference cases. A graph whose inputs cannot be stored gets no probe.

    Args:
        components: The graphs of the artifact.
        cases: Reference cases with PyTorch's outputs, by component.
        parts: The PyTorch models of the graphs. They compute the outputs for images and audio, whose sample inputs are too large to store.
    """
    modules = {part.name: part for part in parts}
    selected: list[tuple[Component, Case]] = []
    for component in components:
        for case in _selected(cases.get(component.name, ())):
            storable = _storable(component, case, modules.get(component.name), components)
            if storable is not None:
                selected.append((component, storable))
    outputs = sum(len(call.expected) for _, case in selected for call in _chain(case))
    values = max(16, min(_MOST_VALUES, _BYTES // (8 * max(outputs, 1))))
    return tuple(_probe(component, case, values) for component, case in selected)


def _selected(cases: Sequence[Case]) -> list[Case]:
    """Return a case with several rows and padding, and for texts a case with one longer row."""

    def sequence(case: Case) -> int:
        return case.sizes.get("sequence", 0)

    single = [case for case in cases if case.sizes.get("batch", 1) == 1]
    several = [case for case in cases if case.sizes.get("batch", 1) > 1]
    padded = [case for case in several if _is_padded(case)] or several
    if not cases:
        return []
    first = min(padded or single, key=lambda case: (sequence(case) < 2, sequence(case) or case.sizes.get("batch", 1)))
    longest = max(single or several, key=sequence) if any(map(sequence, cases)) else first
    if first.stateful:
        first = max(padded or single, key=sequence)
        longest = min(single or several, key=lambda case: (case.then is None, sequence(case) < 2, sequence(case)))
    return [first] if longest is first else [first, longest]


def _is_padded(case: Case) -> bool:
    mask = case.feeds.get("attention_mask")
    return mask is not None and not bool((mask != 0).all())


def _chain(case: Case) -> Iterator[Case]:
    following: Case | None = case
    while following is not None:
        yield following
        following = following.then


def _storable(component: Component, case: Case, part: Source | None, components: Sequence[Component]) -> Case | None:
    """Return a case whose inputs can be stored or computed, or `None`."""
    read = _read_by(component)
    large = {name for name in _large_inputs(case) if name in read}
    outputs = {spec.name for other in components for spec in other.outputs}
    if all(case.sources and _ALIASES.get(name, name) in outputs for name in large):
        return case
    if case.stateful or part is None or PATCHES in large:
        return None
    feeds: dict[str, torch.Tensor | Noise] = dict(case.feeds)
    for seed, name in enumerate(sorted(large), start=1):
        value = case.feeds[name]
        if not value.is_floating_point() and "mask" not in name:
            return None
        feeds[name] = Noise.like(value if value.is_floating_point() else torch.ones_like(value), seed)
    try:
        expected = reference(part.model, values_of(feeds))
    # The model's own code may raise any exception.
    except Exception as error:  # noqa: BLE001
        logger.debug("the graph %s gets no probe: %s", part.name, error)
        return None
    return replace(case, feeds=values_of(feeds), expected=expected, sources={component.name: feeds})


def _read_by(component: Component) -> set[str]:
    """Return the names of the inputs that a probe needs: those of the graph, and those that select the compared tokens."""
    return {spec.name for spec in component.inputs if spec.pair is None} | {_KEPT, "attention_mask"}


def _large_inputs(case: Case) -> set[str]:
    """Return the names of inputs that are too large to store."""
    floats = {n: t.numel() for call in _chain(case) for n, t in call.feeds.items() if t.is_floating_point()}
    several = sum(1 for _ in _chain(case))
    many = sum(floats.values()) * several > MOST_STORED
    large = {name for name, count in floats.items() if many and count > _TINY}
    return large | {name for call in _chain(case) for name, value in call.feeds.items() if value.numel() > MOST_STORED}


def values_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return inputs as tensors."""
    return {name: value.tensor() if isinstance(value, Noise) else value for name, value in inputs.items()}


def _probe(component: Component, case: Case, values: int) -> GraphProbe:
    names = [spec.name for spec in component.outputs if spec.pair is None]
    by_token = {spec.name for spec in component.outputs if tuple(spec.shape[:2]) == ("batch", "sequence")}
    read, large = _read_by(component), _large_inputs(case)
    calls = []
    for seed, call in enumerate(_chain(case)):
        noise = call.sources.get(component.name, {})
        feeds: dict[str, torch.Tensor | Noise] = {
            name: noise.get(name, value)
            for name, value in call.feeds.items()
            if name in read and (name in noise or name not in large)
        }
        # Graphs of other tools may have other names for the outputs, in the same order.
        renamed = {} if set(call.expected) <= set(names) else dict(zip(call.expected, names, strict=False))
        expected = {
            renamed.get(name, name): _sampled(value, call, values, seed, renamed.get(name, name) in by_token)
            for name, value in call.expected.items()
        }
        needed = large & read
        sources = {name: inputs for name, inputs in call.sources.items() if name != component.name and needed}
        calls.append(ProbeCall(feeds, sources, expected))
    return GraphProbe(component.name, case.stateful, case.sizes.get("batch", 1), tuple(calls))


def _sampled(value: torch.Tensor, call: Case, count: int, seed: int, by_token: bool) -> ExpectedValues:
    """Return some values of an output, at random positions that are not padding."""
    shape = list(value.shape)
    if call.skip:
        shape[1] += call.skip
    indices = torch.arange(math.prod(shape)).reshape(shape)
    if call.skip:
        indices = indices[:, call.skip :]
    mask = call.feeds.get("attention_mask")
    if not call.stateful and by_token and mask is not None and tuple(mask.shape) == tuple(value.shape[:2]):
        indices, value = indices[mask.bool()], value[mask.bool()]
    indices, value = indices.flatten(), value.flatten()
    if indices.numel() > count:
        order = torch.randperm(indices.numel(), generator=torch.Generator().manual_seed(seed))[:count].sort().values
        indices, value = indices[order], value[order]
    return ExpectedValues(tuple(shape), indices.to(torch.int32), value.detach().clone())


def run_probes(sessions: Mapping[str, Session], probes: Sequence[GraphProbe]) -> dict[str, OutputError]:
    """Run probes and return the largest error of each output, by `component/output`.

    A probe is left out if the graph cannot run it: graphs without a mask input get no padded prompts. A probe of a graph that is not open
    is left out.

    Raises:
        SessionError: The runtime failed.
    """
    errors: dict[str, OutputError] = {}
    for probe in probes:
        session = sessions.get(probe.component)
        if session is None:
            continue
        names = {spec.name for spec in session.inputs if spec.pair is None}
        state = None
        if probe.stateful:
            masks = (call.feeds.get("attention_mask") for call in probe.calls)
            if "attention_mask" not in names and any(isinstance(m, torch.Tensor) and not m.all() for m in masks):
                continue
            state = session.new_state(probe.batch)
        for call in probe.calls:
            stored = values_of(call.feeds)
            feeds = {name: stored[name] if name in stored else _computed(name, call, sessions) for name in names}
            outputs = session.run(feeds, state=state)
            if _KEPT in stored and _KEPT not in names:
                # Graphs of other tools return logits for all new tokens.
                outputs = {name: value.index_select(1, stored[_KEPT]) for name, value in outputs.items()}
            for name, expected in call.expected.items():
                key = f"{probe.component}/{name}"
                error, before = _error(outputs.get(name), expected), errors.get(key)
                errors[key] = error if before is None else OutputError(
                    max(before.largest, error.largest), max(before.rms, error.rms), error.integers
                )  # fmt: skip
    return errors


def _computed(name: str, call: ProbeCall, sessions: Mapping[str, Session]) -> torch.Tensor:
    """Return an input that another graph of the artifact computes."""
    output = _ALIASES.get(name, name)
    for component, session in sessions.items():
        if output in {spec.name for spec in session.outputs}:
            stored = values_of(call.sources.get(component, {}))
            inputs = {
                spec.name: stored[spec.name] if spec.name in stored else _computed(spec.name, call, sessions)
                for spec in session.inputs
            }
            return session.run(inputs)[output]
    raise SessionError(f"No probe contains the input {name!r}, and no graph of the artifact computes it.")


def _error(actual: torch.Tensor | None, expected: ExpectedValues) -> OutputError:
    values = expected.values
    integers = not values.is_floating_point()
    if actual is None or tuple(actual.shape) != expected.shape:
        return OutputError(math.inf, math.inf, integers)
    sampled = actual.detach().cpu().flatten()[expected.positions.long()]
    if integers:
        different = float((sampled.long() != values.long()).double().mean()) if values.numel() else 0.0
        return OutputError(different, different, integers=True)
    largest, scale = differences_by_output({"": sampled}, {"": values})[""]
    a, b = sampled.double(), values.double()
    read = b.isfinite() & a.isfinite() & (b.abs() < torch.finfo(values.dtype).max / 4)
    size = float(b[read].square().mean().sqrt()) if bool(read.any()) else 0.0
    rms = float((a - b)[read].square().mean().sqrt()) / size if size else 0.0
    relative = largest / scale if scale else largest
    return OutputError(relative, rms if math.isfinite(largest) else math.inf)


# Files.


def graph_files(artifact: Artifact) -> dict[str, str]:
    """Return the graph file of each component."""
    return {component.name: component.file for component in artifact.components}


def write_probes(folder: Path, probes: Probes) -> None:
    """Write `probes.safetensors`, of at most 100 KB: all probes, or the first of each graph, or no file if they are still too large."""
    path = folder / PROBES
    path.unlink(missing_ok=True)
    first = {probe.component: probe for probe in reversed(probes.probes)}
    for stored in (probes, replace(probes, probes=tuple(reversed(first.values())))):
        if stored.probes and len(content := _content(stored)) <= _MOST_BYTES:
            path.write_bytes(content)
            return
    logger.debug("the probes of %s are too large to store", folder)


def _content(probes: Probes) -> bytes:
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}

    def stored(name: str, inputs: Inputs) -> dict[str, Any]:
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                small = value.dtype == torch.int64 and value.numel() and int(value.abs().max()) < 1 << 31
                tensors[f"{name}{key}"] = value.to(torch.int32 if small else value.dtype).contiguous().clone()
        return {
            key: asdict(value) if isinstance(value, Noise) else str(value.dtype).removeprefix("torch.")
            for key, value in inputs.items()
        }

    described = []
    for i, probe in enumerate(probes.probes):
        calls = []
        for j, call in enumerate(probe.calls):
            place = f"{i}.{j}."
            for name, expected in call.expected.items():
                tensors[f"{place}values.{name}"] = expected.values.contiguous()
                tensors[f"{place}positions.{name}"] = expected.positions.contiguous()
            calls.append({
                "feeds": stored(f"{place}feeds.", call.feeds),
                "sources": {name: stored(f"{place}sources.{name}.", feeds) for name, feeds in call.sources.items()},
                "shapes": {name: list(expected.shape) for name, expected in call.expected.items()},
            })  # fmt: skip
        described.append(
            {"component": probe.component, "stateful": probe.stateful, "batch": probe.batch, "calls": calls}
        )
    metadata = {
        "version": _VERSION,
        "probes": described,
        "measured": {name: asdict(error) for name, error in probes.measured.items()},
        "conditions": dict(probes.conditions),
        "files": dict(probes.files),
    }
    texts = {} if probes.tokens is None else {TOKENS: json.dumps(probes.tokens)}
    content: bytes = save(tensors, metadata={_METADATA: json.dumps(metadata), **texts})
    return content


def read_probes(artifact: Artifact) -> Probes | None:
    """Return the probes of an artifact; `None` if it has none, or if a later version of accel wrote them.

    Raises:
        IntegrityError: The file is damaged.
    """
    from safetensors import safe_open

    path = artifact.path / PROBES
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_METADATA])
            if metadata["version"] != _VERSION:
                return None
            files = metadata["files"]
            if files != graph_files(artifact):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        probes = tuple(
            GraphProbe(
                probe["component"], probe["stateful"], probe["batch"],
                tuple(_read_call(call, f"{i}.{j}.", tensors) for j, call in enumerate(probe["calls"])),
            )
            for i, probe in enumerate(metadata["probes"])
        )  # fmt: skip
        measured = {name: OutputError(**error) for name, error in metadata["measured"].items()}
        return Probes(probes, measured, metadata["conditions"], files=files)
    # safetensors raises an error of its own type, and JSON of any type may be in the file.
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"The probes in {path} cannot be read: {type(error).__name__}: {error}",
        fix="create the artifact again, or remove the file to open the artifact without this check.",
    )


def _read_call(call: Mapping[str, Any], place: str, tensors: Mapping[str, torch.Tensor]) -> ProbeCall:
    def inputs(described: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor | Noise]:
        return {
            name: Noise.from_dict(value)
            if isinstance(value, dict)
            else tensors[f"{prefix}{name}"].to(getattr(torch, value))
            for name, value in described.items()
        }

    return ProbeCall(
        inputs(call["feeds"], f"{place}feeds."),
        {name: inputs(described, f"{place}sources.{name}.") for name, described in call["sources"].items()},
        {
            name: ExpectedValues(tuple(shape), tensors[f"{place}positions.{name}"], tensors[f"{place}values.{name}"])
            for name, shape in call["shapes"].items()
        },
    )
