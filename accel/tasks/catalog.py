"""Specifications (`TaskSpec`) of accel's built-in tasks, registered as entry points of the group `accel.tasks`."""

from __future__ import annotations

from ..interfaces.task_spec import Column, TaskSpec

LABEL = Column(
    use="label",
    known=("label", "labels", "category", "intent", "class", "target", "sentiment", "coarse_label", "fine_label"),
    holds="label",
    needed="measuring",
    answer=True,
)

TEXT = Column(
    use="text",
    known=("text", "sentence", "query", "utterance", "content", "review", "tweet", "document", "input", "question"),
    holds="text",
)

_PAIR = ("sentence2", "sentence_2", "text2", "text_b", "positive")

_EMBEDDED = (
    Column(
        use="score",
        known=("score", "similarity_score", "similarity", "label"),
        holds="number",
        needed="measuring",
        answer=True,
    ),
    Column(use="text", known=("sentence1", "sentence_1", "text1", "text_a", "anchor", *TEXT.known), holds="text"),
    Column(use="text_pair", known=_PAIR, holds="text", needed="measuring"),
)

TEXT_CLASSIFICATION = TaskSpec(
    name="text-classification",
    audit="classify",
    impl="accel.tasks.text_classification:TextClassification",
    auto_model="AutoModelForSequenceClassification",
    output="SequenceClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    suffixes=("ForSequenceClassification",),
    loss="ForSequenceClassification",
    synonyms=("sequence-classification", "sentiment-analysis"),
    pipelines=("zero-shot-classification",),
    columns=(LABEL, TEXT, Column(use="text_pair", known=_PAIR, holds="text", needed="named")),
    adapter="SEQ_CLS",
)

TOKEN_CLASSIFICATION = TaskSpec(
    name="token-classification",
    impl="accel.tasks.token_classification:TokenClassification",
    auto_model="AutoModelForTokenClassification",
    output="TokenClassifierOutput",
    outputs={"logits": ("batch", "sequence", "num_labels")},
    suffixes=("ForTokenClassification",),
    loss="ForTokenClassification",
    synonyms=("ner",),
    columns=(
        Column(
            use="tags",
            known=("ner_tags", "tags", "labels", "label", "pos_tags"),
            holds="tags",
            needed="measuring",
            answer=True,
        ),
        Column(use="words", known=("tokens", "words"), holds="words"),
    ),
    adapter="TOKEN_CLS",
)

QUESTION_ANSWERING = TaskSpec(
    name="question-answering",
    impl="accel.tasks.question_answering:QuestionAnswering",
    auto_model="AutoModelForQuestionAnswering",
    output="QuestionAnsweringModelOutput",
    outputs={"start_logits": ("batch", "sequence"), "end_logits": ("batch", "sequence")},
    suffixes=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    loss="ForQuestionAnswering",
    own_pipelines=("question-answering",),
    usual_models={"question-answering": ("distilbert/distilbert-base-cased-distilled-squad", "564e9b5")},
    columns=(
        Column(use="answers", known=("answers", "answer"), holds="answers", needed="measuring", answer=True),
        Column(use="question", known=("question", "query"), holds="text"),
        Column(use="context", known=("context", "passage", "paragraph", "text"), holds="text"),
    ),
    adapter="QUESTION_ANS",
)

DOCUMENT_QUESTION_ANSWERING = TaskSpec(
    name="document-question-answering",
    impl="accel.tasks.document_question_answering:DocumentQuestionAnswering",
    auto_model="AutoModelForDocumentQuestionAnswering",
    output="QuestionAnsweringModelOutput",
    outputs={"start_logits": ("batch", "sequence"), "end_logits": ("batch", "sequence")},
    keeps=("start_logits", "end_logits"),
    listed=True,
    loss="ForQuestionAnswering",
    columns=(
        Column(use="answers", known=("answers", "answer"), holds="answers", needed="measuring", answer=True),
        Column(use="question", known=("question", "query"), holds="text"),
        Column(use="words", known=("words", "tokens"), holds="words"),
        Column(use="boxes", known=("boxes", "bboxes", "bbox"), holds="boxes"),
    ),
)

TABLE_QUESTION_ANSWERING = TaskSpec(
    name="table-question-answering",
    impl="accel.tasks.table_question_answering:TableQuestionAnswering",
    auto_model="AutoModelForTableQuestionAnswering",
    outputs={"logits": ("batch", "sequence")},
    keeps=("logits", "logits_aggregation"),
    listed=True,
)

MULTIPLE_CHOICE = TaskSpec(
    name="multiple-choice",
    impl="accel.tasks.multiple_choice:MultipleChoice",
    auto_model="AutoModelForMultipleChoice",
    output="MultipleChoiceModelOutput",
    outputs={"logits": ("batch", "choices")},
    suffixes=("ForMultipleChoice",),
)

FILL_MASK = TaskSpec(
    name="fill-mask",
    impl="accel.tasks.fill_mask:FillMask",
    auto_model="AutoModelForMaskedLM",
    output="MaskedLMOutput",
    outputs={"logits": ("batch", "sequence", "vocab_size")},
    suffixes=("ForMaskedLM", "WithLMHeadModel"),
    loss="ForMaskedLM",
    synonyms=("masked-lm",),
    columns=(TEXT,),
)

FEATURE_EXTRACTION = TaskSpec(
    name="feature-extraction",
    audit="embed",
    impl="accel.tasks.feature_extraction:FeatureExtraction",
    auto_model="AutoModel",
    # For checkpoints that contain only the encoder of an encoder-decoder (sentence-t5, GTR).
    more_auto_models=("AutoModelForTextEncoding",),
    output="BaseModelOutput",
    suffixes=("Model",),
    synonyms=("default",),
    pipelines=("sentence-similarity", "image-feature-extraction"),
    columns=_EMBEDDED,
    embeds=True,
    adapter="FEATURE_EXTRACTION",
)

SENTENCE_SIMILARITY = TaskSpec(
    name="sentence-similarity",
    audit="embed",
    impl="accel.tasks.feature_extraction:FeatureExtraction",
    auto_model="AutoModel",
    # For checkpoints that contain only the encoder of an encoder-decoder (sentence-t5, GTR).
    more_auto_models=("AutoModelForTextEncoding",),
    output="BaseModelOutput",
    sentence_kinds=("embedder", "sparse encoder", "multi-vector encoder"),
    synonyms=("embedding", "embeddings"),
    pipelines=("feature-extraction",),
    columns=_EMBEDDED,
    embeds=True,
    pooling="mean",
)

TEXT_RANKING = TaskSpec(
    name="text-ranking",
    audit="rerank",
    impl="accel.tasks.text_ranking:TextRanking",
    auto_model="AutoModelForSequenceClassification",
    output="SequenceClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    suffixes=("ForSequenceClassification",),
    # Config fields that sentence-transformers writes for a cross-encoder.
    marks=("sentence_transformers", "sbert_ce_default_activation_function"),
    sentence_kinds=("cross-encoder",),
    synonyms=("reranking", "cross-encoder"),
    pipelines=("text-classification",),
    columns=(
        Column(use="query", known=("query", "question", "anchor", "text"), holds="text"),
        Column(use="positive", known=("positive", "positives", "relevant", "answer"), holds="texts"),
        Column(use="negative", known=("negative", "negatives", "irrelevant"), holds="texts", needed="measuring"),
    ),
    loss="ForSequenceClassification",
)

CUSTOM = TaskSpec(name="custom", impl="accel.tasks.custom:Custom", synonyms=("custom-tasks",), any_graph=True)

IMAGE = Column(use="image", known=("image", "img", "pixel_values", "file", "path", "image_path"), holds="image")

_CAPTION = Column(use="text", known=("text", "caption", "sentence", "prompt"), holds="text", needed="known")

_OBJECTS = Column(
    use="objects",
    known=("objects", "annotations", "annotation", "labels", "label"),
    holds="objects",
    needed="measuring",
    answer=True,
)


def _map(use: str, *names: str) -> Column:
    """Return the specification of a data column that contains references with one value per pixel, such as depth maps."""
    return Column(use=use, known=names, holds="map", needed="measuring", answer=True)


IMAGE_CLASSIFICATION = TaskSpec(
    name="image-classification",
    impl="accel.tasks.image_classification:ImageClassification",
    auto_model="AutoModelForImageClassification",
    output="ImageClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    # Perceiver has one model class for each of its three ways to preprocess images, with these suffixes.
    suffixes=tuple(f"ForImageClassification{how}" for how in ("", "Learned", "Fourier", "ConvProcessing")),
    modalities=("image",),
    columns=(LABEL, IMAGE),
    loss="ForImageClassification",
)

ZERO_SHOT_IMAGE_CLASSIFICATION = TaskSpec(
    name="zero-shot-image-classification",
    impl="accel.tasks.zero_shot_image_classification:ZeroShotImageClassification",
    auto_model="AutoModelForZeroShotImageClassification",
    outputs={"logits_per_image": ("batch", "texts")},
    keeps=("logits_per_image", "logits_per_text", "image_embeds", "text_embeds"),
    listed=True,
    modalities=("image", "text"),
    columns=(LABEL, IMAGE, _CAPTION),
)

OBJECT_DETECTION = TaskSpec(
    name="object-detection",
    impl="accel.tasks.object_detection:ObjectDetection",
    auto_model="AutoModelForObjectDetection",
    outputs={"logits": ("batch", "queries", "classes"), "pred_boxes": ("batch", "queries", "corners")},
    keeps=("logits", "pred_boxes", "order_logits", "out_masks"),
    suffixes=("ForObjectDetection",),
    modalities=("image",),
    columns=(_OBJECTS, IMAGE),
)

ZERO_SHOT_OBJECT_DETECTION = TaskSpec(
    name="zero-shot-object-detection",
    impl="accel.tasks.zero_shot_object_detection:ZeroShotObjectDetection",
    auto_model="AutoModelForZeroShotObjectDetection",
    outputs={"logits": ("batch", "queries", "texts"), "pred_boxes": ("batch", "queries", "corners")},
    keeps=("logits", "pred_boxes", "objectness_logits"),
    listed=True,
    modalities=("image", "text"),
    columns=(_OBJECTS, IMAGE, _CAPTION),
)

IMAGE_SEGMENTATION = TaskSpec(
    name="image-segmentation",
    impl="accel.tasks.image_segmentation:ImageSegmentation",
    auto_model="AutoModelForSemanticSegmentation",
    more_auto_models=(
        "AutoModelForUniversalSegmentation",
        "AutoModelForInstanceSegmentation",
        "AutoModelForImageSegmentation",
    ),
    keeps=("logits", "pred_boxes", "pred_masks", "class_queries_logits", "masks_queries_logits"),
    suffixes=(
        "ForSemanticSegmentation",
        "ForInstanceSegmentation",
        "ForUniversalSegmentation",
        "ForSegmentation",
    ),
    synonyms=("semantic-segmentation", "instance-segmentation", "universal-segmentation"),
    modalities=("image",),
    columns=(
        _map("mask", "annotation", "mask", "masks", "label", "labels", "segmentation_mask", "semantic_mask"),
        IMAGE,
    ),
)

MASK_GENERATION = TaskSpec(
    name="mask-generation",
    impl="accel.tasks.mask_generation:MaskGeneration",
    auto_model="AutoModelForMaskGeneration",
    listed=True,
    modalities=("image",),
)

KEYPOINT_MATCHING = TaskSpec(
    name="keypoint-matching",
    impl="accel.tasks.keypoint_matching:KeypointMatching",
    auto_model="AutoModelForKeypointMatching",
    outputs={"matches": ("batch", "pair", "keypoints"), "keypoints": ("batch", "pair", "keypoints", "coordinates")},
    keeps=("matches", "matching_scores", "keypoints", "mask"),
    suffixes=("ForKeypointMatching",),
    modalities=("image",),
)

DEPTH_ESTIMATION = TaskSpec(
    name="depth-estimation",
    impl="accel.tasks.depth_estimation:DepthEstimation",
    auto_model="AutoModelForDepthEstimation",
    output="DepthEstimatorOutput",
    outputs={"predicted_depth": ("batch", "height", "width")},
    keeps=("predicted_depth", "field_of_view", "domain_logits"),
    suffixes=("ForDepthEstimation",),
    modalities=("image",),
    columns=(_map("depth", "depth", "depth_map", "depths", "label"), IMAGE),
)

IMAGE_TO_IMAGE = TaskSpec(
    name="image-to-image",
    impl="accel.tasks.image_to_image:ImageToImage",
    auto_model="AutoModelForImageToImage",
    output="ImageSuperResolutionOutput",
    outputs={"reconstruction": ("batch", "channels", "height", "width")},
    keeps=("reconstruction",),
    suffixes=("ForImageSuperResolution",),
    modalities=("image",),
    columns=(_map("target", "target", "hr", "high_resolution", "ground_truth", "gt"), IMAGE),
    own_pipelines=("image-to-image",),
    usual_models={"image-to-image": ("caidas/swin2SR-classical-sr-x2-64", "cee1c92")},
)

VIDEO_CLASSIFICATION = TaskSpec(
    name="video-classification",
    impl="accel.tasks.video_classification:VideoClassification",
    auto_model="AutoModelForVideoClassification",
    output="ImageClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    suffixes=("ForVideoClassification",),
    modalities=("video",),
    columns=(
        LABEL,
        Column(use="video", known=("video", "frames", "clip", "images", "pixel_values"), holds="video"),
    ),
    loss="ForVideoClassification",
)

_AUDIO_NAMES = ("audio", "speech", "sound", "file", "path", "audio_path", "wav")

AUDIO = Column(use="audio", known=_AUDIO_NAMES, holds="audio")

CTC = TaskSpec(
    # The pipeline automatic-speech-recognition runs both CTC models and encoder-decoders; the model's config selects the task.
    name="ctc",
    impl="accel.tasks.ctc:Ctc",
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
    processor="AutoProcessor",
)

AUDIO_CLASSIFICATION = TaskSpec(
    name="audio-classification",
    impl="accel.tasks.audio_classification:AudioClassification",
    auto_model="AutoModelForAudioClassification",
    output="SequenceClassifierOutput",
    outputs={"logits": ("batch", "num_labels")},
    # Most audio classifiers are named ...ForSequenceClassification, like text classifiers. `listed` therefore also accepts the classes that
    # `AutoModelForAudioClassification` lists.
    suffixes=("ForAudioClassification",),
    listed=True,
    modalities=("audio",),
    columns=(LABEL, AUDIO),
    loss="ForSequenceClassification",
)

ZERO_SHOT_AUDIO_CLASSIFICATION = TaskSpec(
    name="zero-shot-audio-classification",
    impl="accel.tasks.zero_shot_audio_classification:ZeroShotAudioClassification",
    auto_model="AutoModel",
    outputs={"logits_per_audio": ("batch", "texts")},
    keeps=("logits_per_audio", "logits_per_text", "text_embeds", "audio_embeds"),
    # Models that compare sounds with texts, such as CLAP, have no auto class in transformers; `fields` of the config identify them.
    suffixes=("Model",),
    fields=("audio_config", "text_config", "projection_dim"),
    modalities=("audio", "text"),
    columns=(
        LABEL,
        AUDIO,
        Column(use="text", known=("text", "caption", "sentence", "prompt"), holds="text", needed="known"),
    ),
)

AUDIO_FRAME_CLASSIFICATION = TaskSpec(
    name="audio-frame-classification",
    impl="accel.tasks.audio_frame_classification:AudioFrameClassification",
    auto_model="AutoModelForAudioFrameClassification",
    output="TokenClassifierOutput",
    outputs={"logits": ("batch", "frames", "num_labels")},
    suffixes=("ForAudioFrameClassification",),
    synonyms=("speaker-diarization",),
    modalities=("audio",),
    columns=(
        Column(use="tags", known=("labels", "label", "tags", "frames"), holds="tags", needed="measuring", answer=True),
        AUDIO,
    ),
)

TEXT_TO_AUDIO = TaskSpec(
    name="text-to-audio",
    impl="accel.tasks.text_to_audio:TextToAudio",
    auto_model="AutoModelForTextToWaveform",
    listed=True,
    synonyms=("text-to-speech", "text-to-waveform"),
)

AUDIO_XVECTOR = TaskSpec(
    name="audio-xvector",
    impl="accel.tasks.audio_xvector:AudioXvector",
    auto_model="AutoModelForAudioXVector",
    output="XVectorOutput",
    outputs={"logits": ("batch", "speakers"), "embeddings": ("batch", "embedding")},
    suffixes=("ForXVector",),
    synonyms=("speaker-verification",),
    modalities=("audio",),
    columns=(
        Column(use="label", known=("label", "same", "score", "target"), holds="label", needed="measuring", answer=True),
        Column(use="audio", known=("audio1", "audio_1", "audio_a", "enrollment", *_AUDIO_NAMES), holds="audio"),
        Column(
            use="audio_pair",
            known=("audio2", "audio_2", "audio_b", "audio_pair", "trial"),
            holds="audio",
            needed="measuring",
        ),
    ),
)

TEXT_GENERATION = TaskSpec(
    name="text-generation",
    audit="chat",
    impl="accel.tasks.text_generation:TextGeneration",
    auto_model="AutoModelForCausalLM",
    output="CausalLMOutputWithPast",
    suffixes=("ForCausalLM", "LMHeadModel"),
    synonyms=("causal-lm", "text-generation-with-past"),
    generates=True,
    encoder_decoder=False,
    columns=(TEXT,),
    adapter="CAUSAL_LM",
)

# Default model of transformers 4 for several pipelines that transformers 5 removed.
_T5 = ("google-t5/t5-base", "a9723ea")

TEXT2TEXT_GENERATION = TaskSpec(
    name="text2text-generation",
    impl="accel.tasks.text2text_generation:Text2textGeneration",
    auto_model="AutoModelForSeq2SeqLM",
    output="Seq2SeqLMOutput",
    suffixes=("ForConditionalGeneration", "MTModel"),
    synonyms=("seq2seq-lm", "text2text-generation-with-past"),
    generates=True,
    encoder_decoder=True,
    columns=(TEXT,),
    own_pipelines=("text2text-generation", "summarization", "translation"),
    usual_models={
        "summarization": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e"),
        "text2text-generation": _T5,
        **{f"translation_en_to_{language}": _T5 for language in ("de", "fr", "ro")},
    },
    adapter="SEQ_2_SEQ_LM",
)

AUTOMATIC_SPEECH_RECOGNITION = TaskSpec(
    name="automatic-speech-recognition",
    impl="accel.tasks.automatic_speech_recognition:AutomaticSpeechRecognition",
    auto_model="AutoModelForSpeechSeq2Seq",
    output="Seq2SeqLMOutput",
    listed=True,
    synonyms=("automatic-speech-recognition-with-past", "speech-to-text"),
    modalities=("audio",),
    generates=True,
    encoder_decoder=True,
    columns=(AUDIO,),
)

IMAGE_TO_TEXT = TaskSpec(
    name="image-to-text",
    impl="accel.tasks.image_to_text:ImageToText",
    auto_model="AutoModelForImageTextToText",
    output="Seq2SeqLMOutput",
    listed=True,
    # `image-text-to-text` is also the name of transformers 5's auto class for these models.
    synonyms=("vision2seq", "vision2seq-lm", "image-text-to-text"),
    modalities=("image",),
    generates=True,
    encoder_decoder=True,
    columns=(IMAGE,),
    own_pipelines=("image-to-text",),
    usual_models={"image-to-text": ("ydshieh/vit-gpt2-coco-en", "5bebf1e")},
)

IMAGE_TEXT_TO_TEXT = TaskSpec(
    name="image-text-to-text",
    impl="accel.tasks.image_text_to_text:ImageTextToText",
    auto_model="AutoModelForImageTextToText",
    output="CausalLMOutputWithPast",
    suffixes=("ForConditionalGeneration",),
    fields=("vision_config", "text_config"),
    synonyms=("vision-language",),
    modalities=("image", "text"),
    generates=True,
    encoder_decoder=False,
)
