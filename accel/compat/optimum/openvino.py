"""optimum-intel's `OVQuantizer` and its settings, over our quantization of OpenVINO graphs."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from ...artifact.writing import scratch
from ...config import QuantizeConfig, SessionOptions
from ...errors import ConfigError, QuantizeError, did_you_mean
from ...models.arguments import session_options_of
from ...stages.quantize import quantize
from ...tuning.accuracy_budget import quantize as quantize_with_data
from .calibration import batches_of, calibration_rows, only_inputs
from .placing import without_mark
from .predefined import OTHERS, PREDEFINED, predefined_rows
from .records import Record

logger = logging.getLogger(__name__)

BACKEND = "openvino"
_PRECISIONS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# They choose how a model object is made; here it is always compiled, and its graph says whether it keeps a state.
_WITHOUT_EFFECT = ("compile", "stateful", "dynamic_shapes", "from_onnx", "preload", "tp_size")


def translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `OVModelFor….from_pretrained` as those of ours.

    Raises:
        ConfigError: A precision that OpenVINO does not have.
    """
    given = dict(arguments)
    for name in _WITHOUT_EFFECT:
        if name in given:
            logger.debug("%s=%r changes nothing here.", name, given.pop(name))
    if isinstance(given.get("device"), str):
        given["device"] = given["device"].lower().replace(".", ":")
    options = dict(given.pop("ov_config", None) or {})
    precision = options.pop("INFERENCE_PRECISION_HINT", None)
    if precision is not None:
        if str(precision) not in _PRECISIONS:
            raise ConfigError(
                f"INFERENCE_PRECISION_HINT is {precision!r}.{did_you_mean(str(precision), _PRECISIONS)}",
                fix=f"use {', '.join(_PRECISIONS)}.",
            )
        session = session_options_of(given.get("session_options")) or SessionOptions()
        given["session_options"] = replace(session, compute_dtype=_PRECISIONS[str(precision)])  # type: ignore[arg-type]
    if options:
        given["provider_options"] = {**options, **(given.get("provider_options") or {})}
    given.setdefault("backend", BACKEND)
    return given


class _Settings:
    """What optimum-intel's settings share: they are read and written as JSON, and say which ones are without counterpart."""

    _names: ClassVar[tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: getattr(self, name) for name in self._names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings from `to_dict`."""
        return cls(**{name: value for name, value in values.items() if name in cls._names})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


def _refuse(kind: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that would change the result and have no counterpart.

    Raises:
        ConfigError: The first that is set.
    """
    for name, value in settings.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"{kind} has no {name}={value!r} here.", fix=f"leave {name} out; see the guide 'Coming from Optimum'."
            )


def _excluded(scope: Any) -> tuple[str, ...]:
    """Nodes that stay float, of an NNCF scope or its values."""
    values = dict(scope if isinstance(scope, Mapping) else vars(scope or object) if scope is not None else {})
    if values.get("types"):
        raise ConfigError(
            f"ignored_scope names types ({', '.join(values['types'])}).", fix="name nodes, or patterns of their names."
        )
    return (*values.get("names", ()), *(f"re:{pattern}" for pattern in values.get("patterns", ())))


class OVWeightQuantizationConfig(_Settings):
    """Weights in 8 or 4 bits: `weight-int8` and `weight-int4` here.

    Args:
        bits: 8 or 4.
        sym: Symmetric weights.
        group_size: Of 4 bits: values that share a scale; 32 when `None`.
        tokenizer: The model's own is taken.
        dataset: Texts, or a data set, for AWQ, GPTQ and scale estimation.
        ratio: Of 4 bits: share of the layers that get them, the rest 8.
        all_layers: Follows from `ratio`.
        ignored_scope: `{"names": [...], "patterns": [...]}` that stay float.
        num_samples: Rows of `dataset` at most.
        quant_method: `"default"` or `"awq"`.
        scale_estimation: Of 4 bits: fit scales to `dataset`.
        dtype: `"int8"` or `"int4"`, instead of `bits`.
        gptq: Of 4 bits: GPTQ.
        processor: The model's own is taken.
        **others: Refused where set.
    """

    _names = (
        "bits", "sym", "group_size", "tokenizer", "dataset", "ratio", "all_layers", "ignored_scope", "num_samples",
        "quant_method", "scale_estimation", "dtype", "gptq", "processor",
    )  # fmt: skip

    def __init__(
        self,
        bits: int = 8,
        sym: bool = False,
        group_size: int | None = None,
        tokenizer: Any = None,
        dataset: Any = None,
        ratio: float = 1.0,
        all_layers: bool | None = None,
        ignored_scope: Any = None,
        num_samples: int | None = None,
        quant_method: str = "default",
        scale_estimation: bool | None = None,
        dtype: str | None = None,
        gptq: bool | None = None,
        processor: Any = None,
        **others: Any,
    ) -> None:
        _refuse(type(self).__name__, others)
        dtype = dtype or f"int{bits}"
        if dtype not in ("int8", "int4"):
            raise ConfigError(f"Weights in {dtype} are not made here.", fix="use bits=8 or bits=4.")
        self.bits, self.dtype = int(dtype.removeprefix("int")), dtype
        self.sym, self.group_size, self.ratio, self.all_layers = sym, group_size, ratio, all_layers
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset, self.num_samples = dataset, num_samples
        self.ignored_scope = ignored_scope
        self.quant_method = str(getattr(quant_method, "value", quant_method))
        self.scale_estimation, self.gptq = scale_estimation, gptq
        self.to_accel()

    def to_accel(self) -> QuantizeConfig:
        """The same in our settings."""
        values: dict[str, Any] = {
            "scheme": f"weight-int{self.bits}",
            "symmetric": self.sym,
            "exclude": _excluded(self.ignored_scope),
        }
        if self.bits == 4:
            values |= {
                "ratio": self.ratio,
                "algorithm": "gptq" if self.gptq else "awq" if self.quant_method == "awq" else "rtn",
                "scale_estimation": bool(self.scale_estimation),
            }
            if self.group_size is not None:
                values["block_size"] = self.group_size
        elif self.gptq or self.scale_estimation or self.quant_method == "awq":
            raise ConfigError("AWQ, GPTQ and scale estimation are for 4 bits.", fix="use bits=4, or leave them out.")
        if self.num_samples is not None:
            values["samples"] = self.num_samples
        return QuantizeConfig.from_dict(values)


class OVQuantizationConfig(_Settings):
    """Weights and activations in 8 bits: `static-int8` here.

    Args:
        bits: 8.
        sym: Symmetric activations: as the target has them.
        ignored_scope: `{"names": [...], "patterns": [...]}` that stay float.
        num_samples: Rows of calibration data at most; 300 when `None`.
        model_type: `"transformer"`.
        fast_bias_correction: Always so here.
        overflow_fix: Follows from the target.
        dataset: Texts, or a data set.
        tokenizer: The model's own is taken.
        processor: Likewise.
        smooth_quant_alpha: SmoothQuant's exponent; negative for off.
        dtype: `"int8"`.
        **others: Refused where set.
    """

    _names = (
        "bits", "sym", "ignored_scope", "num_samples", "model_type", "fast_bias_correction", "overflow_fix", "dataset",
        "tokenizer", "processor", "smooth_quant_alpha", "dtype",
    )  # fmt: skip

    def __init__(
        self,
        bits: int = 8,
        sym: bool = False,
        ignored_scope: Any = None,
        num_samples: int | None = None,
        model_type: str = "transformer",
        fast_bias_correction: bool = True,
        overflow_fix: str = "disable",
        dataset: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        smooth_quant_alpha: float | None = None,
        dtype: str | None = "int8",
        **others: Any,
    ) -> None:
        _refuse(type(self).__name__, others)
        if bits != 8 or dtype not in (None, "int8"):
            raise ConfigError(f"Activations in {dtype or bits} are not made here.", fix="use dtype='int8'.")
        self.bits, self.sym, self.dtype = bits, sym, "int8"
        self.ignored_scope, self.num_samples, self.dataset = ignored_scope, num_samples, dataset
        self.model_type, self.fast_bias_correction, self.overflow_fix = model_type, fast_bias_correction, overflow_fix
        self.tokenizer, self.processor = tokenizer, processor
        self.smooth_quant_alpha = smooth_quant_alpha
        self.to_accel()

    def to_accel(self) -> QuantizeConfig:
        """The same in our settings."""
        values: dict[str, Any] = {
            "scheme": "static-int8",
            "exclude": _excluded(self.ignored_scope),
            "samples": self.num_samples or 300,
        }
        if self.smooth_quant_alpha is not None and self.smooth_quant_alpha >= 0:
            values["smooth_quant"] = self.smooth_quant_alpha
        return QuantizeConfig.from_dict(values)


Quantization = OVWeightQuantizationConfig | OVQuantizationConfig


def settings_from(config: Any) -> Quantization:
    """Settings of either kind, from their values too: 8-bit activations where they say so.

    Raises:
        ConfigError: Something else.
    """
    if isinstance(config, OVWeightQuantizationConfig | OVQuantizationConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"quantization_config is a {type(config).__name__}.",
            fix="pass OVWeightQuantizationConfig, OVQuantizationConfig or a dictionary of one's values.",
        )
    values = {name: value for name, value in config.items() if name not in ("weight_only", "quantization_method")}
    static = config.get("weight_only") is False or bool(
        {"smooth_quant_alpha", "overflow_fix", "fast_bias_correction", "model_type"} & config.keys()
    )
    return OVQuantizationConfig(**values) if static else OVWeightQuantizationConfig(**values)


class OVConfig(Record):
    """optimum-intel's record of settings, `openvino_config.json`.

    Attributes:
        quantization_config: What the graph was quantized with.
        dtype: Its type.
    """

    CONFIG_NAME: ClassVar[str] = "openvino_config.json"

    def __init__(self, quantization_config: Any = None, dtype: str | None = None, **_: Any) -> None:
        self.quantization_config = settings_from(quantization_config) if quantization_config else None
        self.dtype = self.quantization_config.dtype if self.quantization_config is not None else dtype

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        config = self.quantization_config
        values = {**config.to_dict(), "weight_only": isinstance(config, OVWeightQuantizationConfig)} if config else None
        return {"dtype": self.dtype, "quantization_config": values}


class OVQuantizer:
    """optimum-intel's quantizer: `from_pretrained(model)`, then `quantize`, which the model then runs, too."""

    def __init__(self, model: Any, **_: Any) -> None:
        if getattr(getattr(model, "artifact", None), "format", None) != "openvino_ir":
            raise ConfigError(
                f"OVQuantizer takes an OVModelFor..., not {type(model).__name__}.",
                fix="load the model with OVModelFor....from_pretrained(...).",
            )
        self.model = model

    @classmethod
    def from_pretrained(cls, model: Any, **settings: Any) -> Self:
        """For a model that is open."""
        return cls(model, **settings)

    def get_calibration_dataset(
        self,
        dataset_name: str,
        num_samples: int | None = 100,
        dataset_config_name: str | None = None,
        dataset_split: str | None = "train",
        preprocess_function: Callable[..., Any] | None = None,
        preprocess_batch: bool = True,
        token: bool | str | None = None,
        **_: Any,
    ) -> Any:
        """A data set of the Hub or of files, shuffled, cut and preprocessed: a `datasets.Dataset` of the graph's inputs."""
        return calibration_rows(
            self.model.artifact,
            dataset_name,
            num_samples=num_samples,
            name=dataset_config_name,
            split=dataset_split,
            preprocess=preprocess_function,
            batched=preprocess_batch,
            seed=42,
            token=token,
        )

    def quantize(
        self,
        calibration_dataset: Any = None,
        save_directory: str | os.PathLike[str] | None = None,
        ov_config: OVConfig | None = None,
        file_name: str | None = None,
        batch_size: int = 1,
        remove_unused_columns: bool = True,
        **settings: Any,
    ) -> None:
        """Quantize the model, which runs the result from now on, and save it.

        Args:
            calibration_dataset: Rows of the graph's inputs, for activations in 8 bits.
            save_directory: Where to write the model; nothing is written when `None`.
            ov_config: How; weights in 8 bits when `None`, activations too where there are rows.
            file_name: Refused: loading finds the graph by its usual name.
            batch_size: Rows a call.
            remove_unused_columns: Always so here.
            **settings: Refused.

        Raises:
            QuantizeError: Activations in 8 bits without rows.
        """
        del remove_unused_columns
        _refuse("OVQuantizer.quantize", {"file_name": file_name, **settings})
        config = ov_config.quantization_config if ov_config is not None else None
        if config is None:
            config = OVQuantizationConfig() if calibration_dataset is not None else OVWeightQuantizationConfig()
        rows = None
        if calibration_dataset is not None:
            cleaned = calibration_dataset
            if hasattr(cleaned, "column_names"):
                cleaned = only_inputs(self.model.artifact, cleaned)
            rows = list(batches_of(self.model.artifact, cleaned, batch_size))
        quantize_in_place(self.model, config, rows)
        if save_directory is not None:
            self.model.save_pretrained(save_directory)
            OVConfig(quantization_config=config).save_pretrained(save_directory)


def quantize_in_place(model: Any, config: Quantization, rows: Sequence[Mapping[str, Any]] | Any) -> None:
    """Let a model run a quantized form of its artifact, in a temporary folder of its own.

    Args:
        model: An `OVModelFor…`.
        config: How.
        rows: Batches of inputs; `None` for the data set that the settings name.

    Raises:
        QuantizeError: Activations in 8 bits, and no rows.
    """
    # As long as the model lives, or the process; what is left by a killed one is removed by the next.
    lifetime = contextlib.ExitStack()
    target, ours = lifetime.enter_context(scratch()) / "model", config.to_accel()
    weakref.finalize(model, lifetime.close)
    if rows is None and config.dataset is not None:
        texts = config.dataset
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            texts = [{"text": text} for text in texts]
        elif isinstance(texts, str) and (texts in PREDEFINED or texts in OTHERS):
            texts = predefined_rows(texts, ours.samples)
        made = quantize_with_data(model.artifact, target, calibration=texts, config=ours, backend=BACKEND)
    else:
        if rows is None and isinstance(config, OVQuantizationConfig):
            raise QuantizeError(
                "Activations in 8 bits need calibration data.",
                fix="pass calibration_dataset=..., or dataset=[texts] in the configuration.",
            )
        needed = rows if ours.scheme == "static-int8" or ours.scale_estimation or ours.algorithm != "rtn" else None
        made = quantize(model.artifact, target, calibration=needed, config=ours, backend=BACKEND)
    model.replace_artifact(without_mark(made))


def quantized_on_the_way(model: Any, config: Any, *, load_in_8bit: bool | None, calibration: Any) -> None:
    """Quantize a model in place, where `from_pretrained` was asked to."""
    if config is None and load_in_8bit:
        config = OVWeightQuantizationConfig(bits=8)
    if config is not None:
        rows = None if calibration is None else list(batches_of(model.artifact, calibration, 1))
        quantize_in_place(model, settings_from(config), rows)
