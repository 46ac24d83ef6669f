"""Reads a model for a task: from a transformers folder, an adapter, or memory."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..artifact import MANIFEST, Origin
from ..config import ExportConfig
from ..errors import AccelError, ArtifactNotFoundError, ExportError, TaskError
from ..hub import HubOptions, Location
from ..tasks import infer_task, read_config, task_spec
from .samples import Axes, default_sample, known_axes, max_sizes_of, resize, safe_sizes
from .source import Source, quiet
from .wrappers import SentenceEmbedder


def load_source(
    model: Location | torch.nn.Module,
    *,
    task: str | None,
    config: ExportConfig,
    hub: HubOptions,
    sample: Mapping[str, torch.Tensor] | None = None,
    axes: Axes | None = None,
) -> Source:
    """Read a model and prepare what it is traced with.

    Args:
        model: A transformers folder, a folder with a PEFT adapter (merged), or a module in memory.
        task: Its task; inferred from its config when `None`.
        config: How it will be captured.
        hub: For adapters, whose base model may be elsewhere.
        sample: Inputs to trace with instead of our own. A single row, a short sequence or a mask without padding is
            repaired.
        axes: Names of the axes of `sample` that may vary; needed for `custom`.

    Raises:
        ArtifactNotFoundError: The folder holds no model.
        TaskError: The task is unknown or does not fit the model.
        ExportError: The model cannot be loaded, or no inputs can be made for it.
    """
    if isinstance(model, torch.nn.Module):
        module, folder = model, None
        model_config: Any = getattr(module, "config", None)
        values = model_config.to_dict() if model_config is not None else {}
        task = task_spec(task).name if task else ("custom" if not values else _infer(module, values))
        name = values.get("_name_or_path") or type(module).__name__
        origin = Origin(id=str(name), digest=None)
        module = module.to(getattr(torch, config.dtype))
    else:
        folder = model.folder
        values = read_config(folder)
        adapter = folder / "adapter_config.json"
        if not values and not adapter.is_file():
            raise ArtifactNotFoundError(
                f"{folder} holds no model: it has neither config.json nor adapter_config.json.", fix="check the path."
            )
        _check_not_exported(folder)
        task = task_spec(task).name if task else None if adapter.is_file() else infer_task(values, folder)
        module, task = _load_module(folder, task, config, hub, adapter.is_file())
        origin = Origin(id=model.id, revision=model.revision, digest=folder_digest(folder))
    module = module.eval()
    pooling, normalize = _pooling(task, folder, config)
    if pooling:
        module = SentenceEmbedder(module, pooling, normalize).eval()
    if sample is None:
        example, axes, unused = default_sample(module, folder)
    else:
        example, axes, unused = dict(sample), axes or known_axes(sample), ()
        sizes = safe_sizes(example, axes)
        example = resize(example, axes, sizes, getattr(module, "config", None), seed=0)
    limits = max_sizes_of(module, axes)
    return Source(
        model=module,
        task=task,
        folder=folder,
        origin=origin,
        example=example,
        axes=axes,
        max_sizes=limits,
        unused_inputs=unused,
        dtype=config.dtype,
    )


def _check_not_exported(folder: Path) -> None:
    """Refuse an artifact, which holds a graph and no weights to load."""
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if (folder / MANIFEST).is_file() and not weights:
        raise ArtifactNotFoundError(
            f"{folder} is an exported artifact already and holds no PyTorch weights.",
            fix="load it with ORTModelFor...from_pretrained, or export the model it was made from.",
        )


def _infer(module: torch.nn.Module, values: Mapping[str, Any]) -> str:
    return infer_task({**values, "architectures": [type(module).__name__]})


def _load_module(
    folder: Path, task: str | None, config: ExportConfig, hub: HubOptions, adapter: bool
) -> tuple[torch.nn.Module, str]:
    import transformers

    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "trust_remote_code": hub.trust_remote_code,
        "local_files_only": True,
    }
    try:
        with quiet():
            if adapter:
                return _load_adapter(folder, task, kwargs, hub)
            assert task is not None
            spec = task_spec(task)
            if spec.auto_model:
                loader = getattr(transformers, spec.auto_model)
                supported = loader._model_mapping
                model_config = transformers.AutoConfig.from_pretrained(
                    folder, trust_remote_code=hub.trust_remote_code, local_files_only=True
                )
                if type(model_config) not in supported and not hasattr(model_config, "auto_map"):
                    raise TaskError(
                        f"A {model_config.model_type} model cannot do {task}: transformers has no {spec.auto_model} for it.",
                        fix="pass a task that fits the model, or leave it out to infer it.",
                    )
                _check_head(loader, model_config, task)
                return _load_complete(loader, folder, task, config=model_config, **kwargs), task
            architecture = read_config(folder).get("architectures", [""])[0]
            return _load_complete(getattr(transformers, architecture), folder, task, **kwargs), task
    # transformers and code that comes with the model, which may raise anything.
    except Exception as error:
        if isinstance(error, AccelError):
            raise
        raise ExportError(
            f"transformers cannot load a model from {folder}: {error}", fix="check that the folder holds its weights."
        ) from error


def _load_complete(loader: Any, folder: Path, task: str, **kwargs: Any) -> torch.nn.Module:
    """A model all of whose weights come from the folder.

    The pooler that language models' checkpoints lack is left out of a model that makes features.

    Raises:
        ExportError: Weights are missing; transformers would make random ones.
    """
    model, info = loader.from_pretrained(folder, output_loading_info=True, **kwargs)
    missing = sorted(info["missing_keys"])
    features = task in ("feature-extraction", "sentence-similarity")
    if missing and features and all("pooler" in name.split(".") for name in missing):
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
    loaded: torch.nn.Module = model
    return loaded


def _check_head(loader: Any, config: Any, task: str) -> None:
    """Refuse a task whose head the checkpoint does not have: transformers would make a random one."""
    names = config.architectures or []
    if task in ("feature-extraction", "sentence-similarity") or not names:
        return
    wanted = loader._model_mapping.get(type(config), None)
    known = wanted if isinstance(wanted, (list, tuple)) else (wanted,)
    if wanted is not None and names[0] not in {cls.__name__ for cls in known if cls is not None}:
        raise TaskError(
            f"The checkpoint holds a {names[0]}, whose weights have no head for {task}; transformers would make a random one.",
            fix=f"pass a task that fits the model ({_fitting(names[0])}), or leave it out to infer it.",
        )


def _fitting(architecture: str) -> str:
    try:
        return infer_task({"architectures": [architecture]})
    except TaskError:
        return "feature-extraction"


def _load_adapter(
    folder: Path, task: str | None, kwargs: dict[str, Any], hub: HubOptions
) -> tuple[torch.nn.Module, str]:
    """Load the base model of a PEFT adapter and merge the adapter into its weights."""
    import transformers
    from safetensors import safe_open

    from ..hub import locate

    try:
        import peft
    except ImportError as error:
        raise ExportError(
            f"{folder} holds a PEFT adapter, and peft is not installed.", fix="pip install peft"
        ) from error

    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = locate(settings["base_model_name_or_path"], replace(hub, subfolder="", revision=None), want_graph=False)
    task_of = {
        "SEQ_CLS": "text-classification",
        "TOKEN_CLS": "token-classification",
        "QUESTION_ANS": "question-answering",
    }
    task = task or task_of.get(settings.get("task_type") or "", "feature-extraction")
    extra = {}
    # The adapter holds the trained head; its first axis is the number of labels, which the base model does not know.
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        with safe_open(weights, framework="pt") as file:
            heads = [k for k in file.keys() if re.search(r"(classifier|score|out_proj)\.weight$", k)]  # noqa: SIM118
            if heads:
                extra["num_labels"] = file.get_slice(heads[0]).get_shape()[0]
    config_file = read_config(folder)
    if "id2label" in config_file:
        extra["id2label"] = {int(k): v for k, v in config_file["id2label"].items()}
        extra["label2id"] = {v: int(k) for k, v in config_file["id2label"].items()}
        extra.pop("num_labels", None)
    loader = getattr(transformers, task_spec(task).auto_model)
    model = loader.from_pretrained(base.folder, **kwargs, **extra)
    merged = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return merged, task


def _pooling(task: str, folder: Path | None, config: ExportConfig) -> tuple[str | None, bool]:
    """Pooling and normalisation from the config, else from sentence-transformers' files, else the task's default."""
    if task not in ("feature-extraction", "sentence-similarity"):
        if config.pooling or config.normalize:
            raise TaskError(f"pooling and normalize are for embeddings, not for {task}.", fix="leave them out.")
        return None, False
    pooling: str | None = config.pooling
    normalize = config.normalize
    modules = folder / "modules.json" if folder else None
    if modules is not None and modules.is_file() and task == "sentence-similarity":
        for entry in json.loads(modules.read_text(encoding="utf-8")):
            kind = entry["type"].rsplit(".", 1)[-1]
            if kind == "Pooling" and pooling is None:
                pooling = _sentence_transformers_pooling(modules.parent / entry["path"] / "config.json")
            elif kind == "Normalize" and normalize is None:
                normalize = True
            elif kind not in ("Transformer", "Pooling", "Normalize"):
                raise ExportError(
                    f"The sentence-transformers module {kind} cannot be put into the graph.",
                    fix="export with task='feature-extraction' and do the rest outside.",
                )
    if pooling is None and (task == "sentence-similarity" or normalize):
        pooling = "mean"
    return pooling, bool(normalize)


def _sentence_transformers_pooling(path: Path) -> str:
    settings = json.loads(path.read_text(encoding="utf-8"))
    modes = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
    modes["pooling_mode_lasttoken"] = "last"
    chosen = [name for key, name in modes.items() if settings.get(key)]
    if settings.get("pooling_mode") in modes.values():
        chosen = [settings["pooling_mode"]]
    if len(chosen) != 1:
        raise ExportError(f"{path} asks for a pooling that cannot be put into the graph.", fix="pass pooling=...")
    return chosen[0]


def folder_digest(folder: Path) -> str:
    """Identifies the model files of a folder by name, size and modification time, and its configs by content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            stat = path.stat()
            digest.update(f"{path.relative_to(folder)}:{stat.st_size}:{stat.st_mtime_ns};".encode())
            if path.suffix == ".json" and stat.st_size < 1 << 20:
                digest.update(path.read_bytes())
    return digest.hexdigest()
