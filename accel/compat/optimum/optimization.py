"""`ORTOptimizer` and its settings, over `accel.optimize`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from ...artifact.companions import open_companion
from ...artifact.writing import scratch
from ...config import OptimizeConfig
from ...errors import ConfigError, did_you_mean
from ...stages.optimize import optimize
from .placing import place, source_of
from .records import ORTConfig

logger = logging.getLogger(__name__)

_CPU, _GPU = "cpu", "cuda"
# Optimum's switches that turn a fusion off, and ours of the same meaning, for either target.
_FUSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "disable_gelu_fusion": (("gelu",), ()),
    "disable_attention_fusion": (("attention", "attention-scores"), ("attention",)),
    "disable_bias_gelu_fusion": ((), ("bias-gelu",)),
    "disable_layer_norm_fusion": (("layer-norm",), ()),
    "disable_rotary_embeddings": (("rotary",), ("rotary",)),
    "disable_skip_layer_norm_fusion": ((), ("skip-layer-norm", "skip-rms-norm")),
    "disable_embed_layer_norm_fusion": (("embed-layer-norm",), ("embed-layer-norm",)),
}
# They change what is computed, and there is nothing like them here.
_WITHOUT_COUNTERPART = {"no_attention_mask": "drops the mask, which changes the answers of padded batches"}
# They choose among forms of one operator; which one suits a target is ours to know.
_WITHOUT_EFFECT = (
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
    """Optimum's settings of graph optimization; what each becomes is in the guide "Coming from Optimum".

    Attributes:
        optimization_level: 0 or 1 for general rewriting, 2 or 99 for more of it.
        enable_transformers_specific_optimizations: Whether layers of transformers are fused (`O2` here).
        optimize_for_gpu: Whether the graph will run on a GPU.
        fp16: Half precision (`O4` here).
        enable_gelu_approximation: GELU by its tanh form (`O3` here).
        disable_gelu_fusion: And so on: fusions that are left out.
        no_attention_mask: Refused: padded batches would be wrong.
        use_mask_index: And so on: forms of one operator, which are chosen here by target.
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
            raise ConfigError(f"optimization_level is {self.optimization_level}.", fix="use 0, 1, 2 or 99.")
        for name, what in _WITHOUT_COUNTERPART.items():
            if getattr(self, name):
                raise ConfigError(f"{name}=True {what}.", fix=f"leave {name} out.")

    @property
    def backend(self) -> str:
        """Whose kernels the graph is made for."""
        return _GPU if self.optimize_for_gpu else _CPU

    @property
    def changes_nothing(self) -> bool:
        """Whether neither the runtime nor the transformer's rewriting was asked for."""
        return not (self.optimization_level or self.enable_transformers_specific_optimizations or self.fp16)

    def to_accel(self) -> OptimizeConfig:
        """The same in our settings."""
        for item in fields(self):
            if item.name in _WITHOUT_EFFECT and getattr(self, item.name) != item.default:
                logger.debug("%s=%r changes nothing here.", item.name, getattr(self, item.name))
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
    """Optimum's levels."""

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
        """The settings of a level; half precision is for GPUs.

        Raises:
            ConfigError: There is no such level.
        """
        if optimization_level not in cls._LEVELS:
            raise ConfigError(
                f"There is no level {optimization_level!r}.{did_you_mean(optimization_level, cls._LEVELS)}",
                fix=f"use {', '.join(cls._LEVELS)}.",
            )
        if optimization_level == "O4" and not for_gpu:
            logger.warning("O4 is half precision, which GPUs are faster in: taking for_gpu=True.")
            for_gpu = True
        return OptimizationConfig(optimize_for_gpu=for_gpu, **cls._LEVELS[optimization_level], **settings)

    @classmethod
    def O1(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """General rewriting."""
        return cls.with_optimization_level("O1", for_gpu, **settings)

    @classmethod
    def O2(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """With fusions of transformers' layers."""
        return cls.with_optimization_level("O2", for_gpu, **settings)

    @classmethod
    def O3(cls, for_gpu: bool = False, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """With approximated GELU."""
        return cls.with_optimization_level("O3", for_gpu, **settings)

    @classmethod
    def O4(cls, for_gpu: bool = True, **settings: Any) -> OptimizationConfig:  # noqa: N802
        """With half precision."""
        return cls.with_optimization_level("O4", for_gpu, **settings)


class ORTOptimizer:
    """Optimum's optimizer: `from_pretrained`, then `optimize`."""

    def __init__(self, model: Any) -> None:
        self._source = source_of(model)

    @classmethod
    def from_pretrained(
        cls, model_or_path: str | os.PathLike[str] | Any, file_names: Sequence[str] | None = None
    ) -> Self:
        """For a model that is open, or a folder with a graph.

        Raises:
            ArtifactNotFoundError: There is no such graph.
        """
        if file_names and len(file_names) > 1:
            raise ConfigError(
                f"file_names has {len(file_names)} entries.",
                fix="leave file_names out: all graphs of an artifact are optimized together.",
            )
        return cls(source_of(model_or_path, file_names[0] if file_names else None))

    @property
    def normalized_config(self) -> Any:
        """The model's config; of a model of texts and images, that of the images."""
        config = open_companion("AutoConfig", self._source.path)
        return config if hasattr(config, "image_size") else getattr(config, "vision_config", config)

    def optimize(
        self,
        optimization_config: OptimizationConfig,
        save_dir: str | os.PathLike[str],
        file_suffix: str | None = "optimized",
        one_external_file: bool = True,
    ) -> Path:
        """Write the optimized graph into `save_dir` as `model_<suffix>.onnx`, compared with its parent, and return the folder.

        Args:
            optimization_config: How.
            save_dir: May hold other files, which stay.
            file_suffix: What the files are called; empty for the original's names.
            one_external_file: Always so here.

        Raises:
            ValidationError: The result differs from its parent by more than the tolerance; nothing is written.
            OutputFolderError: `save_dir` holds another artifact whose manifest this one would need.
        """
        if not one_external_file:
            raise ConfigError("Weights beside a graph are one file here.", fix="leave one_external_file out.")
        config = optimization_config.to_accel()
        with scratch() as folder:
            made = self._source
            if not optimization_config.changes_nothing:
                made = optimize(made, folder / "made", config=config, backend=optimization_config.backend)
            target = place(made, save_dir, file_suffix)
        ORTConfig(optimization=optimization_config).save_pretrained(target)
        return target

    @staticmethod
    def get_fused_operators(onnx_model_path: str | os.PathLike[str]) -> dict[str, int]:
        """How often each fused operator occurs in a graph."""
        own = {"LayerNormalization", "RMSNormalization", "Gelu", "SkipLayerNormalization", "FastGelu", "BiasGelu"}
        import onnx

        model = onnx.load(os.fspath(onnx_model_path), load_external_data=False)
        counts = Counter(
            node.op_type for node in model.graph.node if node.domain == "com.microsoft" or node.op_type in own
        )
        return dict(counts)

    @staticmethod
    def get_nodes_number_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> int:
        """How many nodes fewer the second graph has."""
        return sum(_operators(onnx_model_path).values()) - sum(_operators(onnx_optimized_model_path).values())

    @staticmethod
    def get_operators_difference(
        onnx_model_path: str | os.PathLike[str], onnx_optimized_model_path: str | os.PathLike[str]
    ) -> dict[str, int]:
        """By operator, how many fewer the second graph has; those with as many are left out."""
        before, after = _operators(onnx_model_path), _operators(onnx_optimized_model_path)
        differences = {name: before[name] - after[name] for name in before.keys() | after.keys()}
        return {name: count for name, count in differences.items() if count}


def _operators(path: str | os.PathLike[str]) -> Counter[str]:
    import onnx

    model = onnx.load(os.fspath(path), load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)
