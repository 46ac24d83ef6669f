"""Folders without our manifest: Optimum's, transformers.js', onnx-community's, or a lone ONNX file.

Their specs are read from the graph, and their axis names translated to ours.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.checksums import FileRecord
from ..artifact.hub import HubOptions, Location
from ..artifact.manifest import MARK, Artifact, Component, Manifest, Origin, Quantization, lost_manifest
from ..artifact.tensors import TensorSpec
from ..backends import registry
from ..backends.specs import WEIGHTS, BackendSpec
from ..config import ExportConfig
from ..errors import ArtifactNotFoundError, IntegrityError, PluginError, did_you_mean
from ..tasks.infer import infer_task, read_config, task_spec

if TYPE_CHECKING:
    import onnx

_DEFAULT_FILES = ("model.onnx", "onnx/model.onnx")
_AXES = {
    "batch_size": "batch",
    "sequence_length": "sequence",
    "seq_len": "sequence",
    "seq_length": "sequence",
    "num_choices": "choices",
    "encoder_sequence_length": "encoder_sequence",
}
_INTEGER_OPERATORS = {
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeMatMul",
}
_BLOCK_OPERATORS = {"MatMulNBits"}
_SUFFIX = re.compile(r"\.onnx\Z")


def graph_files(folder: Path) -> list[str]:
    """ONNX files of a folder and of its `onnx` subfolder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in (*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")))


def holds_graphs(folder: Path) -> bool:
    """Whether a folder holds graphs that something here reads, as opposed to PyTorch weights alone."""
    return bool(graph_files(folder)) or registry.backend_for_layout([p.name for p in folder.iterdir()]) is not None


def beside_config(location: Location, file_name: str | None) -> tuple[Path, str | None]:
    """The folder with the config of a model, and the graph in it.

    Optimum and transformers.js keep graphs in a subfolder, `onnx`, and the config in the root; who names the subfolder
    means both.
    """
    folder, root = location.folder, location.root
    if root is None or (folder / "config.json").is_file() or not (root / "config.json").is_file():
        return folder, file_name
    if file_name is None or registry.backend_for_layout([Path(file_name).name]) is None:
        file_name = _pick(folder, file_name)
    return root, str((folder / file_name).relative_to(root))


def adopt(folder: Path, *, file_name: str | None, task: str | None, hub: HubOptions) -> Artifact:
    """An artifact for a folder of another tool; nothing is written.

    Args:
        folder: The folder.
        file_name: The graph to take from a plain ONNX folder.
        task: Its task; inferred from `config.json` when `None`.
        hub: Whether code that comes with the model may run.

    Raises:
        ArtifactNotFoundError: No such graph.
        IntegrityError: It cannot be read.
    """
    chosen = task_spec(task).name if task else infer_task(read_config(folder), folder)
    spec = registry.backend_for_layout([Path(file_name).name]) if file_name is not None else None
    if spec is not None and file_name is not None:
        # A graph that a backend reads itself, named; the backend takes it for the folder.
        if not (folder / file_name).is_file():
            raise ArtifactNotFoundError(f"{folder} has no graph {file_name!r}.", fix="check file_name=...")
        return _adopted_by(spec, folder / file_name, chosen, ExportConfig(), hub)
    spec = registry.backend_for_layout([p.name for p in folder.iterdir()])
    if spec is None or file_name is not None or graph_files(folder):
        return adopt_onnx(folder, file_name=file_name, task=chosen)
    return _adopted_by(spec, folder, chosen, ExportConfig(), hub)


def adopt_weights(location: Location, *, task: str, config: ExportConfig, hub: HubOptions) -> Artifact:
    """The PyTorch weights of a transformers or adapter folder as an artifact that PyTorch runs; nothing is written.

    Raises:
        BackendUnavailableError: No backend here runs PyTorch models.
    """
    made = _adopted_by(registry.owner("export", WEIGHTS), location.folder, task, config, hub)
    source = Origin(id=location.id, revision=location.revision)
    return replace(made, manifest=replace(made.manifest, source=source))


def _adopted_by(spec: BackendSpec, folder: Path, task: str, config: ExportConfig, hub: HubOptions) -> Artifact:
    backend = registry.load(spec)
    made = backend.adopt(folder, task=task, config=config, trust_remote_code=hub.trust_remote_code)
    if made is None:
        raise PluginError(f"The backend {spec.name!r} declares folders like {folder} and adopts none.")
    return made


def adopt_onnx(folder: Path, *, file_name: str | None = None, task: str | None = None) -> Artifact:
    """An artifact for a plain ONNX folder; nothing is written.

    Args:
        folder: The folder.
        file_name: The graph to take, relative to the folder; `model.onnx` or the only one when `None`.
        task: Its task; inferred from `config.json` when `None`.

    Raises:
        ArtifactNotFoundError: No such graph, or several and none is the usual one; lists the candidates.
        IntegrityError: The file is not ONNX, or one of ours without its manifest.
    """
    name = _pick(folder, file_name)
    model = _read(folder / name)
    if any(entry.key == MARK for entry in model.metadata_props):
        raise lost_manifest(folder / name)
    config = read_config(folder)
    files = [name, *_external_files(model, folder, name)]
    records = tuple(_stamp(folder, file) for file in files)
    pad = config.get("pad_token_id")
    component = Component(
        name="model",
        file=name,
        files=records,
        inputs=_specs(model, model.graph.input, pad if isinstance(pad, int) else 0),
        outputs=_specs(model, model.graph.output, 0),
        max_sizes=_max_sizes(config),
        domains=_operator_domains(model),
    )
    types = {tensor.data_type for tensor in model.graph.initializer}
    half = {10: "float16", 16: "bfloat16"}
    dtype = next((half[t] for t in half if t in types and 1 not in types), "float32")
    operators = {node.op_type for node in model.graph.node}
    scheme = "int8" if operators & _INTEGER_OPERATORS else "weight-int4" if operators & _BLOCK_OPERATORS else None
    manifest = Manifest(
        format="onnx",
        task=task_spec(task).name if task else infer_task(config, folder),
        architecture=str((config.get("architectures") or [""])[0]),
        dtype=dtype,
        opset=next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), None),
        source=Origin(id=str(folder)),
        components=(component,),
        quantization=Quantization(scheme=scheme) if scheme else None,
    )
    return Artifact(folder.absolute(), manifest)


def _operator_domains(model: onnx.ModelProto) -> tuple[str, ...]:
    """Domains of the operators that a graph uses; functions that the file itself defines count by what they use."""
    own = {(function.domain, function.name) for function in model.functions}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    found = set()
    while nodes:
        node = nodes.pop()
        if (node.domain, node.op_type) not in own:
            found.add("" if node.domain == "ai.onnx" else node.domain)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                nodes.extend(graph.node)
    return tuple(sorted(found))


def _pick(folder: Path, file_name: str | None) -> str:
    candidates = graph_files(folder)
    listing = ", ".join(candidates) or "none"
    if file_name is not None:
        if not _SUFFIX.search(file_name) or not (folder / file_name).is_file():
            raise ArtifactNotFoundError(
                f"{folder} has no graph {file_name!r}.{did_you_mean(file_name, candidates)} It has: {listing}.",
                fix="pass one of these as file_name=...",
            )
        return file_name
    for name in _DEFAULT_FILES:
        if name in candidates:
            return name
    if len(candidates) != 1:
        raise ArtifactNotFoundError(
            f"{folder} has no model.onnx, and which of its graphs to take is not clear: {listing}.",
            fix="pass one of these as file_name=..."
            if candidates
            else "export the model first: `accel export MODEL OUT`.",
        )
    return candidates[0]


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise IntegrityError(
            f"{path} cannot be read as ONNX: {error}.", fix="copy or export the file again."
        ) from error
    if not model.graph.output:
        raise IntegrityError(f"{path} holds no graph: truncated?", fix="copy or export the file again.")
    return model


def _external_files(model: onnx.ModelProto, folder: Path, name: str) -> list[str]:
    """Files with the weights, relative to the folder.

    Raises:
        IntegrityError: One of them is missing.
    """
    places = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == tensor.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    parent = Path(name).parent
    for place in places:
        if not (folder / parent / place).is_file():
            raise IntegrityError(
                f"{folder / name} keeps its weights in {place!r}, which is missing.",
                fix="copy that file beside the graph.",
            )
    return sorted(str(parent / place) for place in places)


def _stamp(folder: Path, name: str) -> FileRecord:
    """A record that identifies a file without reading it; adopted folders have no checksums to compare with."""
    stat = (folder / name).stat()
    return FileRecord(name=name, bytes=stat.st_size, sha256=f"mtime:{stat.st_mtime_ns}")


def _specs(model: onnx.ModelProto, values: Any, pad: int) -> tuple[TensorSpec, ...]:
    import onnx

    stored = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in values:
        if value.name in stored:
            continue
        tensor = value.type.tensor_type
        shape = tuple(
            _AXES.get(dim.dim_param, dim.dim_param)
            if dim.dim_param
            else dim.dim_value
            if dim.HasField("dim_value")
            else f"{value.name}_{i}"
            for i, dim in enumerate(tensor.shape.dim)
        )
        word = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        dtype = {"float": "float32", "double": "float64"}.get(word, word)
        role = "mask" if value.name == "attention_mask" else "data"
        specs.append(TensorSpec(value.name, dtype, shape, role=role, pad_value=pad if value.name == "input_ids" else 0))  # type: ignore[arg-type]
    return tuple(specs)


def _max_sizes(config: dict[str, Any]) -> dict[str, int]:
    """The length limit of models with learned absolute positions, from their config."""
    limit = config.get("max_position_embeddings")
    rotary = "rope_theta" in config or "rope_parameters" in config or config.get("position_biased_input") is False
    if not isinstance(limit, int) or rotary:
        return {}
    # Their tables start counting behind the padding row (transformers, modeling_roberta.py).
    shifted = config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")
    return {"sequence": limit - int(config.get("pad_token_id", 1)) - 1 if shifted else limit}
