"""Reads a model for a task: from a transformers folder, an adapter, or memory."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..artifact.checksums import folder_digest, sha256
from ..artifact.hub import HubOptions, Location
from ..artifact.manifest import Origin
from ..artifact.reading import read_json
from ..artifact.sentence_settings import sentence_settings
from ..config import ExportConfig
from ..errors import AccelError, ExportError, TaskError
from ..interfaces.family import Axes
from ..interfaces.family_registry import family_of
from ..interfaces.task_registry import infer_task, is_adapter, load_task, read_config
from ..interfaces.task_spec import TaskSpec
from ..interfaces.wrapper import Wrapper, unwrapped
from ..upstream.auto_models import classes_for
from ..upstream.library_output import quiet
from .adapter_embeddings import adapter_shapes, fit_embeddings
from .layer_outputs import WithInnerStates
from .output_selection import Answering
from .position_limits import max_sizes_of
from .process_lock import one_thread_at_a_time
from .quantized_linears import TRAINED_STEPS, holds_quantized, load_quantized, origin_of, without_training
from .reference_cases import own_defaults_of
from .row_pooling import answering_by_row
from .samples import check_sample, default_sample, known_axes, resize, safe_sizes, same_draws, tokenizer_names
from .sentence_embeddings import SentenceEmbedder, SentenceLayers, sentence_layers
from .source import Source
from .speech_samples import longest_sound


@contextlib.contextmanager
def modes_kept(model: object) -> Iterator[None]:
    """Parts of a module in memory that train do so again in the end."""
    training = [one for one in model.modules() if one.training] if isinstance(model, torch.nn.Module) else []
    try:
        yield
    finally:
        for one in training:
            one.training = True


def _in_dtype(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A module whose weights are of that type: a copy where they are of another, since the given one is the caller's."""
    weights = (*module.parameters(), *module.buffers())
    if all(one.dtype is dtype or not one.is_floating_point() for one in weights):
        return module
    # Those that stay as they are, are not copied.
    return copy.deepcopy(module, {id(one): one for one in weights if one.dtype is dtype}).to(dtype)


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
) -> Source:
    """Read a model and prepare what it is traced with.

    Args:
        model: A transformers folder, a folder with a PEFT adapter (merged), or a module in memory.
        task: Its task.
        config: How it will be captured.
        hub: For adapters, whose base model may be elsewhere.
        sample: Inputs to trace with instead of our own. A single row, a short sequence or a mask without padding is
            repaired.
        axes: Names of the axes of `sample` that may vary; needed for `custom`.
        weights: `False` leaves the weights where they are: the model's shape alone, which cannot run.

    Raises:
        TaskError: The task does not fit the model.
        ExportError: The model cannot be loaded, or no inputs can be made for it.
    """
    work = load_task(task)
    spec = work.spec
    if isinstance(model, torch.nn.Module):
        module, folder = model, None
        values: dict[str, Any] = getattr(getattr(module, "config", None), "to_dict", dict)()
        origin = Origin(id=str(values.get("_name_or_path") or type(module).__name__), digest=None)
        module = _plain_forward(module)
        module = _in_dtype(without_training(module), getattr(torch, config.dtype))
    else:
        folder = model.folder
        module = _load_module(folder, spec, config, hub, weights)
        origin = origin_of(folder) or Origin(id=model.id, revision=model.revision, digest=folder_digest(folder))
    family = family_of(getattr(module, "config", None))
    module = family.traced_module(answering_by_row(module)).eval()
    if config.output_hidden_states or config.output_attentions:
        if spec.generates or not work.traced_as_is or (isinstance(module, Wrapper) and not module.returns_layers):
            raise TaskError(
                f"A graph for {spec.name} returns no hidden states or attentions.",
                fix="export with task='feature-extraction', or leave output_hidden_states and output_attentions out.",
            )
        module = WithInnerStates(
            module, hidden_states=config.output_hidden_states, attentions=config.output_attentions
        ).eval()
    layers = _sentence_layers(spec, folder, config)
    if layers is not None:
        module = SentenceEmbedder(module, layers).eval()
    elif spec.keeps:
        module = Answering(module, spec.keeps).eval()
    module = work.traced(module).eval()
    if sample is None:
        # From the start again: a model that is loaded may have drawn, one in memory has not.
        with same_draws():
            inner = unwrapped(module)
            example, axes, unused = family.sample(inner, work.sample(module, folder) or default_sample(module, folder))
    else:
        check_sample(sample, axes)
        example, axes, unused = dict(sample), axes or known_axes(sample), ()
        sizes = safe_sizes(example, axes)
        example = resize(example, axes, sizes, getattr(module, "config", None), seed=0)
    own = own_defaults_of(module, example) if weights and not spec.generates else ()
    if sample is None:
        # Where the tokenizer leaves them out, the graph computes them, too.
        left_out = {name for name in own if name not in tokenizer_names(folder)}
        example = {name: tensor for name, tensor in example.items() if name not in left_out}
        axes = {name: named for name, named in axes.items() if name not in left_out}
    if spec.generates:
        # Encoders of sounds compute in the dtype of what they hear.
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
        own_defaults=own,
        dtype=config.dtype,
    )


def _load_module(folder: Path, spec: TaskSpec, config: ExportConfig, hub: HubOptions, weights: bool) -> torch.nn.Module:
    import transformers

    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": hub.trust_remote_code,
        "local_files_only": True,
    }
    try:
        with quiet():
            if is_adapter(folder):
                return _load_adapter(folder, spec, kwargs, hub)
            if (made := load_task(spec.name).load(folder, **kwargs)) is not None:
                return made if weights else made.to("meta")
            if not spec.auto_model:
                architecture = read_config(folder).get("architectures", [""])[0]
                return _load_complete(getattr(transformers, architecture), folder, spec, **kwargs)
            model_config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=hub.trust_remote_code, local_files_only=True
            )
            loader = loader_for(spec, model_config)
            if not classes_for(loader, model_config) and not hasattr(model_config, "auto_map"):
                raise TaskError(
                    f"A {model_config.model_type} model cannot do {spec.name}: transformers has no {spec.auto_model} for it.",
                    fix="pass a task that fits the model, or leave it out to infer it.",
                )
            _check_head(loader, model_config, spec)
            if not weights:
                with torch.device("meta"):
                    shape: torch.nn.Module = loader.from_config(
                        model_config, dtype=kwargs["dtype"], trust_remote_code=hub.trust_remote_code
                    )
                return shape
            if holds_quantized(folder):
                return _load_quantized(loader, folder, model_config, config, hub)
            return _load_complete(loader, folder, spec, config=model_config, **kwargs)
    # transformers and code that comes with the model, which may raise anything.
    except Exception as error:
        if isinstance(error, AccelError):
            raise
        raise ExportError(
            f"transformers cannot load a model from {folder}: {error}", fix="check that the folder holds its weights."
        ) from error


def loader_for(spec: TaskSpec, config: Any) -> Any:
    """The auto class that has the architecture which the config names; else one that has a class for the config, or the first."""
    import transformers

    loaders = [getattr(transformers, name) for name in spec.auto_models]
    having = [loader for loader in loaders if classes_for(loader, config)]
    named = (config.architectures or [""])[0]
    return next((loader for loader in having if named in classes_for(loader, config)), (having or loaders)[0])


def _plain_forward(module: torch.nn.Module) -> torch.nn.Module:
    """The module without what was put around its `forward`: `Trainer` leaves automatic mixed precision there (`bf16=True`), which is
    no part of the model. The given module stays as it is.

    Raises:
        ExportError: It is accelerated: compiled code cannot be captured.
    """
    if hasattr(vars(module).get("acceleration"), "restore"):
        raise ExportError(
            f"The {type(module).__name__} is accelerated, and compiled code cannot be exported.",
            fix="call model.restore() first.",
        )
    original = vars(module).get("_original_forward")
    if original is None or getattr(original, "__func__", None) is not type(module).forward:
        return module
    made = copy.copy(module)
    for name in ("forward", "_original_forward"):
        vars(made).pop(name, None)
    return made


def _load_complete(loader: Any, folder: Path, spec: TaskSpec, **kwargs: Any) -> torch.nn.Module:
    """A model all of whose weights come from the folder.

    The pooler that language models' checkpoints lack is left out of a model that makes features.

    Raises:
        ExportError: Weights are missing (transformers would make random ones), or they are in training for integers.
    """
    model, info = loader.from_pretrained(folder, output_loading_info=True, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing and spec.embeds and all("pooler" in name.split(".") for name in missing):
        parameters = inspect.signature(type(model).__init__).parameters
        if "add_pooling_layer" in parameters:
            model, info = loader.from_pretrained(folder, output_loading_info=True, add_pooling_layer=False, **kwargs)
            missing = sorted(info["missing_keys"])
    if missing:
        raise ExportError(
            f"The checkpoint in {folder} lacks {len(missing)} weights of a {type(model).__name__} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); transformers would make random ones.",
            fix="pass a task that the weights have a head for, or take a checkpoint that is complete.",
        )
    trained = sorted(name for name in info["unexpected_keys"] if name.endswith(TRAINED_STEPS))
    if trained:
        raise ExportError(
            f"{folder} holds a model in training for integers ({trained[0]}); its weights alone are not rounded as they were.",
            fix="make the model as before (from_pretrained, accel.prepare_qat), load the checkpoint's state dict into it, and export "
            "that model: accel.export(model, out).",
        )
    loaded: torch.nn.Module = model
    return loaded


def _load_quantized(
    loader: Any, folder: Path, model_config: Any, config: ExportConfig, hub: HubOptions
) -> torch.nn.Module:
    """A model with quantized layers.

    Raises:
        ExportError: Another dtype than float32 was asked for.
    """
    if config.dtype != "float32":
        raise ExportError(
            f"{folder} holds a quantized model, which computes in float32 around its integers, not in {config.dtype}.",
            fix="leave dtype out, or export the model that it was made from.",
        )

    def make(**settings: bool) -> torch.nn.Module:
        made: torch.nn.Module = loader.from_config(model_config, trust_remote_code=hub.trust_remote_code, **settings)
        return made.float()

    return load_quantized(folder, make)


def _check_head(loader: Any, config: Any, spec: TaskSpec) -> None:
    """Refuse a class of another task: its head may have weights of the same names.

    Of a class with several heads (`BertForPreTraining`), or one that transformers does not have, the weights tell; see `_load_complete`.
    """
    names = config.architectures or []
    if spec.embeds or not names:
        return
    known = classes_for(loader, config)
    fitting = _fitting(config)
    if known and names[0] not in known and fitting not in (None, spec.name):
        raise TaskError(
            f"The checkpoint holds a {names[0]}, whose weights have no head for {spec.name}; transformers would make a random one.",
            fix=f"pass a task that fits the model ({fitting}), or leave it out to infer it.",
        )


def _fitting(config: Any) -> str | None:
    """The task of a config's architecture; `None` where it has none."""
    try:
        return infer_task(config.to_dict())
    except TaskError:
        return None


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
            f"{folder} holds a PEFT adapter, and peft is not installed.", fix="pip install peft"
        ) from error

    extra: dict[str, Any] = {}
    # The adapter holds the trained head; its first axis is the number of labels, which the base model does not know.
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
            f"The adapter in {folder} does not fit its base model {base}: {_one_line(error)}",
            fix="check base_model_name_or_path and revision in adapter_config.json: the model that it was trained on.",
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.peft_config[adapted.active_adapter].peft_type
        raise ExportError(
            f"{folder} holds an adapter of the kind {getattr(kind, 'value', kind)}, which cannot be merged into the weights of a model.",
            fix="run it with PEFT, or train LoRA, DoRA or IA3, which can be merged.",
        )
    _give_weights_of_their_own(adapted)
    try:
        merged: torch.nn.Module = adapted.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ExportError(
            f"PEFT cannot merge the adapter in {folder} into its model: {_one_line(error)}", fix="run it with PEFT."
        ) from error
    return merged


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def base_of_adapter(folder: Path, hub: HubOptions) -> Location:
    """The model that a PEFT adapter was trained on, in the revision that the adapter names.

    Raises:
        ArtifactNotFoundError: It is neither a folder nor on the Hub.
    """
    from ..artifact.hub import locate

    settings = read_json(folder / "adapter_config.json")
    told = replace(hub, subfolder="", revision=settings.get("revision"))
    return locate(settings["base_model_name_or_path"], told, want_graph=False)


def code_elsewhere(folder: Path, hub: HubOptions) -> list[str]:
    """What identifies the code of a model that lies in other repositories than its own (`auto_map: {...: "OWNER/NAME--FILE.CLASS"}`):
    the commit that the Hub's cache has, or a folder's modules.
    """
    from transformers.utils import cached_file

    told = read_config(folder).get("auto_map") if (folder / "config.json").is_file() else None
    names = [name for name in (told or {}).values() if isinstance(name, str) and "--" in name]
    found = []
    for repository, _, name in sorted({name.partition("--") for name in names}):
        if Path(repository).is_dir():
            found += [f"{path.name}:{sha256(path)}" for path in sorted(Path(repository).glob("*.py"))]
            continue
        kept = cached_file(
            repository, f"{name.partition('.')[0]}.py", cache_dir=hub.cache_dir, token=hub.token,
            local_files_only=hub.local_files_only,
            _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        found.append(f"{repository}:{Path(kept).parent.name if kept else ''}")
    return found


def _give_weights_of_their_own(adapted: Any) -> None:
    """Copy the tables that adapted layers share with others: merged into a shared one, an adapter of a model's input would change its
    output, too, where the model before it was merged does not.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [one.get_base_layer() for one in adapted.modules() if isinstance(one, BaseTunerLayer)]
    uses = Counter(
        id(one.weight)
        for one in adapted.modules()
        if isinstance(vars(one)["_parameters"].get("weight"), torch.nn.Parameter)
    )
    for layer in layers:
        weight = vars(layer)["_parameters"].get("weight")
        if weight is not None and uses[id(weight)] > 1:
            uses[id(weight)] -= 1
            layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
            adapted.config.tie_word_embeddings = False


def _sentence_layers(spec: TaskSpec, folder: Path | None, config: ExportConfig) -> SentenceLayers | None:
    """Pooling and the modules after it: from the config, else from sentence-transformers' files, else the task's default; `None` where
    the graph returns hidden states alone.
    """
    if not spec.embeds:
        if config.pooling or config.normalize:
            raise TaskError(f"pooling and normalize are for embeddings, not for {spec.name}.", fix="leave them out.")
        return None
    if not (spec.pooling or config.pooling or config.normalize):
        return None
    # Features of a folder are what is asked for, whatever its own modules make of them.
    settings = sentence_settings(folder) if folder is not None and spec.pooling else None
    return sentence_layers(settings, pooling=config.pooling, normalize=config.normalize, default=spec.pooling or "mean")
