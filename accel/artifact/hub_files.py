"""Choose the files of a Hub repository to download: only the files that will be opened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from .gguf_files import GGUF
from .manifest import MANIFEST
from .probe_file import PROBES

# Extensions of small files of a model: configs, tokenizers, templates, processors.
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".spm", ".vocab", ".codes", ".merges")
# Extensions of files that are never external data of a graph: weights of PyTorch and other libraries, images and texts.
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
# Path of a file in a module folder of sentence-transformers, such as `1_Pooling`, `2_Dense`, or in a router's module such as
# `query_0_SparseStaticEmbedding` or `2_Asym/140_Dense`.
_MODULE = re.compile(r"((query_|document_)?\d+_[^/]+/)+[^/]+\Z")
# Weights of the heads of BGE-M3.
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
_TEMPLATES = "additional_chat_templates"


def files_to_fetch(
    files: Sequence[str],
    *,
    subfolder: str,
    want_graph: bool | None,
    choose_graphs: Callable[[Sequence[str]], Sequence[str]] | None,
    manifest: Callable[[], Path],
    gguf_file: str | None = None,
) -> list[str]:
    """Return the files to download: graphs with their external data, or weights in the best format; and configs,
    tokenizers and processors.

    Args:
        files: All files of the repository.
        subfolder: The model's folder in the repository.
        want_graph: `True` for graphs, `False` for PyTorch weights, `None` for graphs if there are any.
        choose_graphs: Function that chooses the graphs from the files of the model's folder. When `None`, all ONNX
            graphs in that folder and in its subfolder `onnx/`.
        manifest: Function that downloads the manifest of an artifact and returns its path.
        gguf_file: A GGUF file in the model's folder. It contains the config and the tokenizer, so no other file is downloaded.
            When `None`, the GGUF file of a repository that has neither graphs nor weights, if there is only one.
    """
    above = f"{subfolder.strip('/')}/" if subfolder else ""
    if gguf_file is not None:
        return [file for file in files if file == above + gguf_file]
    inside = [file.removeprefix(above) for file in files if file.startswith(above)]
    weights = _weights(inside)
    chosen: list[str] = []
    if MANIFEST in inside and (want_graph is not False or not weights):
        chosen = _of_artifact(manifest(), inside)
        weights = []
    elif want_graph is not False:
        chosen = _graphs(inside, choose_graphs or _all_graphs, subfolders=not weights)
    if not chosen and want_graph is not True:
        chosen = weights or _only_gguf(inside)
    folders = {"", _TEMPLATES, *(_folder(file) for file in chosen)}
    small = [
        file
        for file in inside
        if (file.endswith(_COMPANIONS) and _folder(file) in folders)
        or file.endswith((".py", "/config.json"))
        or file == PROBES
        or (file.count("/") == 1 and file.endswith(f"/{MANIFEST}"))
    ]  # fmt: skip
    needed = [above + file for file in dict.fromkeys([*chosen, *small, *_modules(inside)])]
    # For a model in a subfolder, the config, tokenizer and processor may lie in the root of the repository.
    root = [file for file in files if above and "/" not in file and file.endswith((*_COMPANIONS, ".py"))]
    return list(dict.fromkeys([*needed, *root]))


def _folder(file: str) -> str:
    parent = PurePosixPath(file).parent.as_posix()
    return "" if parent == "." else parent


def _weights(files: Sequence[str]) -> list[str]:
    """Return the PyTorch weight files that transformers and PEFT open; safetensors are preferred."""
    top_level = [file for file in files if "/" not in file and file != PROBES]
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        all_of_it = [file for file in top_level if file.endswith(suffix)]
        usual = re.compile(rf"({stem}(-\d+-of-\d+)?|adapter_model(-\d+-of-\d+)?){re.escape(suffix)}\Z")
        if weight_files := [file for file in all_of_it if usual.match(file)] or all_of_it:
            return weight_files
    return []


def _only_gguf(files: Sequence[str]) -> list[str]:
    """Return the GGUF file in the model's folder if there is exactly one."""
    names = [file for file in files if file.endswith(GGUF) and "/" not in file]
    return names if len(names) == 1 else []


def _modules(files: Sequence[str]) -> list[str]:
    """Return the files of sentence-transformers modules. Each module's weights are in one format; safetensors are
    preferred.
    """
    module_files = [file for file in files if _MODULE.match(file) or file in _HEADS]
    safe = {_folder(file) for file in module_files if file.endswith(".safetensors")}
    return [
        file
        for file in module_files
        if file.endswith((*_COMPANIONS, ".safetensors", ".pt")) or (file.endswith(".bin") and _folder(file) not in safe)
    ]


def _of_artifact(manifest: Path, files: Sequence[str]) -> list[str]:
    """Return the graph and weight files that the manifest records. If the manifest cannot be read, return all files, so that
    opening the downloaded artifact raises the error.
    """
    try:
        components = json.loads(manifest.read_text(encoding="utf-8"))["components"]
        named = {record["name"] for component in components for record in component["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return list(files)
    return [file for file in files if file in named]


def _all_graphs(files: Sequence[str]) -> list[str]:
    return [file for file in files if file.endswith(".onnx") and _folder(file) in ("", "onnx")]


def _graphs(files: Sequence[str], choose: Callable[[Sequence[str]], Sequence[str]], *, subfolders: bool) -> list[str]:
    """Return the chosen graphs with their external data."""
    # OpenVINO stores the weights in a `.bin` file with the same name as the graph.
    others = [file for file in files if file.endswith(".xml") and file.count("/") <= subfolders]
    chosen = list(choose(files)) or [file for file in others if "/" not in file] or others
    graphs = [file for file in files if file.endswith(_GRAPHS)]
    return [*chosen, *(file for file in files if any(_is_data_of(graph, file, graphs) for graph in chosen))]


def _is_data_of(graph: str, file: str, graphs: Sequence[str]) -> bool:
    """Return whether a file contains external data of a graph.

    The file belongs to the graph with the longest matching name. A file whose name matches no graph of the folder may
    belong to every graph.
    """
    name = PurePosixPath(file).name
    if _folder(file) != _folder(graph) or file in graphs:
        return False
    if name.endswith((*_NO_DATA, *_COMPANIONS)) or name.startswith((*_NO_DATA_NAMES, ".")):
        return False
    owners = [
        candidate for candidate in graphs if _folder(candidate) == _folder(file) and _called_like(file, candidate)
    ]
    return max(owners, key=len) == graph if owners else True


def _called_like(file: str, graph: str) -> bool:
    stem = graph.rpartition(".")[0]
    return file.startswith((f"{graph}_", f"{graph}.", f"{stem}.", f"{stem}_data"))
