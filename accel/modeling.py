"""`ORTModelFor…`: an artifact behind the interface of a transformers model, on any backend.

A model holds sessions; it inherits from no runtime and from no `torch.nn.Module`. What it offers is what transformers'
pipelines and its users read from a model: `config`, `device`, `dtype`, `forward`, `to`, `save_pretrained`.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import transformers
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from . import registry
from .artifact import MANIFEST, Artifact, check_output, copy_companions, staging, with_files
from .config import ExportConfig, SessionOptions
from .errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    InputError,
    IntegrityError,
    TaskError,
    did_you_mean,
)
from .exporting import cached_export, graph_location
from .hub import HubOptions, Location, locate
from .interfaces import Session
from .layouts import adopt_onnx, graph_files
from .sessions import Opened, open_artifact
from .specs import DeviceSpec
from .tasks import TASKS, infer_task, read_config, task_spec

logger = logging.getLogger(__name__)

# Arguments of a transformers model that choose what it returns; a graph cannot change that.
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")
# What a transformers model assumes when these are left out.
_DEFAULT_FILL = {"attention_mask": 1, "token_type_ids": 0}
_LOGITS_AXES = {
    "SequenceClassifierOutput": 2,
    "MultipleChoiceModelOutput": 2,
    "ImageClassifierOutput": 2,
    "TokenClassifierOutput": 3,
    "MaskedLMOutput": 3,
}
_INDEXED = re.compile(r"(?P<field>\w+)\.(?P<index>\d+)\Z")
_NATIVE_OPTIONS_KEY = "onnxruntime.SessionOptions"

# Sessions inherited through a fork: their threads are gone, so they can neither run nor be torn down.
_abandoned: list[Opened] = []
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

# A `ModelOutput` is filled without its constructor and its item assignment, which check every field on every call:
# 20 microseconds instead of 80 with cold caches. Fields that are not set read as `None`, their class default.
_set_item = OrderedDict.__setitem__
_TENSOR = {torch.Tensor}


def fast_output(kind: Any, values: Mapping[str, Any]) -> Any:
    """A `ModelOutput` of a class with these fields, none checked."""
    output = kind.__new__(kind)
    for name, value in values.items():
        _set_item(output, name, value)
    output.__dict__.update(values)
    return output


@dataclass
class SentenceEmbeddingOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """What a model with pooling in its graph returns.

    Attributes:
        sentence_embedding: `(batch, hidden)`
        last_hidden_state: `(batch, sequence, hidden)`
    """

    sentence_embedding: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


class _NotSupportedFilter(logging.Filter):
    """Drops the page-long "not supported" error that stock pipelines log for any class outside transformers, where the
    class does serve the pipeline's task.
    """

    _MESSAGE = re.compile(r"The model '(ORTModelFor\w+)' is not supported for ([\w-]+)\.")

    def filter(self, record: logging.LogRecord) -> bool:
        match = self._MESSAGE.match(str(record.msg))
        if match is None:
            return True
        return not any(spec.model == match[1] and match[2] in (spec.name, *spec.pipelines) for spec in TASKS.values())


_FILTER = _NotSupportedFilter()


class ORTModel:
    """Base of the task classes; made by `from_pretrained`.

    The prefix is the one the field knows; the runtime is an argument (`backend="openvino"`). A model may be pickled: it
    stores the artifact's folder and how it was opened, and opens it again. After a fork, the child opens its own session at
    the first call.
    """

    task: ClassVar[str] = "custom"
    base_model_prefix = "model"
    generation_config = None

    def __init__(
        self,
        artifact: Artifact,
        *,
        backend: str | None = None,
        device: str | None = None,
        provider_options: Mapping[str, object] | None = None,
        session_options: SessionOptions | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(artifact, Artifact):
            raise ConfigError(
                f"{type(self).__name__}(...) takes an Artifact, not {artifact!r}.",
                fix=f"use {type(self).__name__}.from_pretrained({artifact!r}).",
            )
        self._check_task(artifact)
        self.artifact = artifact
        self._how: dict[str, Any] = {
            "backend": backend,
            "device": device,
            "provider_options": provider_options,
            "options": session_options,
        }
        self._trust_remote_code = trust_remote_code
        self.config = self._load_config()
        logging.getLogger("transformers.pipelines.base").addFilter(_FILTER)
        self._open()

    # Loading

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str] | Artifact,
        *,
        export: bool | None = None,
        backend: str | None = None,
        device: str | int | torch.device | None = None,
        provider: str | None = None,
        provider_options: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        session_options: SessionOptions | Any | None = None,
        task: str | None = None,
        config: Any = None,
        subfolder: str = "",
        file_name: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> Self:
        """Load a model from a Hub id, a transformers folder, an artifact, or a plain ONNX folder.

        A transformers folder is exported once (4 to 20 s for encoders) and kept under `ACCEL_HOME`. Backend and
        provider are checked before anything is exported.

        Args:
            model_id: Hub id, folder, or an artifact at hand.
            export: `None` exports when there is no graph; `True` always; `False` never.
            backend: Name of a backend; chosen automatically when `None`.
            device: `"cpu"`, `"cuda:0"`, ...; the backend's first when `None`.
            provider: ONNX Runtime's word for the backend (`"CPUExecutionProvider"`).
            provider_options: The vendor's own options for the device.
            session_options: `SessionOptions`, or ONNX Runtime's own object.
            task: For classes that serve several tasks.
            config: A transformers config that replaces the folder's.
            subfolder, revision, token, cache_dir, local_files_only, trust_remote_code: As in transformers.
            file_name: The graph to take from a plain ONNX folder.
            **settings: Fields of `ExportConfig`, for a folder that is exported.

        Raises:
            ArtifactNotFoundError: No model, or no graph and `export=False`.
            TaskError: The model does another task.
            UnknownBackendError, BackendUnavailableError: With what exists, or every reason.
            ConfigError: An option that does not exist.
        """
        if isinstance(model_id, Artifact):
            model_id = model_id.path
        backend = _backend_name(backend, provider)
        options = _session_options(session_options)
        hub = HubOptions(
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
            trust_remote_code=trust_remote_code,
        )
        export_config = _export_config(settings, cls.from_pretrained)
        where = _device_name(device)
        location = locate(model_id, hub, want_graph=None if export is None else not export)
        artifact = cls._artifact(location, export, backend, where, task, file_name, export_config, hub)
        model = cls(
            artifact,
            backend=backend,
            device=where,
            provider_options=_provider_options(provider_options),
            session_options=options,
            trust_remote_code=trust_remote_code,
        )
        if config is not None:
            model.config = config
        return model

    @classmethod
    def _artifact(
        cls,
        location: Location,
        export: bool | None,
        backend: str | None,
        device: str | None,
        task: str | None,
        file_name: str | None,
        config: ExportConfig,
        hub: HubOptions,
    ) -> Artifact:
        """Load what the folder holds, or export it."""
        folder = location.folder
        if export is not True and (graph_location(location) or file_name is not None):
            if config != ExportConfig():
                raise ConfigError(
                    f"{folder} holds an exported graph already, which export settings cannot change.",
                    fix="leave them out, or pass export=True for a folder that also holds PyTorch weights.",
                )
            if (folder / MANIFEST).is_file() and file_name is None:
                return Artifact.load(folder)
            # The class decides the task: an exported folder need not name its architecture.
            wanted = task_spec(task).name if task else cls.task
            if not graph_files(folder):
                spec = registry.backend_for_layout([p.name for p in folder.iterdir()])
                if spec is not None:
                    adopt = getattr(registry.load(spec), "adopt")  # noqa: B009  # optional member of a backend
                    adopted: Artifact = adopt(folder, task=wanted)
                    return adopted
            return adopt_onnx(folder, file_name=file_name, task=wanted)
        if export is False:
            raise ArtifactNotFoundError(
                f"{folder} holds no exported graph, and export=False.",
                fix="leave export out, or export it first: `accel export MODEL OUT`.",
            )
        wanted = cls._task_to_export(folder, task)
        # A backend that only runs a format (cuda) gets it from the format's owner.
        exports = backend is not None and registry.describe(backend).capability("export") is not None
        spec = registry.owner("export", _export_format(backend), backend if exports else None)
        produced = spec.capability("export")
        assert produced is not None
        # Fails now, with every reason, rather than after the export.
        registry.choose(
            format=produced.produces or "onnx",
            task=wanted or cls.task,
            dtype=config.dtype,
            device=DeviceSpec.parse(device) if device else None,
            backend=backend,
        )
        return cached_export(location, task=wanted, spec=spec, config=config, hub=hub)

    @classmethod
    def _task_to_export(cls, folder: Path, task: str | None) -> str:
        """The task this class exports a folder for."""
        if task is not None:
            wanted = task_spec(task)
            if wanted.model != cls.__name__:
                raise TaskError(f"{cls.__name__} does not do {wanted.name}.", fix=f"use {wanted.model}.")
            return wanted.name
        return cls.task

    def _check_task(self, artifact: Artifact) -> None:
        wanted = task_spec(artifact.task)
        if wanted.model != type(self).__name__ and not isinstance(self, ORTModelForCustomTasks):
            raise TaskError(
                f"{artifact.path} holds a model for {artifact.task}, which {type(self).__name__} does not do.",
                fix=f"use {wanted.model}, or export the model again with another task.",
            )

    def _load_config(self) -> Any:
        if not (self.artifact.path / "config.json").is_file():
            return transformers.PreTrainedConfig()
        try:
            return transformers.AutoConfig.from_pretrained(
                self.artifact.path, local_files_only=True, trust_remote_code=self._trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise IntegrityError(
                f"{self.artifact.path / 'config.json'} cannot be read: {error}", fix="make the artifact again."
            ) from error

    def _open(self) -> None:
        self._opened = open_artifact(self.artifact, **self._how)
        self._forks = _forks
        self._reopening = threading.Lock()
        component = self.artifact.components[0]
        self._session = self._opened.sessions[component.name]
        names = [spec.name for spec in self._session.outputs]
        self._input_names = frozenset(spec.name for spec in self._session.inputs)
        self._output_class = self._choose_output(names)
        self._output_groups = _group(names)
        self._limit = component.max_sizes.get("sequence", 0)
        # The sequence is the last axis of token ids, also behind `choices`.
        first = self._session.inputs[0]
        self._limited = first.name if self._limit and first.shape and first.shape[-1] == "sequence" else None
        self._ignored = frozenset(component.unused_inputs)

    def _choose_output(self, names: Sequence[str]) -> Any:
        spec = task_spec(self.artifact.task)
        # A folder of another tool's does not say its task: the class does, and may be wrong.
        found = next((len(output.shape) for output in self._session.outputs if output.name == "logits"), None)
        wanted = _LOGITS_AXES.get(spec.output or "")
        if found is not None and wanted is not None and found != wanted:
            raise TaskError(
                f"The graph in {self.artifact.path} returns logits with {found} axes; a model for {spec.name} returns {wanted}.",
                fix="use the class that the model was exported for.",
            )
        return getattr(modeling_outputs, spec.output) if spec.output else ModelOutput

    # What pipelines and users read

    @property
    def device(self) -> torch.device:
        """Where outputs live."""
        spec = self._session.device
        capability = self._opened.backend.capability("run", self.artifact.format)
        if spec.type == "cpu" or capability is None or not capability.device_io:
            return torch.device("cpu")
        return torch.device(spec.type, spec.index)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the artifact's floating-point values."""
        dtype: torch.dtype = getattr(torch, self.artifact.dtype)
        return dtype if dtype.is_floating_point else torch.float32

    @property
    def compute_dtype(self) -> str:
        """What the kernels really compute in."""
        return self._session.compute_dtype

    @property
    def backend(self) -> str:
        """Name of the backend that runs it."""
        return self._opened.backend.name

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The open session of each component."""
        return self._opened.sessions

    @property
    def main_input_name(self) -> str:
        """The input that carries the data."""
        return self._session.inputs[0].name

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What it reads: `text` or `image`."""
        return ("image",) if self.main_input_name == "pixel_values" else ("text",)

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """What it makes, in transformers' words."""
        return ("text",)

    def can_generate(self) -> bool:
        """Whether `generate` works."""
        return False

    def cpu(self) -> Self:
        """`to("cpu")`."""
        return self.to("cpu")

    def eval(self) -> Self:
        """Does nothing: a graph has no training mode."""
        return self

    def to(self, device: str | int | torch.device | torch.dtype) -> Self:
        """Move to a device: nothing when it is there, opens the session again where the backend has that device.

        Anything else warns once and stays: another device needs another backend.
        """
        if isinstance(device, torch.dtype):
            if device != self.dtype:
                logger.warning("%s stays in %s: a graph's dtype is fixed when it is exported.", self, self.dtype)
            return self
        wanted = torch.device("cuda", device) if isinstance(device, int) and device >= 0 else torch.device(device)
        if wanted.type == self.device.type and wanted.index in (None, self.device.index):
            return self
        spec = DeviceSpec.parse(str(wanted))
        have = registry.probe(self._opened.backend).devices
        if any((d.type, d.index) == (spec.type, spec.index) for d in have):
            self._how["device"] = str(spec)
            self._close()
            self._open()
        else:
            logger.warning(
                "%s stays on %s: backend %r has no %s. Load it with from_pretrained(..., device=%r).",
                type(self).__name__, self.device, self.backend, wanted, str(wanted),
            )  # fmt: skip
        return self

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.artifact.path)!r}, backend={self.backend!r}, "
            f"device={str(self.device)!r}, compute_dtype={self.compute_dtype!r})"
        )

    # Running

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Calling a model is calling its `forward`, without a frame in between.
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the graph; inputs by name, or in the graph's order."""
        if args:
            inputs.update(zip((spec.name for spec in self._session.inputs), args, strict=False))
        return self._run(inputs)

    def _run(self, inputs: dict[str, Any]) -> Any:
        """Check, run and wrap. `torch` in gives `torch` out, NumPy in gives NumPy out.

        Like `OrtSession.run` written for cold caches: what a tokenizer gives goes straight through, and the rest is
        sorted out in `_prepare`.
        """
        numpy = wants_tuple = False
        if {*map(type, inputs.values())} != _TENSOR or inputs.keys() != self._input_names:
            inputs, numpy, wants_tuple = self._prepare(inputs)
        if self._limited is not None and inputs[self._limited].size(-1) > self._limit:
            raise InputError(
                f"{self._limited!r} has {inputs[self._limited].size(-1)} tokens; the model has {self._limit} positions.",
                fix=f"truncate: tokenizer(..., truncation=True, max_length={self._limit}).",
            )
        if self._forks != _forks:
            self._reopen_after_fork()
        values: dict[str, Any] = self._session.run(inputs)
        if numpy:
            values = {name: tensor.cpu().numpy() for name, tensor in values.items()}
        if self._output_groups:
            values = _grouped(values, self._output_groups)
        if wants_tuple:
            return tuple(values.values())
        return fast_output(self._output_class, values)

    def _prepare(self, given: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], bool, bool]:
        """Inputs as tensors by the graph's names, whether NumPy is wanted back, and whether a tuple is."""
        feeds: dict[str, torch.Tensor] = {}
        numpy = False
        for name, value in given.items():
            if name == "return_dict" or value is None:
                continue
            if name not in self._input_names:
                self._refuse(name, value)
                continue
            numpy = numpy or isinstance(value, np.ndarray)
            feeds[name] = _as_tensor(name, value)
        if len(feeds) != len(self._input_names):
            self._fill_defaults(feeds)
        return feeds, numpy, given.get("return_dict") is False

    def _refuse(self, name: str, value: Any) -> None:
        """An input that the graph does not take: dropped where that changes nothing, else an error."""
        if name in self._ignored or (name in _OUTPUT_FLAGS and not value):
            return
        if name == "token_type_ids" and not torch.as_tensor(value).any():
            return
        names = sorted(self._input_names)
        if name in _OUTPUT_FLAGS:
            raise InputError(f"The graph does not return what {name} asks for.", fix=f"leave {name} out.")
        if name == "labels":
            raise InputError(
                "The graph computes no loss.", fix="leave labels out and compute the loss from the logits."
            )
        raise InputError(
            f"The graph takes {names}, not {name!r}.{did_you_mean(name, names)}", fix=f"leave {name!r} out."
        )

    def _fill_defaults(self, feeds: dict[str, torch.Tensor]) -> None:
        """Add what a transformers model assumes when it is left out; name what is missing otherwise."""
        missing = [name for name in self._input_names if name not in feeds]
        main = next((feeds[name] for name in ("input_ids",) if name in feeds), None)
        for name in missing:
            if main is None or name not in _DEFAULT_FILL:
                raise InputError(
                    f"The graph takes {sorted(self._input_names)} and was given {sorted(feeds)}; missing: {missing}.",
                    fix="pass the tokenizer's or processor's whole output: model(**inputs).",
                )
            if name == "token_type_ids" and self.config.model_type and not hasattr(self.config, "type_vocab_size"):
                raise InputError(
                    f"{name} are missing, and a {self.config.model_type} model that is not given them does not take zeros.",
                    fix="pass the tokenizer's whole output: model(**inputs).",
                )
            feeds[name] = torch.full_like(main, _DEFAULT_FILL[name])

    # Lifetime

    def _check_fork(self) -> None:
        """Open sessions of its own in a child process, before anything else there."""
        if self._forks != _forks:
            self._reopen_after_fork()

    def _reopen_after_fork(self) -> None:
        with self._reopening:
            if self._forks != _forks:
                _abandoned.append(self._opened)
                self._open()

    def _close(self) -> None:
        for session in self._opened.sessions.values():
            session.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.artifact.path,
            "artifact": self.artifact,
            "how": self._how,
            "config": self.config,
            "trust_remote_code": self._trust_remote_code,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        path: Path = state["path"]
        self.artifact = Artifact.load(path) if (path / MANIFEST).is_file() else state["artifact"]
        self._how = state["how"]
        self.config = state["config"]
        self._trust_remote_code = state["trust_remote_code"]
        self._open()

    # Saving

    def save_pretrained(self, folder: str | os.PathLike[str], *, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write a folder that loads without the source: graph, manifest, config, tokenizer or processor.

        Args:
            folder: Must not exist or be empty.
            push_to_hub: Upload it as well; `repo_id` and so on as in `push_to_hub`.

        Raises:
            OutputFolderError: The folder is the model's own or not empty.
        """
        target = check_output(folder, self.artifact.path)
        with staging(target) as temporary:
            self._write(temporary)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", target.name), **kwargs)

    def _write(self, folder: Path, *, public: bool = False) -> None:
        """Write everything into a folder; `public` leaves this machine's paths out."""
        manifest = self.artifact.manifest
        if public and manifest.source is not None:
            manifest = replace(manifest, source=replace(manifest.source, id=_public_name(manifest.source.id)))
        self.config.save_pretrained(folder)
        names = [[record.name for record in component.files] for component in self.artifact.components]
        for name in {name for of_one in names for name in of_one}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.artifact.path / name, folder / name)
        components = with_files(folder, self.artifact.components, names)
        export_manifest = self.artifact.path / "export.json"
        if export_manifest.is_file():
            shutil.copyfile(export_manifest, folder / export_manifest.name)
        copy_companions(self.artifact.path, folder)
        Artifact.create(folder, replace(manifest, components=components))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload an accelerated model",
    ) -> str:
        """Upload what `save_pretrained` writes, with a model card that says how it was made. Returns the URL."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(token=token)
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                self._write(folder, public=True)
                (folder / "README.md").write_text(self.model_card(repo.repo_id), encoding="utf-8")
                info = api.upload_folder(
                    repo_id=repo.repo_id, folder_path=folder, revision=revision, commit_message=commit_message
                )
        except (HfHubHTTPError, HFValidationError, ConnectionError) as error:
            raise ArtifactError(
                f"Uploading to {repo_id!r} failed: {error}", fix="check the name, the network and token=..."
            ) from error
        return str(info)

    def model_card(self, repo_id: str) -> str:
        """A model card in Markdown: what it was made from, each step, the measured difference, how to load it."""
        from huggingface_hub import ModelCardData

        manifest = self.artifact.manifest
        source = manifest.source.id if manifest.source else "unknown"
        base = source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else None
        data = ModelCardData(
            library_name="accel",
            pipeline_tag=manifest.task if manifest.task != "custom" else None,
            base_model=base,
            tags=[manifest.format, *([manifest.quantization.scheme] if manifest.quantization else [])],
        )
        steps = "\n".join(
            f"| {step.stage} | {step.backend} | {step.validation.get('max_abs_difference', 'not measured')} |"
            for step in manifest.steps
        )
        return (
            f"---\n{data.to_yaml()}\n---\n\n# {repo_id}\n\n"
            f"{manifest.architecture or 'A model'} for {manifest.task}, made from `{base or Path(source).name}`"
            f" with accel {manifest.accel} ({manifest.format}, {manifest.dtype}).\n\n"
            f"| step | backend | largest difference from its parent |\n| --- | --- | --- |\n{steps}\n\n"
            "```python\n"
            f"from accel import {type(self).__name__}\n\n"
            f'model = {type(self).__name__}.from_pretrained("{repo_id}")\n'
            "```\n"
        )


def _public_name(source: str) -> str:
    """A Hub id as it is, the last part of a path."""
    return Path(source).name if Path(source).is_absolute() else source


def _export_format(backend: str | None) -> str:
    if backend is None:
        return "onnx"
    spec = registry.describe(backend)
    made = [c.produces for c in spec.capabilities if c.stage == "export" and c.produces]
    return made[0] if made else "onnx"


def _backend_name(backend: str | None, provider: str | None) -> str | None:
    """One name from `backend=` and `provider=`; unknown ones fail here, before any work.

    Raises:
        ConfigError: Both are given and disagree.
        UnknownBackendError: No plugin has that name.
    """
    names = {registry.describe(name).name for name in (backend, provider) if name is not None}
    if len(names) > 1:
        raise ConfigError(f"backend={backend!r} and provider={provider!r} name two backends.", fix="pass one of them.")
    return names.pop() if names else None


def _provider_options(
    options: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> Mapping[str, object] | None:
    """The options of the one provider; a list of one, as ONNX Runtime has it, works as well.

    Raises:
        ConfigError: A list of another length, or not a mapping.
    """
    if options is None or isinstance(options, Mapping):
        return options
    entries = list(options) if isinstance(options, Sequence) and not isinstance(options, str) else []
    if len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise ConfigError(
            f"provider_options holds {len(entries)} entries for one provider.", fix="pass one dictionary of options."
        )
    return entries[0]


def _session_options(options: SessionOptions | Any | None) -> SessionOptions | None:
    """Ours as they are; a vendor's own object is carried along untouched."""
    if options is None or isinstance(options, SessionOptions):
        return options
    if isinstance(options, Mapping):
        return SessionOptions.from_dict(options)
    if not type(options).__module__.startswith("onnxruntime"):
        raise ConfigError(
            f"session_options is a {type(options).__name__}.",
            fix="pass accel.SessionOptions or onnxruntime.SessionOptions.",
        )
    return SessionOptions(native={_NATIVE_OPTIONS_KEY: options})


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        # torch reads no negative strides.
        return (
            torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray) else torch.as_tensor(value)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Input {name!r} is a {type(value).__name__}, not a tensor.",
            fix="pass what the tokenizer or processor returns, by name: model(**inputs).",
        ) from error


def _sentence_settings(folder: Path) -> tuple[Mapping[str, Any], str]:
    """What sentence-transformers' files in a folder say about texts, and the prompt before each of them."""

    def settings(name: str) -> dict[str, Any]:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    general = settings("config_sentence_transformers.json")
    prompt = (general.get("prompts") or {}).get(general.get("default_prompt_name"), "")
    return settings("sentence_bert_config.json"), prompt


def _export_config(settings: Mapping[str, Any], method: Any) -> ExportConfig:
    """The export settings among the arguments of `from_pretrained`, with transformers' ways of naming a dtype.

    Raises:
        ConfigError: An argument that is neither.
    """
    values = dict(settings)
    if "torch_dtype" in values:
        values.setdefault("dtype", values.pop("torch_dtype"))
    if isinstance(values.get("dtype"), torch.dtype):
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    arguments = [name for name in inspect.signature(method).parameters if name != "settings"]
    known = [field.name for field in fields(ExportConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"from_pretrained has no argument {name!r}.{did_you_mean(name, [*arguments, *known])}",
                fix=f"use one of {', '.join(arguments)}, or an export setting: {', '.join(known)}.",
            )
    return ExportConfig.from_dict(values)


def _device_name(device: str | int | torch.device | None) -> str | None:
    """A device in our words; a number as transformers' pipelines have it, -1 for the CPU."""
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    return None if device is None else str(device)


def _group(names: Sequence[str]) -> dict[str, list[str]]:
    """Outputs called `hidden_states.0`, `hidden_states.1`, ... by field; empty when there are none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if match := _INDEXED.match(name):
            groups.setdefault(match["field"], []).append(name)
    return groups


def _grouped(values: Mapping[str, Any], groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """The outputs with each group as one tuple."""
    members = {name for names in groups.values() for name in names}
    result = {name: value for name, value in values.items() if name not in members}
    return result | {field: tuple(values[name] for name in names) for field, names in groups.items()}


class _TextEncoder(ORTModel):
    """What the single-graph text tasks share: the signature that pipelines read."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on `(batch, sequence)` integer inputs."""
        if token_type_ids is None:
            # `None` among the inputs would take the slow path of `_run`: 1.3 microseconds with warm caches.
            return self._run({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        return self._run(
            {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids, **inputs}
        )


class ORTModelForSequenceClassification(_TextEncoder):
    """Text classification and regression: `logits: (batch, num_labels)`."""

    task = "text-classification"


class ORTModelForTokenClassification(_TextEncoder):
    """Named entities and the like: `logits: (batch, sequence, num_labels)`."""

    task = "token-classification"


class ORTModelForQuestionAnswering(_TextEncoder):
    """Extractive question answering: `start_logits` and `end_logits: (batch, sequence)`."""

    task = "question-answering"


class ORTModelForMultipleChoice(_TextEncoder):
    """Multiple choice: inputs `(batch, choices, sequence)`, `logits: (batch, choices)`."""

    task = "multiple-choice"


class ORTModelForMaskedLM(_TextEncoder):
    """Masked language modelling: `logits: (batch, sequence, vocab_size)`."""

    task = "fill-mask"


class ORTModelForFeatureExtraction(ORTModel):
    """Hidden states, and sentence embeddings where pooling is in the graph."""

    task = "feature-extraction"

    @classmethod
    def _task_to_export(cls, folder: Path, task: str | None) -> str:
        if task is None:
            config = read_config(folder)
            return infer_task(config, folder) if (folder / "modules.json").is_file() else cls.task
        return super()._task_to_export(folder, task)

    def _choose_output(self, names: Sequence[str]) -> Any:
        if "logits" in names or "start_logits" in names:
            raise TaskError(
                f"The graph in {self.artifact.path} returns {', '.join(names)}, and no hidden states.",
                fix="use the class that the model was exported for.",
            )
        if "sentence_embedding" in names:
            return SentenceEmbeddingOutput
        if "pooler_output" in names:
            return modeling_outputs.BaseModelOutputWithPooling
        return modeling_outputs.BaseModelOutput

    def encode(
        self, texts: str | Sequence[str], *, batch_size: int = 32, tokenizer: Any = None, convert_to_numpy: bool = True
    ) -> Any:
        """Embeddings of texts, in their order.

        Texts of like length share a batch. Without pooling in the graph, hidden states are averaged over the tokens. What
        a sentence-transformers folder says about its texts (longest length, lower case, default prompt) is followed.

        Args:
            texts: One text or many.
            batch_size: Texts a call.
            tokenizer: The artifact's own when `None`.
            convert_to_numpy: NumPy (default) or `torch`.

        Returns:
            `(len(texts), hidden)` float32; `(hidden,)` for one text.
        """
        single = isinstance(texts, str)
        items = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        if not all(isinstance(item, str) for item in items):
            raise InputError("encode takes texts.", fix="pass a string or a list of strings.")
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}.", fix="use at least 1.")
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(self.artifact.path, local_files_only=True)
        limit = self.artifact.components[0].max_sizes.get("sequence")
        texts_config, prompt = _sentence_settings(self.artifact.path)
        items = [prompt + item for item in items]
        if texts_config.get("do_lower_case"):
            items = [item.lower() for item in items]
        lengths = [
            limit,
            tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None,
            texts_config.get("max_seq_length"),
        ]
        max_length = min((n for n in lengths if n), default=None)
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(items)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            inputs = tokenizer(
                [items[i] for i in part],
                padding=True,
                truncation=max_length is not None,
                max_length=max_length,
                return_tensors="pt",
            )
            output = self._run(dict(inputs))
            if "sentence_embedding" in output:
                pooled = output.sentence_embedding
            else:
                mask = inputs["attention_mask"].unsqueeze(-1).to(output.last_hidden_state.dtype)
                pooled = (output.last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)
            for i, row in zip(part, pooled, strict=True):
                rows[i] = row
        embeddings = torch.stack(rows) if rows else torch.empty(0, 0)
        result: Any = embeddings.cpu().numpy() if convert_to_numpy else embeddings
        return result[0] if single else result


class ORTModelForImageClassification(ORTModel):
    """Image classification: `pixel_values: (batch, channels, height, width)` to `logits: (batch, num_labels)`."""

    task = "image-classification"

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on images."""
        return self._run({"pixel_values": pixel_values, **inputs})


class ORTModelForCustomTasks(ORTModel):
    """Any graph, its names kept: inputs by name, outputs as a `ModelOutput` with one entry a name."""

    task = "custom"

    def _choose_output(self, names: Sequence[str]) -> Any:
        return ModelOutput
