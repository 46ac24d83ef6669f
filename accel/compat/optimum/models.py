"""Optimum's model classes, which are accel's model classes with the attributes and arguments of Optimum."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from ...artifact.manifest import MANIFEST, Artifact
from ...errors import AccelError
from ...interfaces.folder_reader import Part
from ...interfaces.protocols import Session
from ...models import base
from ...models.encoder_decoder import EncoderDecoder
from ...models.generation_mixin import Generator
from ...models.persistence import save_model
from .graph_parts import PART_NAMES, ORTDecoderForSeq2Seq, ORTEncoder, ORTPart, file_name_of, files_before, runtime_of

logger = logging.getLogger(__name__)

# Azure builds of ONNX Runtime list AzureExecutionProvider first. It runs graphs on the CPU.
_ON_CPU = {"AzureExecutionProvider": "CPUExecutionProvider"}
# Settings of `generate` that request outputs other than logits.
_ANSWERED = ("output_attentions", "output_hidden_states")


@dataclass
class PooledOutput(BaseModelOutputWithPooling, BaseModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Hidden states and pooled states. The class also inherits from `BaseModelOutput`, because scripts for Optimum check for this class."""


class OptimumModelMixin(base.ORTModel):
    """Mixin that gives accel's model classes the arguments and attributes of Optimum's classes.

    In contrast to accel's classes, `save_pretrained` replaces existing files.
    """

    _use_cache: bool | None = None
    _use_io_binding: bool | None = None
    _use_merged: bool | None = None
    _asked: tuple[str | None, str, str | None] = (None, "", None)
    _before: tuple[Path, dict[Part, Path]] | None = None

    @classmethod
    def from_pretrained(cls, model_id: str | os.PathLike[str] | Artifact, **arguments: Any) -> Self:
        """Load a model with Optimum's arguments.

        With `use_cache=False`, `generate` of the loaded model computes each token from the complete text, without a KV cache.
        """
        use_io_binding = arguments.pop("use_io_binding", None)
        use_cache = arguments.get("use_cache")
        if arguments.get("force_download") and (isinstance(model_id, Artifact) or Path(model_id).is_dir()):
            # A local folder is not downloaded, so the argument is ignored.
            del arguments["force_download"]
        translated = cls._translated(arguments)
        model = super().from_pretrained(model_id, **translated)
        requested = (translated["file_name"], translated.get("subfolder") or "", translated.get("variant"))
        model.remember(
            requested, use_cache=use_cache, use_io_binding=use_io_binding, use_merged=arguments.get("use_merged")
        )
        return model

    def remember(self, requested: tuple[str | None, str, str | None], **uses: bool | None) -> None:
        """Store arguments of `from_pretrained` in the model. `requested` contains the graph's file name, the subfolder and the variant."""
        self._asked = requested
        for name, value in uses.items():
            setattr(self, f"_{name}", value)
        if not self.can_generate():
            return
        if self._use_cache is not None:
            self.config.use_cache = self._use_cache
        if self.generation_config.use_cache is None and self.can_use_cache:
            # Optimum's default is True. The generation_config.json of older folders does not contain this field.
            self.generation_config.use_cache = True

    @classmethod
    def _translated(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Replace Optimum's arguments by the arguments of accel's `from_pretrained`."""
        translated = dict(arguments)
        if translated.get("provider") in _ON_CPU:
            translated["provider"] = _ON_CPU[translated["provider"]]
        if translated.get("providers"):
            translated["providers"] = [_ON_CPU.get(name, name) for name in translated["providers"]]
        if cls.task == "feature-extraction":
            # Without a task, accel would load a sentence-transformers folder with pooling. Scripts for Optimum pool the hidden states
            # themselves.
            translated.setdefault("task", cls.task)
        file_name = file_name_of({name: translated.pop(name, None) for name in PART_NAMES})
        if translated.get("file_name") is None:
            translated["file_name"] = file_name
        return translated

    def _choose_output(self, names: Sequence[str]) -> Any:
        chosen = super()._choose_output(names)
        return PooledOutput if chosen is BaseModelOutputWithPooling else chosen

    def files_before(self) -> dict[Part, Path]:
        """Return the original graph files of another tool, by part. Empty if the model was not converted from files of another tool."""
        if self._before is None or self._before[0] != self.artifact.path:
            self._before = self.artifact.path, files_before(self.artifact, *self._asked)
        return self._before[1]

    @property
    def path(self) -> Path:
        """Path of the file of the first graph. If the graph was converted from a file of another tool, path of that file."""
        before = self.files_before()
        usual: tuple[Part, ...] = ("encoder", "model", "merged", "following" if self.can_use_cache else "first")
        return next((before[part] for part in (*usual, *before) if part in before), super().path)

    @property
    def model_save_dir(self) -> Path:
        """Folder that contains the graph file `path`."""
        return self.path.parent if self.files_before() else super().model_save_dir

    @property
    def session(self) -> Any:
        """The runtime's session of the first graph.

        Raises:
            InputError: The backend does not provide its runtime's session.
        """
        return runtime_of(self._session, self.backend)

    @property
    def model(self) -> Any:
        """The same object as `session`. Older scripts use this name."""
        return self.session

    @property
    def use_io_binding(self) -> bool:
        """Value of the argument `use_io_binding` of `from_pretrained`. It has no effect, because accel's sessions choose between copies and
        I/O binding themselves.
        """
        return True if self._use_io_binding is None else self._use_io_binding

    @use_io_binding.setter
    def use_io_binding(self, value: bool) -> None:
        self._use_io_binding = value

    @property
    def can_use_cache(self) -> bool:
        """Whether `generate` can use a KV cache: the graphs have a cache, and the model was not loaded with `use_cache=False`."""
        return super().can_use_cache and self._use_cache is not False

    def save_pretrained(  # type: ignore[override]  # Optimum's argument
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **settings: Any
    ) -> None:
        """Save the model to a folder, and replace a model in this folder. A script may save a tokenizer to the same folder afterwards.

        Args:
            save_directory: The output folder. Other files in this folder are kept.
            push_to_hub: Whether the model is uploaded to the Hub.
            **settings: Arguments of `push_to_hub`.
        """
        target = Path(save_directory)
        self._save_pretrained(target)
        if self.config is not None and not (target / "config.json").exists():
            self.config.save_pretrained(target)
        if push_to_hub:
            settings.setdefault("repo_id", settings.pop("repository_id", target.name))
            hub_arguments = ("repo_id", "token", "private", "revision", "commit_message")
            self.push_to_hub(**{name: value for name, value in settings.items() if name in hub_arguments})

    def _save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """Write the artifact to a folder. Other libraries override this method to write to a subfolder."""
        target = Path(save_directory).absolute()
        if target.resolve() == self.artifact.path.resolve() and (target / MANIFEST).is_file():
            # The model was loaded from this folder, so only the config may have changed.
            if self.config is not None:
                self.config.save_pretrained(target)
            return
        config, generation = self.config, self.generation_config
        save_model(self.artifact, config, target, generation_config=generation, overwrite=True, companions=False)


class OptimumGenerationMixin(OptimumModelMixin, Generator):
    """Mixin for generating models with Optimum's arguments and attributes."""

    @property
    def use_merged(self) -> bool:
        """Value of the argument `use_merged` of `from_pretrained`. If the argument was not passed, the value is True if the original files
        contain a merged decoder.
        """
        return "merged" in self.files_before() if self._use_merged is None else self._use_merged

    def _check_rest(self, rest: Mapping[str, Any]) -> None:
        # Scripts for Optimum may pass settings of `generate` to single calls of a model. transformers ignores them, so they are allowed.
        super()._check_rest(
            {
                name: value
                for name, value in rest.items()
                if name in _ANSWERED or not hasattr(self.generation_config, name)
            }
        )


class OptimumEncoderDecoderMixin(OptimumGenerationMixin, EncoderDecoder):
    """Mixin for encoder-decoder models that gives access to the encoder and the decoder, as Optimum's classes do."""

    # Whisper's `generate` assigns this attribute, so it must not be a read-only property.
    model: Any = None

    def _make_encoder(self, session: Session, main_input_name: str) -> ORTEncoder:
        return ORTEncoder(self, session, main_input_name)

    @property
    def can_use_cache(self) -> bool:
        """Whether `generate` can use a KV cache.

        The graphs must have a cache, and the model must not be loaded with `use_cache=False`. This argument has no effect on a merged
        decoder.
        """
        return super().can_use_cache or (self.use_merged and any(part.stateful for part in self.artifact.components))

    @property
    def decoder(self) -> ORTDecoderForSeq2Seq:
        """The decoder of the model, which can be called."""
        return ORTDecoderForSeq2Seq(self, is_merged=self.use_merged)

    @property
    def decoder_with_past(self) -> ORTDecoderForSeq2Seq | None:
        """The decoder with a KV cache. It is the same graph as `decoder`. The value is `None` for models with a merged decoder or without a
        KV cache, as in Optimum.
        """
        if not self.can_use_cache or self.use_merged:
            return None
        return ORTDecoderForSeq2Seq(self, is_merged=False, with_past=True)

    @property
    def parts(self) -> list[ORTPart]:
        """The encoder and the decoder. The list also contains `decoder_with_past` if it has a separate file in the original folder."""
        parts, following = [self.encoder, self.decoder], self.decoder_with_past
        return [*parts, following] if following is not None and following.path != self.decoder.path else parts


class ORTModel(OptimumModelMixin):
    """A model for any task. `from_pretrained` returns an instance of the class for the model's task."""

    _any_task = True

    @classmethod
    def _for_task(cls, task: str) -> type[Any]:
        return ort_class(base.model_class(task).__name__) if cls is ORTModel else super()._for_task(task)


class OVModel(OptimumModelMixin):
    """A model for any task that runs with OpenVINO. If a folder contains only PyTorch weights, `from_pretrained` exports the model."""

    _any_task = True
    ov_config: dict[str, Any]

    @classmethod
    def _for_task(cls, task: str) -> type[Any]:
        return ov_class(base.model_class(task).__name__) if cls is OVModel else super()._for_task(task)

    @classmethod
    def from_pretrained(cls, model_id: str | os.PathLike[str] | Artifact, **arguments: Any) -> Self:
        """Load a model with `backend="openvino"` and the arguments of optimum-intel.

        If `quantization_config` or `load_in_8bit` is passed, accel quantizes the model and writes the result to a temporary folder. The
        folder is deleted together with the model object.
        """
        from .openvino import quantized_on_the_way

        ov_config = dict(arguments.get("ov_config") or {})
        config, eight = arguments.pop("quantization_config", None), arguments.pop("load_in_8bit", None)
        rows = arguments.pop("calibration_dataset", None)
        model = super().from_pretrained(model_id, **arguments)
        model.ov_config = ov_config
        quantized_on_the_way(model, config, load_in_8bit=eight, calibration=rows)
        return model

    @classmethod
    def _translated(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        from .openvino import translated

        return translated(super()._translated(arguments))

    @property
    def model(self) -> Any:
        """The runtime model (`openvino.Model`) of the first graph's compiled model."""
        return self.session.get_runtime_model()

    @property
    def request(self) -> Any:
        """The compiled OpenVINO model of the first graph."""
        return self.session

    def compile(self) -> None:
        """Do nothing, because `from_pretrained` compiles the model."""

    def clear_requests(self) -> None:
        """Do nothing, because accel's sessions manage the inference requests."""

    def reshape(
        self, batch_size: int, sequence_length: int, height: int | None = None, width: int | None = None
    ) -> Self:
        """Compile the model for a fixed text length. Later calls pad their texts to this length. -1 allows any length.

        The batch size is ignored, because the model accepts any batch size. The method does not change models for images or audio and
        generating models, whose inputs cannot be padded.

        Raises:
            ConfigError: The length is larger than the number of the model's positions. The model is then unchanged.
        """
        from dataclasses import replace

        from ...backends.buckets import why_unpadded
        from ...config import SessionOptions

        if (reason := why_unpadded(self.artifact)) is not None:
            logger.debug("reshape() did not change the model: %s.", reason)
            return self
        before = self._plan
        buckets = (sequence_length,) if sequence_length > 0 else ()
        options = replace(before.settings.options or SessionOptions(), buckets=buckets)
        self._plan = before.with_options(options)
        self.close()
        try:
            self._open()
        except AccelError:
            self._plan = before
            self._open()
            raise
        return self

    def to(self, device: Any) -> Self:
        """Move the model to a device. The method also accepts OpenVINO's device names, such as `"CPU"` and `"GPU.0"`."""
        return super().to(device.lower().replace(".", ":") if isinstance(device, str) else device)

    def replace_artifact(self, artifact: Artifact) -> None:
        """Close the model's sessions, and open another artifact in their place."""
        self.close()
        self.artifact = artifact
        self._plan = self._planned(self._plan.settings)
        self._open()


def _of_kind(name: str, kind: type[OptimumModelMixin], original: type[base.ORTModel]) -> type[Any]:
    facts = {"__module__": __name__, "__doc__": original.__doc__, "task": original.task}
    kinds: tuple[type[Any], ...] = (kind,)
    if issubclass(original, EncoderDecoder):
        kinds = (OptimumEncoderDecoderMixin, kind)
    elif issubclass(original, Generator):
        kinds = (OptimumGenerationMixin, kind)
    cls = type(name, (*kinds, original), facts)
    # pickle looks the class up by its name in this module.
    globals()[name] = cls
    return cls


@functools.cache
def ort_class(name: str) -> type[Any]:
    """Return the class `ORTModelFor...` with Optimum's behaviour for the accel class of the same name."""
    return _of_kind(name, ORTModel, getattr(importlib.import_module("accel"), name))


@functools.cache
def ov_class(name: str) -> type[Any]:
    """Return the class `OVModelFor...` for the name of an accel class, `ORTModelFor...`."""
    return _of_kind("OV" + name.removeprefix("ORT"), OVModel, getattr(importlib.import_module("accel"), name))


def __getattr__(name: str) -> Any:
    # A class is created when it is used for the first time. pickle may be the first user, because it looks classes up by name.
    if name.startswith(("ORTModelFor", "OVModelFor")):
        make = ov_class if name.startswith("OV") else ort_class
        original = "ORT" + name.removeprefix("OV").removeprefix("ORT")
        if hasattr(importlib.import_module("accel"), original):
            return make(original)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pipeline(
    task: str | None = None,
    model: Any = None,
    *,
    accelerator: str | None = "ort",
    model_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return a pipeline, as Optimum's function `pipeline` does.

    `accelerator` selects ONNX Runtime (`"ort"`) or OpenVINO (`"ov"`) if `model` is a Hub id or a folder. The function ignores unknown
    arguments and logs a warning.
    """
    from ...models.loading_arguments import read_arguments
    from ...models.pipelines.pipeline import has_several_classes, pipeline_class, usual_model
    from ...models.pipelines.pipeline import pipeline as ours
    from ...models.pipelines.pipeline_arguments import loading_arguments, unknown_arguments

    if task is not None:
        for name in set(unknown_arguments(pipeline_class(task), settings)) - loading_arguments():
            logger.warning(
                "The pipeline for the task %r ignores the unknown argument %s=%r.", task, name, settings.pop(name)
            )
    kind: type[OptimumModelMixin] = OVModel if accelerator in ("ov", "openvino") else ORTModel
    settings = {name: value for name, value in settings.items() if name != "use_fast"}
    if model is None:
        model, settings["revision"] = usual_model(task, settings.get("revision"))
    if isinstance(model, str | os.PathLike):
        loading = ("revision", "token", "trust_remote_code", "device")
        arguments: dict[str, Any] = {name: settings.pop(name) for name in loading if name in settings}
        arguments.update(model_kwargs or {})
        cls: Any = kind
        if task is not None:
            name = base.model_class(task).__name__
            if has_several_classes(task):
                model = read_arguments(task=task, **arguments).resolve(model)
                name = base.model_class(model.task).__name__
            cls = ov_class(name) if kind is OVModel else ort_class(name)
        model = cls.from_pretrained(model, **arguments)
    return ours(task, model, **settings)
