"""The task read from a config's architecture."""

import pytest

from accel.errors import TaskError
from accel.tasks.infer import infer_task


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
    ],
)
def test_the_longest_suffix_decides(architecture: str, task: str) -> None:
    assert infer_task({"architectures": [architecture]}) == task


def test_images_in_the_prompt_are_told_from_an_encoder_decoder() -> None:
    llava = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    assert infer_task(llava) == "image-text-to-text"
    del llava["vision_config"]
    assert infer_task(llava) == "text2text-generation"


@pytest.mark.parametrize("architecture", ["GPT2DoubleHeadsModel", "TransfoXLHeadModel"])
def test_a_head_without_a_task_is_not_dropped(architecture: str) -> None:
    with pytest.raises(TaskError, match=architecture):
        infer_task({"architectures": [architecture]})
