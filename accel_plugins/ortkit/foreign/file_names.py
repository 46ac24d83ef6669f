"""Selection of the graphs in an ONNX folder by the file names that Optimum and transformers.js use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from accel.artifact.json_reading import read_json
from accel.errors import ArtifactNotFoundError, did_you_mean
from accel.interfaces.folder_reader import Part

# The first matching name is used. Longer names come first, because `decoder_model` also matches `decoder_model_merged`.
_STEMS: tuple[tuple[str, Part], ...] = (
    ("decoder_with_past_model", "following"),
    ("decoder_with_past", "following"),
    ("decoder_model_merged", "merged"),
    ("decoder_merged", "merged"),
    ("decoder_model", "first"),
    ("encoder_model", "encoder"),
    ("decoder", "first"),
    ("encoder", "encoder"),
    ("model", "model"),
)
EXPORT, GENAI = "export.json", "genai_config.json"
"""File names of manifests that list the graphs of a folder: transformers' and ONNX Runtime GenAI's."""
_SUBFOLDER = "onnx"
_SUFFIX = ".onnx"
# Variant names in transformers.js for graphs whose file names have no suffix.
_WHOLE = ("", "fp32", "default")


@dataclass(frozen=True, slots=True)
class NamedGraphFile:
    """A graph file whose name gives the part of the model and the variant (`quantized`, `q4`, ...)."""

    file: str
    part: Part
    variant: str


def descriptions_in(folder: Path) -> set[str]:
    """Return the file names of the manifests in a folder.

    An `export.json` in the format of another library is ignored.
    """
    present = {name for name in (EXPORT, GENAI) if (folder / name).is_file()}
    if EXPORT in present and not {"export_format", "components"} & set(read_json(folder / EXPORT)):
        present.remove(EXPORT)
    return present


def graph_files(folder: Path, subfolder: str = "") -> list[str]:
    """Return the ONNX files of one subfolder, or of the folder and its subfolder `onnx`, relative to the folder."""
    folders = [folder / subfolder] if subfolder else [folder, folder / _SUBFOLDER]
    return sorted(path.relative_to(folder).as_posix() for parent in folders for path in parent.glob(f"*{_SUFFIX}"))


def graphs_to_fetch(
    name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
) -> list[str]:
    """Return the graphs to download from a repository: the graphs of one variant that the model needs.

    Args:
        name: The repository, for error messages.
        files: The files of the model's folder.
        file_name: The requested graph file.
        variant: The requested variant: the suffix of the file names.

    Returns:
        The file names. If it is not clear which graphs the model needs, the names of all graphs, so that the caller can
        inspect the downloaded folder.

    Raises:
        ArtifactNotFoundError: The file or the variant does not exist; the message lists the existing files or variants.
    """
    candidates = [file for file in files if _is_graph(file)]
    graphs = [graph for file in candidates if (graph := named(file)) is not None]
    if file_name is not None:
        if file_name not in files:
            raise _no_graph(name, file_name, candidates)
        requested, place = named(file_name), PurePosixPath(file_name).parent
        if requested is None or not file_name.endswith(_SUFFIX):
            return [file_name]
        named_files = [graph for file in files if file.endswith(_SUFFIX) and (graph := named(file)) is not None]
        return [
            graph.file
            for graph in named_files
            if PurePosixPath(graph.file).parent == place and graph.variant == requested.variant
        ]
    if variant is None and not {EXPORT, GENAI}.isdisjoint(files):
        # After the download, the manifest in the folder decides which graphs are used, so download all graphs.
        return [file for file in candidates if "/" not in file] or candidates
    suffix = "" if variant in (None, *_WHOLE) else variant
    for place in sorted({PurePosixPath(graph.file).parent for graph in graphs}, key=lambda place: len(place.parts)):
        chosen = [graph for graph in graphs if graph.variant == suffix and PurePosixPath(graph.file).parent == place]
        if chosen:
            parts = {graph.part for graph in chosen}
            if "model" in parts and "encoder" not in parts:
                return [graph.file for graph in chosen if graph.part == "model"]
            unread = ("first", "following") if "merged" in parts else ()
            return [graph.file for graph in chosen if graph.part not in unread]
    if variant is not None and candidates:
        raise _no_variant(name, variant, graphs)
    return candidates


def _is_graph(file: str) -> bool:
    return file.endswith(_SUFFIX) and PurePosixPath(file).parent.as_posix() in (".", _SUBFOLDER)


def named(file: str) -> NamedGraphFile | None:
    """Return the part of the model and the variant that a file name contains; `None` for an unknown name."""
    stem = PurePosixPath(file).name.removesuffix(_SUFFIX)
    for prefix, part in _STEMS:
        suffix = stem.removeprefix(prefix)
        if stem.startswith(prefix) and (not suffix or suffix.startswith("_")):
            return NamedGraphFile(file, part, suffix[1:])
    return None


def one_graph(folder: Path, candidates: list[str], file_name: str | None = None, variant: str | None = None) -> str:
    """Return the file of a model with a single graph: the requested file, else `model.onnx`, else the only graph.

    Raises:
        ArtifactNotFoundError: The graph does not exist, or the choice is ambiguous; the message lists the candidates.
    """
    if file_name is not None:
        return checked_file(folder, file_name, candidates)
    graphs = [graph for file in candidates if (graph := named(file)) is not None and graph.part == "model"]
    suffix = "" if variant in (None, *_WHOLE) else variant
    for graph in sorted(graphs, key=lambda graph: graph.file.count("/")):
        if graph.variant == suffix:
            return graph.file
    if variant is not None:
        raise _no_variant(folder, variant, graphs)
    if len(candidates) != 1:
        raise _unclear(folder, candidates)
    return candidates[0]


def several_graphs(
    folder: Path, candidates: list[str], file_name: str | None = None, variant: str | None = None, *, encoder: bool
) -> dict[Part, str]:
    """Return the graph files of a generative model by part, all of one variant.

    Args:
        folder: The folder.
        candidates: The graph files of the folder.
        file_name: One of the graph files; it determines the subfolder and the variant.
        variant: The suffix of the file names.
        encoder: Whether the model has an encoder.

    Raises:
        ArtifactNotFoundError: A graph is missing, or the choice is ambiguous; the message lists the candidates.
    """
    suffix = "" if variant in _WHOLE else variant
    parent, requested_part = None, None
    if file_name is not None:
        graph = named(checked_file(folder, file_name, candidates))
        if graph is None:
            if encoder:
                raise ArtifactNotFoundError(
                    f"The file name {file_name!r} does not show whether the graph is the encoder or the decoder of the model.",
                    fix="rename the files as Optimum does: decoder_model.onnx and encoder_model.onnx.",
                )
            return {"model": file_name}
        if variant is not None and suffix != graph.variant:
            raise ArtifactNotFoundError(
                f"file_name={file_name!r} and variant={variant!r} contradict each other: the file is not of this variant.",
                fix="leave variant=... out.",
            )
        suffix, parent, requested_part = graph.variant, PurePosixPath(file_name).parent, graph.part
        candidates = sorted({*candidates, *_neighbours(folder, file_name)})
    graphs = [graph for file in candidates if (graph := named(file)) is not None]
    if parent is None:
        # The shortest path comes first: graphs in the folder have priority over graphs in its subfolder.
        folders = sorted({PurePosixPath(graph.file).parent for graph in graphs}, key=lambda place: len(place.parts))
        parent = folders[0] if folders else PurePosixPath()
    graphs = [graph for graph in graphs if PurePosixPath(graph.file).parent == parent]
    variants = {graph.variant for graph in graphs}
    if suffix is None:
        suffix = "" if "" in variants or not variants else next(iter(variants)) if len(variants) == 1 else None
    if suffix is None:
        raise _unclear(folder, candidates)
    parts: dict[Part, str] = {graph.part: graph.file for graph in graphs if graph.variant == suffix}
    if variant is not None and not parts:
        raise _no_variant(folder, variant, graphs)
    return _complete(folder, parts, candidates, requested_part, encoder=encoder)


def _complete(
    folder: Path, parts: dict[Part, str], candidates: list[str], requested: Part | None, *, encoder: bool
) -> dict[Part, str]:
    """Select the graph files that form a complete model; a part that the caller requested by file name has priority."""
    chosen: dict[Part, str] = {}
    if encoder:
        if "encoder" not in parts:
            raise _missing(folder, "encoder_model.onnx", "the encoder", parts, candidates)
        chosen["encoder"] = parts["encoder"]
    elif requested in (None, "model") and "model" in parts:
        return {"model": parts["model"]}
    if "merged" in parts and requested not in ("first", "following"):
        return {**chosen, "merged": parts["merged"]}
    if "first" not in parts:
        raise _missing(folder, "decoder_model.onnx", "the decoder that reads the prompt", parts, candidates)
    chosen["first"] = parts["first"]
    if "following" in parts:
        chosen["following"] = parts["following"]
    return chosen


def _neighbours(folder: Path, file_name: str) -> list[str]:
    parent = PurePosixPath(file_name).parent
    return [(parent / path.name).as_posix() for path in (folder / parent).glob(f"*{_SUFFIX}")]


def checked_file(folder: Path, file_name: str, candidates: list[str] | None = None) -> str:
    """Return the name of a graph file in normal form, after checking that the file is in the folder.

    Args:
        folder: The folder.
        file_name: The graph file, relative to the folder.
        candidates: The graph files of the folder, for the error message.

    Raises:
        ArtifactNotFoundError: The file does not exist, or is outside of the folder.
    """
    inside = (folder / file_name).absolute()
    if not file_name.endswith(_SUFFIX) or ".." in Path(file_name).parts or not inside.is_file():
        raise _no_graph(folder, file_name, graph_files(folder) if candidates is None else candidates)
    return PurePosixPath(file_name).as_posix()


def _no_graph(folder: Path | str, file_name: str, candidates: list[str]) -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"{folder} has no graph {file_name!r}.{did_you_mean(file_name, candidates)} It has: {_listing(candidates)}.",
        fix="pass one of its graphs as file_name=..."
        if candidates
        else "export the model first: `accel export MODEL OUT`.",
    )


def _missing(
    folder: Path, file: str, role: str, parts: dict[Part, str], candidates: list[str]
) -> ArtifactNotFoundError:
    same_variant = f" of the same variant as {', '.join(sorted(parts.values()))}" if parts else ""
    return ArtifactNotFoundError(
        f"{folder} has no {file} ({role}){same_variant}; its graphs are: {_listing(candidates)}.",
        fix=f"copy {file} into the folder, or export the model again: `accel export MODEL OUT`.",
    )


def _no_variant(folder: Path | str, variant: str, graphs: list[NamedGraphFile]) -> ArtifactNotFoundError:
    variants = sorted({graph.variant or _WHOLE[1] for graph in graphs})
    if not variants:
        return ArtifactNotFoundError(
            f"variant={variant!r} selects the ONNX graph model_{variant}.onnx, but no graph in {folder} has a variant in "
            "its name.",
            fix="leave variant=... out. Variants of PyTorch weights (model.fp16.safetensors) are not supported.",
        )
    return ArtifactNotFoundError(
        f"{folder} has no graphs of the variant {variant!r}.{did_you_mean(variant, variants)} Its variants are: {_listing(variants)}.",
        fix="pass one of its variants as variant=...",
    )


def _unclear(folder: Path, candidates: list[str]) -> ArtifactNotFoundError:
    if not candidates:
        return ArtifactNotFoundError(
            f"{folder} has no model.onnx and no other ONNX graph.",
            fix="export the model first: `accel export MODEL OUT`.",
        )
    return ArtifactNotFoundError(
        f"{folder} has no model.onnx, and the choice among its other graphs is not clear: {_listing(candidates)}.",
        fix="pass the name of one of these graphs as file_name=...",
    )


def _listing(names: list[str]) -> str:
    return ", ".join(names) or "none"
