"""Optimum's `ORTQuantizer` and its quantization settings, implemented with accel's quantization."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from ...artifact.atomic_folder_writing import scratch
from ...artifact.manifest import Artifact
from ...config import QuantizeConfig
from ...errors import ConfigError, QuantizeError
from ...stages.quantize import quantize
from .calibration import (
    CalibrationConfig,
    DeferredCalibration,
    RecordedBatches,
    batches_of,
    calibration_rows,
    member,
    only_inputs,
)
from .ort_config import ORTConfig
from .output_folders import nodes_of, place, source_of

logger = logging.getLogger(__name__)


class QuantFormat(Enum):
    """Representation of quantized operators in a graph: integer operators (`QOperator`), or Q/DQ nodes (`QDQ`)."""

    QOperator = 0
    QDQ = 1


class QuantizationMode(Enum):
    """Kind of quantized operators: `IntegerOps` for dynamic quantization, `QLinearOps` for static quantization."""

    IntegerOps = 0
    QLinearOps = 1


class QuantType(Enum):
    """Data types of 8-bit integers."""

    QInt8 = 0
    QUInt8 = 1


class ORTQuantizableOperator(Enum):
    """Operator types that ONNX Runtime can quantize."""

    Gather = "Gather"
    Transpose = "Transpose"
    EmbedLayerNormalization = "EmbedLayerNormalization"
    Conv = "Conv"
    MatMul = "MatMul"
    Gemm = "Gemm"
    Add = "Add"
    Mul = "Mul"
    Relu = "Relu"
    Clip = "Clip"
    LeakyRelu = "LeakyRelu"
    Sigmoid = "Sigmoid"
    MaxPool = "MaxPool"
    GlobalAveragePool = "GlobalAveragePool"
    Split = "Split"
    Pad = "Pad"
    Reshape = "Reshape"
    Squeeze = "Squeeze"
    Unsqueeze = "Unsqueeze"
    Resize = "Resize"
    AveragePool = "AveragePool"
    Concat = "Concat"
    Attention = "Attention"
    LSTM = "LSTM"


@dataclass
class QuantizationConfig:
    """Optimum's quantization settings. The guide "Coming from Optimum" describes how accel converts them.

    Attributes:
        is_static: Whether the quantization is static, with activation ranges from calibration data.
        format: `QDQ` or `QOperator`, for static quantization.
        mode: `QLinearOps` for static quantization, `IntegerOps` for dynamic quantization.
        activations_dtype: Data type of activations.
        activations_symmetric: Ignored, because signed activations are always symmetric and unsigned activations never are.
        weights_dtype: Only written to the settings file. accel always uses signed weights, because all kernels are fast for them.
        weights_symmetric: Whether weights are quantized symmetrically.
        per_channel: Whether each output channel has its own scale.
        reduce_range: Whether weights use only 7 bits.
        nodes_to_quantize: Names of the nodes that are quantized. Empty means all nodes.
        nodes_to_exclude: Names of nodes that are not quantized.
        operators_to_quantize: Operator types that are quantized. Empty means the types with fast kernels on the target.
        qdq_add_pair_to_weight: Only written to the settings file.
        qdq_dedicated_pair: Whether Q/DQ nodes are placed as TensorRT needs them.
        qdq_op_type_per_channel_support_to_axis: Only written to the settings file, because the operator type determines the axis.
    """

    is_static: bool
    format: Any = QuantFormat.QDQ
    mode: Any = QuantizationMode.QLinearOps
    activations_dtype: Any = QuantType.QUInt8
    activations_symmetric: bool = False
    weights_dtype: Any = QuantType.QInt8
    weights_symmetric: bool = True
    per_channel: bool = False
    reduce_range: bool = False
    nodes_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    operators_to_quantize: list[Any] = field(default_factory=list)
    qdq_add_pair_to_weight: bool = False
    qdq_dedicated_pair: bool = False
    qdq_op_type_per_channel_support_to_axis: dict[str, int] = field(default_factory=lambda: {"MatMul": 1})

    def __post_init__(self) -> None:
        self.format = member(QuantFormat, self.format)
        self.mode = member(QuantizationMode, self.mode)
        self.activations_dtype = member(QuantType, self.activations_dtype)
        self.weights_dtype = member(QuantType, self.weights_dtype)
        # `target` is not a dataclass field, because fields are written to Optimum's settings file, which has no such key.
        self.target: str | None = None
        signed = self.activations_dtype.name == "QInt8"
        if not self.is_static and self.mode.name == "QLinearOps":
            raise ConfigError(
                "mode=QLinearOps cannot be used with dynamic quantization (is_static=False).",
                fix="use mode=QuantizationMode.IntegerOps.",
            )
        if not self.is_static and signed:
            raise ConfigError(
                "activations_dtype=QInt8 cannot be used with dynamic quantization (is_static=False), which needs unsigned activations.",
                fix="use activations_dtype=QuantType.QUInt8.",
            )
        if self.is_static and signed and self.weights_dtype.name == "QUInt8":
            raise ConfigError(
                "activations_dtype=QInt8 cannot be combined with weights_dtype=QUInt8, because ONNX Runtime does not support signed "
                "activations with unsigned weights.",
                fix="use weights_dtype=QuantType.QInt8.",
            )

    @property
    def use_symmetric_calibration(self) -> bool:
        """Whether activation ranges are symmetric around zero."""
        return self.activations_symmetric and self.weights_symmetric

    @property
    def preset(self) -> str:
        """Name of accel's preset for the target processor. If no target was chosen, the preset follows from the data types."""
        if self.target is not None:
            return self.target
        if self.is_static and self.activations_dtype.name == "QInt8":
            return "tensorrt" if self.qdq_dedicated_pair else "arm64"
        return "avx2" if self.reduce_range else "avx512_vnni"

    def to_accel(self, calibration: CalibrationConfig | None = None) -> QuantizeConfig:
        """Return the quantization settings of accel, without `nodes_to_quantize`, which can be converted only with the graph."""
        if self.weights_dtype.name == "QUInt8" and self.target is None:
            logger.warning(
                "accel ignores weights_dtype=QUInt8 and writes signed weights (QInt8), because all kernels are fast for signed weights."
            )
        if self.activations_symmetric and self.activations_dtype.name == "QUInt8":
            logger.warning(
                "accel ignores activations_symmetric=True, because unsigned activations (QUInt8) need a zero point."
            )
        operators = tuple(
            operator.value if isinstance(operator, Enum) else str(operator) for operator in self.operators_to_quantize
        )
        values: dict[str, Any] = {
            "scheme": "static-int8" if self.is_static else "dynamic-int8",
            "preset": self.preset,
            "per_channel": self.per_channel,
            "symmetric": self.weights_symmetric,
            "operators": operators or None,
            "exclude": tuple(self.nodes_to_exclude),
        }
        if self.is_static:
            values["format"] = self.format.name.lower()
            values |= calibration.to_accel() if calibration is not None else {}
        return QuantizeConfig.from_dict(values)

    def __str__(self) -> str:
        words = {"QInt8": "s8", "QUInt8": "u8"}
        schema = f"{words[self.activations_dtype.name]}/{words[self.weights_dtype.name]}"
        return f"{self.format} (mode: {self.mode}, schema: {schema}, channel-wise: {self.per_channel})"


class AutoQuantizationConfig:
    """Functions that create quantization settings for a processor. accel's preset of the same name determines the data types."""

    @staticmethod
    def arm64(is_static: bool, **settings: Any) -> QuantizationConfig:
        """Return settings for ARM."""
        return _for("arm64", is_static, **settings)

    @staticmethod
    def avx2(is_static: bool, **settings: Any) -> QuantizationConfig:
        """Return settings for x86 with AVX2. Weights use 7 bits, because the 16-bit sums of AVX2 could saturate with 8 bits."""
        return _for("avx2", is_static, **{"weights_dtype": QuantType.QUInt8, **settings})

    @staticmethod
    def avx512(is_static: bool, **settings: Any) -> QuantizationConfig:
        """Return settings for x86 with AVX-512 without VNNI. Weights use 7 bits, because the 16-bit sums could saturate with 8 bits."""
        return _for("avx512", is_static, **settings)

    @staticmethod
    def avx512_vnni(is_static: bool, **settings: Any) -> QuantizationConfig:
        """Return settings for x86 with VNNI."""
        return _for("avx512_vnni", is_static, **settings)

    @staticmethod
    def ppc64le(is_static: bool, **settings: Any) -> QuantizationConfig:
        """Return settings for POWER."""
        return _for("ppc64le", is_static, **settings)

    @staticmethod
    def tensorrt(per_channel: bool = True, **settings: Any) -> QuantizationConfig:
        """Return settings for TensorRT: static quantization with signed, symmetric activations."""
        return _for(
            "tensorrt",
            True,
            per_channel=per_channel,
            use_symmetric_activations=True,
            activations_dtype=QuantType.QInt8,
            qdq_add_pair_to_weight=True,
            qdq_dedicated_pair=True,
            **settings,
        )


def _for(
    preset: str,
    is_static: bool,
    *,
    use_symmetric_activations: bool = False,
    use_symmetric_weights: bool = True,
    per_channel: bool = True,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    operators_to_quantize: Sequence[Any] | None = None,
    **settings: Any,
) -> QuantizationConfig:
    config = QuantizationConfig(
        is_static=is_static,
        format=QuantFormat.QDQ if is_static else QuantFormat.QOperator,
        mode=QuantizationMode.QLinearOps if is_static else QuantizationMode.IntegerOps,
        activations_symmetric=use_symmetric_activations,
        weights_symmetric=use_symmetric_weights,
        per_channel=per_channel,
        nodes_to_quantize=list(nodes_to_quantize or ()),
        nodes_to_exclude=list(nodes_to_exclude or ()),
        operators_to_quantize=list(operators_to_quantize or ()),
        **settings,
    )
    config.target = preset
    return config


class ORTQuantizer:
    """Quantizer with the interface of Optimum.

    Call `from_pretrained` and then `quantize`. For static quantization, call `fit` before `quantize`.
    """

    def __init__(self, model: Any) -> None:
        self._source = source_of(model)
        self._batches: list[dict[str, Any]] = []
        self._config: CalibrationConfig | None = None

    @classmethod
    def from_pretrained(cls, model_or_path: str | os.PathLike[str] | Any, file_name: str | None = None) -> Self:
        """Create a quantizer for a loaded model, or for a folder with a graph.

        Raises:
            ArtifactNotFoundError: The graph does not exist.
        """
        return cls(source_of(model_or_path, file_name))

    def get_calibration_dataset(
        self,
        dataset_name: str,
        num_samples: int | None = 100,
        dataset_config_name: str | None = None,
        dataset_split: str | None = None,
        preprocess_function: Callable[..., Any] | None = None,
        preprocess_batch: bool = True,
        seed: int = 2016,
        token: bool | str | None = None,
    ) -> Any:
        """Return a data set for calibration, as a `datasets.Dataset` with the graph's inputs as columns.

        The data set is loaded from the Hub or from files, shuffled, truncated and preprocessed.
        """
        return calibration_rows(
            self._source,
            dataset_name,
            num_samples=num_samples,
            name=dataset_config_name,
            split=dataset_split,
            preprocess=preprocess_function,
            batched=preprocess_batch,
            seed=seed,
            token=token,
        )

    def clean_calibration_dataset(self, dataset: Any) -> Any:
        """Return the data set with only the columns that are inputs of the graph."""
        return only_inputs(self._source, dataset)

    def fit(self, dataset: Any, calibration_config: CalibrationConfig, **settings: Any) -> DeferredCalibration:
        """Read the calibration data, and return it for `quantize`. The arguments are the same as for `partial_fit`.

        Data of earlier calls of `fit` or `partial_fit` is discarded.
        """
        self._batches = []
        self.partial_fit(dataset, calibration_config, **settings)
        return self.compute_ranges()

    def partial_fit(
        self,
        dataset: Any,
        calibration_config: CalibrationConfig,
        onnx_augmented_model_name: str | Path = "augmented_model.onnx",
        operators_to_quantize: Sequence[str] | None = None,
        batch_size: int = 1,
        use_external_data_format: bool = False,
        use_gpu: bool = False,
        force_symmetric_range: bool = False,
    ) -> None:
        """Add rows to the calibration data.

        Args:
            dataset: Rows with the graph's inputs by name, such as token ids.
            calibration_config: Calibration settings.
            onnx_augmented_model_name: Ignored, because accel does not write this file.
            operators_to_quantize: Ignored, because accel uses the value in the `QuantizationConfig`.
            batch_size: Number of rows in a batch. All rows of a batch must have the same length.
            use_external_data_format: Ignored.
            use_gpu: Ignored, because the calibration runs on the CPU.
            force_symmetric_range: Ignored, because the target determines whether ranges are symmetric.
        """
        del onnx_augmented_model_name, operators_to_quantize, use_external_data_format
        for name, value in (("use_gpu", use_gpu), ("force_symmetric_range", force_symmetric_range)):
            if value:
                logger.debug("accel ignores the argument %s=%r of partial_fit.", name, value)
        self._batches.extend(batches_of(self._source, dataset, batch_size))
        self._config = calibration_config

    def compute_ranges(self) -> DeferredCalibration:
        """Return the calibration data for the argument `calibration_tensors_range` of `quantize`.

        Raises:
            QuantizeError: There are no calibration rows.
        """
        if self._config is None or not self._batches:
            raise QuantizeError(
                "There are no calibration rows, because the quantizer has read no data set.",
                fix="call quantizer.fit(dataset, calibration_config) or quantizer.partial_fit(dataset, calibration_config) first.",
            )
        return DeferredCalibration(tuple(self._batches), self._config)

    def quantize(
        self,
        quantization_config: QuantizationConfig,
        save_dir: str | os.PathLike[str],
        file_suffix: str | None = "quantized",
        calibration_tensors_range: DeferredCalibration | None = None,
        use_external_data_format: bool = False,
        preprocessor: Any = None,
    ) -> Path:
        """Quantize the model, write `model_<suffix>.onnx` to `save_dir`, and return this folder.

        Args:
            quantization_config: Quantization settings.
            save_dir: The output folder. Other files in this folder are kept.
            file_suffix: Suffix of the file names. Empty or `None` keeps the original names.
            calibration_tensors_range: The result of `fit`, for static quantization.
            use_external_data_format: Only written to the settings file. accel writes external weights if the model is larger than 1 GiB.
            preprocessor: Not supported. Use `nodes_to_exclude` of the quantization settings instead.

        Raises:
            QuantizeError: Static quantization has no calibration data, or the graph is already quantized.
            ConfigError: `calibration_tensors_range` is not a result of `fit`.
        """
        if preprocessor is not None:
            raise ConfigError(
                "accel does not support the argument preprocessor of ORTQuantizer.quantize.",
                fix="leave out preprocessor, and list the excluded nodes in nodes_to_exclude of the QuantizationConfig.",
            )
        ranges = calibration_tensors_range
        if ranges is not None and not isinstance(ranges, DeferredCalibration):
            raise ConfigError(
                f"calibration_tensors_range is a {type(ranges).__name__}, not a result of ORTQuantizer.fit.",
                fix="pass calibration_tensors_range=quantizer.fit(dataset, calibration_config).",
            )
        if quantization_config.is_static and ranges is None:
            raise QuantizeError(
                "Static quantization (is_static=True) needs calibration ranges, and calibration_tensors_range is None.",
                fix="pass calibration_tensors_range=quantizer.fit(dataset, calibration_config), or use is_static=False.",
            )
        static = quantization_config.is_static and ranges is not None
        config = quantization_config.to_accel(ranges.config if static and ranges else None)
        if quantization_config.nodes_to_quantize:
            others = _other_nodes(self._source, quantization_config.nodes_to_quantize)
            config = QuantizeConfig.from_dict({**config.to_dict(), "exclude": (*config.exclude, *others)})
        calibration = RecordedBatches(ranges) if static and ranges else None
        with scratch() as folder:
            quantized = quantize(self._source, folder / "made", calibration=calibration, config=config)
            target = place(quantized, save_dir, file_suffix)
        ORTConfig(quantization=quantization_config, use_external_data_format=use_external_data_format).save_pretrained(
            target
        )
        return target


def _other_nodes(artifact: Artifact, selected: Sequence[str]) -> list[str]:
    """Return the names of all nodes that are not in `selected`.

    Raises:
        ConfigError: The graph has no node with one of the names in `selected`.
    """
    names = [node.name for component in artifact.components for node in nodes_of(artifact.path / component.file)]
    missing = sorted(set(selected) - set(names))
    if missing:
        raise ConfigError(
            f"nodes_to_quantize contains {missing[0]!r}, but the graph has no node with this name.",
            fix="remove the name from nodes_to_quantize, or correct it to the name of a node in the ONNX file.",
        )
    return [name for name in names if name and name not in selected]
