"""Optimum's model classes: ours, with what Optimum's scripts ask of them."""

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
from .parts import PART_NAMES, ORTDecoderForSeq2Seq, ORTEncoder, ORTPart, file_name_of, files_before, runtime_of

logger = logging.getLogger(__name__)

# Of builds for Azure's endpoints, where it is listed first: it computes what runs here on the CPU.
_ON_CPU = {"AzureExecutionProvider": "CPUExecutionProvider"}
# Settings of `generate` that ask each call for more than logits.
_ANSWERED = ("output_attentions", "output_hidden_states")


@dataclass
class PooledOutput(BaseModelOutputWithPooling, BaseModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Hidden states and the pooled ones, as PyTorch's model returns them, and a `BaseModelOutput`, which Optimum's scripts expect."""


class Words(base.ORTModel):
    """What Optimum's models do otherwise than ours: saving replaces what is there, and some arguments and attributes."""

    _use_cache: bool | None = None
    _use_io_binding: bool | None = None
    _use_merged: bool | None = None
    _asked: tuple[str | None, str, str | None] = (None, "", None)
    _before: tuple[Path, dict[Part, Path]] | None = None

    @classmethod
    def from_pretrained(cls, model_id: str | os.PathLike[str] | Artifact, **arguments: Any) -> Self:
        """`from_pretrained` of our class of the same name, with Optimum's arguments.

        `use_cache=False` is kept by the model: `generate` then computes each token from the whole text.
        """
        use_io_binding = arguments.pop("use_io_binding", None)
        use_cache = arguments.get("use_cache")
        if arguments.get("force_download") and (isinstance(model_id, Artifact) or Path(model_id).is_dir()):
            # Of a folder there is nothing to download.
            del arguments["force_download"]
        translated = cls._translated(arguments)
        made = super().from_pretrained(model_id, **translated)
        asked = (translated["file_name"], translated.get("subfolder") or "", translated.get("variant"))
        made.remember(use_cache, use_io_binding, arguments.get("use_merged"), asked)
        return made

    def remember(
        self,
        use_cache: bool | None,
        use_io_binding: bool | None,
        use_merged: bool | None,
        asked: tuple[str | None, str, str | None],
    ) -> None:
        """Keep what was asked for at loading; `asked` is the graph's name, the subfolder and the variant."""
        self._asked = asked
        self._use_cache, self._use_io_binding, self._use_merged = use_cache, use_io_binding, use_merged
        if not self.can_generate():
            return
        if use_cache is not None:
            self.config.use_cache = use_cache
        if self.generation_config.use_cache is None and self.can_use_cache:
            # Optimum's default, which folders of older ones do not name.
            self.generation_config.use_cache = True

    @classmethod
    def _translated(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments that our `from_pretrained` lacks, in its words."""
        given = dict(arguments)
        if given.get("provider") in _ON_CPU:
            given["provider"] = _ON_CPU[given["provider"]]
        if given.get("providers"):
            given["providers"] = [_ON_CPU.get(name, name) for name in given["providers"]]
        if cls.task == "feature-extraction":
            # Pooling of a sentence-transformers folder is done by who asks for hidden states.
            given.setdefault("task", cls.task)
        named_one = file_name_of({name: given.pop(name, None) for name in PART_NAMES})
        if given.get("file_name") is None:
            given["file_name"] = named_one
        return given

    def _choose_output(self, names: Sequence[str]) -> Any:
        chosen = super()._choose_output(names)
        return PooledOutput if chosen is BaseModelOutputWithPooling else chosen

    def files_before(self) -> dict[Part, Path]:
        """Another tool's files that the graphs were brought to our form from; none where the graphs are what was loaded."""
        if self._before is None or self._before[0] != self.artifact.path:
            self._before = self.artifact.path, files_before(self.artifact, *self._asked)
        return self._before[1]

    @property
    def path(self) -> Path:
        """The first graph's file; of a graph that was brought to our form, the file that it was."""
        before = self.files_before()
        usual: tuple[Part, ...] = ("encoder", "model", "merged", "following" if self.can_use_cache else "first")
        return next((before[part] for part in (*usual, *before) if part in before), super().path)

    @property
    def model_save_dir(self) -> Path:
        """The folder of that file."""
        return self.path.parent if self.files_before() else super().model_save_dir

    @property
    def session(self) -> Any:
        """The runtime's own session of the first graph.

        Raises:
            InputError: This backend shows none.
        """
        return runtime_of(self._session, self.backend)

    @property
    def model(self) -> Any:
        """The same, by its older name."""
        return self.session

    @property
    def use_io_binding(self) -> bool:
        """What was asked for: sessions here decide themselves how tensors reach them."""
        return True if self._use_io_binding is None else self._use_io_binding

    @use_io_binding.setter
    def use_io_binding(self, value: bool) -> None:
        self._use_io_binding = value

    @property
    def can_use_cache(self) -> bool:
        """Whether the graphs keep keys and values between calls, and were not loaded with `use_cache=False`."""
        return super().can_use_cache and self._use_cache is not False

    def save_pretrained(  # type: ignore[override]  # Optimum's argument
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **settings: Any
    ) -> None:
        """Write the model into a folder, over what was there; tokenizers that are saved beside it later are fine.

        Args:
            save_directory: May hold other files, which stay.
            push_to_hub: Upload it as well; `repository_id` and so on as in `push_to_hub`.
            **settings: Of `push_to_hub`.
        """
        target = Path(save_directory)
        self._save_pretrained(target)
        if self.config is not None and not (target / "config.json").exists():
            self.config.save_pretrained(target)
        if push_to_hub:
            settings.setdefault("repo_id", settings.pop("repository_id", target.name))
            known = ("repo_id", "token", "private", "revision", "commit_message")
            self.push_to_hub(**{name: value for name, value in settings.items() if name in known})

    def _save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """Write the artifact; other libraries replace this to have it in a subfolder."""
        target = Path(save_directory).absolute()
        if target.resolve() == self.artifact.path.resolve() and (target / MANIFEST).is_file():
            # It is there already; the config may have changed.
            if self.config is not None:
                self.config.save_pretrained(target)
            return
        config, generation = self.config, self.generation_config
        save_model(self.artifact, config, target, generation_config=generation, overwrite=True, companions=False)


class Writes(Words, Generator):
    """Models that generate."""

    @property
    def use_merged(self) -> bool:
        """What was asked for; where nothing was, whether it is a merged decoder that another tool wrote."""
        return "merged" in self.files_before() if self._use_merged is None else self._use_merged

    def _check_rest(self, rest: Mapping[str, Any]) -> None:
        # Of `generate`, which scripts pass to single calls, too, where transformers does not read them either.
        super()._check_rest(
            {
                name: value
                for name, value in rest.items()
                if name in _ANSWERED or not hasattr(self.generation_config, name)
            }
        )


class WithEncoder(Writes, EncoderDecoder):
    """Models with an encoder, whose graphs Optimum's scripts read one by one."""

    # Whisper's `generate` keeps something of its own here; several graphs have no session that is the model's.
    model: Any = None

    def _make_encoder(self, session: Session, main_input_name: str) -> ORTEncoder:
        return ORTEncoder(self, session, main_input_name)

    @property
    def can_use_cache(self) -> bool:
        """Likewise; of a merged decoder in any case."""
        return super().can_use_cache or (self.use_merged and any(part.stateful for part in self.artifact.components))

    @property
    def decoder(self) -> ORTDecoderForSeq2Seq:
        """The decoder, callable by itself."""
        return ORTDecoderForSeq2Seq(self, is_merged=self.use_merged)

    @property
    def decoder_with_past(self) -> ORTDecoderForSeq2Seq | None:
        """The same graph; `None` where Optimum has no second one, merged or without a cache."""
        if not self.can_use_cache or self.use_merged:
            return None
        return ORTDecoderForSeq2Seq(self, is_merged=False, with_past=True)

    @property
    def parts(self) -> list[ORTPart]:
        """The encoder and the decoder; also the decoder behind a cache where that was a file of its own."""
        found, following = [self.encoder, self.decoder], self.decoder_with_past
        return [*found, following] if following is not None and following.path != self.decoder.path else found


class ORTModel(Words):
    """Any task: `from_pretrained` gives the class of the model's task."""

    _any_task = True

    @classmethod
    def _for_task(cls, task: str) -> type[Any]:
        return ort_class(base.model_class(task).__name__) if cls is ORTModel else super()._for_task(task)


class OVModel(Words):
    """The same for OpenVINO: its graphs, made when a folder holds PyTorch weights alone."""

    _any_task = True
    ov_config: dict[str, Any]

    @classmethod
    def _for_task(cls, task: str) -> type[Any]:
        return ov_class(base.model_class(task).__name__) if cls is OVModel else super()._for_task(task)

    @classmethod
    def from_pretrained(cls, model_id: str | os.PathLike[str] | Artifact, **arguments: Any) -> Self:
        """`from_pretrained` with `backend="openvino"`, and the arguments of optimum-intel.

        `quantization_config` and `load_in_8bit` quantize the graph on the way, into a folder that lives as long as the model.
        """
        from .openvino import quantized_on_the_way

        ov_config = dict(arguments.get("ov_config") or {})
        config, eight = arguments.pop("quantization_config", None), arguments.pop("load_in_8bit", None)
        rows = arguments.pop("calibration_dataset", None)
        made = super().from_pretrained(model_id, **arguments)
        made.ov_config = ov_config
        quantized_on_the_way(made, config, load_in_8bit=eight, calibration=rows)
        return made

    @classmethod
    def _translated(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        from .openvino import translated

        return translated(super()._translated(arguments))

    @property
    def model(self) -> Any:
        """OpenVINO's model of the first graph, as it was compiled."""
        return self.session.get_runtime_model()

    @property
    def request(self) -> Any:
        """The compiled model."""
        return self.session

    def compile(self) -> None:
        """Does nothing: a model is compiled when it is opened."""

    def clear_requests(self) -> None:
        """Does nothing: requests are kept by the session."""

    def reshape(
        self, batch_size: int, sequence_length: int, height: int | None = None, width: int | None = None
    ) -> Self:
        """Pad texts to one length, for which the graph is compiled; -1 leaves it free. Any batch runs.

        Models whose inputs cannot be padded (images, sounds, models that generate) stay as they are: any size runs, too.

        Raises:
            ConfigError: A length that the model does not have; it goes on as before.
        """
        from dataclasses import replace

        from ...backends.buckets import why_unpadded
        from ...config import SessionOptions

        if (reason := why_unpadded(self.artifact)) is not None:
            logger.debug("reshape() changes nothing: %s.", reason)
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
        """Move to a device, in OpenVINO's words too (`"CPU"`, `"GPU.0"`)."""
        return super().to(device.lower().replace(".", ":") if isinstance(device, str) else device)

    def replace_artifact(self, artifact: Artifact) -> None:
        """Run another artifact from now on."""
        self.close()
        self.artifact = artifact
        self._plan = self._planned(self._plan.settings)
        self._open()


def _of_kind(name: str, kind: type[Words], original: type[base.ORTModel]) -> type[Any]:
    facts = {"__module__": __name__, "__doc__": original.__doc__, "task": original.task}
    kinds: tuple[type[Any], ...] = (kind,)
    if issubclass(original, EncoderDecoder):
        kinds = (WithEncoder, kind)
    elif issubclass(original, Generator):
        kinds = (Writes, kind)
    made = type(name, (*kinds, original), facts)
    # Found by pickle, and by whoever looks for the class of a pickled model.
    globals()[name] = made
    return made


@functools.cache
def ort_class(name: str) -> type[Any]:
    """Our class of that name with Optimum's words."""
    return _of_kind(name, ORTModel, getattr(importlib.import_module("accel"), name))


@functools.cache
def ov_class(name: str) -> type[Any]:
    """The class of that name (`ORTModelFor...`) for OpenVINO, as `OVModelFor...`."""
    return _of_kind("OV" + name.removeprefix("ORT"), OVModel, getattr(importlib.import_module("accel"), name))


def __getattr__(name: str) -> Any:
    # Classes are made when they are first asked for; a pickled model names its class so.
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
    """Optimum's `pipeline`: `accel.pipeline`, with `accelerator="ort"` or `"ov"` for a model given by id or folder.

    Arguments that neither it nor the pipeline knows are passed over with a warning, as stock pipelines do without one.
    """
    from ...models.arguments import read_arguments
    from ...models.pipelines.pipeline import has_several_classes, pipeline_class, usual_model
    from ...models.pipelines.pipeline import pipeline as ours
    from ...models.pipelines.pipeline_arguments import loading_arguments, unknown_arguments

    if task is not None:
        for name in set(unknown_arguments(pipeline_class(task), settings)) - loading_arguments():
            logger.warning("The pipeline %s passes %s=%r over.", task, name, settings.pop(name))
    kind: type[Words] = OVModel if accelerator in ("ov", "openvino") else ORTModel
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


def names(prefix: str) -> Sequence[str]:
    """Names of all task classes, `ORTModelFor...` or `OVModelFor...`."""
    ours = importlib.import_module("accel").__all__
    return [prefix + name.removeprefix("ORT") for name in ours if name.startswith("ORTModelFor")]
