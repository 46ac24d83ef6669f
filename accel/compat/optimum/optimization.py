"""Optimum's `ORTOptimizer` and its settings, implemented with `accel.optimize`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from ...artifact.atomic_folder_writing import scratch
from ...artifact.processor_loading import open_companion
from ...config import OptimizeConfig
from ...errors import ConfigError, did_you_mean
from ...stages.optimize import optimize
from .ort_config import ORTConfig
from .output_folders import nodes_of, place, source_of

logger = logging.getLogger(__name__)

_CPU, _GPU = "cpu", "cuda"
# Optimum's settings that disable a fusion, with the names of the same fusions in accel, for the CPU and for GPUs.
_FUSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "disable_attention_fusion": (("attention",), ("attention",)),
    "disable_bias_gelu_fusion": ((), ("bias-gelu",)),
    "disable_rotary_embeddings": (("rotary",), ("rotary",)),
    "disable_skip_layer_norm_fusion": ((), ("skip-layer-norm", "skip-rms-norm")),
    "disable_embed_layer_norm_fusion": ((), ("embed-layer-norm",)),
}
# Settings that raise an error, because accel does not support them and ignoring them would change the results. The values are the reasons.
_WITHOUT_COUNTERPART = {
    "no_attention_mask": "would remove the attention mask, so padded batches would give wrong results"
}
# Settings that accel ignores. ONNX Runtime always fuses GELU and LayerNorm when it opens a graph. The other settings choose between
# variants of an operator, and accel makes this choice itself.
_WITHOUT_EFFECT = (
    "disable_gelu_fusion",
    "disable_layer_norm_fusion",
    "disable_bias_skip_layer_norm_fusion",
    "disable_skip_group_norm_fusion",
    "disable_bias_splitgelu_fusion",
    "disable_bias_add_fusion",
    "disable_group_norm_fusion",
    "enable_gemm_fast_gelu_fusion",
    "use_mask_index",
    "disable_packed_kv",
    "use_raw_attention_mask",
    "disable_shape_inference",
    "use_multi_head_attention",
    "use_group_norm_channels_first",
    "disable_packed_qkv",
    "disable_nhwc_conv",
)


@dataclass
class OptimizationConfig:
    """Optimum's settings for graph optimization. The guide "Coming from Optimum" describes how accel converts them.

    Attributes:
        optimization_level: 0 or 1 for general optimizations, 2 or 99 for extended optimizations.
        enable_transformers_specific_optimizations: Whether transformer layers are fused (level `O2` of accel).
        optimize_for_gpu: Whether the graph is optimized for GPUs.
        fp16: Whether the graph uses half precision (level `O4` of accel).
        enable_gelu_approximation: Whether GELU is replaced by its tanh approximation (level `O3` of accel).
        disable_attention_fusion: Whether the fusion of attention is disabled. The other `disable_...` settings disable other fusions.
        no_attention_mask: Not supported. True raises an error, because padded batches would give wrong results.
        use_mask_index: Ignored, because accel chooses the variant of an operator for the target. accel also ignores the other settings
            that choose a variant.
    """

    optimization_level: int = 1
    enable_transformers_specific_optimizations: bool = True
    optimize_for_gpu: bool = False
    fp16: bool = False
    disable_gelu_fusion: bool = False
    disable_attention_fusion: bool = False
    disable_bias_gelu_fusion: bool = False
    disable_layer_norm_fusion: bool = False
    disable_rotary_embeddings: bool = False
    disable_skip_layer_norm_fusion: bool = False
    disable_bias_skip_layer_norm_fusion: bool = False
    disable_skip_group_norm_fusion: bool = False
    disable_bias_splitgelu_fusion: bool = False
    disable_bias_add_fusion: bool = False
    disable_group_norm_fusion: bool = True
    disable_embed_layer_norm_fusion: bool = True
    enable_gemm_fast_gelu_fusion: bool = False
    use_mask_index: bool = False
    disable_packed_kv: bool = True
    no_attention_mask: bool = False
    use_raw_attention_mask: bool = False
    disable_shape_inference: bool = False
    use_multi_head_attention: bool = False
    enable_gelu_approximation: bool = False
    use_group_norm_channels_first: bool = False
    disable_packed_qkv: bool = False
    disable_nhwc_conv: bool = False

    def __post_init__(self) -> None:
        if self.optimization_level not in (0, 1, 2, 99):
            raise ConfigError(
                f"optimization_level is {self.optimization_level!r}, which is not a level of Optimum.",
                fix="use 0, 1, 2 or 99.",
            )
        for name, reason in _WITHOUT_COUNTERPART.items():
            if getattr(self, name):
                raise ConfigError(f"accel does not support {name}=True, because it {reason}.", fix=f"leave out {name}.")

    @property
    def backend(self) -> str:
        """Name of the backend that the graph is optimized for."""
        return _GPU if self.optimize_for_gpu else _CPU

    @property
    def changes_nothing(self) -> bool:
        """Whether the settings disable all optimizations."""
        return not (self.optimization_level or self.enable_transformers_specific_optimizations or self.fp16)

    def to_accel(self) -> OptimizeConfig:
        """Return the optimization settings of accel."""
        for item in fields(self):
            if item.name in _WITHOUT_EFFECT and getattr(self, item.name) != item.default:
                logger.debug(
                    "accel ignores %s=%r of Optimum's OptimizationConfig.", item.name, getattr(self, item.name)
                )
        level = "O1"
        if self.enable_transformers_specific_optimizations:
            level = "O3" if self.enable_gelu_approximation else "O2"
        if self.fp16:
            level = "O4"
        target = 1 if self.optimize_for_gpu else 0
        off = [name for word, ours in _FUSIONS.items() if getattr(self, word) for name in ours[target]]
        if self.fp16 and not self.enable_gelu_approximation and not self.optimize_for_gpu:
            off.append("fast-gelu")
        return OptimizeConfig.from_dict({"level": level, "disable": tuple(off)})


class AutoOptimizationConfig:
    """Optimum's optimization levels."""

    _LEVELS: ClassVar[dict[str, dict[str, Any]]] = {
        "O1": {"optimization_level": 1, "enable_transformers_specific_optimizations": False},
        "O2": {"optimization_level": 2},
        "O3": {"optimization_level": 2, "enable_gelu_approximation": True},
        "O4": {"optimization_level": 2, "enable_gelu_approximation": True, "fp16": True},
    }

    @classmethod
    def with_optimization_level(
        cls, optimization_level: str, for_gpu: bool = False, **settings: Any
    ) -> OptimizationConfig:
        """Return the settings of an optimization level. With half precision (`O4`), `for_gpu` is set to True.

        Raises:
            ConfigError: The level does not exist.
        """
        if optimization_level not in cls._LEVELS:
            raise ConfigError(
                f"The optimization level {optimization_level!r} does not exist.{did_you_mean(optimization_level, cls._LEVELS)}",
                fix=f"use one of {', '.join(cls._LEVELS)}.",
            )
        if optimization_level == "O4" and not for_gpu:
            logger.warning("O4 uses half precision, which is faster only on GPUs, so accel sets for_gpu=True.")
            for_gpu = True
        return OptimizationConfig(optimize_for_gpu=for_gpu, **cls._LEVELS[optimization_level], **settings)

    @classmethod
    def O1(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """Return settings for general optimizations."""
        return cls.with_optimization_level("O1", for_gpu, **settings)

    @classmethod
    def O2(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """Return settings with fusions of transformer layers."""
        return cls.with_optimization_level("O2", for_gpu, **settings)

    @classmethod
    def O3(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """Return settings with approximated GELU."""
        return cls.with_optimization_level("O3", for_gpu, **settings)

    @classmethod
    def O4(cls, for_gpu: bool = True, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """Return settings with half precision."""
        return cls.with_optimization_level("O4", for_gpu, **settings)


class ORTOptimizer:
    """Optimizer with the interface of Optimum. Call `from_pretrained` and then `optimize`."""

    def __init__(self, model: Any) -> None:
        self._source = source_of(model)

    @classmethod
    def from_pretrained(
        cls, model_or_path: str | os.PathLike[str] | Any, file_names: Sequence[str] | None = None
    ) -> Self:
        """Create an optimizer for a loaded model, or for a folder with a graph.

        Raises:
            ArtifactNotFoundError: The graph does not exist.
        """
        if file_names and len(file_names) > 1:
            raise ConfigError(
                f"file_names contains {len(file_names)} names, and accel accepts only one.",
                fix="leave out file_names: accel optimizes all graphs of the model together.",
            )
        return cls(source_of(model_or_path, file_names[0] if file_names else None))

    @property
    def normalized_config(self) -> Any:
        """The model's config. For a model of texts and images, the config of the vision model."""
        config = open_companion("AutoConfig", self._source.path)
        return config if hasattr(config, "image_size") else getattr(config, "vision_config", config)

    def optimize(
        self,
        optimization_config: OptimizationConfig,
        save_dir: str | os.PathLike[str],
        file_suffix: str | None = "optimized",
        one_external_file: bool = True,
    ) -> Path:
        """Optimize the model, write `model_<suffix>.onnx` to `save_dir`, and return this folder.

        accel compares the optimized graph with the original graph before it writes the result.

        Args:
            optimization_config: Settings of the optimization.
            save_dir: The output folder. Other files in this folder are kept.
            file_suffix: Suffix of the file names. Empty or `None` keeps the original names.
            one_external_file: Must be True.

        Raises:
            ValidationError: The outputs differ from the original graph by more than the tolerance. Nothing is written.
            OutputFolderError: `save_dir` already contains another model, and the new model needs its own manifest.
        """
        if not one_external_file:
            raise ConfigError(
                "one_external_file=False is not supported: accel writes all external weights of a graph to one file.",
                fix="leave out one_external_file.",
            )
        config = optimization_config.to_accel()
        with scratch() as folder:
            optimized = self._source
            if not optimization_config.changes_nothing:
                optimized = optimize(optimized, folder / "made", config=config, backend=optimization_config.backend)
            target = place(optimized, save_dir, file_suffix)
        ORTConfig(optimization=optimization_config).save_pretrained(target)
        return target

    @staticmethod
    def get_fused_operators(onnx_model_path: str | os.PathLike[str]) -> dict[str, int]:
        """Return the number of fused operators in a graph, by operator type."""
        fused_types = {
            "LayerNormalization",
            "RMSNormalization",
            "Gelu",
            "SkipLayerNormalization",
            "FastGelu",
            "BiasGelu",
        }
        nodes = nodes_of(onnx_model_path)
        return dict(
            Counter(node.op_type for node in nodes if node.domain == "com.microsoft" or node.op_type in fused_types)
        )

    @staticmethod
    def get_nodes_number_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> int:
        """Return the number of nodes in the first graph minus the number of nodes in the second graph."""
        return len(nodes_of(onnx_model_path)) - len(nodes_of(onnx_optimized_model_path))

    @staticmethod
    def get_operators_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> dict[str, int]:
        """Return the number of nodes in the first graph minus the number in the second graph, for each operator type.

        Operator types with the same number of nodes in both graphs are left out.
        """
        before, after = (
            Counter(node.op_type for node in nodes_of(path)) for path in (onnx_model_path, onnx_optimized_model_path)
        )
        differences = {name: before[name] - after[name] for name in before.keys() | after.keys()}
        return {name: count for name, count in differences.items() if count}
