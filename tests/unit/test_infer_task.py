"""Tests that the task is inferred from the model architecture in a config."""

import pytest

from accel.errors import TaskError
from accel.interfaces.task_registry import all_tasks, infer_task, task_spec


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "feature-extraction"),
        ("XLMWithLMHeadModel", "fill-mask"),
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("MarianMTModel", "text2text-generation"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("VisionEncoderDecoderModel", "image-to-text"),
        ("DistilBertForQuestionAnswering", "question-answering"),
        ("FlaubertForQuestionAnsweringSimple", "question-answering"),
        ("LayoutLMv3ForQuestionAnswering", "document-question-answering"),
        ("TapasForQuestionAnswering", "table-question-answering"),
        ("CLIPModel", "zero-shot-image-classification"),
        ("ViTModel", "feature-extraction"),
        ("DetrForObjectDetection", "object-detection"),
        ("MMGroundingDinoForObjectDetection", "zero-shot-object-detection"),
        ("DetrForSegmentation", "image-segmentation"),
        ("Mask2FormerForUniversalSegmentation", "image-segmentation"),
        ("SegformerForSemanticSegmentation", "image-segmentation"),
        ("DepthAnythingForDepthEstimation", "depth-estimation"),
        ("Swin2SRForImageSuperResolution", "image-to-image"),
        ("VJEPA2ForVideoClassification", "video-classification"),
    ],
)
def test_task_is_inferred_from_architecture(architecture: str, task: str) -> None:
    has_encoder = task in ("automatic-speech-recognition", "image-to-text", "text2text-generation")
    assert infer_task({"architectures": [architecture], "is_encoder_decoder": has_encoder}) == task


def test_image_prompts_are_distinguished_from_encoder_decoders() -> None:
    llava = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    assert infer_task(llava) == "image-text-to-text"
    del llava["vision_config"]
    assert infer_task(llava) == "text2text-generation"
    pix2struct = {"architectures": ["Pix2StructForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    assert infer_task({**pix2struct, "is_encoder_decoder": True}) == "image-to-text"


@pytest.mark.parametrize("architecture", ["GPT2DoubleHeadsModel", "TransfoXLHeadModel"])
def test_architecture_without_task_is_refused(architecture: str) -> None:
    with pytest.raises(TaskError, match=architecture):
        infer_task({"architectures": [architecture]})


LEFT_OUT = {
    "any-to-any": "its models generate images and speech, too, by code of their own",
    "decision": "it reads logits at positions that it names, which graphs of generating models do not return",
}
"""Pipelines of transformers without a task in accel, with the reasons. docs/guides/pipelines.md lists them as well."""


def test_every_transformers_pipeline_has_a_task_or_a_reason() -> None:
    from transformers.pipelines import SUPPORTED_TASKS

    served = {word for spec in all_tasks() for word in spec.serves}
    assert set(SUPPORTED_TASKS) - served == set(LEFT_OUT)


@pytest.mark.parametrize("word", LEFT_OUT)
def test_unsupported_pipeline_is_refused_by_name(word: str) -> None:
    with pytest.raises(TaskError, match=f"'{word}' does not exist"):
        task_spec(word)
