"""Run Hugging Face transformers fast, on the hardware at hand, through the transformers API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .artifact.manifest import Artifact as Artifact
    from .backends.doctor import list_backends as list_backends
    from .config import AccelerateConfig as AccelerateConfig
    from .config import ExportConfig as ExportConfig
    from .config import OptimizeConfig as OptimizeConfig
    from .config import QuantizeConfig as QuantizeConfig
    from .config import SessionOptions as SessionOptions
    from .decoding.generation_options import GenerationOptions as GenerationOptions
    from .errors import AccelError as AccelError
    from .interfaces.protocols import Exporter as Exporter
    from .interfaces.protocols import Optimizer as Optimizer
    from .interfaces.protocols import Quantizer as Quantizer
    from .measuring.accuracy.evaluation import evaluate as evaluate
    from .measuring.latency.benchmark import benchmark as benchmark
    from .models.audio import ORTModelForAudioClassification as ORTModelForAudioClassification
    from .models.audio import ORTModelForAudioFrameClassification as ORTModelForAudioFrameClassification
    from .models.audio import ORTModelForAudioXVector as ORTModelForAudioXVector
    from .models.audio import ORTModelForCTC as ORTModelForCTC
    from .models.audio import ORTModelForZeroShotAudioClassification as ORTModelForZeroShotAudioClassification
    from .models.base import ORTModel as ORTModel
    from .models.documents import ORTModelForDocumentQuestionAnswering as ORTModelForDocumentQuestionAnswering
    from .models.encoder_decoder import ORTModelForSeq2SeqLM as ORTModelForSeq2SeqLM
    from .models.encoder_decoder import ORTModelForVision2Seq as ORTModelForVision2Seq
    from .models.encoders import ORTModelForCustomTasks as ORTModelForCustomTasks
    from .models.encoders import ORTModelForFeatureExtraction as ORTModelForFeatureExtraction
    from .models.encoders import ORTModelForImageClassification as ORTModelForImageClassification
    from .models.encoders import ORTModelForMaskedLM as ORTModelForMaskedLM
    from .models.encoders import ORTModelForMultipleChoice as ORTModelForMultipleChoice
    from .models.encoders import ORTModelForQuestionAnswering as ORTModelForQuestionAnswering
    from .models.encoders import ORTModelForSequenceClassification as ORTModelForSequenceClassification
    from .models.encoders import ORTModelForTokenClassification as ORTModelForTokenClassification
    from .models.generation_mixin import ORTModelForCausalLM as ORTModelForCausalLM
    from .models.images import ORTModelForDepthEstimation as ORTModelForDepthEstimation
    from .models.images import ORTModelForImageSegmentation as ORTModelForImageSegmentation
    from .models.images import ORTModelForImageToImage as ORTModelForImageToImage
    from .models.images import ORTModelForKeypointMatching as ORTModelForKeypointMatching
    from .models.images import ORTModelForObjectDetection as ORTModelForObjectDetection
    from .models.images import ORTModelForSemanticSegmentation as ORTModelForSemanticSegmentation
    from .models.images import ORTModelForZeroShotImageClassification as ORTModelForZeroShotImageClassification
    from .models.images import ORTModelForZeroShotObjectDetection as ORTModelForZeroShotObjectDetection
    from .models.masks import ORTModelForMaskGeneration as ORTModelForMaskGeneration
    from .models.pipelines.pipeline import pipeline as pipeline
    from .models.speech import ORTModelForSpeechSeq2Seq as ORTModelForSpeechSeq2Seq
    from .models.tables import ORTModelForTableQuestionAnswering as ORTModelForTableQuestionAnswering
    from .models.videos import ORTModelForVideoClassification as ORTModelForVideoClassification
    from .models.vision_language import ORTModelForImageTextToText as ORTModelForImageTextToText
    from .models.voices import ORTModelForTextToWaveform as ORTModelForTextToWaveform
    from .serving.continuous_batching.generation_engine import GenerationEngine as GenerationEngine
    from .serving.continuous_batching.scheduler import GenerationLimits as GenerationLimits
    from .serving.engine import Engine as Engine
    from .stages.export import export as export
    from .stages.optimize import optimize as optimize
    from .stages.prepare.accelerating import accelerate as accelerate
    from .stages.prepare.training import prepare_qat as prepare_qat
    from .stages.validate import validate as validate
    from .tuning.accuracy_budget import quantize as quantize
    from .tuning.tune import tune as tune

# Every public name and the module that holds it; imported at first use (PEP 562), so that `import accel` is cheap.
_MODULE_OF = {
    "accelerate": "stages.prepare.accelerating",
    "AccelerateConfig": "config",
    "AccelError": "errors",
    "Artifact": "artifact.manifest",
    "benchmark": "measuring.latency.benchmark",
    "Engine": "serving.engine",
    "evaluate": "measuring.accuracy.evaluation",
    "export": "stages.export",
    "ExportConfig": "config",
    "Exporter": "interfaces.protocols",
    "GenerationEngine": "serving.continuous_batching.generation_engine",
    "GenerationLimits": "serving.continuous_batching.scheduler",
    "GenerationOptions": "decoding.generation_options",
    "list_backends": "backends.doctor",
    "optimize": "stages.optimize",
    "OptimizeConfig": "config",
    "Optimizer": "interfaces.protocols",
    "ORTModel": "models.base",
    "ORTModelForAudioClassification": "models.audio",
    "ORTModelForAudioFrameClassification": "models.audio",
    "ORTModelForAudioXVector": "models.audio",
    "ORTModelForCausalLM": "models.generation_mixin",
    "ORTModelForCTC": "models.audio",
    "ORTModelForCustomTasks": "models.encoders",
    "ORTModelForDocumentQuestionAnswering": "models.documents",
    "ORTModelForFeatureExtraction": "models.encoders",
    "ORTModelForImageClassification": "models.encoders",
    "ORTModelForImageTextToText": "models.vision_language",
    "ORTModelForMaskedLM": "models.encoders",
    "ORTModelForMaskGeneration": "models.masks",
    "ORTModelForMultipleChoice": "models.encoders",
    "ORTModelForQuestionAnswering": "models.encoders",
    "ORTModelForSeq2SeqLM": "models.encoder_decoder",
    "ORTModelForSequenceClassification": "models.encoders",
    "ORTModelForSpeechSeq2Seq": "models.speech",
    "ORTModelForTableQuestionAnswering": "models.tables",
    "ORTModelForTextToWaveform": "models.voices",
    "ORTModelForTokenClassification": "models.encoders",
    "ORTModelForVideoClassification": "models.videos",
    "ORTModelForVision2Seq": "models.encoder_decoder",
    "ORTModelForDepthEstimation": "models.images",
    "ORTModelForImageSegmentation": "models.images",
    "ORTModelForImageToImage": "models.images",
    "ORTModelForKeypointMatching": "models.images",
    "ORTModelForObjectDetection": "models.images",
    "ORTModelForSemanticSegmentation": "models.images",
    "ORTModelForZeroShotAudioClassification": "models.audio",
    "ORTModelForZeroShotImageClassification": "models.images",
    "ORTModelForZeroShotObjectDetection": "models.images",
    "pipeline": "models.pipelines.pipeline",
    "prepare_qat": "stages.prepare.training",
    "quantize": "tuning.accuracy_budget",
    "QuantizeConfig": "config",
    "Quantizer": "interfaces.protocols",
    "SessionOptions": "config",
    "tune": "tuning.tune",
    "validate": "stages.validate",
}

__all__ = sorted([*_MODULE_OF, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
