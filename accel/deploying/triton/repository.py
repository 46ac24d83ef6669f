"""Write model repositories for Triton: the graph, and models that tokenize texts and convert the graph's outputs to results."""

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
from ...artifact.manifest import Artifact
from ...artifact.processor_loading import open_companion
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
    tensors,
    version_policy,
    write_graph,
)
from .model_config import model_config, tensor, write
from .text_fronts import TextFront, TextModelFacts, TritonTensor
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
        path: Folder of the repository, for `tritonserver --model-repository`.
        name: Name of the model that clients call.
        models: Triton backend of each model, by model name.
        task: The pipeline task that is served.
        layout: `text`, `ensemble` or `graph`.
        sample: A sample request with texts by input name; empty if the model takes tensors.
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
        out: Folder for the repository; new or empty.
        config: Deployment settings.
        **settings: Fields of `TritonConfig`, which override the fields of `config`.

    Raises:
        BackendUnavailableError: The extra `triton` is not installed.
        ConfigError: Triton or the artifact does not support the settings.
        TaskError: Triton cannot run the model, or the model does not serve the task as text.
        OutputFolderError: `out` is the artifact's folder, or is not empty.
    """
    source = artifact_of(artifact)
    config = TritonConfig.merged(config, settings)
    target = check_output(out, source.path)
    task = _task(source, config)
    front = _front(source, task)
    layout = config.layout if config.layout != "auto" else "text" if front is not None else "graph"
    name = config.name or task.replace("-", "_")
    if config.queue_timeout_us is not None or config.queue_size is not None:
        logger.warning(
            "A queue policy makes Triton lose throughput over time, down to a stall (server issue 8870): leave "
            "queue_timeout_us and queue_size out where clients can have timeouts of their own."
        )
    progress.report("writing the repository", 0, None)
    with staging(target, needs=source.bytes) as folder:
        if layout == "graph":
            models = _Writer(folder, config, source).graph(name, config.max_length)
        elif front is None:
            raise TaskError(
                f"A model for {task} is not served as text by Triton.", fix="deploy it with --layout graph."
            )
        else:
            writer = _TextWriter(folder, config, source, front, name, layout)
            models = writer.generator() if front.generates else writer.write()
    sample = dict(front.sample) if front is not None and layout != "graph" else {}
    return Repository(path=target, name=name, models=models, task=task, layout=layout, sample=sample)


def _task(artifact: Artifact, config: TritonConfig) -> str:
    """Return the pipeline task to serve.

    Raises:
        TaskError: The model does not support the configured task.
    """
    own = task_spec(artifact.task)
    if config.task is None:
        return own.name
    task = config.task if config.task in own.serves else task_spec(config.task).name
    if task not in own.serves:
        raise TaskError(
            f"The artifact was made for {own.name}, which serves {', '.join(own.serves)}; not {config.task}.",
            fix="leave the task out, or deploy another artifact.",
        )
    return task


def _front(artifact: Artifact, task: str) -> TextFront | None:
    return load_task(artifact.task).fronts().get(task)


@dataclass(frozen=True)
class _Writer:
    """Write the models of a repository into a folder."""

    folder: Path
    config: TritonConfig
    artifact: Artifact

    def graph(self, name: str, length: int | None) -> dict[str, str]:
        """Write the model that runs the graph. Return the backend name of the model by model name."""
        backend = backend_for(self.artifact, self.config)
        if length is None and len(self.artifact.components) == 1:
            length = self.artifact.components[0].max_sizes.get("sequence")
        graph = Graph(self.artifact, self.config, name, length)
        version = self.version(name)
        write(graph_config(graph, backend), version.parent)
        settings = write_graph(graph, version)
        if BACKENDS[backend].code:
            self.code(version, BACKENDS[backend].code)
        self.settings(version, settings)
        return {name: backend}

    def version(self, name: str) -> Path:
        """Create the folder of a model version."""
        folder = self.folder / name / str(self.config.version)
        folder.mkdir(parents=True)
        return folder

    def code(self, version: Path, main: str, *others: str | Path) -> None:
        """Copy modules of `served` into a model version: `main` as `model.py`, and other modules or files given by path."""
        shutil.copyfile(SERVED / f"{main}.py", version / "model.py")
        for name in others:
            shutil.copyfile(SERVED / name, version / Path(name).name)

    def settings(self, version: Path, values: Mapping[str, Any]) -> None:
        """Write `settings.json` of a model version, with the checksums of the version's files."""
        files = sorted(path for path in version.rglob("*") if path.is_file())
        values = {**values, "files": {path.relative_to(version).as_posix(): sha256(path) for path in files}}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (version / SETTINGS).write_text(text, encoding="utf-8")


class _TextWriter(_Writer):
    """Write the models that take texts and return results."""

    def __init__(
        self, folder: Path, config: TritonConfig, artifact: Artifact, front: TextFront, name: str, layout: str
    ) -> None:
        super().__init__(folder, config, artifact)
        self.front, self.name, self.layout = front, name, layout
        self.facts = _facts(artifact)
        self.length = self._length()

    def write(self) -> dict[str, str]:
        """Write the front model or the steps of an ensemble, and the graph's model."""
        self._check()
        graph = f"{self.name}_graph"
        models = self.graph(graph, self.length)
        settings = self._settings(graph)
        if self.layout == "ensemble":
            return {**self._ensemble(graph, settings), **models}
        fields = self._interface(self.name, self.front.inputs, self.front.outputs(self.facts))
        self._step(fields, "text_model", settings)
        return {self.name: "python", **models}

    def generator(self) -> dict[str, str]:
        """Write a model that generates text, with the graph next to its code."""
        from .generator_settings import generator_settings

        if self.layout == "ensemble":
            raise TaskError("An ensemble cannot generate text.", fix="deploy it with --layout text.")
        settings = generator_settings(self.facts, self.config)
        fields = self._interface(self.name, self.front.inputs, self.front.outputs(self.facts))
        # No batching by Triton: each request has one prompt, and its text is sent in pieces (decoupled responses).
        fields |= {"max_batch_size": 0, "model_transaction_policy": {"decoupled": True}}
        version = self.version(self.name)
        write(self._python(fields), version.parent)
        self.code(version, "generator", "text_decoder.py", "tokens.py")
        self._tokenizer(version)
        known = write_graph(Graph(self.artifact, self.config, self.name), version)
        self.settings(version, {**settings, **known})
        return {self.name: "python"}

    def _length(self) -> int | None:
        """Return the greatest number of tokens in a text, or `None` if unknown."""
        own = self.front.limit(self.facts)
        limit = self.artifact.components[0].max_sizes.get("sequence")
        length = longest(limit, self.facts.tokenizer, self.config.max_length)
        length = min((n for n in (length, own) if n is not None), default=None)
        if length is not None and self.config.buckets and self.config.buckets[-1] > length:
            raise ConfigError(
                f"The bucket {self.config.buckets[-1]} is longer than the {length} tokens of a text.",
                fix=f"use buckets up to {length}.",
            )
        return length

    def _check(self) -> None:
        """Raise if the graph has inputs other than tokens, or outputs that the front model cannot use.

        Raises:
            TaskError: The graph has unsupported inputs or outputs.
        """
        component = self.artifact.components[0]
        known = {"input_ids", "attention_mask", "token_type_ids", *self.front.makes}
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
        for name in self.front.reads(self.facts):
            self.facts.sizes(name)
            if next(spec.dtype for spec in component.outputs if spec.name == name) == "bfloat16":
                raise TaskError(
                    f"The graph's {name} is bfloat16, which Triton's Python backend cannot read.",
                    fix="deploy a float32 or float16 artifact.",
                )
        if self.layout == "ensemble" and not self.front.one_row:
            raise TaskError(
                "An ensemble needs one row of the graph for each text; this task makes several.",
                fix="deploy it with --layout text.",
            )

    def _settings(self, graph: str) -> dict[str, Any]:
        """Return the settings of the code that runs inside Triton."""
        tokenizer, component = self.facts.tokenizer, self.artifact.components[0]
        named = set(tokenizer.model_input_names)
        own = set(component.own_defaults)
        zeros = [spec.name for spec in component.inputs if spec.name not in named]
        if any(name in own for name in zeros):
            raise TaskError(
                f"The tokenizer does not make {', '.join(zeros)}, and zeros are not their default values in this model.",
                fix="add them to model_input_names of its tokenizer_config.json.",
            )
        fill = {"input_ids": _padding(tokenizer), "attention_mask": 0, "token_type_ids": tokenizer.pad_token_type_id}
        return {
            "service": Path(self.front.service).name,
            "graph": graph,
            "inputs": {spec.name: spec.dtype for spec in component.inputs},
            "outputs": list(self.front.reads(self.facts)),
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
            "options": self.front.options(self.facts),
        }

    def _ensemble(self, graph: str, settings: Mapping[str, Any]) -> dict[str, str]:
        """Write an ensemble of three steps: tokenizer, graph, results."""
        if not BACKENDS[backend_for(self.artifact, self.config)].batches:
            raise ConfigError(
                "Triton's backend for this graph fixes its batch, and an ensemble needs it free.",
                fix="deploy it with --layout text.",
            )
        text = (TritonTensor(name="TEXT", dtype="string"),)
        component, reads = self.artifact.components[0], self.front.reads(self.facts)
        ids = tensors(component.inputs, 1)
        returned = tensors([spec for spec in component.outputs if spec.name in reads], 1)
        tokenizer, last = f"{self.name}_tokenizer", f"{self.name}_answers"
        whole = self._interface(self.name, text, self.front.outputs(self.facts))
        answers = self._interface(last, text, self.front.outputs(self.facts))
        answers["input"] += returned
        self._step({**self._interface(tokenizer, text, ()), "output": ids}, "ensemble_step", settings, "text_model.py")
        self._step(answers, "ensemble_step", settings, "text_model.py")
        steps = [
            _link(tokenizer, ["TEXT"], [one["name"] for one in ids]),
            _link(graph, [one["name"] for one in ids], reads),
            _link(last, ["TEXT", *reads], [one["name"] for one in answers["output"]]),
        ]
        folder = self.version(self.name).parent
        write(model_config(**whole, platform="ensemble", ensemble_scheduling={"step": steps}), folder)
        # Triton needs a version folder, and git and some archive formats omit empty folders: add a file.
        (folder / str(self.config.version) / ".keep").touch()
        self._labels(folder)
        return {self.name: "ensemble", tokenizer: "python", last: "python"}

    def _interface(self, name: str, inputs: Sequence[TritonTensor], outputs: Sequence[TritonTensor]) -> Fields:
        """Return the configuration fields of a Python model or an ensemble: name, tensors and version policy."""
        return {
            "name": name,
            "max_batch_size": self.config.max_batch_size,
            "input": [
                tensor(one.name, one.dtype, one.dims, optional=one.optional, allow_ragged_batch=one.ragged)
                for one in inputs
            ],
            "output": [
                tensor(one.name, one.dtype, one.dims, label_filename=LABELS if one.name == self.front.labels else "")
                for one in outputs
            ],
            "version_policy": version_policy(self.config),
        }

    def _python(self, fields: Fields) -> Any:
        """Return the configuration of a Python model. It runs on the CPU, even if the graph runs on a GPU."""
        return model_config(**fields, backend="python", instance_group=[instances("cpu", self.config.front_instances)])

    def _step(self, fields: Fields, main: str, settings: Mapping[str, Any], *others: str) -> None:
        """Write a Python model that tokenizes texts or computes results."""
        version = self.version(fields["name"])
        write(self._python({**fields, "dynamic_batching": batching(self.config)}), version.parent)
        self.code(version, main, *_SHARED, Path(f"{self.front.service.rpartition(':')[0]}.py"), *others)
        self._tokenizer(version)
        self.settings(version, settings)
        if any(one.get("label_filename") for one in fields["output"]):
            self._labels(version.parent)

    def _tokenizer(self, version: Path) -> None:
        self.facts.tokenizer.backend_tokenizer.save(str(version / TOKENIZER))

    def _labels(self, folder: Path) -> None:
        if self.front.labels:
            broken = [label for label in self.facts.labels if label.splitlines() != [label]]
            if broken:
                raise ConfigError(
                    f"The label {broken[0]!r} is not one line, and Triton reads labels line by line.",
                    fix="rename it in id2label of config.json, or deploy with --layout graph.",
                )
            (folder / LABELS).write_text("".join(f"{label}\n" for label in self.facts.labels), encoding="utf-8")


def _facts(artifact: Artifact) -> TextModelFacts:
    """Read the config and the tokenizer from the artifact's folder.

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
            "The model has no fast tokenizer, which Triton needs.",
            fix="deploy it with --layout graph, and tokenize where the client is.",
        )
    if tokenizer.split_special_tokens:
        raise TaskError(
            "The tokenizer reads special tokens in texts as letters (split_special_tokens), which its tokenizer.json, all that runs "
            "inside Triton, does not say.",
            fix="deploy it with --layout graph, and tokenize where the client is.",
        )
    return TextModelFacts(artifact, config, tokenizer)


def _padding(tokenizer: Any) -> int:
    """Return the id of the padding token. If there is none, return another id, because the attention mask excludes the padding."""
    token = tokenizer.pad_token_id
    return int(token if token is not None else tokenizer.eos_token_id or 0)


def _link(model: str, inputs: Sequence[str], outputs: Sequence[str]) -> Fields:
    """Return one step of an ensemble, with the tensor names of its model."""
    maps = {"input_map": {name: name for name in inputs}, "output_map": {name: name for name in outputs}}
    return {"model_name": model, "model_version": -1, **maps}
