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
from ...artifact.atomic_folder_writing import check_output, staging
from ...artifact.checksums import sha256
from ...artifact.manifest import Artifact
from ...artifact.processor_loading import open_companion
from ...data.batches import longest
from ...errors import ArtifactNotFoundError, ConfigError, TaskError
from ...interfaces.required_tokens import with_row_tokens
from ...interfaces.task_registry import load_task, task_spec
from ...models.model_card import CARD, model_card
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
    """The model repository that `deploy` wrote.

    Attributes:
        path: Folder of the repository, for `tritonserver --model-repository`.
        name: Name of the model that clients call.
        models: Triton backend of each model, by model name.
        task: The pipeline task that is served.
        layout: `text`, `ensemble` or `graph`.
        sample: A sample request with texts by input name; empty if the inputs of the model are tensors.
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
    """Write a model repository for Triton Inference Server. The folder of the model that clients call also gets a model card.

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
            "queue_timeout_us and queue_size write a queue policy. With a queue policy, Triton becomes slower over time and can stop "
            "answering (Triton server issue 8870). Leave both out if clients can set timeouts themselves."
        )
    progress.report("writing the repository", 0, None)
    with staging(target, needs=source.bytes) as folder:
        if layout == "graph":
            models = _Writer(folder, config, source).graph(name, config.max_length)
        elif front is None:
            raise TaskError(
                f"accel cannot deploy the task {task!r} with --layout {layout}: Triton models with texts as inputs exist only for some "
                "tasks.",
                fix="deploy with --layout graph, and send tensors to Triton.",
            )
        else:
            writer = _TextWriter(folder, config, source, front, name, layout)
            models = writer.generator() if front.generates else writer.write()
        code = f"tritonserver --model-repository {target.name}"
        (folder / name / CARD).write_text(model_card(source, name, code=code, language="bash"), encoding="utf-8")
    sample = dict(front.sample) if front is not None and layout != "graph" else {}
    return Repository(path=target, name=name, models=models, task=task, layout=layout, sample=sample)


def _task(artifact: Artifact, config: TritonConfig) -> str:
    """Return the pipeline task to serve.

    Raises:
        TaskError: The model does not support the configured task.
    """
    spec = task_spec(artifact.task)
    if config.task is None:
        return spec.name
    task = config.task if config.task in spec.serves else task_spec(config.task).name
    if task not in spec.serves:
        raise TaskError(
            f"The artifact {artifact.path} was exported for the task {spec.name!r}, which can be deployed for {', '.join(spec.serves)}, "
            f"but not for {config.task!r}.",
            fix="leave the task out, or deploy an artifact that was exported for the task.",
        )
    return task


def _front(artifact: Artifact, task: str) -> TextFront | None:
    return load_task(artifact.task).fronts().get(task)


@dataclass(frozen=True)
class _Writer:
    """Writer of the Triton models of a repository."""

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
        """Copy modules of `served` into a model version: `main` as `model.py`, and the other modules with their names."""
        shutil.copyfile(SERVED / f"{main}.py", version / "model.py")
        for name in others:
            shutil.copyfile(SERVED / name, version / Path(name).name)

    def settings(self, version: Path, values: Mapping[str, Any]) -> None:
        """Write `settings.json` of a model version, with the checksums of the version's files.

        Args:
            version: Folder of the model version.
            values: The settings. Their entry `files` contains the checksums that are already known, by file name.
        """
        checksums = values.get("files", {})
        paths = {path.relative_to(version).as_posix(): path for path in sorted(version.rglob("*")) if path.is_file()}
        values = {**values, "files": {name: checksums.get(name) or sha256(path) for name, path in paths.items()}}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (version / SETTINGS).write_text(text, encoding="utf-8")


class _TextWriter(_Writer):
    """Writer of the Triton models that accept texts and return the results of a task."""

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
            raise TaskError(
                f"--layout ensemble is not supported for the task {self.artifact.task!r}, because a Triton ensemble cannot generate text.",
                fix="deploy with --layout text.",
            )
        settings = generator_settings(self.facts, self.config)
        fields = self._interface(self.name, self.front.inputs, self.front.outputs(self.facts))
        # `max_batch_size` 0 turns off Triton's batching: each request has one prompt, and its text is sent in pieces (decoupled responses).
        fields |= {"max_batch_size": 0, "model_transaction_policy": {"decoupled": True}}
        version = self.version(self.name)
        write(self._python(fields), version.parent)
        self.code(version, "generator", "text_decoder.py", "tokens.py")
        self._tokenizer(version)
        graph_settings = write_graph(Graph(self.artifact, self.config, self.name), version)
        self.settings(version, {**settings, **graph_settings})
        return {self.name: "python"}

    def _length(self) -> int | None:
        """Return the greatest number of tokens in a text, or `None` if unknown."""
        task_limit = self.front.limit(self.facts)
        limit = self.artifact.components[0].max_sizes.get("sequence")
        length = longest(limit, self.facts.tokenizer, self.config.max_length)
        length = min((n for n in (length, task_limit) if n is not None), default=None)
        if length is not None and self.config.buckets and self.config.buckets[-1] > length:
            raise ConfigError(
                f"buckets contains {self.config.buckets[-1]}, but texts of this model have at most {length} tokens.",
                fix=f"use buckets of at most {length} tokens.",
            )
        return length

    def _check(self) -> None:
        """Raise if the graph has inputs other than tokens, or outputs that the front model cannot use. The front model is the
        Triton model that tokenizes texts.

        Raises:
            TaskError: The graph has unsupported inputs or outputs.
        """
        component = self.artifact.components[0]
        supported = {"input_ids", "attention_mask", "token_type_ids", *self.front.makes}
        others = [spec.name for spec in component.inputs if spec.name not in supported]
        if others:
            raise TaskError(
                f"The graph has the inputs {', '.join(others)}, which the tokenizer does not return, so it cannot run on texts alone.",
                fix="deploy with --layout graph, and send all inputs as tensors.",
            )
        if any(spec.equal_counts for spec in with_row_tokens(self.artifact).components[0].inputs):
            raise TaskError(
                "The graph computes wrong results for a batch in which rows have different numbers of end-of-sequence tokens. Triton puts "
                "rows of several clients into one batch, so this graph cannot be deployed.",
                fix="export the original model again with this version of accel: `accel export MODEL OUT`.",
            )
        for name in self.front.reads(self.facts):
            self.facts.sizes(name)
            if next(spec.dtype for spec in component.outputs if spec.name == name) == "bfloat16":
                raise TaskError(
                    f"The graph's output {name!r} is bfloat16, but Triton's Python backend uses NumPy, which has no bfloat16.",
                    fix="export the model with --dtype float32 or --dtype float16, and deploy that artifact.",
                )
        if self.layout == "ensemble" and not self.front.one_row:
            raise TaskError(
                f"--layout ensemble is not supported for the task {self.artifact.task!r}: a Triton ensemble needs exactly one row of the "
                "graph for each text, and this task can have several rows for one text.",
                fix="deploy with --layout text.",
            )

    def _settings(self, graph: str) -> dict[str, Any]:
        """Return the settings of the code that runs inside Triton."""
        tokenizer, component = self.facts.tokenizer, self.artifact.components[0]
        tokenizer_inputs = set(tokenizer.model_input_names)
        own_defaults = set(component.own_defaults)
        zeros = [spec.name for spec in component.inputs if spec.name not in tokenizer_inputs]
        if any(name in own_defaults for name in zeros):
            raise TaskError(
                f"The graph has the inputs {', '.join(zeros)}, which the tokenizer does not return, and zeros are not the model's default "
                "values for them.",
                fix=f"add {', '.join(zeros)} to model_input_names in the artifact's tokenizer_config.json.",
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
        """Write a Triton ensemble with three steps: the tokenizer, the graph, and the computation of results."""
        if not BACKENDS[backend_for(self.artifact, self.config)].batches:
            raise ConfigError(
                f"--layout ensemble is not supported for Triton's backend {backend_for(self.artifact, self.config)!r}, which cannot batch "
                "requests of different sizes.",
                fix="deploy with --layout text.",
            )
        text = (TritonTensor(name="TEXT", dtype="string"),)
        component, reads = self.artifact.components[0], self.front.reads(self.facts)
        ids = tensors(component.inputs, 1)
        returned = tensors([spec for spec in component.outputs if spec.name in reads], 1)
        tokenizer, last = f"{self.name}_tokenizer", f"{self.name}_answers"
        ensemble = self._interface(self.name, text, self.front.outputs(self.facts))
        answers = self._interface(last, text, self.front.outputs(self.facts))
        answers["input"] += returned
        self._step({**self._interface(tokenizer, text, ()), "output": ids}, "ensemble_step", settings, "text_model.py")
        self._step(answers, "ensemble_step", settings, "text_model.py")
        steps = [
            _link(tokenizer, ["TEXT"], [field["name"] for field in ids]),
            _link(graph, [field["name"] for field in ids], reads),
            _link(last, ["TEXT", *reads], [field["name"] for field in answers["output"]]),
        ]
        folder = self.version(self.name).parent
        write(model_config(**ensemble, platform="ensemble", ensemble_scheduling={"step": steps}), folder)
        # Triton needs a version folder for an ensemble. Add a file to it, because git and some archive formats omit empty folders.
        (folder / str(self.config.version) / ".keep").touch()
        self._labels(folder)
        return {self.name: "ensemble", tokenizer: "python", last: "python"}

    def _interface(self, name: str, inputs: Sequence[TritonTensor], outputs: Sequence[TritonTensor]) -> Fields:
        """Return the configuration fields of a Python model or an ensemble: name, tensors and version policy."""
        return {
            "name": name,
            "max_batch_size": self.config.max_batch_size,
            "input": [
                tensor(spec.name, spec.dtype, spec.dims, optional=spec.optional, allow_ragged_batch=spec.ragged)
                for spec in inputs
            ],
            "output": [
                tensor(
                    spec.name, spec.dtype, spec.dims, label_filename=LABELS if spec.name == self.front.labels else ""
                )
                for spec in outputs
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
        if any(output.get("label_filename") for output in fields["output"]):
            self._labels(version.parent)

    def _tokenizer(self, version: Path) -> None:
        self.facts.tokenizer.backend_tokenizer.save(str(version / TOKENIZER))

    def _labels(self, folder: Path) -> None:
        if self.front.labels:
            broken = [label for label in self.facts.labels if label.splitlines() != [label]]
            if broken:
                raise ConfigError(
                    f"The label {broken[0]!r} in the model's config.json is empty or contains a line break, but Triton's labels.txt needs "
                    "one line for each label.",
                    fix="rename the label in id2label and label2id of config.json, or deploy with --layout graph.",
                )
            (folder / LABELS).write_text("".join(f"{label}\n" for label in self.facts.labels), encoding="utf-8")


def _facts(artifact: Artifact) -> TextModelFacts:
    """Read the config and the tokenizer from the artifact's folder.

    Raises:
        TaskError: The folder has no tokenizer, or the tokenizer does not work without transformers.
    """
    config = open_companion("AutoConfig", artifact.path)
    try:
        tokenizer = open_companion("AutoTokenizer", artifact.path)
    except ArtifactNotFoundError as error:
        raise TaskError(
            f"{artifact.path} contains no tokenizer that transformers can load, and a Triton model for texts needs a tokenizer.",
            fix=f"save the original model's tokenizer: AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(artifact.path)!r}).",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TaskError(
            f"The tokenizer in {artifact.path} is not a fast tokenizer, but inside Triton accel can use only fast tokenizers "
            "(tokenizer.json).",
            fix="deploy with --layout graph, and tokenize the texts in the client.",
        )
    if tokenizer.split_special_tokens:
        raise TaskError(
            f"The tokenizer in {artifact.path} has split_special_tokens=true, so it reads special tokens in texts as normal characters. "
            "Triton loads only tokenizer.json, which does not contain this setting.",
            fix="deploy with --layout graph, and tokenize the texts in the client.",
        )
    return TextModelFacts(artifact, config, tokenizer)


def _padding(tokenizer: Any) -> int:
    """Return the id of the padding token. A tokenizer without padding token can pad with any id, because the attention mask excludes it."""
    token = tokenizer.pad_token_id
    return int(token if token is not None else tokenizer.eos_token_id or 0)


def _link(model: str, inputs: Sequence[str], outputs: Sequence[str]) -> Fields:
    """Return one step of an ensemble, with the tensor names of its model."""
    maps = {"input_map": {name: name for name in inputs}, "output_map": {name: name for name in outputs}}
    return {"model_name": model, "model_version": -1, **maps}
