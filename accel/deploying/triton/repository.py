"""Writes model repositories for Triton: a graph, what reads texts for it and what makes answers of its outputs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.checksums import sha256
from ...artifact.companions import open_companion
from ...artifact.manifest import Artifact
from ...artifact.writing import check_output, staging
from ...data.batches import longest
from ...errors import ArtifactNotFoundError, ConfigError, TaskError
from ...interfaces.row_tokens import with_row_tokens
from ...interfaces.task_registry import load_task, task_spec
from ...stages.resolution import artifact_of
from .graph_models import (
    BACKENDS,
    Fields,
    Graph,
    backend_for,
    batching,
    graph_config,
    instances,
    version_policy,
    write_graph,
)
from .model_config import data_type, model_config, write
from .text_fronts import Facts, Tensor, TextFront
from .triton_config import TritonConfig

logger = logging.getLogger(__name__)

SERVED = Path(__file__).parent / "served"
SETTINGS = "settings.json"
TOKENIZER = "tokenizer.json"
LABELS = "labels.txt"
_SHARED = ("text_batches.py", "call_costs.py", "tokens.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A model repository that was written.

    Attributes:
        path: The folder, for `tritonserver --model-repository`.
        name: The model that clients call.
        models: Every model in it, with Triton's backend for it.
        task: The pipeline task that is served.
        layout: `text`, `ensemble` or `graph`.
        sample: A request for it; empty where it takes tensors.
    """

    path: Path
    name: str
    models: Mapping[str, str]
    task: str
    layout: str
    sample: Mapping[str, list[str]]


def deploy(
    artifact: str | os.PathLike[str] | Artifact,
    out: str | os.PathLike[str],
    *,
    config: TritonConfig | None = None,
    **settings: Any,
) -> Repository:
    """Write a model repository for Triton Inference Server.

    Args:
        artifact: An artifact or its folder.
        out: Folder to make.
        config: How; its fields may also be given as keyword arguments (`layout="graph"`).
        **settings: Fields of `TritonConfig`.

    Raises:
        BackendUnavailableError: The extra `triton` is not installed.
        ConfigError: Settings that Triton, or the artifact, does not have.
        TaskError: A model that Triton cannot run, or that does not serve the task as text.
        OutputFolderError: `out` is the artifact's folder or not empty.
    """
    found = artifact_of(artifact)
    config = TritonConfig.from_dict({**(config.to_dict() if config else {}), **settings})
    target = check_output(out, found.path)
    task = _task(found, config)
    service = _service(found, task)
    layout = config.layout if config.layout != "auto" else "text" if service is not None else "graph"
    name = config.name or task.replace("-", "_")
    if config.queue_timeout_us is not None or config.queue_size is not None:
        logger.warning(
            "A queue policy makes Triton lose throughput over time, down to a stall (server issue 8870): leave "
            "queue_timeout_us and queue_size out where clients can have timeouts of their own."
        )
    progress.report("writing the repository", 0, None)
    with staging(target, needs=found.bytes) as folder:
        if layout == "graph":
            models = _Writer(folder, config, found).graph(name, config.max_length, name)
        elif service is None:
            raise TaskError(
                f"A model for {task} is not served as text by Triton.", fix="deploy it with --layout graph."
            )
        else:
            writer = _TextWriter(folder, config, found, service, name, layout)
            models = writer.generator() if service.generates else writer.write()
    sample = dict(service.sample) if service is not None and layout != "graph" else {}
    return Repository(path=target, name=name, models=models, task=task, layout=layout, sample=sample)


def _task(artifact: Artifact, config: TritonConfig) -> str:
    """The pipeline task to serve.

    Raises:
        TaskError: The model does not serve it.
    """
    own = task_spec(artifact.task)
    if config.task is None:
        return own.name
    wanted = config.task if config.task in own.serves else task_spec(config.task).name
    if wanted not in own.serves:
        raise TaskError(
            f"The artifact was made for {own.name}, which serves {', '.join(own.serves)}; not {config.task}.",
            fix="leave the task out, or deploy another artifact.",
        )
    return wanted


def _service(artifact: Artifact, task: str) -> TextFront | None:
    return load_task(artifact.task).fronts().get(task)


@dataclass(frozen=True)
class _Writer:
    """Writes models into a folder that becomes a repository."""

    folder: Path
    config: TritonConfig
    artifact: Artifact

    def graph(self, name: str, length: int | None, seen_as: str) -> dict[str, str]:
        """The graph's model."""
        backend = backend_for(self.artifact, self.config)
        if length is None and len(self.artifact.components) == 1:
            length = self.artifact.components[0].max_sizes.get("sequence")
        graph = Graph(self.artifact, self.config, name, length)
        version = self.version(name)
        write(graph_config(graph, backend), version.parent)
        known = write_graph(graph, version)
        if BACKENDS[backend].code:
            self.code(version, BACKENDS[backend].code[0])
            self.settings(version, known)
        return {name: backend}

    def version(self, name: str) -> Path:
        """The folder of a model's version."""
        folder = self.folder / name / str(self.config.version)
        folder.mkdir(parents=True)
        return folder

    def code(self, version: Path, main: str, *others: str | Path) -> None:
        """Copy modules of `served`, the first one under the name that Triton looks for; others may be files elsewhere."""
        shutil.copyfile(SERVED / f"{main}.py", version / "model.py")
        for name in others:
            shutil.copyfile(SERVED / name, version / Path(name).name)

    def settings(self, version: Path, values: Mapping[str, Any]) -> None:
        """What the code is told, and what the files beside it were when they were written."""
        written = sorted(path for path in version.iterdir() if path.suffix == ".py" or path.name == TOKENIZER)
        values = {**values, "files": {path.name: sha256(path) for path in written}}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (version / SETTINGS).write_text(text, encoding="utf-8")


class _TextWriter(_Writer):
    """Writes what reads texts and answers with what a graph says."""

    def __init__(
        self, folder: Path, config: TritonConfig, artifact: Artifact, service: TextFront, name: str, layout: str
    ) -> None:
        super().__init__(folder, config, artifact)
        self.service, self.name, self.layout = service, name, layout
        self.facts = _facts(artifact)
        self.length = self._length()

    def write(self) -> dict[str, str]:
        """A front, or the steps of an ensemble, over the graph's model."""
        self._check()
        graph = f"{self.name}_graph"
        models = self.graph(graph, self.length, self.name)
        settings = self._settings(graph)
        if self.layout == "ensemble":
            return {**self._ensemble(graph, settings), **models}
        config = self._python(self.name, self.service.inputs, self.service.outputs(self.facts))
        version = self._step(config, "text_model", settings)
        self._labels(version.parent)
        return {self.name: "python", **models}

    def generator(self) -> dict[str, str]:
        """A model that answers in pieces, with the graph beside it."""
        from .generator_settings import generator_settings

        if self.layout == "ensemble":
            raise TaskError("Text is generated by a loop, which no ensemble has.", fix="deploy it with --layout text.")
        settings = generator_settings(self.facts, self.config)
        config = self._python(self.name, self.service.inputs, self.service.outputs(self.facts), decoupled=True)
        version = self.version(self.name)
        write(config, version.parent)
        self.code(version, "generator", "text_decoder.py", "tokens.py")
        self._tokenizer(version)
        known = write_graph(Graph(self.artifact, self.config, self.name), version)
        self.settings(version, {**settings, **known})
        return {self.name: "python"}

    def _length(self) -> int | None:
        """Tokens of a text at most."""
        own = self.service.limit(self.facts)
        limit = self.artifact.components[0].max_sizes.get("sequence")
        found = longest(limit, self.facts.tokenizer, self.config.max_length)
        found = min((n for n in (found, own) if n is not None), default=None)
        if found is not None and self.config.buckets and self.config.buckets[-1] > found:
            raise ConfigError(
                f"The bucket {self.config.buckets[-1]} is longer than the {found} tokens of a text.",
                fix=f"use buckets up to {found}.",
            )
        return found

    def _check(self) -> None:
        """Whether texts can be made into what the graph takes, and answers of what it returns.

        Raises:
            TaskError: They cannot, and why.
        """
        component = self.artifact.components[0]
        known = {"input_ids", "attention_mask", "token_type_ids", *self.service.makes}
        others = [spec.name for spec in component.inputs if spec.name not in known]
        if others:
            raise TaskError(
                f"The graph takes {', '.join(others)}, which no tokenizer makes.", fix="deploy it with --layout graph."
            )
        if any(spec.equal_counts for spec in with_row_tokens(self.artifact).components[0].inputs):
            raise TaskError(
                "This graph answers a row from another row's tokens where they hold unequal numbers of end tokens, and Triton batches "
                "rows of several callers.",
                fix="export the model again with this version of accel: accel export MODEL OUT.",
            )
        for name in self.service.reads(self.facts):
            self.facts.sizes(name)
            if next(spec.dtype for spec in component.outputs if spec.name == name) == "bfloat16":
                raise TaskError(
                    f"The graph's {name} is bfloat16, which Triton's Python backend cannot read.",
                    fix="deploy a float32 or float16 artifact.",
                )
        if self.layout == "ensemble" and not self.service.one_row:
            raise TaskError(
                "An ensemble hands one row of the graph on for each text; this task makes several, or none alone.",
                fix="deploy it with --layout text.",
            )

    def _settings(self, graph: str) -> dict[str, Any]:
        """What the modules inside Triton are told."""
        tokenizer, component = self.facts.tokenizer, self.artifact.components[0]
        named = set(tokenizer.model_input_names)
        own = set(component.own_defaults)
        zeros = [spec.name for spec in component.inputs if spec.name not in named]
        if any(name in own for name in zeros):
            raise TaskError(
                f"The tokenizer does not make {', '.join(zeros)}, and for this model zeros are something else.",
                fix="add them to model_input_names of its tokenizer_config.json.",
            )
        fill = {"input_ids": _padding(tokenizer), "attention_mask": 0, "token_type_ids": tokenizer.pad_token_type_id}
        return {
            "service": Path(self.service.module).name,
            "graph": graph,
            "inputs": {spec.name: spec.dtype for spec in component.inputs},
            "outputs": list(self.service.reads(self.facts)),
            "zeros": zeros,
            "max_rows": self.config.max_batch_size,
            "max_length": self.length,
            "buckets": list(self.config.buckets),
            "required": {spec.name: spec.required for spec in component.inputs if spec.required is not None},
            "padding": {
                "side": tokenizer.padding_side,
                "values": {spec.name: fill.get(spec.name, 0) for spec in component.inputs},
            },
            "truncation_side": tokenizer.truncation_side,
            "options": self.service.options(self.facts),
        }

    def _ensemble(self, graph: str, settings: Mapping[str, Any]) -> dict[str, str]:
        """Triton's own chain: tokenizer, graph, answers."""
        if not BACKENDS[backend_for(self.artifact, self.config)].batches:
            raise ConfigError(
                "Triton's backend for this graph fixes its batch, and an ensemble needs it free.",
                fix="deploy it with --layout text.",
            )
        text = (Tensor(name="TEXT", dtype="string"),)
        component = self.artifact.components[0]
        reads = self.service.reads(self.facts)
        ids = tuple(_as_tensor(spec.name, spec.dtype, spec.shape) for spec in component.inputs)
        found = tuple(_as_tensor(s.name, s.dtype, s.shape) for s in component.outputs if s.name in reads)
        answers = self.service.outputs(self.facts)
        tokenizer, last = f"{self.name}_tokenizer", f"{self.name}_answers"
        self._step(self._python(tokenizer, text, ids), "tokenizer_step", settings, "text_model.py")
        self._step(self._python(last, (*text, *found), answers), "answer_step", settings, "text_model.py")
        steps = [
            _link(tokenizer, {"TEXT": "TEXT"}, {one.name: one.name for one in ids}),
            _link(graph, {one.name: one.name for one in ids}, {name: name for name in reads}),
            _link(
                last,
                {"TEXT": "TEXT", **{name: name for name in reads}},
                {one.name: one.name for one in answers},
            ),
        ]
        fields = self._interface(self.name, text, answers)
        self.version(self.name)
        config = model_config(**fields, platform="ensemble", ensemble_scheduling={"step": steps})
        write(config, self.folder / self.name)
        # Git and archives leave empty folders out, and Triton wants a version.
        (self.folder / self.name / str(self.config.version) / ".keep").touch()
        self._labels(self.folder / self.name)
        return {self.name: "ensemble", tokenizer: "python", last: "python"}

    def _interface(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Fields:
        return {
            "name": name,
            "max_batch_size": self.config.max_batch_size,
            "input": [
                {
                    "name": one.name,
                    "data_type": data_type(one.dtype),
                    "dims": list(one.dims),
                    "optional": one.optional,
                    "allow_ragged_batch": one.ragged,
                }
                for one in inputs
            ],
            "output": [
                {
                    "name": one.name,
                    "data_type": data_type(one.dtype),
                    "dims": list(one.dims),
                    "label_filename": LABELS if one.name == self.service.labels else "",
                }
                for one in outputs
            ],
            "version_policy": version_policy(self.config),
        }

    def _python(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, decoupled: bool = False
    ) -> Any:
        """The configuration of a model in Python: on the CPU, wherever the graph is."""
        fields = self._interface(name, inputs, outputs)
        if decoupled:
            # One row a request: its answer comes in pieces.
            fields["max_batch_size"] = 0
            fields["model_transaction_policy"] = {"decoupled": True}
        else:
            fields["dynamic_batching"] = batching(self.config)
        for one in fields["output"]:
            if not (self.service.labels and name in (self.name, f"{self.name}_answers")):
                one["label_filename"] = ""
        count = self.config.front_instances
        return model_config(**fields, backend="python", instance_group=[instances("cpu", count)])

    def _step(self, config: Any, main: str, settings: Mapping[str, Any], *others: str) -> Path:
        """A model in Python that reads texts or writes answers."""
        version = self.version(config.name)
        write(config, version.parent)
        self.code(version, main, *_SHARED, Path(f"{self.service.module}.py"), *others)
        self._tokenizer(version)
        self.settings(version, settings)
        if any(one.label_filename for one in config.output):
            self._labels(version.parent)
        return version

    def _tokenizer(self, version: Path) -> None:
        self.facts.tokenizer.backend_tokenizer.save(str(version / TOKENIZER))

    def _labels(self, folder: Path) -> None:
        if self.service.labels:
            broken = [label for label in self.facts.labels if label.splitlines() != [label]]
            if broken:
                raise ConfigError(
                    f"The label {broken[0]!r} is not one line, and Triton reads labels line by line.",
                    fix="rename it in id2label of config.json, or deploy with --layout graph.",
                )
            (folder / LABELS).write_text("".join(f"{label}\n" for label in self.facts.labels), encoding="utf-8")


def _facts(artifact: Artifact) -> Facts:
    """What the files beside a graph say.

    Raises:
        TaskError: There is no tokenizer that works without transformers.
    """
    config = open_companion("AutoConfig", artifact.path)
    try:
        tokenizer = open_companion("AutoTokenizer", artifact.path)
    except ArtifactNotFoundError as error:
        raise TaskError(
            f"{artifact.path} has no tokenizer that can be loaded.",
            fix="save it there: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER).",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TaskError(
            "The model's tokenizer has no fast form, which is what runs inside Triton.",
            fix="deploy it with --layout graph, and tokenize where the client is.",
        )
    if tokenizer.split_special_tokens:
        raise TaskError(
            "The tokenizer reads special tokens in texts as letters (split_special_tokens), which its tokenizer.json, all that runs "
            "inside Triton, does not say.",
            fix="deploy it with --layout graph, and tokenize where the client is.",
        )
    return Facts(artifact, config, tokenizer)


def _padding(tokenizer: Any) -> int:
    """The padding token's id; where there is none any token will do behind a mask."""
    found = tokenizer.pad_token_id
    return int(found if found is not None else tokenizer.eos_token_id or 0)


def _as_tensor(name: str, dtype: str, shape: Sequence[int | str]) -> Tensor:
    return Tensor(name=name, dtype=dtype, dims=tuple(n if isinstance(n, int) else -1 for n in shape[1:]))


def _link(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Fields:
    """A step of an ensemble: the model's tensors to those of the ensemble."""
    return {"model_name": model, "model_version": -1, "input_map": dict(inputs), "output_map": dict(outputs)}
