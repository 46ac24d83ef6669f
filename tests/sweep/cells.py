"""One pair through one backend: a cell for each stage, with a measured difference or the reason of its refusal."""

from __future__ import annotations

import copy
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation

import accel
from accel.artifact import Artifact
from accel.backends import registry
from accel.errors import AccelError
from accel.interfaces.task_registry import task_spec
from accel.models.base import model_class
from accel.stages.graph_comparison import accepted_rounding
from accel.stages.quantize import quantize
from accel.upstream.library_output import quiet

from .building import NotBuilt, build
from .cases import Pair, loader_of
from .questions import Question, Tensors, answers, difference, prompts, questions
from .rounding import largest_error, own_error
from .rows import INTEGER_PAIRS, Apart, Company, Row, all_apart, apart, companies

EXPORT, OPTIMIZE, QUANTIZE, HALF, GENERATE, BUILD = "export", "O2", "int8", "O4", "generate", "build"
ROWS, ROWS_INT8 = "rows", "rows-int8"
STAGES = (EXPORT, OPTIMIZE, QUANTIZE, HALF, GENERATE, ROWS, ROWS_INT8)
PYTORCH, GPU = "pytorch", "cuda"
TOLERANCES = {EXPORT: 1e-4, OPTIMIZE: 1e-4, QUANTIZE: 0.35, GENERATE: 0.0, ROWS: 1e-4, ROWS_INT8: 0.35}
"""Largest accepted relative difference. Float32 sums in another order are about 1e-6 apart; more is accepted where PyTorch's own float32 is
as far from float64. Eight bits in a model of random weights are a tenth apart, and more in deep ones."""
_UPSTREAM = 1e-3  # a graph of transformers' own exporters counts as captured up to here
NEW_TOKENS = 8
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 1}
"""Greedy, and no token twice: models of random weights come to repeat one, and that hides a wrong cache."""
# Logits of two tokens this close, relative to the largest, may be told apart either way.
_TIE = 1e-3

OK, WRONG, REFUSED, FAILED, NOT_BUILT, NONE = "ok", "wrong", "refused", "failed", "not built", "none"
STATUSES = (WRONG, FAILED, REFUSED, OK, NOT_BUILT, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one stage of one backend made of one pair.

    Attributes:
        architecture, task, backend, stage: What it is about; the backend of a model that was not built is `pytorch`.
        status: `ok`; `wrong`: it ran and differs; `refused`: the library said why not; `failed`: it ended in another
            way, by a time limit or a crash; `not built`: there is no model to try; `none`: the backend has no such stage.
        difference: Relative to the largest value that PyTorch answers.
        in_batch: Largest relative difference between a row alone and the same row in a batch, for `rows` and `rows-int8`.
        reason: Why it is not `ok`, in one line.
        upstream: Whether transformers' own exporters capture the model, where that was tried.
        seconds: It took.
        digest: Of the code and the versions that it was made with.
    """

    architecture: str
    task: str
    backend: str
    stage: str
    status: str
    difference: float | None = None
    in_batch: float | None = None
    reason: str = ""
    upstream: bool | None = None
    seconds: float = 0.0
    digest: str = ""

    @property
    def key(self) -> str:
        """What it is about in one word."""
        return "/".join((self.architecture, self.task, self.backend, self.stage))

    def to_dict(self) -> dict[str, Any]:
        """What is kept: no empty fields."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


Report = Callable[[Cell], None]
Announce = Callable[[str, str], None]


def stages_of(pair: Pair, backend: str = "cpu") -> tuple[str, ...]:
    """The stages that a pair goes through on a backend."""
    if backend == GPU:
        return (HALF, GENERATE) if pair.task == "text-generation" else (HALF,)
    stages = [EXPORT, OPTIMIZE, QUANTIZE]
    if task_spec(pair.task).generates:
        stages.append(GENERATE)
    stages.append(ROWS)
    if backend == "cpu" and pair.name in INTEGER_PAIRS:
        stages.append(ROWS_INT8)
    return tuple(stages)


def wanted(pair: Pair, backends: Sequence[str], stages: Sequence[str] = STAGES) -> set[tuple[str, str]]:
    """The backends and stages that a pair goes through, among some stages."""
    return {(backend, stage) for backend in backends for stage in stages_of(pair, backend) if stage in stages}


def sweep_pair(
    pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Sequence[tuple[str, str]] = ()
) -> None:
    """Take a pair through every stage of every backend.

    Args:
        pair: What to try.
        backends: Names of backends.
        report: Called with each cell as soon as it is known.
        announce: Called with the backend and the stage that begins.
        skip: Backends and stages that are known already.
    """
    announce(PYTORCH, BUILD)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        try:
            model, source = saved(pair, build(pair), Path(folder) / "model")
            asked = questions(pair, model)
        except NotBuilt as error:
            report(cell_of(pair, PYTORCH, BUILD, NOT_BUILT, started, reason=str(error)))
            return
        exports: dict[str, Artifact] = {}
        for backend in backends:
            if not wanted(pair, [backend]) <= set(skip):
                _Run(pair, backend, model, source, asked, Path(folder), exports, report, announce, skip).all_stages()


def saved(pair: Pair, model: Any, folder: Path) -> tuple[Any, Path | None]:
    """A model in a folder, as users have them, and as transformers reads it from there.

    transformers does not read all that it writes (Youtu's embedding of padding), and finds no model for this task in some
    folders (the part of a model that writes, alone): those are exported from memory, and `None` is returned for the folder.
    """
    auto = loader_of(pair)
    try:
        with quiet():
            model.save_pretrained(folder)
            loaded = auto.from_pretrained(folder, local_files_only=True)
    # Foreign code, which may raise anything.
    except Exception:  # noqa: BLE001
        return model, None
    return (loaded.eval(), folder) if type(loaded) is type(model) else (model, None)


def cell_of(pair: Pair, backend: str, stage: str, status: str, started: float, **rest: Any) -> Cell:
    """A cell of a pair that took from `started` until now."""
    seconds = round(time.perf_counter() - started, 1)
    return Cell(
        architecture=pair.architecture, task=pair.task, backend=backend, stage=stage, status=status, seconds=seconds, **rest
    )  # fmt: skip


# Graphs lie in folders of this run, whose names say nothing and differ each time.
_TEMPORARY = re.compile(r"(?:/[\w.+-]+){2,}/([\w.+-]+)")


def reason_of(error: Exception) -> str:
    """What an error says, in one line, without the names of temporary folders."""
    text = error.message if isinstance(error, AccelError) else str(error)
    line = f"{type(error).__name__}: {' '.join(text.split())}"
    return _TEMPORARY.sub(r"\1", line)[:400]


class _Run:
    """A pair on its way through one backend."""

    def __init__(
        self,
        pair: Pair,
        backend: str,
        model: Any,
        source: Path | None,
        asked: list[Question],
        folder: Path,
        exports: dict[str, Artifact],
        report: Report,
        announce: Announce,
        skip: Sequence[tuple[str, str]],
    ) -> None:
        self.pair, self.backend, self.model, self.asked = pair, backend, model, asked
        self.source = source
        self.folder, self.exports, self.report, self.announce = folder, exports, report, announce
        self.skip = set(skip)
        self.rows: list[Company] = []
        self.integers: Artifact | None = None
        self.apart = Apart()
        self.why_not_exported = ""

    def all_stages(self) -> None:
        """Export; then each stage that starts from the export."""
        exports, backend = self.exports, self.backend

        def export() -> float:
            out = self.folder / f"{backend}-export"
            exports[backend] = accel.export(self.source or self.model, out, task=self.pair.task, backend=backend)
            return self._difference(exports[backend])

        why = self.why_not_exported = self._stage(EXPORT, export)
        steps: dict[str, Callable[[], float]] = {
            OPTIMIZE: lambda: self._difference(self._optimized()),
            QUANTIZE: lambda: self._difference(self._quantized(exports[backend])),
            GENERATE: lambda: self._tokens(exports[backend]),
            ROWS: lambda: self._rows(exports[backend]),
            ROWS_INT8: lambda: self._integer_rows(exports[backend]),
        }
        for stage in stages_of(self.pair, backend)[1:]:
            if backend in exports:
                self._stage(stage, steps[stage])
            elif (self.backend, stage) not in self.skip:
                started = time.perf_counter()
                self.report(cell_of(self.pair, self.backend, stage, REFUSED, started, reason=why))

    def _stage(self, stage: str, measure: Callable[[], float]) -> str:
        """Measure one cell; returns the reason where it is not green."""
        if (self.backend, stage) in self.skip and stage != EXPORT:
            return ""
        self.announce(self.backend, stage)
        started = time.perf_counter()
        status, reason, apart, upstream = OK, "", None, None
        self.apart = Apart()
        try:
            apart = measure()
            limit = TOLERANCES[stage]
            if stage in (QUANTIZE, ROWS_INT8) and limit < apart < math.inf:
                # Eight bits may do that by themselves; a quarter more for grids that were not tried.
                limit = max(limit, 1.25 * largest_error(self.model, self._asked(stage)))
            if stage in (EXPORT, OPTIMIZE, ROWS) and limit < apart < math.inf:
                limit = max(limit, accepted_rounding(own_error(self.model, self._asked(stage))))
            if not apart <= limit:
                status, reason = WRONG, f"differs by {apart:.2g} of the largest value, more than {limit:.2g}"
                if stage == GENERATE:
                    reason = f"{apart:.0f} tokens of {2 * NEW_TOKENS} are not transformers' own"
                if self.apart.where:
                    reason = f"{self.apart.where}: {reason}"
        except (_NoStage, NotBuilt) as error:
            status, reason = NONE, str(error)
        except AccelError as error:
            reason = reason_of(error)
            # An export that answers must answer these rows as well.
            new = stage in (ROWS, ROWS_INT8) and reason != self.why_not_exported
            status = FAILED if new else REFUSED
        # Whatever else comes out of it is a finding about the library.
        except Exception as error:  # noqa: BLE001
            status, reason = FAILED, reason_of(error)
        if stage == EXPORT:
            upstream = True if apart is not None else captured_upstream(self.pair, self.model, self.asked)
        kept = apart if apart is None or math.isfinite(apart) else None
        self.report(
            cell_of(
                self.pair, self.backend, stage, status, started,
                difference=None if kept is None else float(f"{kept:.2g}"), in_batch=self._in_batch(stage), reason=reason,
                upstream=upstream,
            )
        )  # fmt: skip
        return reason

    def _open(self, artifact: Artifact) -> Any:
        return model_class(self.pair.task)(artifact, backend=self.backend)

    def _difference(self, artifact: Artifact) -> float:
        opened = self._open(artifact)
        try:
            return max(difference(question, answers(opened, question.inputs)) for question in self.asked)
        finally:
            for session in opened.sessions.values():
                session.close()

    def _asked(self, stage: str) -> list[Question]:
        """What rounding is measured with."""
        if stage not in (ROWS, ROWS_INT8):
            return self.asked
        rows = [row for company in self.rows for row in company.rows]
        return [Question(row.name, row.inputs, row.expected, row.real) for row in rows]

    def _in_batch(self, stage: str) -> float | None:
        found = self.apart.in_batch
        return float(f"{found:.2g}") if stage in (ROWS, ROWS_INT8) and math.isfinite(found) else None

    def _rows(self, artifact: Artifact) -> float:
        """Rows alone: how far they are from PyTorch's answers to the rows alone, and from the rows in a batch."""
        self.rows = self.rows or companies(self.pair, self.model)
        opened = self._open(artifact)
        opened.generation_config = copy.deepcopy(getattr(self.model, "generation_config", None))
        try:
            self.apart = all_apart(self.pair, self.model, opened, self.rows)
        finally:
            for session in opened.sessions.values():
                session.close()
        return self.apart.worst

    def _integer_rows(self, artifact: Artifact) -> float:
        """Rows alone and rows in a batch: how far the int8 graph is from the float32 graph that it was made from.

        Scales of activations are computed from the whole batch, so that rows alone differ from rows in the batch.
        """
        self.rows = self.rows or companies(self.pair, self.model)
        parent, integers = self._open(artifact), self._open(self._quantized(artifact))
        try:
            worst = 0.0
            for company in self.rows:

                def expected(row: Row) -> Tensors:
                    return answers(parent, row.inputs)

                found = apart(company, lambda inputs: answers(integers, inputs), expected)
                in_batch = apart(company, lambda inputs: answers(integers, inputs), expected, from_batch=True)
                worst = max(worst, found.alone, in_batch.alone)
                self.apart.add(alone=worst, in_batch=found.in_batch, where=found.where)
            return worst
        finally:
            for opened in (parent, integers):
                for session in opened.sessions.values():
                    session.close()

    def _optimized(self) -> Artifact:
        """The backend's own export; where it optimizes ONNX graphs only, that of the backend that makes them."""
        spec = registry.describe(self.backend)
        able = [one for one in spec.capabilities if one.stage == "optimize" and one.does(self.pair.task)]
        formats = {one.consumes for one in able}
        parent = next((one for one in self.exports.values() if one.format in formats), None)
        if parent is None:
            raise _NoStage(f"{self.backend} optimizes no graph that was exported")
        return accel.optimize(parent, self.folder / f"{self.backend}-O2", backend=self.backend, level="O2")

    def _quantized(self, artifact: Artifact) -> Artifact:
        if self.integers is not None:
            return self.integers
        spec = task_spec(self.pair.task)
        several = spec.generates or len(artifact.components) > 1
        scheme = "dynamic-int8" if self.backend == "cpu" else "weight-int8" if several else "static-int8"
        names = {spec.name for spec in artifact.components[0].inputs}
        batches = [{n: t for n, t in question.inputs.items() if n in names} for question in self.asked]
        calibration = batches if scheme == "static-int8" else None
        out = self.folder / f"{self.backend}-int8"
        self.integers = quantize(artifact, out, backend=self.backend, scheme=scheme, calibration=calibration)
        return self.integers

    def _tokens(self, artifact: Artifact) -> float:
        """How many tokens differ from transformers' own, with a cache, without, and with the next one."""
        opened = self._open(artifact)
        opened.generation_config = copy.deepcopy(self.model.generation_config)
        inputs = prompts(self.pair, self.model)
        worst = 0
        for use_cache in (True, False, True):
            # Positions that count padding make PyTorch itself write another text without a cache, once it wrote padding.
            told = {"use_cache": use_cache, "return_dict_in_generate": True, "output_logits": True}
            expected = self.model.generate(**inputs, **GREEDY, **told)
            found = opened.generate(**inputs, **GREEDY, use_cache=use_cache)
            worst = max(worst, mistaken(found, expected))
        return float(worst)


class _NoStage(Exception):  # noqa: N818  # no failure
    """The backend has no such stage."""


def mistaken(found: torch.Tensor, expected: Any, tie: float = _TIE) -> int:
    """How many of the new tokens differ, up to where two were as likely as each other in PyTorch itself."""
    count = len(expected.logits)
    wanted, have = expected.sequences[:, -count:], found[:, -count:]
    if wanted.shape != have.shape:
        return int(wanted.numel())
    found = found.to(expected.sequences.device)
    count_of_mistaken = 0
    for row in range(wanted.shape[0]):
        for step in range(count):
            if wanted[row, step] == have[row, step]:
                continue
            logits = expected.logits[step][row].float()
            gap = float(logits[wanted[row, step]] - logits[have[row, step]]) / max(float(logits.abs().max()), 1e-6)
            if gap > tie:
                count_of_mistaken += int((wanted[row, step:] != have[row, step:]).sum())
            break
    return count_of_mistaken


@torch.inference_mode()
def captured_upstream(pair: Pair, model: Any, asked: Sequence[Question]) -> bool:
    """Whether transformers' own exporter captures the model: with any sizes, so that what it captured answers like PyTorch
    at other sizes than those of the trace, too.
    """
    try:
        with quiet():
            if task_spec(pair.task).generates:
                return _generation_captured(pair, model)
            # More than one row: a trace makes a constant of an axis of size 1.
            traced, other = asked[1 % len(asked)], asked[2 % len(asked)]
            exported = OnnxExporter().export(model, dict(traced.inputs), OnnxConfig(dynamic=True))
            return all(difference(one, _floating(exported(**one.inputs))) <= _UPSTREAM for one in (traced, other))
    # Foreign code that traces foreign code.
    except Exception:  # noqa: BLE001
        return False


def _generation_captured(pair: Pair, model: Any) -> bool:
    """The same of every part of a generating model: those that read the prompt, and the step behind it."""
    traced, other = prompts(pair, model), prompts(pair, model, batch=3, sequence=14)
    exported = OnnxExporter().export_for_generation(model, traced, OnnxConfig(dynamic=True))
    for name, (part, inputs) in decompose_for_generation(model, other).items():
        expected = _floating(part(**copy.deepcopy(inputs)))
        found = _floating(exported.runners[name](**inputs))
        mask = inputs.get("attention_mask")
        real = mask.bool() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        if not difference(Question(name, {}, expected, real), found) <= _UPSTREAM:
            return False
    return True


def _floating(result: Any) -> Tensors:
    """The floating-point tensors that a model returned, by name."""
    named = result if isinstance(result, Mapping) else {"logits": result}
    return {
        name: value.detach().float()
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
