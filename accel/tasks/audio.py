"""Tasks of models that read sounds and answer at once: transcripts by frames, classes, voices."""

from __future__ import annotations

from .spec import Column, TaskSpec
from .text import LABEL

_NAMES = ("audio", "speech", "sound", "file", "path", "audio_path", "wav")
AUDIO = Column(use="audio", known=_NAMES, holds="audio")
_SAMPLE = "accel.capture.sounds:sound_sample"
_ENCODE = "accel.data.sounds:encode_sounds"

SPECS = (
    TaskSpec(
        # Its pipeline is that of the speech encoder-decoders in `generation`; a model's config says which of both it is.
        name="ctc",
        model="accel.models.audio:ORTModelForCTC",
        auto_model="AutoModelForCTC",
        output="CausalLMOutput",
        outputs={"logits": ("batch", "frames", "vocab_size")},
        suffixes=("ForCTC",),
        synonyms=("automatic-speech-recognition-ctc", "audio-ctc"),
        modalities=("audio",),
        pipelines=("automatic-speech-recognition",),
        columns=(
            Column(
                use="text",
                known=("text", "transcript", "transcription", "sentence", "normalized_text"),
                holds="text",
                needed="measuring",
                answer=True,
            ),
            AUDIO,
        ),
        encode=_ENCODE,
        predictor="accel.measuring.accuracy.sounds:Transcripts",
        sample=_SAMPLE,
        processor="AutoProcessor",
    ),
    TaskSpec(
        name="audio-classification",
        model="accel.models.audio:ORTModelForAudioClassification",
        auto_model="AutoModelForAudioClassification",
        output="SequenceClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        # Most of them have the same name as classifiers of text.
        suffixes=(
            "ForAudioClassification",
            *(
                f"{family}ForSequenceClassification"
                for family in (
                    *("Data2VecAudio", "Hubert", "SEW", "SEWD", "UniSpeech", "UniSpeechSat"),
                    *("Wav2Vec2", "Wav2Vec2Bert", "Wav2Vec2Conformer", "WavLM"),
                )
            ),
        ),
        modalities=("audio",),
        columns=(LABEL, AUDIO),
        encode=_ENCODE,
        predictor="accel.measuring.accuracy.predictors:Classes",
        sample=_SAMPLE,
        loss="ForSequenceClassification",
    ),
    TaskSpec(
        name="zero-shot-audio-classification",
        model="accel.models.audio:ORTModelForZeroShotAudioClassification",
        auto_model="AutoModel",
        outputs={"logits_per_audio": ("batch", "texts")},
        keeps=("logits_per_audio", "logits_per_text", "text_embeds", "audio_embeds"),
        suffixes=("ClapModel",),
        modalities=("audio", "text"),
        columns=(
            LABEL,
            AUDIO,
            Column(use="text", known=("text", "caption", "sentence", "prompt"), holds="text", needed="known"),
        ),
        encode="accel.data.sounds:encode_sounds_with_texts",
        predictor="accel.measuring.accuracy.sounds:SoundCandidates",
        sample="accel.capture.sound_text:sound_text_sample",
    ),
    TaskSpec(
        name="audio-frame-classification",
        model="accel.models.audio:ORTModelForAudioFrameClassification",
        auto_model="AutoModelForAudioFrameClassification",
        output="TokenClassifierOutput",
        outputs={"logits": ("batch", "frames", "num_labels")},
        suffixes=("ForAudioFrameClassification",),
        synonyms=("speaker-diarization",),
        modalities=("audio",),
        columns=(
            Column(
                use="tags", known=("labels", "label", "tags", "frames"), holds="tags", needed="measuring", answer=True
            ),
            AUDIO,
        ),
        encode=_ENCODE,
        predictor="accel.measuring.accuracy.sounds:Frames",
        sample=_SAMPLE,
    ),
    TaskSpec(
        name="text-to-audio",
        model="accel.models.voices:ORTModelForTextToWaveform",
        auto_model="AutoModelForTextToWaveform",
        suffixes=("VitsModel",),
        synonyms=("text-to-speech", "text-to-waveform"),
        sample="accel.capture.waveforms:waveform_sample",
        parts="accel.capture.waveforms:waveform_parts",
    ),
    TaskSpec(
        name="audio-xvector",
        model="accel.models.audio:ORTModelForAudioXVector",
        auto_model="AutoModelForAudioXVector",
        output="XVectorOutput",
        outputs={"logits": ("batch", "speakers"), "embeddings": ("batch", "embedding")},
        suffixes=("ForXVector",),
        synonyms=("speaker-verification",),
        modalities=("audio",),
        columns=(
            Column(
                use="label", known=("label", "same", "score", "target"), holds="label", needed="measuring", answer=True
            ),
            Column(use="audio", known=("audio1", "audio_1", "audio_a", "enrollment", *_NAMES), holds="audio"),
            Column(
                use="audio_pair",
                known=("audio2", "audio_2", "audio_b", "audio_pair", "trial"),
                holds="audio",
                needed="measuring",
            ),
        ),
        encode=_ENCODE,
        predictor="accel.measuring.accuracy.sounds:Voices",
        sample=_SAMPLE,
        stands_in="accel.capture.voices:VoiceEmbedder",
    ),
)
"""The tasks; see `TaskSpec`."""
