"""Which files of a Hub repository are downloaded: those that will be opened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from .manifest import MANIFEST

# Small files that a model is read with: configs, tokenizers, templates, processors.
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".spm", ".vocab", ".codes", ".merges")
# Weights of PyTorch and of others, pictures and texts: nothing that a graph reads.
_NO_DATA = (
    *(".safetensors", ".h5", ".msgpack", ".ot", ".ckpt", ".pt", ".pth", ".gguf", ".ggml", ".tflite", ".mlmodel", ".npz", ".pkl"),
    *(".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".wav", ".mp3", ".mp4", ".py", ".yaml", ".yml", ".gitattributes"),
)  # fmt: skip
_NO_DATA_NAMES = (
    "pytorch_model",
    "adapter_model",
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "consolidated",
)
_GRAPHS = (".onnx", ".xml")
# A module of sentence-transformers: `1_Pooling`, `2_Dense`.
_MODULE = re.compile(r"\d+_[^/]+/[^/]+\Z")
_TEMPLATES = "additional_chat_templates"


def files_to_fetch(
    files: Sequence[str],
    *,
    subfolder: str,
    want_graph: bool | None,
    choose_graphs: Callable[[Sequence[str]], Sequence[str]] | None,
    manifest: Callable[[], Path],
) -> list[str]:
    """Graphs with their external data, or weights in the best format; and the small files next to them.

    Args:
        files: All files of the repository.
        subfolder: The model's folder in it.
        want_graph: `True` for graphs, `False` for PyTorch weights, `None` for graphs where there are any.
        choose_graphs: Chooses among the files of the model's folder; takes all ONNX graphs of it and of `onnx/` when `None`.
        manifest: Downloads the manifest of an artifact.
    """
    above = f"{subfolder.strip('/')}/" if subfolder else ""
    inside = [file.removeprefix(above) for file in files if file.startswith(above)]
    weights = _weights(inside)
    chosen: list[str] = []
    if MANIFEST in inside and (want_graph is not False or not weights):
        chosen = _of_artifact(manifest(), inside)
        weights = []
    elif want_graph is not False:
        chosen = _graphs(inside, choose_graphs or _all_graphs, subfolders=not weights)
    if not chosen and want_graph is not True:
        chosen = weights
    folders = {"", _TEMPLATES, *(_folder(file) for file in chosen)}
    small = [
        file
        for file in inside
        if (file.endswith(_COMPANIONS) and _folder(file) in folders)
        or file.endswith((".py", "/config.json"))
        or (file.count("/") == 1 and file.endswith(f"/{MANIFEST}"))
    ]  # fmt: skip
    wanted = [above + file for file in dict.fromkeys([*chosen, *small, *_modules(inside)])]
    # The config, tokenizer and processor of a model in a subfolder may be in the root.
    root = [file for file in files if above and "/" not in file and file.endswith((*_COMPANIONS, ".py"))]
    return list(dict.fromkeys([*wanted, *root]))


def _folder(file: str) -> str:
    parent = PurePosixPath(file).parent.as_posix()
    return "" if parent == "." else parent


def _weights(files: Sequence[str]) -> list[str]:
    """PyTorch weights as transformers and PEFT open them, in safetensors where there are any."""
    here = [file for file in files if "/" not in file]
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        all_of_it = [file for file in here if file.endswith(suffix)]
        usual = re.compile(rf"({stem}(-\d+-of-\d+)?|adapter_model(-\d+-of-\d+)?){re.escape(suffix)}\Z")
        if found := [file for file in all_of_it if usual.match(file)] or all_of_it:
            return found
    return []


def _modules(files: Sequence[str]) -> list[str]:
    """Files of sentence-transformers' modules, weights in one format."""
    found = [file for file in files if _MODULE.match(file)]
    safe = {_folder(file) for file in found if file.endswith(".safetensors")}
    return [
        file
        for file in found
        if file.endswith((*_COMPANIONS, ".safetensors")) or (file.endswith(".bin") and _folder(file) not in safe)
    ]


def _of_artifact(manifest: Path, files: Sequence[str]) -> list[str]:
    """The files that a manifest names; all graphs and weights where it cannot be read, which is told when it is opened."""
    try:
        components = json.loads(manifest.read_text(encoding="utf-8"))["components"]
        named = {record["name"] for component in components for record in component["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return list(files)
    return [file for file in files if file in named]


def _all_graphs(files: Sequence[str]) -> list[str]:
    return [file for file in files if file.endswith(".onnx") and _folder(file) in ("", "onnx")]


def _graphs(files: Sequence[str], choose: Callable[[Sequence[str]], Sequence[str]], *, subfolders: bool) -> list[str]:
    """The chosen graphs, with their external data."""
    # OpenVINO's keep weights in a file of the same name.
    others = [file for file in files if file.endswith(".xml") and file.count("/") <= subfolders]
    chosen = list(choose(files)) or [file for file in others if "/" not in file] or others
    graphs = [file for file in files if file.endswith(_GRAPHS)]
    return [*chosen, *(file for file in files if any(_is_data_of(graph, file, graphs) for graph in chosen))]


def _is_data_of(graph: str, file: str, graphs: Sequence[str]) -> bool:
    """Whether a file holds weights of a graph: one that is called like it, or next to it like no graph."""
    name = PurePosixPath(file).name
    if _folder(file) != _folder(graph) or file in graphs:
        return False
    if name.endswith((*_NO_DATA, *_COMPANIONS)) or name.startswith((*_NO_DATA_NAMES, ".")):
        return False
    owners = [one for one in graphs if _folder(one) == _folder(file) and _called_like(file, one)]
    return max(owners, key=len) == graph if owners else True


def _called_like(file: str, graph: str) -> bool:
    stem = graph.rpartition(".")[0]
    return file.startswith((f"{graph}_", f"{graph}.", f"{stem}.", f"{stem}_data"))
