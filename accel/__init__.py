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
    from .explaining.explanation import explain as explain
    from .interfaces.protocols import Exporter as Exporter
    from .interfaces.protocols import Optimizer as Optimizer
    from .interfaces.protocols import Quantizer as Quantizer
    from .measuring.accuracy.evaluation import evaluate as evaluate
    from .measuring.latency.benchmark import benchmark as benchmark
    from .models.base import ORTModel as ORTModel
    from .models.pipelines.pipeline import pipeline as pipeline
    from .models.vector_functions import maxsim as maxsim
    from .models.vector_functions import quantize_embeddings as quantize_embeddings
    from .serving.continuous_batching.generation_engine import GenerationEngine as GenerationEngine
    from .serving.continuous_batching.scheduler import GenerationLimits as GenerationLimits
    from .serving.engine import Engine as Engine
    from .stages.export import export as export
    from .stages.optimize import optimize as optimize
    from .stages.prepare import accelerate as accelerate
    from .stages.prepare import prepare_qat as prepare_qat
    from .stages.validate import adopt as adopt
    from .stages.validate import validate as validate
    from .stages.validate import validate_here as validate_here
    from .tasks.audio_classification import ORTModelForAudioClassification as ORTModelForAudioClassification
    from .tasks.audio_frame_classification import (
        ORTModelForAudioFrameClassification as ORTModelForAudioFrameClassification,
    )
    from .tasks.audio_xvector import ORTModelForAudioXVector as ORTModelForAudioXVector
    from .tasks.automatic_speech_recognition import ORTModelForSpeechSeq2Seq as ORTModelForSpeechSeq2Seq
    from .tasks.ctc import ORTModelForCTC as ORTModelForCTC
    from .tasks.custom import ORTModelForCustomTasks as ORTModelForCustomTasks
    from .tasks.depth_estimation import ORTModelForDepthEstimation as ORTModelForDepthEstimation
    from .tasks.document_question_answering import (
        ORTModelForDocumentQuestionAnswering as ORTModelForDocumentQuestionAnswering,
    )
    from .tasks.feature_extraction import ORTModelForFeatureExtraction as ORTModelForFeatureExtraction
    from .tasks.fill_mask import ORTModelForMaskedLM as ORTModelForMaskedLM
    from .tasks.image_classification import ORTModelForImageClassification as ORTModelForImageClassification
    from .tasks.image_segmentation import ORTModelForImageSegmentation as ORTModelForImageSegmentation
    from .tasks.image_segmentation import ORTModelForSemanticSegmentation as ORTModelForSemanticSegmentation
    from .tasks.image_text_to_text import ORTModelForImageTextToText as ORTModelForImageTextToText
    from .tasks.image_to_image import ORTModelForImageToImage as ORTModelForImageToImage
    from .tasks.image_to_text import ORTModelForVision2Seq as ORTModelForVision2Seq
    from .tasks.keypoint_matching import ORTModelForKeypointMatching as ORTModelForKeypointMatching
    from .tasks.mask_generation import ORTModelForMaskGeneration as ORTModelForMaskGeneration
    from .tasks.multiple_choice import ORTModelForMultipleChoice as ORTModelForMultipleChoice
    from .tasks.object_detection import ORTModelForObjectDetection as ORTModelForObjectDetection
    from .tasks.question_answering import ORTModelForQuestionAnswering as ORTModelForQuestionAnswering
    from .tasks.table_question_answering import ORTModelForTableQuestionAnswering as ORTModelForTableQuestionAnswering
    from .tasks.text2text_generation import ORTModelForSeq2SeqLM as ORTModelForSeq2SeqLM
    from .tasks.text_classification import ORTModelForSequenceClassification as ORTModelForSequenceClassification
    from .tasks.text_generation import ORTModelForCausalLM as ORTModelForCausalLM
    from .tasks.text_to_audio import ORTModelForTextToWaveform as ORTModelForTextToWaveform
    from .tasks.token_classification import ORTModelForTokenClassification as ORTModelForTokenClassification
    from .tasks.video_classification import ORTModelForVideoClassification as ORTModelForVideoClassification
    from .tasks.zero_shot_audio_classification import (
        ORTModelForZeroShotAudioClassification as ORTModelForZeroShotAudioClassification,
    )
    from .tasks.zero_shot_image_classification import (
        ORTModelForZeroShotImageClassification as ORTModelForZeroShotImageClassification,
    )
    from .tasks.zero_shot_object_detection import (
        ORTModelForZeroShotObjectDetection as ORTModelForZeroShotObjectDetection,
    )
    from .tuning.quantize_within_budget import quantize as quantize
    from .tuning.tune import tune as tune

# Each public name with its module. Modules are imported at first use (PEP 562), so that `import accel` is fast.
_MODULE_OF = {
    "accelerate": "stages.prepare",
    "AccelerateConfig": "config",
    "AccelError": "errors",
    "adopt": "stages.validate",
    "Artifact": "artifact.manifest",
    "benchmark": "measuring.latency.benchmark",
    "Engine": "serving.engine",
    "evaluate": "measuring.accuracy.evaluation",
    "explain": "explaining.explanation",
    "export": "stages.export",
    "ExportConfig": "config",
    "Exporter": "interfaces.protocols",
    "GenerationEngine": "serving.continuous_batching.generation_engine",
    "GenerationLimits": "serving.continuous_batching.scheduler",
    "GenerationOptions": "decoding.generation_options",
    "list_backends": "backends.doctor",
    "maxsim": "models.vector_functions",
    "optimize": "stages.optimize",
    "OptimizeConfig": "config",
    "Optimizer": "interfaces.protocols",
    "ORTModel": "models.base",
    "ORTModelForAudioClassification": "tasks.audio_classification",
    "ORTModelForAudioFrameClassification": "tasks.audio_frame_classification",
    "ORTModelForAudioXVector": "tasks.audio_xvector",
    "ORTModelForCausalLM": "tasks.text_generation",
    "ORTModelForCTC": "tasks.ctc",
    "ORTModelForCustomTasks": "tasks.custom",
    "ORTModelForDocumentQuestionAnswering": "tasks.document_question_answering",
    "ORTModelForFeatureExtraction": "tasks.feature_extraction",
    "ORTModelForImageClassification": "tasks.image_classification",
    "ORTModelForImageTextToText": "tasks.image_text_to_text",
    "ORTModelForMaskedLM": "tasks.fill_mask",
    "ORTModelForMaskGeneration": "tasks.mask_generation",
    "ORTModelForMultipleChoice": "tasks.multiple_choice",
    "ORTModelForQuestionAnswering": "tasks.question_answering",
    "ORTModelForSeq2SeqLM": "tasks.text2text_generation",
    "ORTModelForSequenceClassification": "tasks.text_classification",
    "ORTModelForSpeechSeq2Seq": "tasks.automatic_speech_recognition",
    "ORTModelForTableQuestionAnswering": "tasks.table_question_answering",
    "ORTModelForTextToWaveform": "tasks.text_to_audio",
    "ORTModelForTokenClassification": "tasks.token_classification",
    "ORTModelForVideoClassification": "tasks.video_classification",
    "ORTModelForVision2Seq": "tasks.image_to_text",
    "ORTModelForDepthEstimation": "tasks.depth_estimation",
    "ORTModelForImageSegmentation": "tasks.image_segmentation",
    "ORTModelForImageToImage": "tasks.image_to_image",
    "ORTModelForKeypointMatching": "tasks.keypoint_matching",
    "ORTModelForObjectDetection": "tasks.object_detection",
    "ORTModelForSemanticSegmentation": "tasks.image_segmentation",
    "ORTModelForZeroShotAudioClassification": "tasks.zero_shot_audio_classification",
    "ORTModelForZeroShotImageClassification": "tasks.zero_shot_image_classification",
    "ORTModelForZeroShotObjectDetection": "tasks.zero_shot_object_detection",
    "pipeline": "models.pipelines.pipeline",
    "prepare_qat": "stages.prepare",
    "quantize": "tuning.quantize_within_budget",
    "quantize_embeddings": "models.vector_functions",
    "QuantizeConfig": "config",
    "Quantizer": "interfaces.protocols",
    "SessionOptions": "config",
    "tune": "tuning.tune",
    "validate": "stages.validate",
    "validate_here": "stages.validate",
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
