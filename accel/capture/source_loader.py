"""Load a model for an export from a transformers folder or a folder with a PEFT adapter, or prepare a model in memory."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..artifact.checksums import folder_digest, sha256
from ..artifact.gguf_files import gguf_weights
from ..artifact.hub import HubOptions, Location
from ..artifact.json_reading import read_json
from ..artifact.manifest import Origin
from ..artifact.sentence_settings import SentenceSettings, sentence_settings, transformer_folder
from ..config import ExportConfig
from ..errors import AccelError, ExportError, TaskError
from ..interfaces.family import Axes, Sample
from ..interfaces.family_registry import family_of
from ..interfaces.task_registry import infer_task, is_adapter, load_task, read_config
from ..interfaces.task_spec import TaskSpec
from ..interfaces.tracing_wrapper import Wrapper, unwrapped
from ..upstream.auto_models import classes_for
from ..upstream.model_internals import without_mixed_precision
from ..upstream.output_silencing import quiet
from .adapter_token_embeddings import adapter_shapes, fit_embeddings
from .answer_scores import AnswerScorer
from .end_token_classifiers import answering_by_row
from .export_source import Source
from .global_state_lock import one_thread_at_a_time
from .layer_outputs import ReturnsLayerOutputs
from .load_errors import load_error
from .output_selection import OutputSelection
from .packed_checkpoints import load_packed, packed_settings
from .position_limits import max_sizes_of
from .quantized_linears import TRAINED_STEPS, holds_quantized, load_quantized, origin_of, without_training
from .reference_cases import own_defaults_of
from .samples import check_sample, default_sample, known_axes, resize, safe_sizes, same_draws, tokenizer_names
from .sentence_embeddings import SentenceEmbedder, embedding_heads
from .sound_samples import sound_sample
from .speech_samples import longest_sound, speech_sample
from .streamed_weights import StreamedWeights, streamed_weights
from .torchao_weights import without_torchao
from .tracer import first_lines
from .video_samples import video_sample


@contextlib.contextmanager
def modes_kept(model: object) -> Iterator[None]:
    """Restore the training mode of all submodules when the context ends."""
    training = [module for module in model.modules() if module.training] if isinstance(model, torch.nn.Module) else []
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _in_dtype(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return the module with weights in the given dtype. If the dtype differs, return a copy and leave the caller's module unchanged."""
    weights = (*module.parameters(), *module.buffers())
    if all(tensor.dtype is dtype or not tensor.is_floating_point() for tensor in weights):
        return module
    # The copy shares the weights that already have the dtype.
    return copy.deepcopy(module, {id(tensor): tensor for tensor in weights if tensor.dtype is dtype}).to(dtype)


@one_thread_at_a_time()
@same_draws()
def load_source(
    model: Location | torch.nn.Module,
    *,
    task: str,
    config: ExportConfig,
    hub: HubOptions,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Axes | None = None,
    weights: bool = True,
    stream: bool = False,
) -> Source:
    """Load a model and prepare the sample inputs of its trace.

    Args:
        model: A transformers folder, a folder with a PEFT adapter, or a module in memory. An adapter is merged into its base model.
        task: Name of the task.
        config: Export settings.
        hub: Hub options for the base model of an adapter.
        sample: Sample inputs for the trace. `None` means that accel makes sample inputs. Sample inputs with one row, a short sequence or a
            mask without padding are resized.
        axes: Names of the axes of `sample` that may vary. The task `custom` needs this argument.
        weights: Whether to load the weights. With `False`, the model has only shapes (meta device) and cannot run.
        stream: Whether large weights stay in the checkpoint's files, if this is possible (`Source.streamed`).

    Raises:
        TaskError: The task does not fit the model.
        ExportError: The model cannot be loaded, or accel cannot make sample inputs for it.
        StreamingError: Weights were to be streamed, and loading the model computes new weights from them.
    """
    work = load_task(task)
    spec = work.spec
    if isinstance(model, torch.nn.Module):
        module, folder, streamed, settings = model, None, None, None
        name = getattr(getattr(module, "config", None), "name_or_path", "")
        origin = Origin(id=str(name or type(module).__name__), digest=None)
        module = _plain_forward(module)
        module = _in_dtype(without_torchao(without_training(module)), getattr(torch, config.dtype))
    else:
        folder = model.folder
        settings = sentence_settings(folder) if spec.sentence_kinds else None
        loaded_spec = _with_head(spec, settings)
        module, streamed = _load_module(transformer_folder(folder), loaded_spec, config, hub, weights, stream)
        module = without_torchao(module)
        origin = origin_of(folder) or Origin(id=model.id, revision=model.revision, digest=folder_digest(folder))
    family = family_of(getattr(module, "config", None))
    module = family.traced_module(answering_by_row(module)).eval()
    if config.output_hidden_states or config.output_attentions:
        if spec.generates or not work.traced_as_is or (isinstance(module, Wrapper) and not module.returns_layers):
            raise TaskError(
                f"A graph for the task {spec.name!r} cannot return hidden states or attentions.",
                fix="export the model with task='feature-extraction', or leave out output_hidden_states and output_attentions.",
            )
        module = ReturnsLayerOutputs(
            module, hidden_states=config.output_hidden_states, attentions=config.output_attentions
        ).eval()
    heads = _embedding_heads(spec, settings, config)
    if heads:
        module = SentenceEmbedder(module, heads).eval()
    elif settings is not None and settings.answers:
        module = AnswerScorer(module, settings.answers).eval()
    elif spec.keeps:
        module = OutputSelection(module, spec.keeps).eval()
    module = work.traced(module).eval()
    if sample is None:
        # The seed is set again, because loading a model may draw random numbers. The samples are then the same for a model in memory.
        with same_draws():
            inner = unwrapped(module)
            place = transformer_folder(folder) if folder is not None else None
            task_sample = work.sample(module, place) or _usual_sample(spec, module, place)
            example, axes, unused = family.sample(inner, task_sample)
    else:
        check_sample(sample, axes)
        example, axes, unused = dict(sample), axes or known_axes(sample), ()
        sizes = safe_sizes(example, axes)
        example = resize(example, axes, sizes, getattr(module, "config", None), seed=0)
    with streamed.loaded(module) if streamed is not None else contextlib.nullcontext():
        own_defaults = own_defaults_of(module, example) if weights and not spec.generates else ()
    if sample is None:
        # If the tokenizer does not return an input of `own_defaults`, the graph has no such input and computes the model's default.
        place = transformer_folder(folder) if folder is not None else None
        left_out = {name for name in own_defaults if name not in tokenizer_names(place)}
        example = {name: tensor for name, tensor in example.items() if name not in left_out}
        axes = {name: named for name, named in axes.items() if name not in left_out}
    if spec.generates:
        # Encoders of speech models compute in the dtype of their input, so the sample inputs must have the dtype of the weights.
        dtype = getattr(torch, config.dtype)
        example = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in example.items()}
    return Source(
        model=module,
        task=spec.name,
        folder=folder,
        origin=origin,
        example=example,
        axes=axes,
        max_sizes=max_sizes_of(module, axes) | longest_sound(module, axes) | family.max_sizes(unwrapped(module), axes),
        unused_inputs=unused,
        own_defaults=own_defaults,
        dtype=config.dtype,
        streamed=streamed,
    )


def _usual_sample(spec: TaskSpec, module: torch.nn.Module, folder: Path | None) -> Sample:
    """Make sample inputs for the modality of the task: videos, audio, or the inputs that `default_sample` makes."""
    if spec.modalities == ("video",):
        return video_sample(module, folder)
    if spec.modalities == ("audio",):
        return speech_sample(module, folder) if spec.generates else sound_sample(module, folder)
    return default_sample(module, folder)


def _load_module(
    folder: Path, spec: TaskSpec, config: ExportConfig, hub: HubOptions, weights: bool, stream: bool
) -> tuple[torch.nn.Module, StreamedWeights | None]:
    """Return the model, and its streamed weights or `None`."""
    import transformers

    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": hub.trust_remote_code,
        "local_files_only": True,
    }
    try:
        with quiet():
            if is_adapter(folder):
                return _load_adapter(folder, spec, kwargs, hub), None
            if (gguf := gguf_weights(folder)) is not None:
                kwargs |= {
                    "gguf_file": gguf.name,
                    "quantization_config": transformers.GgufConfig(dequantize=True),
                }
            if (loaded := load_task(spec.name).load(folder, **kwargs)) is not None:
                return (loaded if weights else loaded.to("meta")), None
            if not spec.auto_model:
                architecture = (read_config(folder).get("architectures") or [""])[0]
                if not hasattr(transformers, architecture):
                    raise TaskError(
                        f"accel cannot load a model for the custom task {spec.name!r}. transformers has no class {architecture!r}, and "
                        "the task defines neither Task.load nor TaskSpec.auto_model.",
                        fix="override Task.load, or set TaskSpec.auto_model to the name of a transformers class.",
                    )
                return _load_complete(getattr(transformers, architecture).from_pretrained, folder, spec, **kwargs), None
            model_config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=hub.trust_remote_code, local_files_only=True
            )
            loader = loader_for(spec, model_config)
            if not classes_for(loader, model_config) and not hasattr(model_config, "auto_map"):
                raise TaskError(
                    f"A {model_config.model_type} model does not support the task {spec.name!r}: {spec.auto_model} of transformers has "
                    f"no class for {model_config.model_type}.",
                    fix="pass a task that the model supports, or leave task out so that accel infers the task.",
                )
            _check_head(loader, model_config, spec)
            if not weights:
                with torch.device("meta"):
                    shape: torch.nn.Module = loader.from_config(
                        model_config, dtype=kwargs["dtype"], trust_remote_code=hub.trust_remote_code
                    )
                return shape, None
            if holds_quantized(folder):
                return _load_quantized(loader, folder, model_config, config, hub), None
            if (settings := packed_settings(model_config)) is not None:
                _check_float32(folder, config)
                load = partial(_load_complete, loader.from_pretrained, folder, spec, **kwargs)
                return load_packed(load, folder, model_config, settings), None
            classes = classes_for(loader, model_config)
            # Custom code may do anything with the weights when it loads them.
            streams = stream and classes and gguf is None and not hub.trust_remote_code
            streamed = streamed_weights(folder) if streams else None
            if streamed is None:
                return _load_complete(loader.from_pretrained, folder, spec, config=model_config, **kwargs), None
            named = (model_config.architectures or [""])[0]
            concrete = getattr(transformers, named if named in classes else min(classes))
            return _load_streamed(concrete, folder, spec, model_config, streamed), streamed
    # transformers and custom model code may raise any exception.
    except Exception as error:
        if isinstance(error, AccelError):
            raise
        raise load_error(folder, error) from error


def loader_for(spec: TaskSpec, config: Any) -> Any:
    """Return the auto class of transformers that loads a model with this config for a task.

    Of the task's auto classes, the function prefers a class that lists the architecture in the config, then a class that supports the type
    of the config, and then the first class.
    """
    import transformers

    loaders = [getattr(transformers, name) for name in spec.auto_models]
    having = [loader for loader in loaders if classes_for(loader, config)]
    named = (config.architectures or [""])[0]
    return next((loader for loader in having if named in classes_for(loader, config)), (having or loaders)[0])


def _plain_forward(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module without the automatic mixed precision that a training library added around its `forward`.

    Raises:
        ExportError: The module was accelerated by `accel.accelerate`. Its compiled code cannot be traced.
    """
    if hasattr(vars(module).get("acceleration"), "restore"):
        raise ExportError(
            f"The {type(module).__name__} was accelerated by accel.accelerate, and accelerated models cannot be exported.",
            fix="call model.restore(), then export the model.",
        )
    return without_mixed_precision(module)


def _load_streamed(
    concrete: Any, folder: Path, spec: TaskSpec, model_config: Any, streamed: StreamedWeights
) -> torch.nn.Module:
    """Load a model of a class of transformers whose large weights stay in the checkpoint's files.

    Raises:
        StreamingError: transformers computes weights of the model from the checkpoint's weights, for example the weights of experts.
    """

    def load(_: Path, **settings: Any) -> Any:
        return concrete.from_pretrained(None, state_dict=streamed.state_dict, **settings)

    model = _load_complete(load, folder, spec, config=model_config, dtype=torch.float32)
    streamed.add_loaded(model)
    with contextlib.suppress(OSError):
        settings: Any = getattr(model, "generation_config", None)
        if settings is not None:
            model.generation_config = type(settings).from_pretrained(folder)
    return model


def _load_complete(from_pretrained: Any, folder: Path, spec: TaskSpec, **kwargs: Any) -> torch.nn.Module:
    """Load a model, and raise an error if the checkpoint does not contain all of its weights.

    Checkpoints of language models often contain no pooler. For feature extraction, such a model is loaded without a pooler.

    Raises:
        ExportError: Weights are missing (transformers would create random ones), or the checkpoint was saved during
            quantization-aware training.
    """
    model, info = from_pretrained(folder, output_loading_info=True, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing and spec.embeds and all("pooler" in name.split(".") for name in missing):
        parameters = inspect.signature(type(model).__init__).parameters
        if "add_pooling_layer" in parameters:
            model, info = from_pretrained(folder, output_loading_info=True, add_pooling_layer=False, **kwargs)
            missing = sorted(info["missing_keys"])
    if missing:
        raise ExportError(
            f"The checkpoint in {folder} lacks {len(missing)} weights of a {type(model).__name__} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}). transformers would fill the missing weights with random numbers.",
            fix="pass task=... with the task that the checkpoint was trained for, or use a complete checkpoint."
            if getattr(getattr(model, "config", None), "quantization_config", None) is None
            else "export the model before its quantization: accel does not read this kind of quantized checkpoint.",
        )
    trained = sorted(name for name in info["unexpected_keys"] if name.endswith(TRAINED_STEPS))
    if trained:
        raise ExportError(
            f"{folder} contains a checkpoint of quantization-aware training (it has the parameter {trained[0]}). transformers ignores "
            "the trained quantization steps when it loads the checkpoint.",
            fix="create the model with from_pretrained, call accel.prepare_qat on the model, load the checkpoint's state dict, and call "
            "accel.export(model, out).",
        )
    loaded: torch.nn.Module = model
    return loaded


def _load_quantized(
    loader: Any, folder: Path, model_config: Any, config: ExportConfig, hub: HubOptions
) -> torch.nn.Module:
    """Load a model with quantized layers.

    Raises:
        ExportError: A dtype other than float32 was requested.
    """
    _check_float32(folder, config)

    def make(**settings: bool) -> torch.nn.Module:
        empty: torch.nn.Module = loader.from_config(model_config, trust_remote_code=hub.trust_remote_code, **settings)
        return empty.float()

    return load_quantized(folder, make)


def _check_float32(folder: Path, config: ExportConfig) -> None:
    """Raise if a dtype other than float32 was requested for a quantized model."""
    if config.dtype != "float32":
        raise ExportError(
            f"{folder} contains a quantized model, which cannot be exported with dtype={config.dtype!r}. Its layers that are not "
            "quantized compute in float32.",
            fix="leave dtype out, or export the original model before quantization.",
        )


def _check_head(loader: Any, config: Any, spec: TaskSpec) -> None:
    """Raise if the class of the checkpoint belongs to another task.

    Loading would not detect this error if the heads of both tasks have the same weight names. For a class with several heads
    (`BertForPreTraining`) or a class outside of transformers, this function does nothing, and `_load_complete` checks the weights.
    """
    names = config.architectures or []
    if spec.embeds or not names:
        return
    supported, fitting = classes_for(loader, config), None
    with contextlib.suppress(TaskError):
        fitting = infer_task(config.to_dict())
    if supported and names[0] not in supported and fitting not in (None, spec.name):
        raise TaskError(
            f"The checkpoint contains a {names[0]}, which has no head for the task {spec.name!r}. transformers would create a head with "
            "random weights.",
            fix=f"pass task={fitting!r}, or leave task out so that accel infers the task.",
        )


def _load_adapter(folder: Path, spec: TaskSpec, kwargs: dict[str, Any], hub: HubOptions) -> torch.nn.Module:
    """Load the base model of a PEFT adapter and merge the adapter into its weights.

    Raises:
        ExportError: PEFT is not installed, or the adapter cannot be merged.
    """
    import transformers

    try:
        import peft
    except ImportError as error:
        raise ExportError(
            f"{folder} contains a PEFT adapter, but the package peft is not installed.", fix="pip install peft"
        ) from error

    extra: dict[str, Any] = {}
    # The adapter contains the trained classification head. The first axis of the head is the number of labels, which is not in the config
    # of the base model.
    shapes = adapter_shapes(folder)
    if heads := [name for name in shapes if re.search(r"(classifier|score|out_proj)\.weight$", name)]:
        extra["num_labels"] = shapes[heads[0]][0]
    config_file = read_config(folder)
    if "id2label" in config_file:
        extra["id2label"] = {int(k): v for k, v in config_file["id2label"].items()}
        extra["label2id"] = {v: int(k) for k, v in config_file["id2label"].items()}
        extra.pop("num_labels", None)
    loader = getattr(transformers, spec.auto_model)
    base = base_of_adapter(folder, hub).folder
    model = loader.from_pretrained(base, **kwargs, **extra)
    fit_embeddings(model, folder, shapes)
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:
        raise ExportError(
            f"The PEFT adapter in {folder} does not fit its base model {base}: {first_lines(error)}",
            fix="set base_model_name_or_path and revision in adapter_config.json to the model that the adapter was trained on.",
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.peft_config[adapted.active_adapter].peft_type
        raise ExportError(
            f"The PEFT adapter in {folder} has the type {getattr(kind, 'value', kind)}, which cannot be merged into the weights of its "
            "base model. accel exports only merged adapters.",
            fix="run the adapter with PEFT, or train a LoRA, DoRA or IA3 adapter.",
        )
    _give_weights_of_their_own(adapted)
    try:
        merged: torch.nn.Module = adapted.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ExportError(
            f"PEFT cannot merge the adapter in {folder} into its base model: {first_lines(error)}",
            fix="run the adapter with PEFT.",
        ) from error
    return merged


def base_of_adapter(folder: Path, hub: HubOptions) -> Location:
    """Return the location of the base model of a PEFT adapter. The adapter's config contains the model's name and revision.

    Raises:
        ArtifactNotFoundError: The base model is neither a folder nor on the Hub.
    """
    from ..artifact.hub import locate

    settings = read_json(folder / "adapter_config.json")
    options = replace(hub, subfolder="", revision=settings.get("revision"))
    return locate(settings["base_model_name_or_path"], options, want_graph=False)


def code_elsewhere(folder: Path, hub: HubOptions) -> list[str]:
    """Return identifiers of the versions of custom code that a model uses from other repositories.

    A model refers to such code in its config, with `auto_map: {...: "OWNER/NAME--FILE.CLASS"}`. An identifier contains the commit in the
    Hub cache, or the checksums of the files in a local folder.
    """
    from transformers.utils import cached_file

    auto_map = read_config(folder).get("auto_map") if (folder / "config.json").is_file() else None
    names = [name for name in (auto_map or {}).values() if isinstance(name, str) and "--" in name]
    identifiers = []
    for repository, _, name in sorted({name.partition("--") for name in names}):
        if Path(repository).is_dir():
            identifiers += [f"{path.name}:{sha256(path)}" for path in sorted(Path(repository).glob("*.py"))]
            continue
        cached = cached_file(
            repository, f"{name.partition('.')[0]}.py", cache_dir=hub.cache_dir, token=hub.token,
            local_files_only=hub.local_files_only,
            _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        identifiers.append(f"{repository}:{Path(cached).parent.name if cached else ''}")
    return identifiers


def _give_weights_of_their_own(adapted: Any) -> None:
    """Give each layer with an adapter its own copy of a weight that it shares with other layers, such as tied embeddings.

    Without the copy, merging an adapter of the input embeddings would also change the output embeddings.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
    uses = Counter(id(weight) for module in adapted.modules() if (weight := _own_weight(module)) is not None)
    for layer in layers:
        weight = _own_weight(layer)
        if weight is not None and uses[id(weight)] > 1:
            uses[id(weight)] -= 1
            layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
            adapted.config.tie_word_embeddings = False


def _own_weight(module: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the parameter `weight` of a module, or `None` if the module has none.

    A wrapper of an adapter has no parameter `weight`, although its attribute `weight` is the weight of the layer inside.
    """
    return dict(module.named_parameters(recurse=False)).get("weight")


def _with_head(spec: TaskSpec, settings: SentenceSettings | None) -> TaskSpec:
    """Return the spec of a task with the auto class that loads the head of a sentence-transformers model, such as a language model's."""
    if settings is None or not settings.auto_model or settings.kind not in spec.sentence_kinds:
        return spec
    return replace(spec, auto_model=settings.auto_model, more_auto_models=())


def _embedding_heads(
    spec: TaskSpec, settings: SentenceSettings | None, config: ExportConfig
) -> dict[str, torch.nn.Module]:
    """Return the modules that compute embeddings by output name, or none if the graph returns hidden states.

    The settings are read from the export config, then from the sentence-transformers files in the folder, and then from the task.
    """
    if not spec.embeds:
        if config.pooling or config.normalize:
            raise TaskError(
                f"The options pooling and normalize apply only to embedding tasks, and the task is {spec.name!r}.",
                fix="leave out pooling and normalize, or pass task='feature-extraction'.",
            )
        return {}
    if not (spec.pooling or config.pooling or config.normalize):
        return {}
    # For a task without pooling (feature extraction), the sentence-transformers modules in the folder are ignored.
    used = settings if spec.pooling else None
    return embedding_heads(used, pooling=config.pooling, normalize=config.normalize, default=spec.pooling or "mean")
