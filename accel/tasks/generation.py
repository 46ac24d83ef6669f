"""Tasks that make text one token after another, from text, speech or images."""

from __future__ import annotations

from .audio import AUDIO
from .image import IMAGE
from .spec import TaskSpec
from .text import TEXT

SPECS = (
    TaskSpec(
        name="text-generation",
        model="accel.models.decoders:ORTModelForCausalLM",
        auto_model="AutoModelForCausalLM",
        output="CausalLMOutputWithPast",
        suffixes=("ForCausalLM", "LMHeadModel"),
        synonyms=("causal-lm", "text-generation-with-past"),
        generates=True,
        encoder_decoder=False,
        columns=(TEXT,),
        predictor="accel.measuring.accuracy.predictors:NextTokens",
        fronts={"text-generation": "accel.deploying.triton.services:GENERATION"},
        adapter="CAUSAL_LM",
    ),
    TaskSpec(
        name="text2text-generation",
        model="accel.models.encoder_decoder:ORTModelForSeq2SeqLM",
        auto_model="AutoModelForSeq2SeqLM",
        output="Seq2SeqLMOutput",
        suffixes=("ForConditionalGeneration", "MTModel"),
        synonyms=("seq2seq-lm", "text2text-generation-with-past"),
        generates=True,
        encoder_decoder=True,
        columns=(TEXT,),
        own_pipelines={
            "text2text-generation": "accel.models.pipelines.text_to_text:Text2TextGenerationPipeline",
            "summarization": "accel.models.pipelines.text_to_text:SummarizationPipeline",
            "translation": "accel.models.pipelines.text_to_text:TranslationPipeline",
        },
        adapter="SEQ_2_SEQ_LM",
    ),
    TaskSpec(
        name="automatic-speech-recognition",
        model="accel.models.speech:ORTModelForSpeechSeq2Seq",
        auto_model="AutoModelForSpeechSeq2Seq",
        output="Seq2SeqLMOutput",
        suffixes=tuple(f"{family}ForConditionalGeneration" for family in ("Whisper", "Moonshine", "Speech2Text")),
        synonyms=("automatic-speech-recognition-with-past", "speech-to-text"),
        modalities=("audio",),
        generates=True,
        encoder_decoder=True,
        columns=(AUDIO,),
        encode="accel.data.sounds:encode_sounds",
        sample="accel.capture.speech:speech_sample",
    ),
    TaskSpec(
        name="image-to-text",
        model="accel.models.encoder_decoder:ORTModelForVision2Seq",
        auto_model="AutoModelForImageTextToText",
        output="Seq2SeqLMOutput",
        suffixes=("VisionEncoderDecoderModel", "Pix2StructForConditionalGeneration"),
        # transformers 5 calls its auto class so, for these models too.
        synonyms=("vision2seq", "vision2seq-lm", "image-text-to-text"),
        modalities=("image",),
        generates=True,
        encoder_decoder=True,
        columns=(IMAGE,),
        encode="accel.data.batches:encode_images",
        own_pipelines={"image-to-text": "accel.models.pipelines.image_to_text:ImageToTextPipeline"},
    ),
    TaskSpec(
        name="image-text-to-text",
        model="accel.models.vision_language:ORTModelForImageTextToText",
        auto_model="AutoModelForImageTextToText",
        output="CausalLMOutputWithPast",
        synonyms=("vision-language",),
        modalities=("image", "text"),
        generates=True,
        encoder_decoder=False,
    ),
)
