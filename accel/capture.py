"""PyTorch model to graph: the only contact with `transformers.exporters`.

`load_source` reads a model for a task, `Source.sample` makes the inputs it is traced with, `capture_onnx` (or
`capture_openvino`) traces it and repairs or refuses what the trace got wrong, and `reference_cases` with
`max_difference` compare the result with the model on other shapes. A trace follows one set of inputs, and what it did
not see it cannot keep: an all-ones mask is dropped from decoder graphs, and an axis of size 1 becomes a constant. So the
samples are ours: two rows or more, unequal sizes, and padding in the mask.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .artifact import MANIFEST, Origin
from .config import ExportConfig
from .errors import AccelError, ArtifactNotFoundError, ExportError, InputError, TaskError
from .hub import HubOptions, Location
from .specs import TensorSpec
from .tasks import infer_task, read_config, task_spec

if TYPE_CHECKING:
    import onnx_ir
    from torch.export import ExportedProgram
    from transformers.exporters import ExportedModel

logger = logging.getLogger(__name__)

SAMPLE_BATCH = 2
SAMPLE_SEQUENCE = 5
SAMPLE_CHOICES = 3
_CHATTY = ("transformers", "torch", "onnxscript", "onnx_ir", "onnx")
_POSITIONS = re.compile(r"(^|[._])(position_embeddings?|embed_positions|wpe|pos_embed\w*)$")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence upstream prints, warnings and log lines, unless `accel`'s own logger is at DEBUG (`--verbose`)."""
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    from transformers.utils import logging as transformers_logging

    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    onnx_loggers = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    levels |= {name: logging.getLogger(name).level for name in onnx_loggers}
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


Tensors = dict[str, torch.Tensor]
Axes = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A PyTorch model about to be exported.

    Attributes:
        model: In evaluation mode, in the dtype to export.
        task: Its task.
        folder: Where its config and processor files are; `None` for a model made in memory.
        origin: Where it came from, for the manifest.
        example: Inputs it is traced with.
        axes: Names of the axes that may vary, by input and position.
        max_sizes: Largest size of an axis, where the model has a limit.
        unused_inputs: Inputs that its result does not depend on.
        dtype: Element type of its weights.
    """

    model: torch.nn.Module
    task: str
    folder: Path | None
    origin: Origin
    example: Tensors
    axes: Axes
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    unused_inputs: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def config(self) -> Any:
        """The transformers config, or `None` for a plain module."""
        return getattr(self.model, "config", None)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        inner = self.model.model if isinstance(self.model, SentenceEmbedder) else self.model
        return type(inner).__name__

    def sample(self, sizes: Mapping[str, int], *, seed: int = 0) -> Tensors:
        """Inputs like the example with other axis sizes: random values, and padding where there is a mask."""
        return _resize(self.example, self.axes, sizes, self.config, seed)


class SentenceEmbedder(torch.nn.Module):
    """A model with pooling and normalisation behind it, so that the graph returns sentence embeddings.

    Returns `last_hidden_state: (batch, sequence, hidden)` and `sentence_embedding: (batch, hidden)`.
    """

    def __init__(self, model: torch.nn.Module, pooling: str, normalize: bool) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.pooling = pooling
        self.normalize = normalize

    def forward(self, attention_mask: torch.Tensor, **inputs: torch.Tensor) -> Tensors:
        """Run the model, pool its last hidden state over the tokens that `attention_mask` keeps."""
        hidden = self.model(attention_mask=attention_mask, **inputs).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = hidden.masked_fill(mask == 0, torch.finfo(hidden.dtype).min).amax(1)
        elif self.pooling == "last":
            # The last kept position, wherever the padding is.
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            last = (attention_mask * positions).argmax(1)
            pooled = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
        else:
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        if self.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        return {"last_hidden_state": hidden, "sentence_embedding": pooled}


# Loading


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
        example, axes, unused = _default_sample(module, folder)
    else:
        example, axes, unused = dict(sample), axes or _known_axes(sample), ()
        sizes = _safe_sizes(example, axes)
        example = _resize(example, axes, sizes, getattr(module, "config", None), seed=0)
    limits = _max_sizes(module, axes)
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
                return loader.from_pretrained(folder, config=model_config, **kwargs), task
            architecture = read_config(folder).get("architectures", [""])[0]
            return getattr(transformers, architecture).from_pretrained(folder, **kwargs), task
    # transformers and code that comes with the model, which may raise anything.
    except Exception as error:
        if isinstance(error, AccelError):
            raise
        raise ExportError(
            f"transformers cannot load a model from {folder}: {error}", fix="check that the folder holds its weights."
        ) from error


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

    from .hub import locate

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


# Samples


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    inner = module.model if isinstance(module, SentenceEmbedder) else module
    return inspect.signature(inner.forward).parameters


def _default_sample(module: torch.nn.Module, folder: Path | None) -> tuple[Tensors, Axes, tuple[str, ...]]:
    """Inputs for a transformers model, from what its forward takes and its config says."""
    config = getattr(module, "config", None)
    inner = module.model if isinstance(module, SentenceEmbedder) else module
    main = getattr(inner, "main_input_name", None)
    if config is None or main not in ("input_ids", "pixel_values"):
        raise ExportError(
            f"No inputs can be made for a {type(inner).__name__}.",
            fix="pass sample={name: tensor} and, for names other than a transformers model's, axes={name: {0: 'batch'}}.",
        )
    if main == "pixel_values":
        height, width = _image_size(config, folder)
        pixels = torch.randn(SAMPLE_BATCH, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": pixels}, {"pixel_values": {0: "batch"}}, ()
    names, unused = _text_inputs(module, config)
    choices = type(inner).__name__.endswith("ForMultipleChoice")
    shape = (SAMPLE_BATCH, SAMPLE_CHOICES, SAMPLE_SEQUENCE) if choices else (SAMPLE_BATCH, SAMPLE_SEQUENCE)
    axis_names = ("batch", "choices", "sequence") if choices else ("batch", "sequence")
    axes = {name: dict(enumerate(axis_names)) for name in names}
    example = {name: torch.ones(shape, dtype=torch.int64) for name in names}
    sizes = dict(zip(axis_names, shape, strict=True))
    return _resize(example, axes, sizes, config, seed=0), axes, unused


def _text_inputs(module: torch.nn.Module, config: Any) -> tuple[list[str], tuple[str, ...]]:
    """What a text model is given, and which inputs it takes but ignores."""
    parameters = _parameters(module)
    names = ["input_ids"]
    if "attention_mask" in parameters:
        names.append("attention_mask")
    if "token_type_ids" in parameters:
        # A table of one row (RoBERTa) or none (DeBERTa-v2) adds the same to every token.
        if getattr(config, "type_vocab_size", 2) > 1:
            names.append("token_type_ids")
        else:
            return names, ("token_type_ids",)
    return names, ()


def _image_size(config: Any, folder: Path | None) -> tuple[int, int]:
    """Height and width in pixels: the model's own, else its processor's, else 224."""
    size = getattr(config, "image_size", None)
    if size is None and folder is not None and (folder / "preprocessor_config.json").is_file():
        settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        size = settings.get("crop_size") or settings.get("size")
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge", 224)
        return int(size.get("height", edge)), int(size.get("width", edge))
    if isinstance(size, Sequence):
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if size else (224, 224)


def _known_axes(sample: Mapping[str, torch.Tensor]) -> Axes:
    """Axes of inputs whose names are a transformers model's."""
    text = {2: ("batch", "sequence"), 3: ("batch", "choices", "sequence")}
    axes: dict[str, dict[int, str]] = {}
    for name, tensor in sample.items():
        if name in ("input_ids", "attention_mask", "token_type_ids", "position_ids") and tensor.ndim in text:
            axes[name] = dict(enumerate(text[tensor.ndim]))
        elif name == "pixel_values":
            axes[name] = {0: "batch"}
        else:
            raise InputError(
                f"Which axes of the sample's {name!r} {tuple(tensor.shape)} vary is not known.",
                fix=f"pass axes={{{name!r}: {{0: 'batch'}}, ...}}; leave an axis out to fix its size.",
            )
    return axes


def _safe_sizes(sample: Mapping[str, torch.Tensor], axes: Axes) -> dict[str, int]:
    """Sizes that a trace can tell apart: at least 2, a sequence of at least 3, all different."""
    sizes: dict[str, int] = {}
    for name, named in axes.items():
        if name not in sample:
            raise InputError(f"axes names {name!r}, which the sample {sorted(sample)} does not hold.")
        for position, axis in named.items():
            size = int(sample[name].shape[position])
            if sizes.setdefault(axis, size) != size:
                raise InputError(f"The axis {axis!r} has sizes {sizes[axis]} and {size} in one sample.")
    taken: set[int] = set()
    for axis, size in sizes.items():
        size = max(size, 3 if axis == "sequence" else 2)
        while size in taken:
            size += 1
        taken.add(size)
        sizes[axis] = size
    return sizes


def _resize(
    example: Mapping[str, torch.Tensor], axes: Axes, sizes: Mapping[str, int], config: Any, seed: int
) -> Tensors:
    """Inputs with the example's names, types and fixed axes, and `sizes` for the named ones.

    Token ids are drawn anew; other tensors are repeated up to size with a little noise on floating-point ones. A mask
    gets padding at the end of every second row, and padded tokens the padding id, as a tokenizer does.
    """
    generator = torch.Generator().manual_seed(seed)
    resized: Tensors = {}
    for name, tensor in example.items():
        named = axes.get(name, {})
        shape = [sizes.get(named[i], n) if i in named else n for i, n in enumerate(tensor.shape)]
        if name == "input_ids":
            resized[name] = _token_ids(shape, config, generator)
        elif name == "attention_mask":
            resized[name] = _padded_mask(shape, tensor.dtype)
        elif name == "token_type_ids":
            types = min(2, int(getattr(config, "type_vocab_size", 2) or 1))
            resized[name] = torch.randint(0, types, shape, generator=generator, dtype=tensor.dtype)
        else:
            value = tensor
            for i, size in enumerate(shape):
                if size != value.shape[i]:
                    repeats = [1] * value.ndim
                    repeats[i] = -(-size // max(value.shape[i], 1))
                    value = value.repeat(repeats).narrow(i, 0, size)
            if value.is_floating_point():
                value = value + 0.1 * torch.randn(value.shape, generator=generator).to(value.dtype)
            resized[name] = value.contiguous()
    if "attention_mask" in resized and "input_ids" in resized:
        ids, mask = resized["input_ids"], resized["attention_mask"]
        if ids.shape == mask.shape:
            ids[mask == 0] = _pad_id(config)
    return resized


def _pad_id(config: Any) -> int:
    value = getattr(config, "pad_token_id", None)
    return value if isinstance(value, int) and value >= 0 else 0


def _token_ids(shape: Sequence[int], config: Any, generator: torch.Generator) -> torch.Tensor:
    vocabulary = int(getattr(config, "vocab_size", 100) or 100)
    ids = torch.randint(0, vocabulary, tuple(shape), generator=generator)
    pad = _pad_id(config)
    # A padding id in the middle would move the positions of RoBERTa-like models.
    return torch.where(ids == pad, (pad + 1) % vocabulary, ids)


def _padded_mask(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(tuple(shape), dtype=dtype)
    rows = mask.view(-1, shape[-1])
    rows[1::2, (shape[-1] + 1) // 2 :] = 0
    return mask


def _max_sizes(module: torch.nn.Module, axes: Axes) -> dict[str, int]:
    """How long a sequence the model's learned positions allow."""
    if not any("sequence" in named.values() for named in axes.values()):
        return {}
    limits = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding) and _POSITIONS.search(name):
            # RoBERTa-like tables start counting behind the padding row.
            offset = child.padding_idx + 1 if child.padding_idx is not None else 0
            limits.append(child.num_embeddings - offset)
    return {"sequence": min(limits)} if limits else {}


# Capturing


def capture_onnx(source: Source, config: ExportConfig) -> tuple[onnx_ir.Model, ExportedModel]:
    """Trace a model into an ONNX graph with named axes.

    Takes 4 to 20 s for encoders. The weights in the graph are the model's own memory, not a copy.

    Returns:
        The graph, and what transformers' exporter made (its manifest is kept beside ours).

    Raises:
        ExportError: The trace failed, or fixed an axis that must vary.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    try:
        with quiet():
            exported = OnnxExporter().export(
                source.model,
                dict(source.example),
                OnnxConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source), opset_version=config.opset),
            )
    # Tracing runs foreign model code, which may raise anything.
    except Exception as error:
        raise _trace_error(source, error) from error
    graph = exported.program
    _name_axes(graph, source)
    strip_provenance(graph)
    return graph, exported


def capture_program(source: Source) -> ExportedProgram:
    """Trace a model into a `torch.export` program with the same inputs and axes as `capture_onnx`.

    For backends that convert such programs themselves.

    Raises:
        ExportError: The trace failed.
    """
    from transformers.exporters import DynamoConfig, DynamoExporter

    try:
        with quiet():
            exported = DynamoExporter().export(
                source.model, dict(source.example), DynamoConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source))
            )
    # Tracing runs foreign model code, which may raise anything.
    except Exception as error:
        raise _trace_error(source, error) from error
    program: ExportedProgram = exported.program
    return program


def capture_openvino(source: Source) -> ExportedModel:
    """Trace a model into an OpenVINO graph with the same inputs and axes as `capture_onnx`.

    The weights in the graph are the model's own memory: write the graph before the model goes.

    Returns:
        What transformers' exporter made; its `program` is an `openvino.Model`, whose axes have no names.

    Raises:
        ExportError: The trace failed, or fixed an axis that must vary.
    """
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    try:
        with quiet(), _without_telemetry():
            exported = OpenVINOExporter().export(
                source.model,
                dict(source.example),
                OpenVINOConfig(dynamic=True, dynamic_shapes=_dynamic_shapes(source), stateful=False),
            )
    # Tracing runs foreign model code, which may raise anything.
    except Exception as error:
        raise _trace_error(source, error) from error
    for port in exported.program.inputs:
        for position, axis in source.axes.get(port.any_name, {}).items():
            dimension = port.partial_shape[position]
            if dimension.is_static:
                raise _fixed_axis(source, axis, port.any_name, dimension.get_length())
    return exported


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """OpenVINO's converter reports each conversion to its vendor unless it believes that it runs in a CI job."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before


def _fixed_axis(source: Source, axis: str, name: str, size: int) -> ExportError:
    return ExportError(
        f"The trace of {source.architecture} fixed the axis {axis!r} of {name!r} to {size}.",
        fix="the model's code compares this size with a constant; leave the axis out of axes=... to accept it.",
    )


def _dynamic_shapes(source: Source) -> dict[str, dict[int, Any]]:
    """Every declared axis as `Dim.DYNAMIC`: the trace fails rather than fixing it."""
    return {name: dict.fromkeys(source.axes.get(name, {}), torch.export.Dim.DYNAMIC) for name in source.example}


def _trace_error(source: Source, error: Exception) -> ExportError:
    return ExportError(
        f"{source.architecture} cannot be traced: {type(error).__name__}: {_first_lines(error)}",
        fix="run again with --verbose (or the `accel` logger at DEBUG) to see what upstream says.",
    )


def _first_lines(error: Exception, count: int = 12) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:count])


def _name_axes(model: onnx_ir.Model, source: Source) -> None:
    """Give the declared axes their names everywhere in the graph; drop inputs that nothing reads.

    One axis that the trace gave two symbols (a mask's rows beside the ids') becomes one again by its name. An axis
    that became a constant, or two axes that became one, are errors of the trace that cannot be repaired here.
    """
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for position, axis in source.axes.get(str(value.name), {}).items():
            assert value.shape is not None
            size = value.shape[position]
            if isinstance(size, int):
                raise _fixed_axis(source, axis, str(value.name), size)
            symbol = str(size)
            if names.setdefault(symbol, axis) != axis:
                raise ExportError(
                    f"The trace of {source.architecture} made one axis of {names[symbol]!r} and {axis!r}.",
                    fix="pass a sample in which these sizes differ.",
                )
    rename_axes(model, names)


def rename_axes(model: onnx_ir.Model, names: Mapping[str, str]) -> None:
    """Replace symbols in all shapes of a graph and its subgraphs, also inside expressions such as `2*s72`."""
    import onnx_ir

    @functools.cache
    def renamed(text: str) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)

    def apply(value: onnx_ir.Value | None) -> None:
        if value is None or value.shape is None:
            return
        dims = [dim if isinstance(dim, int) else renamed(str(dim.value)) if dim.value else None for dim in value.shape]
        value.shape = onnx_ir.Shape(dims)

    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs):
            apply(value)
        for node in graph:
            for output in node.outputs:
                apply(output)


def strip_provenance(model: onnx_ir.Model) -> None:
    """Remove the Python stack trace that the trace left on every node: ten times the size of a small graph."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            for output in node.outputs:
                output.metadata_props.clear()


def drop_unused_inputs(model: onnx_ir.Model) -> tuple[str, ...]:
    """Remove inputs that nothing in the graph reads; return their names."""
    unused = [value for value in model.graph.inputs if not value.uses() and not value.is_graph_output()]
    for value in unused:
        model.graph.inputs.remove(value)
    return tuple(str(value.name) for value in unused)


def graph_specs(values: Sequence[onnx_ir.Value], config: Any = None) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of an `onnx_ir` graph as specs, with roles and pad values of a transformers model's names."""
    specs = []
    for value in values:
        shape: tuple[int | str, ...] = tuple(
            dim if isinstance(dim, int) else str(dim.value or f"{value.name}_{i}")
            for i, dim in enumerate(value.shape or ())
        )
        name = str(value.name)
        specs.append(
            TensorSpec(
                name,
                dtype_name(value.dtype),
                shape,
                role="mask" if name == "attention_mask" else "cache" if name.startswith("past_key_values") else "data",
                pad_value=_pad_id(config) if name == "input_ids" else 0,
            )
        )
    return tuple(specs)


def dtype_name(dtype: onnx_ir.DataType | None) -> str:
    """An ONNX element type in torch's words."""
    words = {"FLOAT": "float32", "DOUBLE": "float64"}
    name = dtype.name if dtype is not None else "FLOAT"
    return words.get(name, name.lower())


def feeds_for(specs: Sequence[TensorSpec], sizes: Mapping[str, int], *, seed: int, folder: Path) -> Tensors:
    """Inputs for a graph that is known by its specs alone: random values, padded masks; axes not in `sizes` get 2."""
    config = SimpleNamespace(**read_config(folder))
    example = {
        spec.name: torch.zeros([n if isinstance(n, int) else sizes.get(n, 2) for n in spec.shape]).to(
            getattr(torch, spec.dtype)
        )
        for spec in specs
    }
    axes = {spec.name: {i: n for i, n in enumerate(spec.shape) if isinstance(n, str)} for spec in specs}
    feeds = _resize(example, axes, sizes, config, seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in feeds.items()
    }


# Comparing


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs and what the PyTorch model answers to them."""

    sizes: Mapping[str, int]
    feeds: Tensors
    expected: Tensors


def reference_cases(source: Source) -> list[Case]:
    """One and three rows, a sequence shorter and one longer than the sample's, a single token, padding."""
    long = min(40, source.max_sizes.get("sequence", 40))
    plans = [(1, 3), (3, long), (1, long), (3, 3), (2, 1)]
    axes = {axis for named in source.axes.values() for axis in named.values()}
    base = _safe_sizes(source.example, source.axes)
    cases = []
    for seed, (batch, sequence) in enumerate(plans, start=1):
        sizes = dict(base)
        if "batch" in axes:
            sizes["batch"] = batch
        if "sequence" in axes:
            sizes["sequence"] = sequence
        feeds = source.sample(sizes, seed=seed)
        try:
            cases.append(Case(sizes, feeds, reference(source.model, feeds)))
        # Foreign model code, which may raise anything.
        except Exception as error:
            raise ExportError(
                f"{source.architecture} itself fails on inputs of sizes {sizes}: {type(error).__name__}: {_first_lines(error)}",
                fix="give axes that must be equal one name in axes=..., and leave out axes that cannot vary.",
            ) from error
    return cases


@torch.inference_mode()
def reference(model: torch.nn.Module, feeds: Tensors) -> Tensors:
    """The PyTorch model's outputs by name; only tensors."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    with quiet():
        result = model(**inputs)
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return {f"output.{index}": value for index, value in enumerate(result) if isinstance(value, torch.Tensor)}


def max_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Largest absolute difference over all outputs, and the largest absolute expected value.

    Outputs are matched by name where the names agree, else by order. A missing output or another shape counts as
    infinitely different, and so does a value that is not finite on one side only.
    """
    pairs: list[tuple[torch.Tensor | None, torch.Tensor]]
    if set(expected) <= set(found):
        pairs = [(found[name], value) for name, value in expected.items()]
    else:
        values = list(found.values())
        pairs = [(values[i] if i < len(values) else None, value) for i, value in enumerate(expected.values())]
    worst, scale = 0.0, 0.0
    for have, want in pairs:
        if have is None or have.shape != want.shape:
            return float("inf"), scale
        a, b = have.double().cpu(), want.double().cpu()
        if b.numel() == 0:
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(b), (a - b).abs())
        worst = max(worst, float(difference.nan_to_num(nan=float("inf")).max()))
        scale = max(scale, float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0)
    return worst, scale


def tolerance(config_atol: float | None, dtype: str, scale: float) -> float:
    """The accepted absolute difference: as configured, or by dtype and scaled with the largest reference value."""
    if config_atol is not None:
        return config_atol
    return {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}[dtype] * max(1.0, scale)
