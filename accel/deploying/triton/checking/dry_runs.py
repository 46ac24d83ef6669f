"""Runs of the Python models that `deploy` wrote, without a server and without their graphs: a request goes in, the graph is zeros, and
what comes out is held against the configuration. Code of the repository is never run: it is compared with ours, and ours is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ....artifact.checksums import sha256
from ....artifact.reading import read_json
from ....errors import IntegrityError
from ....interfaces.task_registry import all_tasks
from ....interfaces.task_spec import load
from ..messages import TYPES, type_name
from ..repository import SERVED, SETTINGS, TOKENIZER
from ..served.batches import Batches, Request
from ..served.decoding import Decoder
from ..served.tokens import Array, Refused
from ..services import TextService
from .contents import Declared, Tensors, read_graph
from .findings import AGAIN, Finding, Model

_MAINS = ("front", "tokenizer_step", "answer_step", "generator", "graph")
_SIDES = ("left", "right")
_PAIR = "a text"
"""What is sent for inputs that a request may leave out."""
_ARRAYS = {TYPES[word]: word for word in TYPES if word not in ("string", "bfloat16")}
Config = Any


def check_runs(model: Model, models: Mapping[str, Model]) -> Iterator[Finding]:
    """What keeps a model's code from answering, as far as that shows without a server."""
    for version in model.versions:
        yield from _check_written(model, version)
        kind = written_as(version)
        if kind is None:
            continue
        if model.config.model_transaction_policy.decoupled != (kind == "generator"):
            yield model.found(
                "decoupled",
                "its code answers each request in pieces, and the configuration has decoupled: false."
                if kind == "generator"
                else "its code answers each request once, and the configuration has decoupled: true.",
                f"set decoupled: {'true' if kind == 'generator' else 'false'}.",
            )
        if not (version / SETTINGS).is_file():
            yield model.found("file-missing", f"version {version.name} has no {SETTINGS}, which its code reads.", AGAIN)
            continue
        try:
            settings = read_json(version / SETTINGS)
        except IntegrityError as error:
            yield model.found("settings-unreadable", error.message, AGAIN)
            continue
        try:
            if kind == "generator":
                yield from _generator(model, version, settings)
            elif kind != "graph":
                yield from _text(model, version, kind, settings, models)
        except (KeyboardInterrupt, SystemExit):
            raise
        except IntegrityError:
            # A graph that cannot be read is named where graphs are.
            continue
        except BaseException as error:  # noqa: BLE001  # a wrong file surfaces as anything, a panic of tokenizers' too
            yield model.found("settings", f"its code does not run with its {SETTINGS}: {_said(error)}.", AGAIN)


def written_as(version: Path) -> str | None:
    """Which module of `served` a version's `model.py` is; `None` where it, or one beside it, is not what this version of ours writes."""
    main = version / "model.py"
    content = main.read_bytes() if main.is_file() else b""
    others = [path for path in version.glob("*.py") if path != main and (SERVED / path.name).is_file()]
    if any((SERVED / path.name).read_bytes() != path.read_bytes() for path in others):
        return None
    return next((name for name in _MAINS if (SERVED / f"{name}.py").read_bytes() == content), None)


def _check_written(model: Model, version: Path) -> Iterator[Finding]:
    """Whether files are still those that were written."""
    try:
        files = read_json(version / SETTINGS).get("files", {})
    except IntegrityError:
        return
    for name, wanted in files.items() if isinstance(files, dict) else ():
        path = version / Path(name).name
        if path.is_file() and sha256(path) != wanted:
            yield model.found(
                "changed",
                f"{name} of version {version.name} is not as it was written.",
                f"{AGAIN[:-1]}; or, where the change is meant, take {name} out of files in {SETTINGS}.",
            )


def _text(
    model: Model, version: Path, kind: str, settings: Mapping[str, Any], models: Mapping[str, Model]
) -> Iterator[Finding]:
    """A front, or a step of an ensemble."""
    if not _is_tokenizer(version):
        if (version / TOKENIZER).is_file():
            yield _no_tokenizer(model, version)
        return
    for key, side in (("padding.side", settings["padding"]["side"]), ("truncation_side", settings["truncation_side"])):
        if side not in _SIDES:
            yield model.found("settings", f"{key} in its {SETTINGS} is {side!r}.", f"use {' or '.join(_SIDES)}.")
    service = _services().get(settings["service"])
    if service is None or not (version / f"{service.module}.py").is_file():
        # Named as a missing file.
        return
    batches = Batches(version)
    sample = {name: list(texts) for name, texts in service.sample.items()}
    if kind == "front":
        yield from _check_inputs(model, service)
        graph = models.get(settings["graph"])
        if graph is None or not set(settings["outputs"]) <= {one.name for one in graph.config.output}:
            return
        whole = {**sample, **{one.name: [_PAIR] for one in service.inputs if one.optional}}
        answers = batches.answer([_request(sample), _request(whole)], lambda feeds: _zeros(graph, settings, feeds))
        for answer in answers:
            if isinstance(answer, Refused):
                yield model.found("settings", f"its code answers a request with: {answer}.", AGAIN)
            else:
                yield from _check_answer(model, answer)
        yield from _check_labels(model, settings)
        return
    batch = batches.encode(_request(sample))
    if kind == "tokenizer_step":
        yield from _check_inputs(model, service)
        yield from _check_answer(model, batch)
        return
    given = {one.name: one for one in model.config.input}
    missing = sorted({*sample, *settings["outputs"]} - set(given))
    if missing:
        yield model.found(
            "input-missing", f"its code reads {', '.join(missing)}, which the configuration lacks.", AGAIN
        )
        return
    yield from _check_answer(model, batches.finish(_request(sample), _filled(settings, given, batch)))
    yield from _check_labels(model, settings)


def _generator(model: Model, version: Path, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """A prompt, its first token and one more."""
    if not _is_tokenizer(version):
        yield _no_tokenizer(model, version)
        return
    service = _services()["decoding"]
    yield from _check_inputs(model, service)
    yield from _check_answer(model, {"TEXT": np.array([b""], dtype=object)})
    if model.config.max_batch_size:
        yield model.found(
            "batch", f"max_batch_size is {model.config.max_batch_size}, and a prompt is a request of its own.", "set 0."
        )
    unset = [key for key in ("threads", "max_rows") if not isinstance(settings.get(key), int)]
    if unset:
        yield model.found("settings", f"its {SETTINGS} has no number for {', '.join(unset)}.", AGAIN)
    graph = version / settings["graph"]
    if not graph.is_file():
        # Named as a missing file.
        return
    inputs, outputs, _ = read_graph(graph)
    wrong = {
        f"takes names {name!r}, which the graph does not take": None for name in settings["takes"] if name not in inputs
    }

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        wrong.update(dict.fromkeys(_misfits(feeds, inputs)))
        sizes = feeds["input_ids"].shape[0], feeds["attention_mask"].shape[1]
        return {name: np.zeros(_sized(one, sizes), _kind(one)) for name, one in outputs.items()}

    tokenizer = Tokenizer.from_file(str(version / TOKENIZER))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ended: list[Exception | None] = []
    decoder = Decoder(run, tokenizer, settings)
    prompt = service.sample["PROMPT"][0]
    decoder.add(decoder.read(prompt, {"max_new_tokens": 2}, send=lambda _: None, done=ended.append))
    while decoder.rows:
        decoder.step()
    for words in wrong:
        yield model.found("settings", f"{words}: {graph.name} does not fit its {SETTINGS}.", AGAIN)


def _misfits(feeds: Mapping[str, Array], graph: Tensors) -> Iterator[str]:
    """What of a call is not as the graph declares it."""
    for name in sorted(set(graph) - set(feeds)):
        yield f"the graph takes {name!r}, which the loop does not give"
    for name, values in feeds.items():
        if name not in graph:
            yield f"the loop gives {name!r}, which the graph does not take"
            continue
        declared = graph[name]
        if str(values.dtype) != declared.dtype:
            yield f"the loop gives {name!r} as {values.dtype}, and the graph takes {declared.dtype}"
        if not _fits(values.shape, declared.dims):
            yield f"the loop gives {name!r} with the shape {list(values.shape)}, and the graph takes {list(declared.dims)}"


def _check_inputs(model: Model, service: TextService) -> Iterator[Finding]:
    """The configuration's inputs beside those that the code reads."""
    given = {one.name: one for one in model.config.input}
    wanted = {one.name: one for one in service.inputs}
    if model.config.max_batch_size == 0 and not service.generates:
        yield model.found("batch", "max_batch_size is 0, and its code reads rows of texts.", "set max_batch_size: 32.")
    for name in sorted(set(given) - set(wanted)):
        yield model.found(
            "input-unknown", f"its code has no input {name!r}, only {', '.join(wanted)}.", "rename the input."
        )
    for name, one in wanted.items():
        if name not in given:
            if not one.optional:
                yield model.found(
                    "input-missing",
                    f"its code reads {name!r}, which the configuration does not name.",
                    "add the input.",
                )
            continue
        found = given[name]
        if type_name(found.data_type) != TYPES[one.dtype]:
            yield model.found(
                "dtype", f"the input {name!r} is {type_name(found.data_type)}.", f"write {TYPES[one.dtype]}."
            )
        if tuple(found.dims) != one.dims:
            yield model.found("dims", f"the input {name!r} has dims {list(found.dims)}.", f"write {list(one.dims)}.")
        if found.optional != one.optional:
            yield model.found(
                "optional",
                f"the input {name!r} {'may' if found.optional else 'may not'} be left out, and to its code it "
                f"{'may' if one.optional else 'may not'}.",
                f"set optional: {str(one.optional).lower()}.",
            )


def _check_answer(model: Model, answer: Mapping[str, Array]) -> Iterator[Finding]:
    """What the code returned beside the outputs of the configuration."""
    given = {one.name: one for one in model.config.output}
    for name in sorted(set(given) - set(answer)):
        yield model.found(
            "output-unknown", f"its code returns no {name!r}, only {', '.join(sorted(answer))}.", "rename the output."
        )
    for name, values in answer.items():
        if name not in given:
            yield model.found(
                "output-missing",
                f"its code returns {name!r}, which the configuration does not name.",
                "add the output.",
            )
            continue
        one = given[name]
        kind = "TYPE_STRING" if values.dtype == object else TYPES[str(values.dtype)]
        if kind != type_name(one.data_type):
            yield model.found("dtype", f"the output {name!r} is {type_name(one.data_type)}.", f"write {kind}.")
        own = values.shape[1:] if model.config.max_batch_size else values.shape
        if not _fits(own, tuple(one.dims)):
            yield model.found(
                "dims", f"the output {name!r} has dims {list(one.dims)}, and its code returns {list(own)}.", AGAIN
            )


def _check_labels(model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Labels that Triton answers with beside those of the code."""
    labels = settings["options"].get("labels")
    for output in model.config.output:
        path = model.folder / output.label_filename
        if not labels or not output.label_filename or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        # Of another number is a finding of its own.
        differ = [(a, b) for a, b in zip(lines, labels, strict=False) if a != b]
        if differ and len(lines) == len(labels):
            yield model.found(
                "labels", f"{path.name} has {differ[0][0]!r} where its code answers {differ[0][1]!r}.", AGAIN
            )


def _services() -> dict[str, TextService]:
    """Services by the module that does their work."""
    paths = {path for spec in all_tasks() for path in spec.fronts.values()}
    return {service.module: service for service in map(load, paths)}


def _request(texts: Mapping[str, Sequence[str]]) -> Request:
    return Request(
        {name: np.array([[text.encode() for text in each]], dtype=object) for name, each in texts.items()}, {}
    )


def _zeros(graph: Model, settings: Mapping[str, Any], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What a graph's configuration says that it returns."""
    return _filled(settings, {one.name: one for one in graph.config.output}, feeds, graph.config.max_batch_size > 0)


def _filled(
    settings: Mapping[str, Any], tensors: Mapping[str, Config], batch: Mapping[str, Array], behind_batch: bool = True
) -> dict[str, Array]:
    found = {}
    for name in settings["outputs"]:
        one = tensors[name]
        dims = (-1, *one.dims) if behind_batch else tuple(one.dims)
        declared = Declared(_ARRAYS.get(type_name(one.data_type), "float32"), dims)
        found[name] = np.zeros(_sized(declared, batch["input_ids"].shape), _kind(declared))
    return found


def _sized(declared: Declared, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with rows and tokens for the sizes that vary."""
    return tuple(size if size >= 0 else sizes[min(axis, 1)] for axis, size in enumerate(declared.dims))


def _kind(declared: Declared) -> str:
    return "float32" if declared.dtype == "bfloat16" else declared.dtype


def _fits(shape: Iterable[int], dims: Iterable[int]) -> bool:
    given, wanted = tuple(shape), tuple(dims)
    return len(given) == len(wanted) and all(b in (-1, a) for a, b in zip(given, wanted, strict=True))


def _is_tokenizer(version: Path) -> bool:
    """Whether there is a tokenizer that can be read."""
    try:
        Tokenizer.from_file(str(version / TOKENIZER))
    except Exception:  # noqa: BLE001  # tokenizers raises no class of its own
        return False
    return True


def _no_tokenizer(model: Model, version: Path) -> Finding:
    if not (version / TOKENIZER).is_file():
        return model.found("file-missing", f"version {version.name} has no {TOKENIZER}.", AGAIN)
    return model.found("file-unreadable", f"{TOKENIZER} of version {version.name} is no tokenizer.", AGAIN)


def _said(error: BaseException) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else f"{error}".rstrip(".") or type(error).__name__
