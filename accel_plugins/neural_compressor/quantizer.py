"""PyTorch weights in, PyTorch weights with fewer bits out."""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from accel.artifact import (
    Artifact,
    HubOptions,
    Location,
    Quantization,
    Step,
    copy_companions,
    record_files,
    tool_versions,
)
from accel.capture import (
    Source,
    first_lines,
    load_source,
    quiet,
    read_by_other_code,
    reference,
    replace_layer,
    save_quantized,
    unwrapped,
    with_record,
)
from accel.config import ExportConfig, QuantizeConfig
from accel.errors import BudgetError, ConfigError, QuantizeError, did_you_mean
from accel.interfaces.protocols import Batches, Evaluate

from .blocks import hidden
from .library import library, mapped
from .static import integer_layers, observed, static_config, traced
from .weights import (
    NEEDS_DATA,
    check_algorithm,
    check_blocks,
    quantize_weights,
    share_again,
    weight_config,
    with_block_layers,
    with_weights_of_their_own,
)

_LINEAR = (torch.nn.Linear,)
_VERSIONS = ("neural-compressor-pt", "torchao", "auto-round", "torch", "transformers")


class CompressorQuantizer:
    """Writes models whose layers hold the integers, scales and zero points that Neural Compressor found."""

    def quantize(
        self,
        artifact: Artifact,
        *,
        config: QuantizeConfig,
        calibration: Batches | None,
        evaluate: Evaluate | None,
        out: Path,
    ) -> Artifact:
        """Write the quantized model; see `accel.interfaces.protocols.Quantizer`. Takes seconds for `rtn` and static schemes on
        encoders, up to minutes for algorithms that search or train.
        """
        _check(artifact, config, calibration, evaluate)
        source = _source(artifact)
        work = _Work(artifact, source, config, calibration, out)
        if config.max_drop is not None:
            assert evaluate is not None
            return work.tuned(evaluate, config.max_drop)
        return work.written(work.quantized(config), config, out)


class _Work:
    """One model on its way: the float model stays as it is, and every attempt starts from a copy."""

    def __init__(
        self, artifact: Artifact, source: Source, config: QuantizeConfig, calibration: Batches | None, out: Path
    ) -> None:
        self._artifact, self._source, self._out = artifact, source, out
        self._config = config
        self._batches = list(_rows(calibration, artifact, config.samples)) if calibration is not None else []
        self._names: list[str] = []
        self._excluded = _excluded(source, config.exclude)
        self._trace: Any = None

    def quantized(self, config: QuantizeConfig) -> torch.nn.Module:
        """A quantized copy of the model, without its wrapper."""
        settings = self._settings(config)
        return self._static(settings) if config.scheme == "static-int8" else self._weights(config, settings)

    def _settings(self, config: QuantizeConfig) -> Any:
        """Neural Compressor's settings for a recipe."""
        if config.scheme == "static-int8":
            return static_config(config)
        return weight_config(config, self._excluded, str(self._artifact.path))

    def _static(self, settings: Any) -> torch.nn.Module:
        taken = self._source.example
        batches = [{name: tensor for name, tensor in batch.items() if name in taken} for batch in self._batches]
        if self._trace is None:
            self._check_calls(batches[0])
            self._trace = traced(self._source)
        try:
            converted = observed(copy_of(self._trace), settings, batches)
        except QuantizeError:
            # A later batch may have values that the model does not take; what it says of them itself is clearer.
            for batch in batches[1:]:
                self._check_calls(batch)
            raise
        model: torch.nn.Module = copy.deepcopy(unwrapped(self._source.model))
        prefix = "model." if self._source.model is not unwrapped(self._source.model) else ""
        layers = integer_layers(converted, model, prefix, lambda name: name not in self._excluded)
        for name, layer in layers.items():
            replace_layer(model, name, layer)
        self._names = list(layers)
        return model

    def _check_calls(self, batch: dict[str, torch.Tensor]) -> None:
        """Refuse models that the inputs of one graph are not all of, with an image, a sound or points beside tokens, and values that
        a model does not take.

        Raises:
            QuantizeError: The model cannot be called with a batch.
        """
        missing = ", ".join(name for name in self._source.example if name not in batch)
        why = f"it takes {missing}, too" if missing else ""
        try:
            if not missing:
                reference(self._source.model, batch)
        # Foreign model code, which may raise anything.
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {first_lines(error)}"
        if why:
            raise QuantizeError(
                f"{self._source.architecture} cannot be called with a batch of the calibration data "
                f"({', '.join(f'{name} of {tuple(value.shape)}' for name, value in batch.items())}): {why}.",
                fix="pass calibration data with all of the model's inputs and values that it takes, or use weight-int8 or "
                "weight-int4, which need none.",
            )

    def _weights(self, config: QuantizeConfig, settings: Any) -> torch.nn.Module:
        inner = unwrapped(self._source.model)
        before = {name: one for name, one in inner.named_modules() if hasattr(one, "weight")}
        model = with_weights_of_their_own(copy.deepcopy(inner))
        batches = self._batches
        if config.algorithm == "awq":
            check_blocks(inner, config, self._excluded)
        if config.algorithm in ("awq", "gptq"):
            batches = [row for batch in batches for row in _rows_alone(batch)]
        with hidden(model, self._excluded if config.algorithm == "gptq" else ()):
            made: torch.nn.Module = quantize_weights(model, config, settings, batches)
        self._names = with_block_layers(made, before)
        share_again(made, inner)
        return made

    def tuned(self, evaluate: Evaluate, max_drop: float) -> Artifact:
        """Neural Compressor's own search: one recipe after the other, until what `evaluate` measures is inside the budget. Of recipes
        that were not asked for, those that the model cannot have are left out and named.

        Raises:
            BudgetError: Nothing is.
        """
        inc, found, refused = library(), dict[str, float](), dict[str, str]()
        recipes = list(_recipes(self._config, calibrated=bool(self._batches)))
        measured: list[tuple[float, QuantizeConfig]] = []

        def attempts() -> Iterator[tuple[QuantizeConfig, Any, float]]:
            for recipe, settings in zip(recipes, theirs, strict=True):
                # Inside the output: what lies beside it is swept by other processes that write there.
                with tempfile.TemporaryDirectory(dir=self._out, prefix=".candidate-") as folder:
                    try:
                        candidate = self.written(self.quantized(recipe), recipe, Path(folder))
                    except (QuantizeError, ConfigError) as error:
                        if recipe is recipes[0]:
                            raise
                        refused[_named(recipe)] = error.message
                        continue
                    value = evaluate(candidate)
                if not math.isfinite(value):
                    refused[_named(recipe)] = f"it measures {value}"
                    continue
                yield recipe, settings, value

        baseline = evaluate(self._artifact)
        if not math.isfinite(baseline):
            raise BudgetError(
                f"The float model measures {baseline}, of which nothing can be lost.",
                fix="pass a measure that is finite.",
            )
        # Its budget is relative to the float model's value; ours is in the points of the measure.
        relative = max_drop / abs(baseline) if baseline else 0.0
        theirs = [self._settings(recipe) for recipe in recipes]
        settings = inc.TuningConfig(config_set=theirs, tolerable_loss=relative, max_trials=len(recipes))
        with mapped("its search", "leave max_drop out, or allow more."):
            from neural_compressor.common.base_tuning import init_tuning

            _, _, monitor = init_tuning(tuning_config=settings)
            monitor.set_baseline(baseline)
        for number, (recipe, their, value) in enumerate(attempts(), 1):
            found[_named(recipe)] = value
            measured.append((value, recipe))
            with mapped("its search", "leave max_drop out, or allow more."):
                monitor.add_trial_result(number, value, their)
                done = monitor.need_stop()
            if done:
                break
        value, best = max(measured, key=lambda one: one[0], default=(-math.inf, self._config))
        if value < baseline - max_drop:
            lines = "\n".join(
                [f"  {name}: {one:.4f}" for name, one in found.items()]
                + [f"  {n}: {why}" for n, why in refused.items()]
            )
            raise BudgetError(
                f"No recipe loses at most {max_drop:g}: the float model has {baseline:.4f}.\n{lines}",
                fix="allow a larger max_drop, or another scheme.",
            )
        report = {"search": {"float": baseline, "tried": found, "refused": refused, "chosen": _named(best)}}
        return self.written(self.quantized(best), best, self._out, report)

    def written(
        self, model: torch.nn.Module, config: QuantizeConfig, out: Path, report: dict[str, Any] | None = None
    ) -> Artifact:
        """The artifact of a quantized model."""
        used = config.scheme == "static-int8" or config.algorithm in NEEDS_DATA
        rows = sum(len(next(iter(batch.values()))) for batch in self._batches)
        record = Quantization(
            scheme=config.scheme,
            preset=config.algorithm if config.scheme != "static-int8" else "",
            excluded=tuple(self._excluded),
            calibration={"method": config.calibration, "n": rows, "seed": config.seed} if used and rows else None,
        )
        copy_companions(self._artifact.path, out)
        files = save_quantized(with_record(model, record), out)
        step = Step(
            stage="quantize",
            backend="neural-compressor",
            config=config.to_dict(),
            versions=tool_versions(*_VERSIONS),
            parent=self._artifact.digest,
            report={"layers": list(self._names), **(report or {})},
        )
        manifest = self._artifact.manifest
        recorded = record_files(out, files)
        components = tuple(replace(one, file=files[0], files=recorded) for one in manifest.components)
        return Artifact.create(
            out,
            replace(manifest, components=components, quantization=record, steps=(*manifest.steps, step), run=None),
        )


def copy_of(graph: Any) -> Any:
    """A copy of a traced model, which keeps the mark that Neural Compressor looks for."""
    # PyTorch's own classes warn when they are copied.
    with quiet():
        made = copy.deepcopy(graph)
    made._exported, made.dynamic_shapes = True, None
    return made


def _source(artifact: Artifact) -> Source:
    recorded = next((step.config for step in artifact.manifest.steps if step.stage == "export"), {})
    config = ExportConfig.from_dict({**recorded, "dtype": "float32", "atol": None})
    location = Location(str(artifact.path), artifact.path)
    return load_source(location, task=artifact.task, config=config, hub=HubOptions(local_files_only=True))


def _check(artifact: Artifact, config: QuantizeConfig, calibration: Batches | None, evaluate: Evaluate | None) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: Settings that Neural Compressor has no counterpart for.
        QuantizeError: Calibration data is missing.
    """
    if config.preset != "auto":
        raise ConfigError("Neural Compressor has no presets.", fix="leave preset out.")
    if artifact.dtype != "float32":
        raise QuantizeError(
            f"{artifact.path} is {artifact.dtype}; quantized layers take float32 activations.",
            fix="quantize the float32 model.",
        )
    if config.scheme == "static-int8":
        if calibration is None:
            raise QuantizeError(
                "static-int8 needs calibration data: activation ranges made up from random inputs are wrong.",
                fix="pass calibration=..., a hundred rows of real inputs or more.",
            )
        if config.calibration == "percentile":
            raise ConfigError(
                "Neural Compressor has no percentile calibration.", fix="use minmax, moving_average or entropy."
            )
    else:
        check_algorithm(config, calibrated=calibration is not None)
    if config.max_drop is not None and evaluate is None:
        raise ConfigError(
            "max_drop needs evaluate=..., which measures the artifact.", fix="pass it, or leave max_drop out."
        )


def _recipes(config: QuantizeConfig, *, calibrated: bool) -> Iterator[QuantizeConfig]:
    """What the search tries: the settings as given, then more careful ones."""
    plain = replace(config, max_drop=None)
    yield plain
    if config.scheme == "static-int8":
        others = [replace(plain, calibration=word) for word in ("minmax", "entropy")]
    else:
        sizes = [size for size in (32, 16) if size < config.block_size]
        words: tuple[Literal["gptq", "awq"], ...] = ("gptq", "awq") if calibrated else ()
        others = [replace(plain, algorithm=word) for word in words] + [replace(plain, block_size=n) for n in sizes]
    yield from (one for one in others if one != plain)


def _named(config: QuantizeConfig) -> str:
    if config.scheme == "static-int8":
        return f"{config.scheme} ({config.calibration})"
    return f"{config.scheme} ({config.algorithm}, blocks of {config.block_size})"


def _rows(calibration: Batches, artifact: Artifact, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Calibration batches with the model's inputs, up to `limit` rows.

    Raises:
        QuantizeError: There are none.
    """
    # A model in PyTorch computes its positions, and all logits, itself.
    names = [spec.name for spec in artifact.components[0].inputs if spec.name not in ("position_ids", "logits_to_keep")]
    rows = 0
    for feeds in calibration:
        if rows >= limit:
            break
        batch = {name: feeds[name][: limit - rows] for name in names if name in feeds}
        if not batch:
            raise QuantizeError(
                f"The calibration data has {', '.join(feeds) or 'nothing'}, and none of what the model takes: {', '.join(names)}.",
                fix="pass batches with the model's inputs, or rows in the columns of its task.",
            )
        rows += len(next(iter(batch.values())))
        yield batch
    if not rows:
        raise QuantizeError("The calibration data is empty.", fix="pass at least a few dozen rows of real inputs.")


def _rows_alone(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Each row of a batch, without its padding: AWQ runs layers alone, with the mask of one call for the rows of all, and GPTQ counts
    padding like tokens.
    """
    mask = batch.get("attention_mask")
    for i in range(len(next(iter(batch.values())))):
        row = {name: tensor[i : i + 1] for name, tensor in batch.items()}
        if mask is not None:
            kept = mask[i].bool()
            row = {n: t[:, kept] if batch[n].shape[:2] == mask.shape else t for n, t in row.items()}
        yield row


def _excluded(source: Source, patterns: Sequence[str]) -> list[str]:
    """Names of the linear layers that patterns take out, and of those whose weights other code reads.

    Raises:
        ConfigError: A pattern that matches none.
    """
    layers = {name: one for name, one in unwrapped(source.model).named_modules() if isinstance(one, _LINEAR)}
    names = list(layers)
    read = read_by_other_code(source.model, source.example)
    taken = [name for name, layer in layers.items() if layer in read]
    for pattern in patterns:
        match: Callable[[str], Any] = (
            re.compile(pattern.removeprefix("re:")).search if pattern.startswith("re:") else pattern.__eq__
        )
        found = [name for name in names if match(name) is True or (pattern.startswith("re:") and match(name))]
        if not found:
            raise ConfigError(
                f"exclude holds {pattern!r}, which matches none of the {len(names)} layers.{did_you_mean(pattern, names)}",
                fix=f"use a name such as {', '.join(names[:3])}, or re: and a regular expression.",
            )
        taken += found
    return list(dict.fromkeys(taken))
