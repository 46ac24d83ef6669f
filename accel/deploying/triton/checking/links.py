"""Checks of what connects the models of a repository: the steps of an ensemble, and the graph that a front calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..messages import TYPES, type_name
from ..repository import SETTINGS, TOKENIZER
from .findings import AGAIN, Finding, Model

_NEEDED: Mapping[str, type] = {"service": str, "graph": str, "inputs": dict, "outputs": list, "max_rows": int}


def check_links(model: Model, models: Mapping[str, Model]) -> Iterator[Finding]:
    """What is wrong between a model and those that it needs."""
    if model.backend == "ensemble" or model.config.HasField("ensemble_scheduling"):
        yield from _check_ensemble(model, models)
    elif "service" in model.settings:
        yield from _check_front(model, models)


def _check_ensemble(model: Model, models: Mapping[str, Model]) -> Iterator[Finding]:
    """Every tensor is made once before it is read, and is of one type and size where it is made and where it is read."""
    config = model.config
    made: dict[str, Any] = {one.name: one for one in config.input}
    waiting = list(config.ensemble_scheduling.step)
    if not waiting:
        yield model.found("ensemble", "it has no steps.", AGAIN)
    every = [name for step in waiting for name in step.output_map.values()]
    produced = set(every)
    for name in sorted({name for name in every if every.count(name) > 1 or name in made}):
        yield model.found(
            "ensemble", f"{name!r} is made more than once.", "give each step's outputs names of their own."
        )
    read = {name for step in waiting for name in step.input_map.values()}
    for name in sorted(set(made) - read):
        yield model.found("ensemble", f"no step reads the input {name!r}.", "drop it, or map it to a step's input.")
    yield from _check_order(model)
    if config.instance_group:
        yield model.found("instances", "an ensemble has no instances of its own.", "drop instance_group.")
    for step in waiting:
        for name in step.input_map.values():
            if name not in made and name not in produced:
                yield model.found(
                    "ensemble",
                    f"the step {step.model_name!r} reads {name!r}, which nothing makes.",
                    "mend its input_map.",
                )
    for step in waiting:
        member = models.get(step.model_name)
        if member is None:
            yield model.found(
                "member-missing", f"the step {step.model_name!r} is no model of this repository.", "add its folder."
            )
            continue
        numbers = [int(version.name) for version in member.versions]
        if step.model_version not in (-1, *numbers):
            yield model.found(
                "member-missing",
                f"the step {step.model_name!r} is of version {step.model_version}, and {numbers} are served.",
                "use model_version: -1, the latest.",
            )
        yield from _check_member(model, member)
        inputs = {one.name: one for one in member.config.input}
        outputs = {one.name: one for one in member.config.output}
        for side, given, known in (("input", step.input_map, inputs), ("output", step.output_map, outputs)):
            for name in sorted(set(given) - set(known)):
                yield model.found(
                    "ensemble", f"{step.model_name!r} has no {side} {name!r}.", f"use {', '.join(sorted(known))}."
                )
        for name in sorted(set(inputs) - set(step.input_map)):
            if not inputs[name].optional:
                yield model.found(
                    "ensemble", f"the input {name!r} of {step.model_name!r} is not mapped.", "add it to its input_map."
                )
        for name, tensor in step.output_map.items():
            if name in outputs:
                made[tensor] = outputs[name]
    for step in waiting:
        member = models.get(step.model_name)
        for one in member.config.input if member is not None else ():
            source = made.get(step.input_map.get(one.name, ""))
            if source is not None:
                yield from _check_same(model, step.input_map[one.name], source, one, step.model_name)
    for one in config.output:
        if one.name not in made or one.name not in produced:
            yield model.found("ensemble", f"no step makes the output {one.name!r}.", "mend the output_map of its step.")
        else:
            yield from _check_same(model, one.name, made[one.name], one, "the ensemble")


def _check_order(model: Model) -> Iterator[Finding]:
    """Whether there is an order of the steps in which each finds what it reads."""
    made = {one.name for one in model.config.input}
    waiting = list(model.config.ensemble_scheduling.step)
    named = made | {name for step in waiting for name in step.output_map.values()}
    while ready := [step for step in waiting if set(step.input_map.values()) & named <= made]:
        made |= {name for step in ready for name in step.output_map.values()}
        waiting = [step for step in waiting if step not in ready]
    if waiting:
        names = ", ".join(repr(step.model_name) for step in waiting)
        yield model.found("ensemble", f"{names} wait for what they make themselves.", "mend their input_map.")


def _check_member(model: Model, member: Model) -> Iterator[Finding]:
    if member.config.max_batch_size < model.config.max_batch_size:
        yield model.found(
            "batch",
            f"max_batch_size is {model.config.max_batch_size}, and of its step {member.name!r} "
            f"{member.config.max_batch_size}.",
            "use the smallest of its steps.",
        )


def _check_same(model: Model, tensor: str, source: Any, target: Any, reader: str) -> Iterator[Finding]:
    if source.data_type != target.data_type:
        yield model.found(
            "dtype",
            f"{tensor!r} is made as {type_name(source.data_type)}, and {reader} reads {type_name(target.data_type)}.",
            "use one type.",
        )
    if not _fits(tuple(source.dims), tuple(target.dims)):
        yield model.found(
            "dims",
            f"{tensor!r} is made with dims {list(source.dims)}, and {reader} reads {list(target.dims)}.",
            "use one size.",
        )


def _fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(given) == len(wanted) and all(a == b or -1 in (a, b) for a, b in zip(given, wanted, strict=True))


def _check_front(model: Model, models: Mapping[str, Model]) -> Iterator[Finding]:
    """What a front or a step was told, beside its tokenizer and the graph that it calls."""
    settings = model.settings
    wrong = [f"{key} as {kind.__name__}" for key, kind in _NEEDED.items() if not isinstance(settings.get(key), kind)]
    if wrong:
        yield model.found("settings", f"its {SETTINGS} has no {', '.join(wrong)}.", AGAIN)
        return
    for version in model.versions:
        for name in (TOKENIZER, f"{settings['service']}.py"):
            if not (version / name).is_file():
                yield model.found("file-missing", f"version {version.name} has no {name}.", AGAIN)
    if settings.get("buckets") and settings.get("max_length") and settings["buckets"][-1] > settings["max_length"]:
        yield model.found(
            "buckets", f"the bucket {settings['buckets'][-1]} is above max_length {settings['max_length']}.", AGAIN
        )
    labels = settings.get("options", {}).get("labels")
    graph = models.get(settings["graph"])
    if graph is None:
        yield model.found(
            "member-missing",
            f"it calls {settings['graph']!r}, which is no model of this repository.",
            "add its folder.",
        )
        return
    inputs = {one.name: one for one in graph.config.input}
    outputs = {one.name: one for one in graph.config.output}
    if set(settings["inputs"]) != set(inputs):
        yield model.found(
            "settings", f"it gives {sorted(settings['inputs'])}, and {graph.name!r} takes {sorted(inputs)}.", AGAIN
        )
    for name, word in settings["inputs"].items():
        if name in inputs and TYPES.get(word) != type_name(inputs[name].data_type):
            yield model.found(
                "dtype",
                f"it gives {name!r} as {TYPES.get(word, word)}; {graph.name!r} reads {type_name(inputs[name].data_type)}.",
                AGAIN,
            )
    for name in settings["outputs"]:
        if name not in outputs:
            yield model.found("settings", f"it reads {name!r}, which {graph.name!r} does not return.", AGAIN)
        elif labels and outputs[name].dims and outputs[name].dims[-1] not in (-1, len(labels)):
            yield model.found(
                "labels", f"it knows {len(labels)} labels, and {name!r} has {outputs[name].dims[-1]} values.", AGAIN
            )
    if graph.config.HasField("sequence_batching"):
        yield model.found(
            "batching", f"it calls {graph.name!r}, whose sequence_batching waits for correlation ids.", "drop that."
        )
    most = graph.config.max_batch_size
    if most and settings["max_rows"] > most:
        yield model.found(
            "batch", f"it calls {graph.name!r} with up to {settings['max_rows']} rows, which takes {most}.", AGAIN
        )
