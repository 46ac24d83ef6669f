"""Run Hugging Face transformers fast, on the hardware at hand, through the transformers API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .artifact import Artifact as Artifact
    from .benchmarking import benchmark as benchmark
    from .config import ExportConfig as ExportConfig
    from .config import OptimizeConfig as OptimizeConfig
    from .config import QuantizeConfig as QuantizeConfig
    from .config import SessionOptions as SessionOptions
    from .doctor import list_backends as list_backends
    from .errors import AccelError as AccelError
    from .evaluation import evaluate as evaluate
    from .exporting import export as export
    from .generation import ORTModelForCausalLM as ORTModelForCausalLM
    from .generation import ORTModelForImageTextToText as ORTModelForImageTextToText
    from .generation import ORTModelForSeq2SeqLM as ORTModelForSeq2SeqLM
    from .generation import ORTModelForVision2Seq as ORTModelForVision2Seq
    from .interfaces import Exporter as Exporter
    from .interfaces import Optimizer as Optimizer
    from .interfaces import Quantizer as Quantizer
    from .modeling import ORTModelForCustomTasks as ORTModelForCustomTasks
    from .modeling import ORTModelForFeatureExtraction as ORTModelForFeatureExtraction
    from .modeling import ORTModelForImageClassification as ORTModelForImageClassification
    from .modeling import ORTModelForMaskedLM as ORTModelForMaskedLM
    from .modeling import ORTModelForMultipleChoice as ORTModelForMultipleChoice
    from .modeling import ORTModelForQuestionAnswering as ORTModelForQuestionAnswering
    from .modeling import ORTModelForSequenceClassification as ORTModelForSequenceClassification
    from .modeling import ORTModelForTokenClassification as ORTModelForTokenClassification
    from .pipelines import pipeline as pipeline
    from .search import quantize as quantize
    from .speech import ORTModelForSpeechSeq2Seq as ORTModelForSpeechSeq2Seq
    from .steps import optimize as optimize
    from .steps import validate as validate
    from .tuning import tune as tune

# Every public name and the module that holds it; imported at first use (PEP 562), so that `import accel` is cheap.
_MODULE_OF = {
    "AccelError": "errors",
    "Artifact": "artifact",
    "ExportConfig": "config",
    "Exporter": "interfaces",
    "ORTModelForCausalLM": "generation",
    "ORTModelForSeq2SeqLM": "generation",
    "ORTModelForSpeechSeq2Seq": "speech",
    "ORTModelForImageTextToText": "generation",
    "ORTModelForVision2Seq": "generation",
    "ORTModelForCustomTasks": "modeling",
    "ORTModelForFeatureExtraction": "modeling",
    "ORTModelForImageClassification": "modeling",
    "ORTModelForMaskedLM": "modeling",
    "ORTModelForMultipleChoice": "modeling",
    "ORTModelForQuestionAnswering": "modeling",
    "ORTModelForSequenceClassification": "modeling",
    "ORTModelForTokenClassification": "modeling",
    "OptimizeConfig": "config",
    "Optimizer": "interfaces",
    "QuantizeConfig": "config",
    "Quantizer": "interfaces",
    "SessionOptions": "config",
    "evaluate": "evaluation",
    "benchmark": "benchmarking",
    "export": "exporting",
    "list_backends": "doctor",
    "optimize": "steps",
    "pipeline": "pipelines",
    "quantize": "search",
    "tune": "tuning",
    "validate": "steps",
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
