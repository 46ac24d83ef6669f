"""Test one pair (architecture and task) on one backend. Report a `Cell` (a result) for each stage, with the difference
from PyTorch or with the reason of a failure.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from accel.upstream.output_silencing import quiet

from .building import NotBuilt, build
from .cases import Pair, loader_of
from .questions import Question, Tensors, answers, difference, prompts, questions
from .rounding import largest_error, own_error
from .rows import INTEGER_PAIRS, Apart, Company, Row, all_apart, apart, companies

EXPORT, OPTIMIZE, QUANTIZE, HALF, GENERATE, BUILD = "export", "O2", "int8", "O4", "generate", "build"
ROWS, ROWS_INT8 = "rows", "rows-int8"
ENGINE = "engine"
STAGES = (EXPORT, OPTIMIZE, QUANTIZE, HALF, GENERATE, ROWS, ROWS_INT8, ENGINE)
PYTORCH, GPU, RTX = "pytorch", "cuda", "tensorrt-rtx"
TOLERANCES = {EXPORT: 1e-4, OPTIMIZE: 1e-4, QUANTIZE: 0.35, GENERATE: 0.0, ROWS: 1e-4, ROWS_INT8: 0.35}
"""Largest accepted relative difference of each stage. Different summation orders in float32 give differences of about 1e-6. A larger
difference is accepted if PyTorch's own float32 differs from float64 as much. Int8 with random weights gives about 0.1, and more in
deep models."""
_UPSTREAM = 1e-3  # largest difference at which a graph of transformers' own exporters counts as captured
NEW_TOKENS = 8
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "no_repeat_ngram_size": 1}
"""Greedy generation that never repeats a token: models with random weights tend to repeat one token, which would hide a wrong cache."""
# The limit is relative to the largest logit. If the logits of two tokens are closer than this limit, both tokens are
# accepted.
_TIE = 1e-3

OK, WRONG, REFUSED, FAILED, NOT_BUILT, NONE = "ok", "wrong", "refused", "failed", "not built", "none"
STATUSES = (WRONG, FAILED, REFUSED, OK, NOT_BUILT, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of one stage of a backend for one pair (architecture and task).

    Attributes:
        architecture, task, backend, stage: Identify the result. The backend of a model that could not be built is `pytorch`.
        status: `ok`; `wrong`: the stage ran and its outputs differ; `refused`: the library raised an error with a reason;
            `failed`: other error, timeout or crash; `not built`: no small model; `none`: the backend has no such stage.
        difference: Largest difference from PyTorch, relative to PyTorch's largest value.
        in_batch: Largest relative difference between a row alone and the same row in a batch, for `rows` and `rows-int8`.
        reason: Reason why the status is not `ok`, in one line.
        upstream: Whether transformers' own exporters capture the model; `None` if not tested.
        seconds: Duration of the stage, in seconds.
        digest: Digest of the code and the library versions that produced the result.
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
        """Key of the result: architecture, task, backend and stage, joined by slashes."""
        return "/".join((self.architecture, self.task, self.backend, self.stage))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the result that are not empty, as a dictionary."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


Report = Callable[[Cell], None]
Announce = Callable[[str, str], None]


def stages_of(pair: Pair, backend: str = "cpu") -> tuple[str, ...]:
    """Return the stages that are tested for a pair (architecture and task) on a backend."""
    if backend == GPU:
        return (HALF, GENERATE) if pair.task == "text-generation" else (HALF,)
    if backend == RTX:
        return (ENGINE,)
    stages = [EXPORT, OPTIMIZE, QUANTIZE]
    if task_spec(pair.task).generates:
        stages.append(GENERATE)
    stages.append(ROWS)
    if backend == "cpu" and pair.name in INTEGER_PAIRS:
        stages.append(ROWS_INT8)
    return tuple(stages)


def cells_of(pair: Pair, backends: Sequence[str], stages: Sequence[str] = STAGES) -> set[tuple[str, str]]:
    """Return the (backend, stage) combinations that are tested for a pair (architecture and task), limited to the
    stages in `stages`.
    """
    return {(backend, stage) for backend in backends for stage in stages_of(pair, backend) if stage in stages}


def sweep_pair(
    pair: Pair, backends: Sequence[str], report: Report, announce: Announce, skip: Sequence[tuple[str, str]] = ()
) -> None:
    """Test a pair (architecture and task) in every stage of every backend.

    Args:
        pair: Architecture and task to test.
        backends: Names of backends.
        report: Function that is called with the result of each stage.
        announce: Function that is called with the backend and the stage that begins.
        skip: (backend, stage) combinations that are already known.
    """
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = Path(name)
        build = built(pair, report, announce, folder / "model")
        exports: dict[str, Artifact] = {}
        for backend in backends if build is not None else ():
            if build is not None and not cells_of(pair, [backend]) <= set(skip):
                model, source, questions_of_pair = build
                _Run(
                    pair=pair, backend=backend, model=model, source=source, asked=questions_of_pair, folder=folder, exports=exports,
                    report=report, announce=announce, skip=skip,
                ).all_stages()  # fmt: skip


def built(
    pair: Pair, report: Report, announce: Announce, folder: Path | None = None
) -> tuple[Any, Path | None, list[Question]] | None:
    """Build the model of a pair and run it in PyTorch. Return the model, its folder and its questions (inputs with
    PyTorch's outputs).

    If the model cannot be built or raises an error, report the failure and return `None`.

    Args:
        pair: Architecture and task of the model.
        report: Function that is called with the result if there is a failure.
        announce: Function that is called before the model is built.
        folder: Folder in which the model is saved and from which it is loaded again, or `None` to keep the model in
            memory.
    """
    announce(PYTORCH, BUILD)
    started = time.perf_counter()
    try:
        model, source = build(pair), None
        if folder is not None:
            model, source = saved(pair, model, folder)
        return model, source, questions(pair, model)
    except NotBuilt as error:
        report(cell_of(pair, PYTORCH, BUILD, NOT_BUILT, started, reason=str(error)))
        return None


def saved(pair: Pair, model: Any, folder: Path) -> tuple[Any, Path | None]:
    """Save a model to a folder and load it again, as users load models. Return the loaded model and the folder.

    transformers cannot load every model that it saves (Youtu's padding embedding), and finds no model for the task in
    some folders (only the text model of a larger model). In these cases, the original model and `None` are returned,
    and the model is exported from memory.
    """
    auto = loader_of(pair)
    try:
        with quiet():
            model.save_pretrained(folder)
            loaded = auto.from_pretrained(folder, local_files_only=True)
    # Catch all exceptions, because model code may raise any type of exception.
    except Exception:  # noqa: BLE001
        return model, None
    return (loaded.eval(), folder) if type(loaded) is type(model) else (model, None)


def cell_of(pair: Pair, backend: str, stage: str, status: str, started: float, **rest: Any) -> Cell:
    """Return the result of a stage that lasted from `started` until now."""
    seconds = round(time.perf_counter() - started, 1)
    return Cell(
        architecture=pair.architecture, task=pair.task, backend=backend, stage=stage, status=status, seconds=seconds, **rest
    )  # fmt: skip


# This pattern matches paths in temporary folders, whose names differ in each run.
_TEMPORARY = re.compile(r"(?:/[\w.+-]+){2,}/([\w.+-]+)")


def reason_of(error: Exception) -> str:
    """Return the message of an error in one line, without the names of temporary folders."""
    text = error.message if isinstance(error, AccelError) else str(error)
    line = f"{type(error).__name__}: {' '.join(text.split())}"
    return _TEMPORARY.sub(r"\1", line)[:400]


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of the test of one pair (architecture and task) on one backend."""

    pair: Pair
    backend: str
    model: Any
    source: Path | None
    asked: list[Question]
    folder: Path
    exports: dict[str, Artifact]
    report: Report
    announce: Announce
    skip: Sequence[tuple[str, str]]
    rows: list[Company] = field(default_factory=list)
    integers: Artifact | None = None
    apart: Apart = field(default_factory=Apart)
    why_not_exported: str = ""

    def all_stages(self) -> None:
        """Run the export, and then every stage that starts from the exported graph."""
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
        """Run one stage and report its result. Return the reason if the status is not `ok`, and an empty string if it
        is `ok`.
        """
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
                # Accept 1.25 times the difference that int8 rounding alone causes in PyTorch. The margin is for
                # other scales and zero points than the tested ones.
                limit = max(limit, 1.25 * largest_error(self.model, self._questions(stage)))
            if stage in (EXPORT, OPTIMIZE, ROWS) and limit < apart < math.inf:
                limit = max(limit, accepted_rounding(own_error(self.model, self._questions(stage))))
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
            # The graph has already run with other inputs, so it must also run with these rows. A new error therefore
            # counts as a failure, and not as a refusal.
            new = stage in (ROWS, ROWS_INT8) and reason != self.why_not_exported
            status = FAILED if new else REFUSED
        # Record every other type of error as a failure of accel.
        except Exception as error:  # noqa: BLE001
            status, reason = FAILED, reason_of(error)
        if stage == EXPORT:
            upstream = True if apart is not None else captured_upstream(self.pair, self.model, self.asked)
        finite = apart if apart is None or math.isfinite(apart) else None
        self.report(
            cell_of(
                self.pair, self.backend, stage, status, started,
                difference=None if finite is None else float(f"{finite:.2g}"), in_batch=self._in_batch(stage), reason=reason,
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

    def _questions(self, stage: str) -> list[Question]:
        """Return the questions (inputs with expected outputs) with which the effect of rounding is measured."""
        if stage not in (ROWS, ROWS_INT8):
            return self.asked
        rows = [row for company in self.rows for row in company.rows]
        return [Question(row.name, row.inputs, row.expected, row.real) for row in rows]

    def _in_batch(self, stage: str) -> float | None:
        difference = self.apart.in_batch
        return float(f"{difference:.2g}") if stage in (ROWS, ROWS_INT8) and math.isfinite(difference) else None

    def _rows(self, artifact: Artifact) -> float:
        """Compute rows alone, and compare them with PyTorch's outputs and with the same rows in a batch. Return the
        largest difference.
        """
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
        """Compare the int8 graph with its float32 graph, for rows computed alone and for rows in a batch. Return the
        largest difference.

        Dynamic quantization computes the scales of activations from the whole batch, so rows computed alone differ from
        rows in the batch.
        """
        self.rows = self.rows or companies(self.pair, self.model)
        parent, integers = self._open(artifact), self._open(self._quantized(artifact))
        try:
            worst = 0.0
            for company in self.rows:

                def expected(row: Row) -> Tensors:
                    return answers(parent, row.inputs)

                integer_apart = apart(company, lambda inputs: answers(integers, inputs), expected)
                in_batch = apart(company, lambda inputs: answers(integers, inputs), expected, from_batch=True)
                worst = max(worst, integer_apart.alone, in_batch.alone)
                self.apart.add(alone=worst, in_batch=integer_apart.in_batch, where=integer_apart.where)
            return worst
        finally:
            for opened in (parent, integers):
                for session in opened.sessions.values():
                    session.close()

    def _optimized(self) -> Artifact:
        """Optimize the backend's own export. If the backend optimizes only ONNX graphs, optimize the ONNX export of
        another backend.
        """
        spec = registry.describe(self.backend)
        optimizations = [item for item in spec.capabilities if item.stage == "optimize" and item.does(self.pair.task)]
        formats = {item.consumes for item in optimizations}
        parent = next((item for item in self.exports.values() if item.format in formats), None)
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
        """Return how many generated tokens differ from transformers' tokens. Generation runs with a cache, without a
        cache, and again with a cache.
        """
        opened = self._open(artifact)
        opened.generation_config = copy.deepcopy(self.model.generation_config)
        inputs = prompts(self.pair, self.model)
        worst = 0
        for use_cache in (True, False, True):
            # Use the same cache setting in PyTorch. If position ids count padding tokens, PyTorch's own texts with and
            # without a cache differ after a generated padding token.
            settings = {"use_cache": use_cache, "return_dict_in_generate": True, "output_logits": True}
            expected = self.model.generate(**inputs, **GREEDY, **settings)
            tokens = opened.generate(**inputs, **GREEDY, use_cache=use_cache)
            worst = max(worst, mistaken(tokens, expected))
        return float(worst)


class _NoStage(Exception):  # noqa: N818  # an expected result, not an error
    """Error that is raised if the backend does not have the stage."""


def mistaken(tokens: torch.Tensor, expected: Any, tie: float = _TIE) -> int:
    """Return how many new tokens differ. If a first difference is between two almost equally probable tokens, the
    tokens after it are not counted.
    """
    count = len(expected.logits)
    expected_tokens, actual_tokens = expected.sequences[:, -count:], tokens[:, -count:]
    if expected_tokens.shape != actual_tokens.shape:
        return int(expected_tokens.numel())
    tokens = tokens.to(expected.sequences.device)
    count_of_mistaken = 0
    for row in range(expected_tokens.shape[0]):
        for step in range(count):
            if expected_tokens[row, step] == actual_tokens[row, step]:
                continue
            logits = expected.logits[step][row].float()
            gap = float(logits[expected_tokens[row, step]] - logits[actual_tokens[row, step]]) / max(
                float(logits.abs().max()), 1e-6
            )
            if gap > tie:
                count_of_mistaken += int((expected_tokens[row, step:] != actual_tokens[row, step:]).sum())
            break
    return count_of_mistaken


@torch.inference_mode()
def captured_upstream(pair: Pair, model: Any, questions_of_pair: Sequence[Question]) -> bool:
    """Return whether transformers' own exporter captures the model with dynamic sizes.

    The captured model must give PyTorch's outputs at the sizes of the trace and at other sizes.
    """
    try:
        with quiet():
            if task_spec(pair.task).generates:
                return _generation_captured(pair, model)
            # Use inputs with several rows, because tracing turns an axis of size 1 into a constant.
            traced, other = questions_of_pair[1 % len(questions_of_pair)], questions_of_pair[2 % len(questions_of_pair)]
            exported = OnnxExporter().export(model, dict(traced.inputs), OnnxConfig(dynamic=True))
            return all(
                difference(question, _floating(exported(**question.inputs))) <= _UPSTREAM
                for question in (traced, other)
            )
    # Catch all exceptions, because the exporter and the model are third-party code.
    except Exception:  # noqa: BLE001
        return False


def _generation_captured(pair: Pair, model: Any) -> bool:
    """Return whether transformers' exporter captures every part of a generating model: the parts that read the prompt,
    and the decoding step.
    """
    traced, other = prompts(pair, model), prompts(pair, model, batch=3, sequence=14)
    exported = OnnxExporter().export_for_generation(model, traced, OnnxConfig(dynamic=True))
    for name, (part, inputs) in decompose_for_generation(model, other).items():
        expected = _floating(part(**copy.deepcopy(inputs)))
        outputs = _floating(exported.runners[name](**inputs))
        mask = inputs.get("attention_mask")
        real = mask.bool() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        if not difference(Question(name, {}, expected, real), outputs) <= _UPSTREAM:
            return False
    return True


def _floating(result: Any) -> Tensors:
    """Return the floating-point tensors in a model's output, by name."""
    named = result if isinstance(result, Mapping) else {"logits": result}
    return {
        name: value.detach().float()
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
