"""Which graphs of an ONNX folder are meant: by their names, as Optimum and transformers.js give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from accel.artifact.reading import read_json
from accel.errors import ArtifactNotFoundError, did_you_mean
from accel.interfaces.folder_reader import Part

# Longer names first: `decoder_model` begins `decoder_model_merged`.
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
"""Descriptions of graphs that a folder may hold: transformers', and ONNX Runtime GenAI's."""
_SUBFOLDER = "onnx"
_SUFFIX = ".onnx"
# What transformers.js calls graphs without an ending.
_WHOLE = ("", "fp32", "default")


@dataclass(frozen=True, slots=True)
class Named:
    """A file whose name says which part of a model it holds, and in which variant (`quantized`, `q4`, ...)."""

    file: str
    part: Part
    variant: str


def descriptions_in(folder: Path) -> set[str]:
    """Names of the descriptions in a folder; other libraries write an `export.json` of another kind, which is none."""
    present = {name for name in (EXPORT, GENAI) if (folder / name).is_file()}
    if EXPORT in present and not {"export_format", "components"} & set(read_json(folder / EXPORT)):
        present.remove(EXPORT)
    return present


def graph_files(folder: Path, subfolder: str = "") -> list[str]:
    """ONNX files of one subfolder, or of a folder and of its subfolder `onnx`; relative to the folder."""
    places = [folder / subfolder] if subfolder else [folder, folder / _SUBFOLDER]
    return sorted(path.relative_to(folder).as_posix() for place in places for path in place.glob(f"*{_SUFFIX}"))


def graphs_to_fetch(
    name: str, files: Sequence[str], *, file_name: str | None = None, variant: str | None = None
) -> list[str]:
    """The graphs among a repository's files that will be opened: one variant, and the parts that `several_graphs` takes.

    Args:
        name: The repository, for errors.
        files: Of the model's folder.
        file_name: The graph that was asked for.
        variant: The ending of the names that was asked for.

    Returns:
        Their names; all graphs where which is meant is not clear, as their folder is then looked at.

    Raises:
        ArtifactNotFoundError: There is no such file, or no such variant; lists what there is.
    """
    candidates = [file for file in files if _is_graph(file)]
    known = [one for file in candidates if (one := named(file)) is not None]
    if file_name is not None:
        if file_name not in files:
            raise _no_graph(name, file_name, candidates)
        asked, place = named(file_name), PurePosixPath(file_name).parent
        if asked is None or not file_name.endswith(_SUFFIX):
            return [file_name]
        same = [one for file in files if file.endswith(_SUFFIX) and (one := named(file)) is not None]
        return [one.file for one in same if PurePosixPath(one.file).parent == place and one.variant == asked.variant]
    if variant is None and not {EXPORT, GENAI}.isdisjoint(files):
        # The description names the graphs: all of its folder.
        return [file for file in candidates if "/" not in file] or candidates
    wanted = "" if variant in (None, *_WHOLE) else variant
    for place in sorted({PurePosixPath(one.file).parent for one in known}, key=lambda place: len(place.parts)):
        chosen = [one for one in known if one.variant == wanted and PurePosixPath(one.file).parent == place]
        if chosen:
            parts = {one.part for one in chosen}
            if "model" in parts and "encoder" not in parts:
                return [one.file for one in chosen if one.part == "model"]
            unread = ("first", "following") if "merged" in parts else ()
            return [one.file for one in chosen if one.part not in unread]
    if variant is not None and candidates:
        raise _no_variant(name, variant, known)
    return candidates


def _is_graph(file: str) -> bool:
    return file.endswith(_SUFFIX) and PurePosixPath(file).parent.as_posix() in (".", _SUBFOLDER)


def named(file: str) -> Named | None:
    """What a file's name says, or nothing."""
    stem = PurePosixPath(file).name.removesuffix(_SUFFIX)
    for known, part in _STEMS:
        rest = stem.removeprefix(known)
        if stem.startswith(known) and (not rest or rest.startswith("_")):
            return Named(file, part, rest[1:])
    return None


def one_graph(folder: Path, candidates: list[str], file_name: str | None = None, variant: str | None = None) -> str:
    """The graph of a model that is one: as named, `model.onnx`, or the only one.

    Raises:
        ArtifactNotFoundError: No such graph, or several and none is the usual one; lists the candidates.
    """
    if file_name is not None:
        return _checked(folder, file_name, candidates)
    known = [one for file in candidates if (one := named(file)) is not None and one.part == "model"]
    wanted = "" if variant in (None, *_WHOLE) else variant
    for one in sorted(known, key=lambda one: one.file.count("/")):
        if one.variant == wanted:
            return one.file
    if variant is not None:
        raise _no_variant(folder, variant, known)
    if len(candidates) != 1:
        raise _unclear(folder, candidates)
    return candidates[0]


def several_graphs(
    folder: Path, candidates: list[str], file_name: str | None = None, variant: str | None = None, *, encoder: bool
) -> dict[Part, str]:
    """The graphs of a model that generates, by part: one variant of each.

    Args:
        folder: The folder.
        candidates: Its graphs.
        file_name: One of them, which says the subfolder and the variant.
        variant: The ending of their names.
        encoder: Whether the model has an encoder.

    Raises:
        ArtifactNotFoundError: One is missing, or which is meant is not clear; lists the candidates.
    """
    wanted = "" if variant in _WHOLE else variant
    where, asked = None, None
    if file_name is not None:
        one = named(_checked(folder, file_name, candidates))
        if one is None:
            if encoder:
                raise ArtifactNotFoundError(
                    f"{file_name!r} does not say by its name which part of the model it is.",
                    fix="name it as Optimum does: decoder_model.onnx, beside encoder_model.onnx.",
                )
            return {"model": file_name}
        if variant is not None and wanted != one.variant:
            raise ArtifactNotFoundError(
                f"{file_name!r} is not of the variant {variant!r}.", fix="leave variant=... out."
            )
        wanted, where, asked = one.variant, PurePosixPath(file_name).parent, one.part
        candidates = sorted({*candidates, *_neighbours(folder, file_name)})
    known = [one for file in candidates if (one := named(file)) is not None]
    if where is None:
        # The root before the subfolder, as for single graphs.
        places = sorted({PurePosixPath(one.file).parent for one in known}, key=lambda place: len(place.parts))
        where = places[0] if places else PurePosixPath()
    known = [one for one in known if PurePosixPath(one.file).parent == where]
    variants = {one.variant for one in known}
    if wanted is None:
        wanted = "" if "" in variants or not variants else next(iter(variants)) if len(variants) == 1 else None
    if wanted is None:
        raise _unclear(folder, candidates)
    found: dict[Part, str] = {one.part: one.file for one in known if one.variant == wanted}
    if variant is not None and not found:
        raise _no_variant(folder, variant, known)
    return _complete(folder, found, candidates, asked, encoder=encoder)


def _complete(
    folder: Path, found: dict[Part, str], candidates: list[str], asked: Part | None, *, encoder: bool
) -> dict[Part, str]:
    """The parts that make a model, of those found; what was asked for by name before what is usual."""
    chosen: dict[Part, str] = {}
    if encoder:
        if "encoder" not in found:
            raise _missing(folder, "encoder_model.onnx", "the encoder", found, candidates)
        chosen["encoder"] = found["encoder"]
    elif asked in (None, "model") and "model" in found:
        return {"model": found["model"]}
    if "merged" in found and asked not in ("first", "following"):
        return {**chosen, "merged": found["merged"]}
    if "first" not in found:
        raise _missing(folder, "decoder_model.onnx", "the decoder that reads the prompt", found, candidates)
    chosen["first"] = found["first"]
    if "following" in found:
        chosen["following"] = found["following"]
    return chosen


def _neighbours(folder: Path, file_name: str) -> list[str]:
    parent = PurePosixPath(file_name).parent
    return [(parent / path.name).as_posix() for path in (folder / parent).glob(f"*{_SUFFIX}")]


def checked_file(folder: Path, file_name: str) -> str:
    """A graph in a folder by its name.

    Raises:
        ArtifactNotFoundError: It is not there, or outside.
    """
    return _checked(folder, file_name, graph_files(folder))


def _checked(folder: Path, file_name: str, candidates: list[str]) -> str:
    inside = (folder / file_name).absolute()
    if not file_name.endswith(_SUFFIX) or ".." in Path(file_name).parts or not inside.is_file():
        raise _no_graph(folder, file_name, candidates)
    return PurePosixPath(file_name).as_posix()


def _no_graph(folder: Path | str, file_name: str, candidates: list[str]) -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"{folder} has no graph {file_name!r}.{did_you_mean(file_name, candidates)} It has: {_listing(candidates)}.",
        fix="pass one of these as file_name=...",
    )


def _missing(
    folder: Path, file: str, what: str, found: dict[Part, str], candidates: list[str]
) -> ArtifactNotFoundError:
    beside = f", in the variant of {', '.join(sorted(found.values()))}" if found else ""
    return ArtifactNotFoundError(
        f"{folder} has no {file}, {what}{beside}; its graphs are: {_listing(candidates)}.",
        fix="copy that file, too, or export the model again: `accel export MODEL OUT`.",
    )


def _no_variant(folder: Path | str, variant: str, known: list[Named]) -> ArtifactNotFoundError:
    have = sorted({one.variant or _WHOLE[1] for one in known})
    if not have:
        return ArtifactNotFoundError(
            f"{folder} has no graph whose name says its variant (model_{variant}.onnx), and variant={variant!r} chooses one of them.",
            fix="leave variant=... out; weights are read as model.safetensors, not as model.fp16.safetensors.",
        )
    return ArtifactNotFoundError(
        f"{folder} has no graphs of the variant {variant!r}.{did_you_mean(variant, have)} It has: {_listing(have)}.",
        fix="pass one of these as variant=...",
    )


def _unclear(folder: Path, candidates: list[str]) -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        f"{folder} has no model.onnx, and which of its graphs to take is not clear: {_listing(candidates)}.",
        fix="pass one of these as file_name=..." if candidates else "export the model first: `accel export MODEL OUT`.",
    )


def _listing(names: list[str]) -> str:
    return ", ".join(names) or "none"
