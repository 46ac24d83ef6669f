"""Base class of the `ORTModelFor...` classes: an artifact with the interface of a transformers model, on any backend.

A model contains open sessions. It does not inherit from a class of a runtime or from `torch.nn.Module`, but has the attributes and methods
that transformers' pipelines and users need: `config`, `device`, `dtype`, `forward`, `to`, `save_pretrained`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import transformers
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ..artifact.hub import HubOptions
from ..artifact.manifest import MANIFEST, Artifact
from ..artifact.resolved_model import ResolvedModel
from ..backends import registry
from ..backends.plan import Plan, RunPreferences, make_plan
from ..backends.sessions import open_plan
from ..config import QuantizeConfig, SessionOptions, checked_arguments
from ..errors import AccelError, ArtifactNotFoundError, ConfigError, IntegrityError, TaskError
from ..interfaces.fork_safety import at_fork, never_destroyed
from ..interfaces.protocols import Session
from ..interfaces.specs import DeviceSpec
from ..interfaces.task_registry import load_task, missing_config, read_config, specs_for, task_spec
from ..interfaces.task_spec import LABELS, TaskSpec
from ..stages.export import folder_identity, was_removed, with_artifact
from .inputs import InputConverter, too_long
from .loading_arguments import LoadingArguments, read_arguments
from .log_filter import FILTER
from .losses import TARGETS, loss_of
from .module_interface import ModuleInterface
from .outputs import fast_output, grouped, indexed
from .persistence import Saveable

logger = logging.getLogger(__name__)

# Number of attempts to export a model if another process removes the exported folder.
_TRIES = 3
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


at_fork(after_in_child=_count_fork)

_TENSOR = {torch.Tensor}


class ORTModel(ModuleInterface, Saveable):
    """Base class of the model classes of all tasks; create a model with `from_pretrained`.

    The prefix `ORT` is kept because users know it from Optimum. The runtime is chosen by an argument, such as `backend="openvino"`.
    A model can be pickled: the pickle stores the path of the artifact's folder and the settings, and unpickling opens the artifact
    again. After a fork, the child process opens a new session at its first call of the model.
    """

    task: ClassVar[str] = ""
    _any_task: ClassVar[bool] = True
    base_model_prefix = "model"
    generation_config: Any = None
    output_class: ClassVar[type[Any] | None] = None
    """Class of the output objects, for tasks that have no output class in transformers."""
    _after: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    """Postprocessing of the graph's outputs, for tasks that need it."""

    def __init__(
        self,
        artifact: Artifact | Plan,
        *,
        backend: str | None = None,
        device: str | None = None,
        provider_options: Mapping[str, object] | None = None,
        session_options: SessionOptions | None = None,
        trust_remote_code: bool = False,
        config: Any = None,
    ) -> None:
        if not isinstance(artifact, Artifact | Plan):
            raise ConfigError(
                f"The constructor of {type(self).__name__} was called with {artifact!r}, but it accepts only a loaded Artifact.",
                fix=f"use {type(self).__name__}.from_pretrained({artifact!r}) to load a model from a Hub id or folder.",
            )
        plan = artifact if isinstance(artifact, Plan) else None
        opened_artifact = artifact if isinstance(artifact, Artifact) else artifact.artifact
        assert opened_artifact is not None, "the plan must contain an exported artifact"
        self._check_task(opened_artifact)
        self.artifact = opened_artifact
        self._trust_remote_code = plan.model.hub.trust_remote_code if plan is not None else trust_remote_code
        self._plan = plan or self._planned(
            RunPreferences(backend=backend, device=device, provider_options=provider_options, options=session_options)
        )
        self.config = config if config is not None else self._load_config()
        logging.getLogger("transformers.pipelines.base").addFilter(FILTER)
        self._open()

    # Loading

    @classmethod
    @checked_arguments(model_id=(str, os.PathLike, Artifact, ResolvedModel), device=(str, int, torch.device))
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str] | Artifact,
        *,
        export: bool | None = None,
        backend: str | None = None,
        device: str | int | torch.device | None = None,
        provider: str | None = None,
        providers: Sequence[str] | None = None,
        provider_options: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        session_options: SessionOptions | Any | None = None,
        task: str | None = None,
        config: Any = None,
        subfolder: str = "",
        file_name: str | None = None,
        variant: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        use_cache: bool | None = None,
        quantization: str | QuantizeConfig | None = None,
        **export_settings: Any,
    ) -> Self:
        """Load a model from a Hub id, a transformers folder, an artifact, a plain ONNX folder, or a GGUF file.

        `ORTModel.from_pretrained` opens a model of any task, with the class of that task.

        A transformers folder is exported once (4 to 20 s for encoders) and kept under `ACCEL_HOME`. Backend and
        provider are checked before anything is exported.

        Args:
            model_id: Hub id, folder, or a loaded artifact.
            export: `None` exports only if there is no graph; `True` always; `False` never.
            backend: Name of a backend; chosen automatically when `None`.
            device: `"cpu"`, `"cuda:0"`, ...; the backend's first device when `None`.
            provider: ONNX Runtime's name of the backend (`"CPUExecutionProvider"`).
            providers: ONNX Runtime's names of execution providers; the first one is used.
            provider_options: The runtime's own options for the device.
            session_options: `SessionOptions`, or ONNX Runtime's own object.
            task: The task, for classes that support several tasks.
            config: A transformers config that replaces the config in the folder.
            subfolder, revision, token, cache_dir, local_files_only, trust_remote_code, gguf_file: As in transformers.
            file_name: File name of the graph in a plain ONNX folder. If the model has several graphs, the name of any of them.
            variant: Suffix of the graph file names, as in transformers.js folders: `quantized`, `q4`, `fp16`, ...
            use_cache: Default of `generate`'s `use_cache`, for generating models; by default, the KV cache is used.
            quantization: Scheme or settings of a quantization that needs no calibration data (`"weight-int4"`), for a model that is
                exported. The export is optimized (level O2) and quantized, and the result is kept under `ACCEL_HOME`.
            **export_settings: Fields of `ExportConfig`, for a model that is exported. transformers' `device_map`, `dtype="auto"`
                and `attn_implementation` are accepted if they are valid for a graph; see `without_other_arguments`.

        Raises:
            ArtifactNotFoundError: There is no model, or no graph and `export=False`.
            TaskError: The model was made for another task.
            UnknownBackendError, BackendUnavailableError: The backend does not exist or cannot run; the message lists the
                available backends or all reasons.
            ConfigError: An option does not exist.
        """
        arguments = read_arguments(
            export=export, backend=backend, device=device, provider=provider, providers=providers,
            provider_options=provider_options, session_options=session_options, task=task, config=config, subfolder=subfolder,
            file_name=file_name, variant=variant, revision=revision, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only, trust_remote_code=trust_remote_code, gguf_file=gguf_file, use_cache=use_cache,
            quantization=quantization, **export_settings,
        )  # fmt: skip
        return cls.from_plan(cls.plan(model_id, arguments), config=arguments.config, use_cache=arguments.use_cache)

    @classmethod
    def plan(cls, model_id: str | os.PathLike[str] | Artifact | ResolvedModel, arguments: LoadingArguments) -> Plan:
        """Return the plan (backend, device and settings) with which `from_pretrained` opens a model; raises the same errors."""
        task = arguments.task
        task_specs = specs_for(task) if task is not None else ()
        if task is not None and not cls._any_task and not any(cls._is_for(spec) for spec in task_specs):
            raise TaskError(
                f"{cls.__name__} does not support the task {task_spec(task).name!r}.",
                fix=f"use {model_class(task).__name__}.from_pretrained.",
            )
        resolved = arguments.resolve(model_id, default_task=None if cls._any_task else cls.task)
        other_task = cls._any_task and resolved.task not in {spec.name for spec in task_specs}
        if task_specs and resolved.kind == "artifact" and other_task:
            raise TaskError(
                f"The artifact {model_id} was exported for the task {resolved.task!r}, not for {task_specs[0].name!r}.",
                fix=f"leave task out, or export the original model again with `--task {task_specs[0].name}`.",
            )
        plan = make_plan(resolved, arguments.settings, arguments.export_config)
        return plan if arguments.quantization is None else plan.quantized(arguments.quantization)

    @classmethod
    def from_plan(cls, plan: Plan, *, config: Any = None, use_cache: bool | None = None) -> Self:
        """Open the model of a plan. If the model is not an artifact, export it first.

        `config` and `use_cache` have the same meaning as in `from_pretrained`.

        Raises:
            BackendUnavailableError: No available backend can run the model.
        """
        kind: type[Any] = cls._for_task(plan.task) if cls._any_task else cls
        for tries_left in reversed(range(_TRIES)):
            ready = with_artifact(plan)
            assert ready.artifact is not None
            before = folder_identity(ready.artifact)
            try:
                model: Self = kind(ready, config=config)
                break
            except (AccelError, OSError):
                if not tries_left or not was_removed(ready.artifact, before):
                    raise
                logger.info(
                    "Another process removed %s while this process opened it; trying again.", ready.artifact.path
                )
                plan = replace(plan, artifact=plan.model.artifact)
        if use_cache is not None and model.generation_config is not None:
            model.generation_config.use_cache = use_cache
        return model

    @classmethod
    def _is_for(cls, spec: TaskSpec) -> bool:
        return issubclass(cls, model_class(spec.name))

    @classmethod
    def _for_task(cls, task: str) -> type[Any]:
        """Return the model class of a task. `from_plan` calls this method on classes that open models of any task."""
        return model_class(task)

    @classmethod
    def opens_any_graph(cls) -> bool:
        """Return whether this class opens models of every task."""
        return not cls.task or task_spec(cls.task).any_graph

    def _check_task(self, artifact: Artifact) -> None:
        spec = task_spec(artifact.task)
        if not self.opens_any_graph() and not self._is_for(spec):
            raise TaskError(
                f"The model in {artifact.path} was exported for the task {artifact.task!r}, which {type(self).__name__} does not "
                "support.",
                fix=f"use {model_class(spec.name).__name__}, or export the original model again with another --task.",
            )

    def _load_config(self) -> Any:
        if not (self.artifact.path / "config.json").is_file():
            if task_spec(self.artifact.task).any_graph:
                return None
            raise missing_config(self.artifact.path)
        values = read_config(self.artifact.path)
        if (
            task_spec(self.artifact.task).any_graph
            and values.get("model_type") not in transformers.CONFIG_MAPPING
            and "auto_map" not in values
        ):
            # The config.json belongs to a model of another library.
            return None
        try:
            return transformers.AutoConfig.from_pretrained(
                self.artifact.path, local_files_only=True, trust_remote_code=self._trust_remote_code
            )
        # transformers raises errors of any type for an invalid config.
        except Exception as error:
            fix = "export the model again."
            if "model_type" not in values:
                fix = (
                    "replace the file with the config.json of the original model, or pass config=... to from_pretrained. For a graph that "
                    "is not from a transformers model, pass task='custom'."
                )
            raise IntegrityError(
                f"transformers cannot load {self.artifact.path / 'config.json'}: {error}", fix=fix
            ) from error

    def _planned(self, settings: RunPreferences) -> Plan:
        """Return a plan to open the model's artifact with other settings."""
        hub = HubOptions(trust_remote_code=self._trust_remote_code)
        return make_plan(ResolvedModel.of_artifact(self.artifact, hub), settings)

    def _open(self) -> None:
        self._opened = open_plan(self._plan)
        self._forks = _forks
        self._closed = False
        self._reopening = threading.Lock()
        component = self.artifact.components[0]
        self._session = self._opened.sessions[component.name]
        names = [spec.name for spec in self._session.outputs]
        self._input_names = frozenset(spec.name for spec in self._session.inputs)
        self._output_class = self._choose_output(names)
        self._output_groups = indexed(names)
        self._limit = component.max_sizes.get("sequence", 0)
        # The sequence is the last axis of token ids, also for multiple choice inputs `(batch, choices, sequence)`.
        first = self._session.inputs[0]
        self._limited = first.name if self._limit and first.shape and first.shape[-1] == "sequence" else None
        self._loss = task_spec(self.artifact.task).loss
        self._inputs = InputConverter(
            self._input_names, frozenset(component.unused_inputs), frozenset(component.own_defaults), self.config,
            frozenset(self._output_groups),
        )  # fmt: skip

    def _choose_output(self, names: Sequence[str]) -> Any:
        spec = task_spec(self.artifact.task)
        self._check_outputs(spec, {output.name: output.shape for output in self._session.outputs})
        return self.output_class or (getattr(modeling_outputs, spec.output) if spec.output else ModelOutput)

    def _check_outputs(self, spec: TaskSpec, returned: Mapping[str, tuple[int | str, ...]]) -> None:
        """Compare the graph's outputs with its task, and its number of labels with the config.

        A folder that another tool exported does not record its task. The model class then defines the task, and the caller may have
        chosen the wrong class. The config may also belong to another model.

        Raises:
            TaskError: The graph's outputs differ from the task's outputs.
            IntegrityError: The number of labels differs from the config.
        """
        if difference := spec.difference(returned):
            raise TaskError(
                f"The graph in {self.artifact.path} does not fit the task {spec.name!r}: it {difference}.",
                fix="load it with the ORTModelFor... class of the task that the model was exported for.",
            )
        for name, axes in spec.outputs.items():
            size, labels = dict(zip(axes, returned[name], strict=True)).get(LABELS), getattr(self.config, LABELS, None)
            if isinstance(size, int) and isinstance(labels, int) and size != labels:
                raise IntegrityError(
                    f"The graph in {self.artifact.path} returns scores of {size} labels, but the config.json has {labels} labels.",
                    fix="copy the config.json of the original model into this folder, or pass config=... to from_pretrained.",
                )

    # Attributes that pipelines and users read

    @property
    def device(self) -> torch.device:
        """Device of the outputs."""
        spec = self._session.device
        capability = self._opened.backend.capability("run", self.artifact.format)
        if spec.type == "cpu" or capability is None or not capability.device_io:
            return torch.device("cpu")
        return torch.device(spec.type, spec.index)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the artifact's floating-point values."""
        dtype: torch.dtype = getattr(torch, self.artifact.dtype)
        return dtype if dtype.is_floating_point else torch.float32

    @property
    def compute_dtype(self) -> str:
        """Data type in which the kernels compute."""
        return self._session.compute_dtype

    @property
    def backend(self) -> str:
        """Name of the backend that runs the model."""
        return self._opened.backend.name

    @property
    def session_options(self) -> SessionOptions:
        """Options with which the sessions were opened."""
        return self._opened.options

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The open sessions, by component name."""
        return self._opened.sessions

    @property
    def main_input_name(self) -> str:
        """Name of the main input, such as `input_ids` or `pixel_values`."""
        return self._session.inputs[0].name

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Modality of the main input: `text`, `image` or `audio`."""
        images, sounds = ("pixel_values", "flattened_patches"), ("input_values", "input_features")
        others = dict.fromkeys(images, "image") | dict.fromkeys(sounds, "audio")
        return (others.get(self.main_input_name, "text"),)

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """Modality of the outputs, named as in transformers."""
        return ("text",)

    def can_generate(self) -> bool:
        """Return whether `generate` is supported."""
        return False

    def to(self, device: str | int | torch.device | torch.dtype) -> Self:
        """Move the model to another device of its backend by opening the session again.

        Nothing happens if the model is already on the device. If the backend does not support the device, the model is not moved and a
        warning is logged, because another device needs another backend.
        """
        if isinstance(device, torch.dtype):
            if device != self.dtype:
                logger.warning(
                    "%s was not converted to %s and still has the dtype %s. A graph's dtype is fixed when the model is exported: use "
                    "`accel export --dtype`.",
                    self, device, self.dtype,
                )  # fmt: skip
            return self
        target = torch.device("cuda", device) if isinstance(device, int) and device >= 0 else torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self
        spec = DeviceSpec.parse(str(target))
        available = registry.probe(self._opened.backend).devices
        if any((d.type, d.index) == (spec.type, spec.index) for d in available):
            self._plan = self._planned(replace(self._plan.settings, device=str(spec)))
            self.close()
            self._open()
        else:
            logger.warning(
                "The %s was not moved and is still on %s, because its backend %r does not support the device %s. Load the model again "
                "with from_pretrained(..., device=%r), which selects a backend for the device.",
                type(self).__name__, self.device, self.backend, target, str(target),
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
        cls._any_task = cls.__dict__.get("_any_task", False)
        # `model(...)` calls `forward` directly; a separate `__call__` would add a Python frame.
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the graph. Inputs are passed by name, or by position in the graph's order."""
        if args:
            inputs.update(zip((spec.name for spec in self._session.inputs), args, strict=False))
        return self._run(inputs)

    def _run(self, inputs: dict[str, Any]) -> Any:
        """Check the inputs, run the graph and wrap the outputs. Torch inputs give torch outputs; NumPy inputs give NumPy outputs.

        The code for the most common case, tensors from a tokenizer, is short, because it must be fast when the processor's caches are
        cold. These tensors are passed to the session unchanged. `InputConverter.read` converts all other inputs.
        """
        numpy = wants_tuple = False
        targets: dict[str, Any] = {}
        if {*map(type, inputs.values())} != _TENSOR or inputs.keys() != self._input_names:
            if self._loss:
                inputs = dict(inputs)
                labels = {name: inputs.pop(name, None) for name in TARGETS if name not in self._input_names}
                targets = {name: value for name, value in labels.items() if value is not None}
            inputs, numpy, wants_tuple = self._inputs.read(inputs)
        # A scalar has an empty shape. This check skips scalars, because the session raises a better error for them.
        if self._limited is not None and (shape := inputs[self._limited].shape) and shape[-1] > self._limit:
            raise too_long(self._limited, shape[-1], self._limit, self.config)
        if self._forks != _forks:
            self._reopen_after_fork()
        values: dict[str, Any] = self._session.run(inputs)
        if self._after is not None:
            values = self._after(values, inputs)
        if targets:
            values = {"loss": loss_of(self._loss, values, targets, self.config), **values}
        if numpy:
            values = {name: tensor.cpu().numpy() for name, tensor in values.items()}
        if self._output_groups:
            values = grouped(values, self._output_groups)
        if wants_tuple:
            return tuple(values.values())
        return fast_output(self._output_class, values)

    def read_inputs(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Convert a call's inputs to the graph's input tensors, and add default values for missing inputs.

        Raises:
            InputError: An input is unknown or missing.
        """
        return self._inputs.read(inputs)[0]

    # Lifetime

    def _check_fork(self) -> None:
        """Open the sessions again if this process was forked after they were opened. Methods call this before any other work."""
        if self._forks != _forks:
            self._reopen_after_fork()

    def _reopen_after_fork(self) -> None:
        with self._reopening:
            if self._forks != _forks and not self._closed:
                never_destroyed(self._opened)
                self._open()

    def close(self) -> None:
        """Close the sessions and release their memory. Later calls raise `SessionClosedError`; closing twice does nothing."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        """Return the model; `with` closes it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.artifact.path,
            "artifact": self.artifact,
            "settings": self._plan.settings,
            "config": self.config,
            "generation_config": self.generation_config,
            "trust_remote_code": self._trust_remote_code,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        path, pickled = state["path"], state["artifact"]
        if not path.is_dir():
            raise ArtifactNotFoundError(
                f"The pickled model cannot be opened, because its folder {path} does not exist on this machine.",
                fix=f"copy the artifact's folder to {path}, or load the model with from_pretrained instead of pickle.",
            )
        stored = Artifact.load(path) if (path / MANIFEST).is_file() else pickled
        # The folder may contain an artifact with other graphs, if the pickled model was selected with `file_name`.
        same = [component.file for component in stored.components] == [
            component.file for component in pickled.components
        ]
        self.artifact = stored if same else pickled
        self._trust_remote_code = state["trust_remote_code"]
        self.config, self.generation_config = state["config"], state["generation_config"]
        self._plan = self._planned(state["settings"])
        self._open()


def model_class(task: str) -> type[ORTModel]:
    """Return the model class of a task, such as `ORTModelForSequenceClassification`."""
    return load_task(task).model or ORTModel
