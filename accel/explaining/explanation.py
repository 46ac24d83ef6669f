"""`accel explain`: where an artifact parts from PyTorch or from another artifact, why, and what helps."""

from __future__ import annotations

import html
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import capture, progress
from ..artifact.hub import HubOptions
from ..artifact.manifest import Artifact, Component
from ..artifact.probe_file import tokens_of
from ..artifact.processor_loading import open_companion
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import RunPreferences, make_plan
from ..capture.module_values import ModuleTrace
from ..config import ExportConfig, SessionOptions, checked_arguments
from ..data.input_defaults import with_defaults
from ..errors import ConfigError
from ..interfaces.layer_traces import LayerTrace, LayerValues, TracingBackend
from ..interfaces.protocols import OpenRequest
from ..measuring.latency.workloads import read_texts
from ..measuring.report import page
from ..stages.checked_export import load_source
from ..stages.resolution import artifact_of, original, resolve
from .causes import Cause, CauseFinder
from .layer_errors import PlaceError, compare_layers
from .remedies import Remedies, Remedy

_FLOOR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
_CAUSES = 8
_PART = 0.1  # errors that are smaller than this part of the largest error get no cause
_ROWS = 64
Feeds = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRow:
    """A row whose answer changed.

    Attributes:
        row: Number of the row.
        text: The text, or the sizes of a sample input.
        expected, actual: Largest class, or for other outputs the cosine of both values.
        margin: Difference of the reference's two largest values; small margins change easily.
    """

    row: int
    text: str
    expected: str
    actual: str
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where two models part.

    Attributes:
        artifact: The artifact.
        reference: The model of the comparison.
        backend: The backend that ran the artifact.
        error: Root mean square error of the output with the largest error, as a session computes it, relative to the output.
        first: The first place that makes an error; `None` if the models agree.
        places: The error of each place, in the order of the computation.
        causes: The causes, largest error first.
        rows: Rows whose answers changed.
        compared_rows: Number of compared rows.
        remedies: Changes, with the error that remains.
        unpaired: Layers of the reference without a layer of the artifact, such as layers that a fusion joined.
        seconds: Duration in seconds.
    """

    artifact: str
    reference: str
    backend: str
    error: float
    first: str | None
    places: tuple[PlaceError, ...]
    causes: tuple[Cause, ...]
    rows: tuple[ChangedRow, ...]
    compared_rows: int
    remedies: tuple[Remedy, ...]
    unpaired: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self._verdict()]
        alike: dict[tuple[str, str], list[str]] = {}
        for cause in self.causes:
            alike.setdefault((cause.kind, cause.detail), []).append(cause.place)
        lines += [
            f"  {places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {kind}: {detail}"
            for (kind, detail), places in alike.items()
        ]
        worst = sorted(self.places, key=lambda place: -place.made)[:_CAUSES]
        shown = [place for place in self.places if place in worst or place.place.startswith("output ")]
        width = max((len(place.place) for place in shown), default=5)
        lines += ["", f"{'place':<{width}}  {'error':>8}  {'made':>8}  {'carried':>8}"]
        lines += [f"{p.place:<{width}}  {p.error:8.2g}  {p.made:8.2g}  {p.carried:8.2g}" for p in shown]
        lines += ["", f"{len(self.rows)} of {self.compared_rows} rows have another answer."]
        lines += [
            f"  {row.row}: {row.expected} -> {row.actual} (margin {row.margin:.2g}) {row.text[:60]}"
            for row in self.rows[:10]
        ]
        if self.remedies:
            lines += ["", "remedy: remaining error (part of the error that it gives back)"]
            lines += [
                f"  {r.name}: {_number(r.error)}{r.back()}{f' ({r.note})' if r.note else ''}" for r in self.remedies
            ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.first is None:
            return f"{self.artifact} agrees with {self.reference}: the error is {self.error:.2g} of the output ({self.backend})."
        error = f"by {self.error:.2g} of the output ({self.backend})"
        return f"{self.artifact} differs from {self.reference} {error}. First place: {self.first}."

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the explanation as an HTML page that needs no other file."""
        parts = [f"<h1>accel explain</h1><p>{html.escape(self._verdict())}</p>"]
        parts.append(_table(("place", "cause", "detail"), [(c.place, c.kind, c.detail) for c in self.causes], "Causes"))
        remedies = [(r.name, _number(r.error), r.back().strip(" ()"), r.note) for r in self.remedies]
        parts.append(_table(("remedy", "remaining error", "given back", ""), remedies, "Remedies"))
        rows = [(str(r.row), r.text, r.expected, r.actual, f"{r.margin:.2g}") for r in self.rows]
        title = f"Changed rows: {len(self.rows)} of {self.compared_rows}"
        parts.append(_table(("row", "input", "expected", "actual", "margin"), rows, title))
        largest = max((place.made for place in self.places if math.isfinite(place.made)), default=0.0)
        bars = [
            (p.place, f"{p.error:.2g}", f"{p.made:.2g}", f"{p.carried:.2g}", _bar(p.made, largest)) for p in self.places
        ]
        parts.append(_table(("place", "error", "made", "carried", ""), bars, "Places", raw_last=True))
        Path(path).write_text(page(parts, title="accel explain"), encoding="utf-8")


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _bar(value: float, largest: float) -> str:
    width = 100.0 if not math.isfinite(value) else 100 * value / largest if largest else 0.0
    bar = f"<rect class=bar width={width:.1f} height=8></rect>"
    return f"<svg viewBox='0 0 100 8' role=img aria-label='made' style='width:10rem'>{bar}</svg>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, *, raw_last: bool = False) -> str:
    if not rows:
        return ""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class=text>{cell if raw_last and i == len(row) - 1 else html.escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    names = "".join(f"<th class=text>{name}</th>" for name in head)
    return f"<h2>{html.escape(title)}</h2><div class=scroll><table><tr>{names}</tr>{body}</table></div>"


@checked_arguments(artifact=(Artifact, str, os.PathLike), device=str, hub=HubOptions)
def explain(
    artifact: Artifact | str | os.PathLike[str],
    against: Artifact | str | os.PathLike[str] | torch.nn.Module | None = None,
    *,
    texts: str | os.PathLike[str] | Sequence[str] | None = None,
    remedies: bool = True,
    backend: str | None = None,
    device: str | None = None,
    session_options: SessionOptions | None = None,
    hub: HubOptions | None = None,
) -> Explanation:
    """Find where an artifact parts from PyTorch or from another artifact, why, and what helps. Takes seconds, and with remedies of
    quantized artifacts as long as an export and a few quantizations.

    Each layer, and the code between the layers, computes with the values of the artifact. So the error that is made in a place is
    separated from the error that it gets from earlier places.

    Args:
        artifact: The artifact or its folder.
        against: The PyTorch model, or an ONNX artifact. The recorded source when `None`.
        texts: Texts, or a file with texts, to compare on. Sample inputs of the export when `None`.
        remedies: Whether remedies are measured.
        backend: The backend that runs the artifact.
        device: The device that runs the artifact.
        session_options: Options of the session.
        hub: Options for downloads from the Hub.

    Raises:
        ArtifactNotFoundError: The source does not exist.
        ConfigError: The backend of the artifact cannot return values of layers.
        IntegrityError: A file of the artifact is damaged.
        SessionError: A graph does not run.
    """
    started = time.perf_counter()
    hub = hub or HubOptions()
    subject = artifact_of(artifact, hub=hub)
    settings = RunPreferences(backend=backend, device=device, options=session_options)
    plan = make_plan(ResolvedModel.of_artifact(subject, hub), settings)
    plan.check()
    assert plan.backend is not None
    progress.report("reading the values of the layers", 0, 3)
    reference = _Reference.of(subject, against, hub)
    traces = _traces(subject, plan.backend.name, plan.options)
    rows = _Rows.of(subject, reference, texts)
    places: list[PlaceError] = []
    causes: list[tuple[float, Cause]] = list(rows.causes)
    unpaired: list[str] = []
    first: str | None = None
    floor = _FLOOR.get(plan.options.compute_dtype or subject.dtype, 1e-5)
    for component in subject.components:
        trace = traces.get(component.name)
        if trace is None or component.name not in reference.traces:
            continue
        model = reference.traces[component.name]
        comparison = compare_layers(model, trace, rows.feeds[component.name])
        places_of_graph = comparison.places()
        finder = CauseFinder(comparison, model)
        largest = max((place.made for place in places_of_graph), default=0.0)
        wrong = [place for place in places_of_graph if place.made > floor and place.made >= _PART * min(largest, 1e9)]
        if first is None:
            first = next((place.place for place in places_of_graph if place.made > floor), None)
        causes += [(p.made, finder.cause(p)) for p in sorted(wrong, key=lambda place: -place.made)[:_CAUSES]]
        places += places_of_graph
        paired = {pair.reference.name for pair in comparison.pairs}
        unpaired += [layer.name for layer in model.layers if layer.name not in paired]
    progress.report("comparing answers", 1, 3)
    measured = Remedies(subject, settings, hub, rows.feeds, reference.results)
    values = measured.values_of_session()
    error = measured.error_of(values)
    traced = max((place.error for place in places if place.place.startswith("output ")), default=0.0)
    if error > 10 * max(traced, floor):
        detail = (
            f"the session's outputs differ by {error:.2g}, and the same graph with readable layers by {traced:.2g}: the error is in a "
            "fused kernel, a graph optimization or the data type of the session"
        )
        causes.append((error, Cause(kind="kernel", place="session", detail=detail)))
        first = first or "session"
    changed, count = rows.changed(values, reference.results)
    progress.report("measuring remedies", 2, 3)
    tried = measured.measure(error, reference.source, causes, places) if remedies and error > floor else []
    progress.report("explained", 3, 3)
    ordered = sorted(causes, key=lambda item: -item[0])
    return Explanation(
        artifact=str(subject.path), reference=reference.name, backend=plan.backend.name, error=error, first=first,
        places=tuple(places), causes=tuple(cause for _, cause in ordered), rows=tuple(changed), compared_rows=count,
        remedies=tuple(tried), unpaired=tuple(unpaired), seconds=round(time.perf_counter() - started, 2),
    )  # fmt: skip


def _traces(artifact: Artifact, backend: str, options: SessionOptions) -> Mapping[str, LayerTrace]:
    spec = registry.describe(backend)
    implementation = registry.load(spec)
    if not isinstance(implementation, TracingBackend):
        raise ConfigError(
            f"The backend {backend!r} cannot return the values of layers.",
            fix="pass another backend (backend=..., --backend); `accel doctor` lists the names.",
        )
    devices = registry.probe(spec).devices
    return implementation.trace_layers(artifact, OpenRequest(device=devices[0], session=options))


@dataclass(frozen=True, slots=True)
class _Reference:
    """The model of the comparison.

    Attributes:
        name: Its name.
        traces: Its layers by component.
        samples: Inputs by component.
        results: Function that computes the outputs of a component.
        source: The PyTorch model, if it is the reference.
        folder: Folder of its tokenizer.
    """

    name: str
    traces: Mapping[str, LayerTrace]
    samples: Mapping[str, Feeds]
    results: Any
    source: capture.Source | None
    folder: Path | None

    @classmethod
    def of(cls, subject: Artifact, against: Any, hub: HubOptions) -> _Reference:
        if against is not None:
            other = resolve(against, hub=hub)
            if other.artifact is not None:
                return cls._of_artifact(other.artifact)
            other = resolve(against, task=subject.task, hub=hub, weights=True)
        else:
            other = original(ResolvedModel.of_artifact(subject, hub))
        return cls._of_source(subject, other)

    @classmethod
    def _of_artifact(cls, artifact: Artifact) -> _Reference:
        spec = make_plan(artifact).backend
        assert spec is not None
        traces = _traces(artifact, spec.name, SessionOptions())
        samples = {component.name: _sample(artifact, component) for component in artifact.components}

        def results(component: str, feeds: Feeds) -> Mapping[str, torch.Tensor]:
            return traces[component].run(feeds).results

        return cls(str(artifact.path), traces, samples, results, None, artifact.path)

    @classmethod
    def _of_source(cls, subject: Artifact, other: ResolvedModel) -> _Reference:
        recorded = next((step.config for step in subject.manifest.steps if step.stage == "export"), {})
        source = load_source(other, ExportConfig.from_dict(recorded))
        parts = {part.name: part for part in capture.split(source)}
        cases = capture.cases_by_part(source, parts=tuple(parts.values()), few=True)
        runs = {name: _run_of(source, parts[name], of_part) for name, of_part in cases.items() if of_part}
        samples = {name: _chosen(cases[name]).feeds for name in runs}
        models = {name: source.model if parts[name].stateful else parts[name].model for name in runs}
        traces = {name: ModuleTrace(models[name], runs[name], samples[name]) for name in runs}

        def results(component: str, feeds: Feeds) -> Mapping[str, torch.Tensor]:
            return traces[component].run(feeds).results

        return cls(other.id, traces, samples, results, source, source.folder)


def _chosen(cases: Sequence[capture.Case]) -> capture.Case:
    """Return a case with several rows and padding."""

    def rank(case: capture.Case) -> tuple[bool, int]:
        mask = case.feeds.get("attention_mask")
        return mask is not None and not bool((mask != 0).all()), case.sizes.get("sequence", 0)

    several = [case for case in cases if case.sizes.get("batch", 1) > 1]
    return max(several or cases, key=rank)


def _run_of(source: capture.Source, part: capture.Source, cases: Sequence[capture.Case]) -> Any:
    """Return a function that computes the outputs of a graph with PyTorch."""
    names = set(cases[0].feeds)
    if not part.stateful:
        return lambda feeds: capture.reference(part.model, {n: v for n, v in feeds.items() if n in names})

    @torch.inference_mode()
    def prompt(feeds: Feeds) -> dict[str, torch.Tensor]:
        read = {name: value for name, value in feeds.items() if name in ("input_ids", "attention_mask", "position_ids")}
        model: Any = source.model
        with capture.quiet():
            logits = model(**read).logits
        positions = feeds.get("logits_to_keep")
        return {"logits": logits if positions is None else logits.index_select(1, positions)}

    return prompt


def _sample(artifact: Artifact, component: Component) -> Feeds:
    specs = [spec for spec in component.inputs if spec.pair is None]
    return capture.feeds_for(specs, {"batch": 3, "sequence": 16}, seed=1, folder=artifact.path)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The inputs of the comparison.

    Attributes:
        feeds: Inputs by component.
        texts: The texts, if the inputs were made from texts.
        labels: Names of the classes.
        causes: Differences of the files next to the graph, with an error of infinity because they change every answer.
    """

    feeds: Mapping[str, Feeds]
    texts: tuple[str, ...]
    labels: Mapping[int, str]
    causes: tuple[tuple[float, Cause], ...]

    @classmethod
    def of(cls, artifact: Artifact, reference: _Reference, texts: Any) -> _Rows:
        causes = tuple((math.inf, cause) for cause in file_causes(artifact.path, reference.folder))
        labels = _labels(artifact.path)
        if texts is None:
            return cls(reference.samples, (), labels, causes)
        lines = list(texts) if not isinstance(texts, str | os.PathLike) else read_texts(texts, artifact.task)
        lines = lines[:_ROWS]
        if len(artifact.components) > 1 or not lines:
            raise ConfigError(
                "texts needs at least one text and a model of one graph.",
                fix="leave texts out (--texts) to compare on sample inputs.",
            )
        component = artifact.components[0]
        tokenizer = open_companion("AutoTokenizer", reference.folder or artifact.path)
        limit = component.max_sizes.get("sequence", 512)
        encoded = tokenizer(lines, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        names = [spec.name for spec in component.inputs]
        feeds = with_defaults({name: value for name, value in encoded.items() if name in names}, names)
        return cls({component.name: feeds}, tuple(lines), labels, causes)

    def changed(self, values: Mapping[str, LayerValues], results: Any) -> tuple[list[ChangedRow], int]:
        """Return the rows whose answers changed, and the number of compared rows."""
        changed: list[ChangedRow] = []
        count = 0
        for component, actual in values.items():
            expected = results(component, self.feeds[component])
            pairs = [
                (v, actual.results[n]) for n, v in expected.items() if n in actual.results and v.is_floating_point()
            ]
            if not pairs:
                continue
            ours, theirs = pairs[0]
            if ours.ndim == 3 and ours.shape[1]:
                ours, theirs = ours[:, -1], theirs.reshape(ours.shape)[:, -1]
            if ours.ndim != 2:
                continue
            for row, (a, b) in enumerate(zip(ours.double(), theirs.double().reshape(ours.shape), strict=True)):
                count += 1
                changed += self._changed(row, a, b)
        return changed, count

    def _changed(self, row: int, a: torch.Tensor, b: torch.Tensor) -> list[ChangedRow]:
        text = self.texts[row] if row < len(self.texts) else "sample input"
        if self.labels and len(a) == len(self.labels) and len(a) > 1:
            top = a.topk(2).values
            if int(a.argmax()) == int(b.argmax()):
                return []
            names = [self.labels.get(int(v.argmax()), str(int(v.argmax()))) for v in (a, b)]
            return [ChangedRow(row=row, text=text, expected=names[0], actual=names[1], margin=float(top[0] - top[1]))]
        cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
        if cosine > 0.999 and int(a.argmax()) == int(b.argmax()):
            return []
        return [ChangedRow(row=row, text=text, expected="cosine 1", actual=f"cosine {cosine:.4f}", margin=1 - cosine)]


def _labels(folder: Path) -> dict[int, str]:
    try:
        config = open_companion("AutoConfig", folder)
        return {int(k): str(v) for k, v in (getattr(config, "id2label", None) or {}).items()}
    # A folder of another tool may have no valid config.
    except Exception:  # noqa: BLE001
        return {}


def file_causes(folder: Path, reference: Path | None) -> list[Cause]:
    """Compare the tokenizer and the labels of two folders."""
    if reference is None:
        return []
    causes = []
    ids = []
    for path in (reference, folder):
        try:
            with capture.quiet():
                ids.append(tokens_of(open_companion("AutoTokenizer", path))["ids"])
        # Models of images have no tokenizer, and tokenizers of tables need other arguments.
        except Exception:  # noqa: BLE001
            ids.append(None)
    if ids[0] is not None and ids[1] is None:
        causes.append(Cause(kind="tokenizer", place="files", detail="the folder has no tokenizer that can be opened"))
    elif ids[0] != ids[1] and ids[0] is not None:
        text = next(text for text, tokens in ids[0].items() if ids[1].get(text) != tokens)
        causes.append(
            Cause(
                kind="tokenizer",
                place="files",
                detail=f"{text!r} becomes the tokens {ids[1][text][:12]} instead of {ids[0][text][:12]}",
            )
        )
    labels = [_labels(path) for path in (reference, folder)]
    if all(labels) and labels[0] != labels[1]:
        wrong = next((i for i, name in labels[0].items() if labels[1].get(i) != name), 0)
        detail = f"the class {wrong} is called {labels[1].get(wrong)!r} instead of {labels[0].get(wrong)!r}"
        causes.append(Cause(kind="labels", place="files", detail=detail))
    return causes
