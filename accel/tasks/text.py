"""Tasks of encoders of text: classification, tags, answers, choices, masks and embeddings."""

from __future__ import annotations

from .spec import Column, TaskSpec

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

_SERVED = "accel.deploying.triton.services"
_EMBEDDINGS = dict.fromkeys(("feature-extraction", "sentence-similarity"), f"{_SERVED}:EMBEDDINGS")

SPECS = (
    TaskSpec(
        name="text-classification",
        model="accel.models.encoders:ORTModelForSequenceClassification",
        auto_model="AutoModelForSequenceClassification",
        output="SequenceClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        suffixes=("ForSequenceClassification",),
        loss="ForSequenceClassification",
        synonyms=("sequence-classification", "sentiment-analysis"),
        pipelines=("zero-shot-classification",),
        columns=(LABEL, TEXT, Column(use="text_pair", known=_PAIR, holds="text", needed="named")),
        encode="accel.data.batches:encode_pairs",
        predictor="accel.measuring.accuracy.predictors:classifier",
        fronts={"text-classification": f"{_SERVED}:CLASSIFICATION", "zero-shot-classification": f"{_SERVED}:ZERO_SHOT"},
        adapter="SEQ_CLS",
    ),
    TaskSpec(
        name="token-classification",
        model="accel.models.encoders:ORTModelForTokenClassification",
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
        encode="accel.data.batches:encode_words",
        predictor="accel.measuring.accuracy.predictors:Tags",
        fronts={"token-classification": f"{_SERVED}:TAGS"},
        adapter="TOKEN_CLS",
    ),
    TaskSpec(
        name="question-answering",
        model="accel.models.encoders:ORTModelForQuestionAnswering",
        auto_model="AutoModelForQuestionAnswering",
        output="QuestionAnsweringModelOutput",
        outputs={"start_logits": ("batch", "sequence"), "end_logits": ("batch", "sequence")},
        suffixes=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
        loss="ForQuestionAnswering",
        own_pipelines={
            "question-answering": "accel.models.pipelines.question_answering:QuestionAnsweringPipeline",
        },
        columns=(
            Column(use="answers", known=("answers", "answer"), holds="answers", needed="measuring", answer=True),
            Column(use="question", known=("question", "query"), holds="text"),
            Column(use="context", known=("context", "passage", "paragraph", "text"), holds="text"),
        ),
        encode="accel.data.batches:encode_questions",
        predictor="accel.measuring.accuracy.predictors:Answers",
        fronts={"question-answering": f"{_SERVED}:ANSWERS"},
        adapter="QUESTION_ANS",
    ),
    TaskSpec(
        name="document-question-answering",
        model="accel.models.documents:ORTModelForDocumentQuestionAnswering",
        auto_model="AutoModelForDocumentQuestionAnswering",
        output="QuestionAnsweringModelOutput",
        outputs={"start_logits": ("batch", "sequence"), "end_logits": ("batch", "sequence")},
        keeps=("start_logits", "end_logits"),
        suffixes=("LayoutLMForQuestionAnswering", "LayoutLMv2ForQuestionAnswering", "LayoutLMv3ForQuestionAnswering"),
        loss="ForQuestionAnswering",
        columns=(
            Column(use="answers", known=("answers", "answer"), holds="answers", needed="measuring", answer=True),
            Column(use="question", known=("question", "query"), holds="text"),
            Column(use="words", known=("words", "tokens"), holds="words"),
            Column(use="boxes", known=("boxes", "bboxes", "bbox"), holds="boxes"),
        ),
        encode="accel.data.documents:encode_documents",
        predictor="accel.measuring.accuracy.documents:DocumentAnswers",
        sample="accel.capture.documents:document_sample",
    ),
    TaskSpec(
        name="table-question-answering",
        model="accel.models.tables:ORTModelForTableQuestionAnswering",
        auto_model="AutoModelForTableQuestionAnswering",
        outputs={"logits": ("batch", "sequence")},
        keeps=("logits", "logits_aggregation"),
        suffixes=("TapasForQuestionAnswering",),
        sample="accel.capture.documents:table_sample",
    ),
    TaskSpec(
        name="multiple-choice",
        model="accel.models.encoders:ORTModelForMultipleChoice",
        auto_model="AutoModelForMultipleChoice",
        output="MultipleChoiceModelOutput",
        outputs={"logits": ("batch", "choices")},
        suffixes=("ForMultipleChoice",),
    ),
    TaskSpec(
        name="fill-mask",
        model="accel.models.encoders:ORTModelForMaskedLM",
        auto_model="AutoModelForMaskedLM",
        output="MaskedLMOutput",
        outputs={"logits": ("batch", "sequence", "vocab_size")},
        suffixes=("ForMaskedLM", "WithLMHeadModel"),
        loss="ForMaskedLM",
        synonyms=("masked-lm",),
        columns=(TEXT,),
    ),
    TaskSpec(
        name="feature-extraction",
        model="accel.models.encoders:ORTModelForFeatureExtraction",
        auto_model="AutoModel",
        # Of checkpoints that are an encoder alone (sentence-t5, GTR), whose whole model has a decoder.
        more_auto_models=("AutoModelForTextEncoding",),
        output="BaseModelOutput",
        suffixes=("Model",),
        synonyms=("default",),
        pipelines=("sentence-similarity", "image-feature-extraction"),
        columns=_EMBEDDED,
        predictor="accel.measuring.accuracy.predictors:Similarities",
        fronts=_EMBEDDINGS,
        embeds=True,
        adapter="FEATURE_EXTRACTION",
    ),
    TaskSpec(
        name="sentence-similarity",
        model="accel.models.encoders:ORTModelForFeatureExtraction",
        auto_model="AutoModel",
        # Of checkpoints that are an encoder alone (sentence-t5, GTR), whose whole model has a decoder.
        more_auto_models=("AutoModelForTextEncoding",),
        output="BaseModelOutput",
        synonyms=("embedding", "embeddings"),
        pipelines=("feature-extraction",),
        columns=_EMBEDDED,
        predictor="accel.measuring.accuracy.predictors:Similarities",
        fronts=_EMBEDDINGS,
        embeds=True,
        pooling="mean",
    ),
    TaskSpec(
        name="text-ranking",
        model="accel.models.encoders:ORTModelForSequenceClassification",
        auto_model="AutoModelForSequenceClassification",
        output="SequenceClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        synonyms=("reranking", "cross-encoder"),
        pipelines=("text-classification",),
        columns=(
            Column(use="query", known=("query", "question", "anchor", "text"), holds="text"),
            Column(use="positive", known=("positive", "positives", "relevant", "answer"), holds="texts"),
            Column(use="negative", known=("negative", "negatives", "irrelevant"), holds="texts", needed="measuring"),
        ),
        encode="accel.data.ranking:encode_queries",
        predictor="accel.measuring.accuracy.ranking:Rankings",
        fronts={"text-ranking": f"{_SERVED}:RANKING", "text-classification": f"{_SERVED}:CLASSIFICATION"},
        loss="ForSequenceClassification",
    ),
    TaskSpec(name="custom", model="accel.models.encoders:ORTModelForCustomTasks", synonyms=("custom-tasks",)),
)
