"""Folders of OpenVINO IR without our manifest, as optimum-intel and transformers' exporter write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openvino as ov

from accel.artifact import MARK, Artifact, Component, FileRecord, Manifest, Origin, Quantization, lost_manifest
from accel.errors import ArtifactNotFoundError, IntegrityError, SessionError

from . import FORMAT
from .exporter import GRAPH, input_spec, output_specs
from .runtime import READ_ERRORS, core, missing_weights, one_line

_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_TEXT_AXES = {2: ("batch", "sequence"), 3: ("batch", "choices", "sequence")}
# Their position tables start counting behind the padding row (transformers, modeling_roberta.py).
_SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


def adopt(folder: Path, *, task: str) -> Artifact:
    """An artifact for a folder with `openvino_model.xml` and `.bin`, or for the graph of that path; nothing is written.

    Where the folder above holds the config, both are meant.

    Raises:
        ArtifactNotFoundError: There is no such graph; lists the graphs found.
        IntegrityError: The `.bin` with the weights is missing, or the graph cannot be read.
        SessionError: A graph with internal state, which a single-graph task cannot use.
    """
    folder, named = (folder.parent, folder.name) if folder.suffix == ".xml" else (folder, GRAPH)
    path = folder / named
    if not path.is_file():
        have = ", ".join(sorted(p.name for p in folder.glob("*.xml"))) or "none"
        raise ArtifactNotFoundError(
            f"{folder} has no {GRAPH}; its graphs are: {have}.",
            fix=f"export the model again, or rename one to {GRAPH}.",
        )
    if not path.with_suffix(".bin").is_file():
        raise missing_weights(path)
    try:
        model = core().read_model(str(path))
    except READ_ERRORS as error:
        raise IntegrityError(
            f"OpenVINO cannot read {path}: {one_line(error)}", fix="copy or export the model again."
        ) from error
    if model.has_rt_info(MARK.split(".")):
        raise lost_manifest(path)
    if model.get_sinks():
        raise SessionError(f"{path} keeps a state between calls, which {task} has no use for.")
    root = (
        folder if (folder / "config.json").is_file() or not (folder.parent / "config.json").is_file() else folder.parent
    )
    config = _config(root)
    pad = config.get("pad_token_id")
    inputs = tuple(
        input_spec(port.any_name, port, _named_shape(port), pad if isinstance(pad, int) else 0) for port in model.inputs
    )
    component = Component(
        name="model",
        file=path.relative_to(root).as_posix(),
        files=tuple(_stamp(file, root) for file in (path, path.with_suffix(".bin"))),
        inputs=inputs,
        outputs=output_specs(model, inputs),
        max_sizes=_max_sizes(config),
    )
    scheme = _scheme(model)
    manifest = Manifest(
        format=FORMAT,
        task=task,
        architecture=str((config.get("architectures") or [""])[0]),
        dtype=_dtype(model),
        source=Origin(id=str(root)),
        components=(component,),
        quantization=Quantization(scheme=scheme) if scheme else None,
    )
    return Artifact(root.absolute(), manifest)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise IntegrityError(f"{path} is not valid JSON: {error}.", fix="copy the file again.") from error
    return values if isinstance(values, dict) else {}


def _named_shape(port: ov.Output) -> tuple[int | str, ...]:
    """OpenVINO names no axes: they follow from the names of a transformers model's inputs."""
    name, shape = port.any_name, port.partial_shape
    known = _TEXT_AXES.get(len(shape), ()) if name in _TEXT else ("batch",)
    return tuple(
        dim.get_length() if dim.is_static else known[i] if i < len(known) else f"{name}_{i}"
        for i, dim in enumerate(shape)
    )


def _stamp(path: Path, root: Path) -> FileRecord:
    """Identifies a file without reading it; adopted folders have no checksums to compare with."""
    stat = path.stat()
    return FileRecord(name=path.relative_to(root).as_posix(), bytes=stat.st_size, sha256=f"mtime:{stat.st_mtime_ns}")


def _scheme(model: ov.Model) -> str | None:
    """`static-int8` where activations are quantized, `weight-…` where only constants are stored in few bits."""
    types = set()
    for node in model.get_ops():
        if node.get_type_name() == "FakeQuantize":
            return "static-int8"
        if node.get_type_name() == "Constant":
            types.add(str(node.get_output_element_type(0).get_type_name()))
    if types & {"i4", "u4", "nf4"}:
        return "weight-int4"
    decompressed = any(
        node.get_type_name() == "Convert"
        and node.input_value(0).get_node().get_type_name() == "Constant"
        and str(node.input_value(0).get_element_type().get_type_name()) in ("i8", "u8")
        and node.get_output_element_type(0).is_real()
        for node in model.get_ops()
    )
    return "weight-int8" if decompressed else None


def _dtype(model: ov.Model) -> str:
    """What the graph says it was exported to compute in; weights alone may be stored in half precision."""
    if model.has_rt_info(["runtime_options", "INFERENCE_PRECISION_HINT"]):
        word = str(model.get_rt_info(["runtime_options", "INFERENCE_PRECISION_HINT"]).value)
        return {"f16": "float16", "bf16": "bfloat16"}.get(word, "float32")
    return "float32"


def _max_sizes(config: dict[str, Any]) -> dict[str, int]:
    """The length limit of models with learned absolute positions, from their config."""
    limit = config.get("max_position_embeddings")
    rotary = "rope_theta" in config or "rope_parameters" in config or config.get("position_biased_input") is False
    if not isinstance(limit, int) or rotary:
        return {}
    shifted = config.get("model_type") in _SHIFTED
    return {"sequence": limit - int(config.get("pad_token_id", 1)) - 1 if shifted else limit}
