"""optimum-intel's `OVQuantizer` and its settings, implemented with accel's quantization of OpenVINO graphs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

from ...artifact.atomic_folder_writing import scratch
from ...config import QuantizeConfig, SessionOptions
from ...errors import ConfigError, QuantizeError, did_you_mean
from ...models.loading_arguments import session_options_of
from ...stages.quantize import quantize
from ...tuning.quantize_within_budget import quantize as quantize_with_data
from .calibration import batches_of, calibration_rows, only_inputs
from .ort_config import SavedSettings
from .output_folders import without_mark
from .predefined_datasets import OTHERS, PREDEFINED, predefined_rows

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
BACKEND = "openvino"
_PRECISIONS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Arguments that accel ignores. accel always compiles models, and the exported graph determines whether the model has a state.
_WITHOUT_EFFECT = ("compile", "stateful", "dynamic_shapes", "from_onnx", "preload", "tp_size")


def translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the arguments of optimum-intel's `from_pretrained` by the arguments of accel.

    Raises:
        ConfigError: `INFERENCE_PRECISION_HINT` has an invalid value.
    """
    translated_arguments = dict(arguments)
    for name in _WITHOUT_EFFECT:
        if name in translated_arguments:
            logger.debug(
                "accel ignores the argument %s=%r of optimum-intel's from_pretrained.",
                name,
                translated_arguments.pop(name),
            )
    if isinstance(translated_arguments.get("device"), str):
        translated_arguments["device"] = translated_arguments["device"].lower().replace(".", ":")
    options = dict(translated_arguments.pop("ov_config", None) or {})
    precision = options.pop("INFERENCE_PRECISION_HINT", None)
    if precision is not None:
        if str(precision) not in _PRECISIONS:
            raise ConfigError(
                f"The OpenVINO option INFERENCE_PRECISION_HINT has the invalid value {precision!r}."
                f"{did_you_mean(str(precision), _PRECISIONS)}",
                fix=f"use one of {', '.join(_PRECISIONS)}.",
            )
        session = session_options_of(translated_arguments.get("session_options")) or SessionOptions()
        translated_arguments["session_options"] = replace(session, compute_dtype=_PRECISIONS[str(precision)])  # type: ignore[arg-type]
    if options:
        translated_arguments["provider_options"] = {**options, **(translated_arguments.get("provider_options") or {})}
    translated_arguments.setdefault("backend", BACKEND)
    return translated_arguments


class _Settings:
    """Base class of settings that can be written to JSON and read from JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create settings from a result of `to_dict`."""
        field_names = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # every subclass is a dataclass
        return cls(**{name: value for name, value in values.items() if name in field_names})


def _refusing_others(cls: type[_T]) -> type[_T]:
    """Let a settings dataclass ignore unknown arguments with the value `None` or `False`, and raise an error for other values."""
    field_names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    make: Any = cls.__init__

    @functools.wraps(make)
    def init(self: _T, *values: Any, **settings: Any) -> None:
        _refuse(cls.__name__, {name: settings.pop(name) for name in settings.keys() - field_names})
        make(self, *values, **settings)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _refuse(kind: str, settings: Mapping[str, Any]) -> None:
    """Raise an error if a setting that accel does not support has a value.

    Raises:
        ConfigError: A setting has a value other than `None` and `False`.
    """
    for name, value in settings.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"accel does not support the argument {name}={value!r} of optimum-intel's {kind}.",
                fix=f"leave out {name}. The guide 'Coming from Optimum' (docs/guides/from-optimum.md) lists the supported arguments.",
            )


def _excluded(scope: Any) -> tuple[str, ...]:
    """Return the names of nodes that are not quantized, from an `IgnoredScope` of NNCF or a mapping with the same keys."""
    values = dict(scope if isinstance(scope, Mapping) else vars(scope or object) if scope is not None else {})
    if values.get("types"):
        raise ConfigError(
            f"ignored_scope contains operator types ({', '.join(values['types'])}), and accel accepts only node names and patterns.",
            fix="replace 'types' by 'names' (node names) or 'patterns' (regular expressions for node names).",
        )
    return (*values.get("names", ()), *(f"re:{pattern}" for pattern in values.get("patterns", ())))


@_refusing_others
@dataclass
class OVWeightQuantizationConfig(_Settings):
    """Settings for the quantization of weights to 8 or 4 bits, which is accel's scheme `weight-int8` or `weight-int4`.

    Other arguments of optimum-intel raise an error if they have a value.

    Attributes:
        bits: Number of bits of a weight, 8 or 4.
        sym: Whether weights are quantized symmetrically.
        group_size: For 4 bits: number of weights that share a scale. `None` means 32.
        tokenizer: Ignored, because accel uses the tokenizer in the model's folder.
        dataset: A list of texts or the name of a data set, for AWQ, GPTQ and scale estimation.
        ratio: For 4 bits: fraction of the layers with 4-bit weights. The other layers get 8-bit weights.
        all_layers: Ignored, because `ratio` determines the layers.
        ignored_scope: Nodes that are not quantized: `{"names": [...], "patterns": [...]}`.
        num_samples: Largest number of rows of `dataset`.
        quant_method: `"default"` or `"awq"`.
        scale_estimation: For 4 bits: whether scales are fitted to `dataset`.
        dtype: `"int8"` or `"int4"`. It replaces `bits`.
        gptq: For 4 bits: whether GPTQ is used.
        processor: Ignored, because accel uses the processor in the model's folder.
    """

    bits: int = 8
    sym: bool = False
    group_size: int | None = None
    tokenizer: Any = None
    dataset: Any = None
    ratio: float = 1.0
    all_layers: bool | None = None
    ignored_scope: Any = None
    num_samples: int | None = None
    quant_method: str = "default"
    scale_estimation: bool | None = None
    dtype: str | None = None
    gptq: bool | None = None
    processor: Any = None

    def __post_init__(self) -> None:
        self.dtype = self.dtype or f"int{self.bits}"
        if self.dtype not in ("int8", "int4"):
            raise ConfigError(
                f"accel cannot quantize weights to {self.dtype}; it supports int8 and int4.",
                fix="use bits=8 or bits=4.",
            )
        self.bits = int(self.dtype.removeprefix("int"))
        self.quant_method = str(getattr(self.quant_method, "value", self.quant_method))
        self.to_accel()

    def to_accel(self) -> QuantizeConfig:
        """Return the quantization settings of accel."""
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
            raise ConfigError(
                f"AWQ, GPTQ and scale estimation need 4-bit weights, and bits is {self.bits}.",
                fix='use bits=4, or leave out gptq, scale_estimation and quant_method="awq".',
            )
        if self.num_samples is not None:
            values["samples"] = self.num_samples
        return QuantizeConfig.from_dict(values)


@_refusing_others
@dataclass
class OVQuantizationConfig(_Settings):
    """Settings for the quantization of weights and activations to 8 bits, which is accel's scheme `static-int8`.

    Other arguments of optimum-intel raise an error if they have a value.

    Attributes:
        bits: Number of bits. Only 8 is supported.
        sym: Ignored: weights are symmetric, and activations may be asymmetric (the preset `mixed` of NNCF).
        ignored_scope: Nodes that are not quantized: `{"names": [...], "patterns": [...]}`.
        num_samples: Largest number of calibration rows. `None` means 300.
        model_type: Type of the model. accel ignores the value.
        fast_bias_correction: Ignored, because accel always uses fast bias correction.
        overflow_fix: Ignored, because the target processor determines the range of weights.
        dataset: A list of texts or the name of a data set for calibration.
        tokenizer: Ignored, because accel uses the tokenizer in the model's folder.
        processor: Ignored, because accel uses the processor in the model's folder.
        smooth_quant_alpha: Exponent of SmoothQuant. A negative value disables SmoothQuant.
        dtype: Data type of the integers. Only `"int8"` is supported.
    """

    bits: int = 8
    sym: bool = False
    ignored_scope: Any = None
    num_samples: int | None = None
    model_type: str = "transformer"
    fast_bias_correction: bool = True
    overflow_fix: str = "disable"
    dataset: Any = None
    tokenizer: Any = None
    processor: Any = None
    smooth_quant_alpha: float | None = None
    dtype: str | None = "int8"

    def __post_init__(self) -> None:
        if self.bits != 8 or self.dtype not in (None, "int8"):
            raise ConfigError(
                f"accel cannot quantize activations with dtype={self.dtype!r} and bits={self.bits}; it supports 8-bit integers.",
                fix="use dtype='int8' and bits=8.",
            )
        self.dtype = "int8"
        self.to_accel()

    def to_accel(self) -> QuantizeConfig:
        """Return the quantization settings of accel."""
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
    """Return a settings object for the argument `quantization_config`.

    A settings object is returned unchanged. A mapping is converted to an `OVQuantizationConfig` if it contains settings for activations,
    and else to an `OVWeightQuantizationConfig`.

    Raises:
        ConfigError: The argument is neither a settings object nor a mapping.
    """
    if isinstance(config, OVWeightQuantizationConfig | OVQuantizationConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"quantization_config is a {type(config).__name__}, which is not a quantization config.",
            fix="pass an OVWeightQuantizationConfig, an OVQuantizationConfig, or a dictionary with the fields of one of these classes.",
        )
    values = {name: value for name, value in config.items() if name not in ("weight_only", "quantization_method")}
    static = config.get("weight_only") is False or bool(
        {"smooth_quant_alpha", "overflow_fix", "fast_bias_correction", "model_type"} & config.keys()
    )
    return OVQuantizationConfig(**values) if static else OVWeightQuantizationConfig(**values)


class OVConfig(SavedSettings):
    """Settings in the file `openvino_config.json` of optimum-intel.

    Attributes:
        quantization_config: Settings of the quantization, or `None`.
        dtype: Data type of the quantized values.
    """

    CONFIG_NAME: ClassVar[str] = "openvino_config.json"

    def __init__(self, quantization_config: Any = None, dtype: str | None = None, **_: Any) -> None:
        self.quantization_config = settings_from(quantization_config) if quantization_config else None
        self.dtype = self.quantization_config.dtype if self.quantization_config is not None else dtype

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        config = self.quantization_config
        values = {**config.to_dict(), "weight_only": isinstance(config, OVWeightQuantizationConfig)} if config else None
        return {"dtype": self.dtype, "quantization_config": values}


class OVQuantizer:
    """Quantizer with the interface of optimum-intel. Call `from_pretrained(model)` and then `quantize`.

    After `quantize`, the model object runs the quantized graph.
    """

    def __init__(self, model: Any, **_: Any) -> None:
        if getattr(getattr(model, "artifact", None), "format", None) != "openvino_ir":
            raise ConfigError(
                f"OVQuantizer needs a model of an OVModelFor... class, not a {type(model).__name__}.",
                fix="load the model with from_pretrained of an OVModelFor... class, such as OVModelForSequenceClassification.",
            )
        self.model = model

    @classmethod
    def from_pretrained(cls, model: Any, **settings: Any) -> Self:
        """Create a quantizer for a loaded model."""
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
        """Return a data set for calibration, as a `datasets.Dataset` with the graph's inputs as columns.

        The data set is loaded from the Hub or from files, shuffled, truncated and preprocessed.
        """
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
        """Quantize the model in place. If `save_directory` is given, also save the quantized model.

        Args:
            calibration_dataset: Rows with the graph's inputs. They are required to quantize activations.
            save_directory: The output folder. With `None`, nothing is saved.
            ov_config: Settings of the quantization. With `None`, weights are quantized to 8 bits. Activations are also quantized to 8 bits
                if `calibration_dataset` is given.
            file_name: Not supported, because the model can be loaded only with the usual file name. A value raises an error.
            batch_size: Number of rows in a calibration batch.
            remove_unused_columns: Ignored, because accel always removes columns that are not inputs of the graph.
            **settings: Not supported. A value raises an error.

        Raises:
            QuantizeError: The settings quantize activations, and there are no calibration rows.
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
    """Quantize a loaded model, write the result to a temporary folder, and let the model run the result.

    Args:
        model: A model of a class `OVModelFor…`.
        config: Quantization settings.
        rows: Calibration batches. With `None`, the data set in `config` is used.

    Raises:
        QuantizeError: The settings quantize activations, and there are no calibration rows.
    """
    # The temporary folder is deleted with the model object or at the end of the process. If the process is killed, the next process that
    # uses accel deletes the folder.
    lifetime = contextlib.ExitStack()
    target, ours = lifetime.enter_context(scratch()) / "model", config.to_accel()
    weakref.finalize(model, lifetime.close)
    if rows is None and config.dataset is not None:
        texts = config.dataset
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            texts = [{"text": text} for text in texts]
        elif isinstance(texts, str) and (texts in PREDEFINED or texts in OTHERS):
            texts = predefined_rows(texts, ours.samples)
        quantized = quantize_with_data(model.artifact, target, calibration=texts, config=ours, backend=BACKEND)
    else:
        if rows is None and isinstance(config, OVQuantizationConfig):
            raise QuantizeError(
                "Quantization of activations to 8 bits needs calibration data, and there is none.",
                fix="pass calibration_dataset=..., or set dataset=[...] in the OVQuantizationConfig to a list of texts.",
            )
        needed = rows if ours.scheme == "static-int8" or ours.scale_estimation or ours.algorithm != "rtn" else None
        quantized = quantize(model.artifact, target, calibration=needed, config=ours, backend=BACKEND)
    model.replace_artifact(without_mark(quantized))


def quantized_on_the_way(model: Any, config: Any, *, load_in_8bit: bool | None, calibration: Any) -> None:
    """Quantize a loaded model in place, if the arguments of `from_pretrained` request a quantization."""
    if config is None and load_in_8bit:
        config = OVWeightQuantizationConfig(bits=8)
    if config is not None:
        rows = None if calibration is None else list(batches_of(model.artifact, calibration, 1))
        quantize_in_place(model, settings_from(config), rows)
