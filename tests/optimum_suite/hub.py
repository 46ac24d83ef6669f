"""Create local folders for the Hub repositories that Optimum's tests name, when a test requests a repository for the
first time.

Models are built as in `tests.sweep`: a small config of the architecture, random weights, and the head of the task,
which the tiny models on the Hub often lack. Repositories that contain graphs are replaced by graphs from
`tests/fixtures/foreign`, which Optimum wrote, or by exports.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken, pre_tokenizers

from accel.errors import TaskError
from accel.interfaces.task_registry import all_tasks, task_spec
from accel.testing.copies_without_manifest import as_foreign
from accel.testing.image_models import PICTURES, tiny_processor
from accel.testing.models import tiny_tokenizer
from tests.sweep import building, cases
from tests.sweep.shrinking import BEGIN, PAD, POSITIONS, small_config

CACHE = "ACCEL_OPTIMUM_SUITE"
"""Name of the environment variable with the folder for all created models."""
LOCAL = "local-tiny/"
"""Prefix of the entries of Optimum's table `MODEL_NAMES`, by which local models are recognized."""
_FOREIGN = Path(__file__).parents[1] / "fixtures" / "foreign" / "folders.tar.xz"
# The default task of a model is the first of these tasks whose table contains the architecture.
_USUAL_TASKS = (
    "text-classification", "image-classification", "automatic-speech-recognition", "ctc", "text-generation",
    "text2text-generation", "feature-extraction", "zero-shot-image-classification", "image-to-image", "image-to-text",
)  # fmt: skip
_SPEECH = 16_000
_FIVE_LAYERS = {
    "num_hidden_layers": 5
}  # the models on the Hub also have five layers, and tests count their weight matrices


def _bert_and_gpt2() -> Any:
    decoder = small_config("gpt2", is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small_config("bert"), decoder)
    config.decoder_start_token_id, config.pad_token_id = BEGIN, PAD
    return config


# Each entry is the architecture, the default task, and config fields or a function that returns the config.
Model = tuple[str, str, Mapping[str, Any] | Callable[[], Any]]
# These entries of `MODEL_NAMES` are not simply the name of an architecture.
_WORDS: Mapping[str, Model] = {
    "encoder-decoder": ("encoder-decoder", "text2text-generation", _bert_and_gpt2),
    "encoder-decoder-bert-bert": ("encoder-decoder", "text2text-generation", {}),
    "falcon-alibi-True": ("falcon", "text-generation", {"alibi": True}),
    "gpt_bigcode-multi_query-False": ("gpt_bigcode", "text-generation", {"multi_query": False}),
    "perceiver_text": ("perceiver", "fill-mask", {}),
    "perceiver_vision": ("perceiver", "image-classification", {}),
    "speech_to_text": ("speech_to_text", "automatic-speech-recognition", {"max_source_positions": POSITIONS * 8}),
    "swin-window": ("swin", "image-classification", {}),
    "visual_bert": ("visual_bert", "feature-extraction", {"visual_embedding_dim": 20}),
    "wav2vec2-conformer": ("wav2vec2-conformer", "audio-classification", {"max_source_positions": 5000}),
    "whisper": ("whisper", "automatic-speech-recognition", {"max_source_positions": 1500, "vocab_size": 1766}),
    "xlm-qa": ("xlm", "question-answering", {}),
}
# Tests name these repositories directly, or they are the default repositories of pipelines.
_REPOSITORIES: Mapping[str, Model] = {
    "dbmdz/bert-large-cased-finetuned-conll03-english": ("bert", "token-classification", {}),
    "distilbert/distilbert-base-cased": ("distilbert", "feature-extraction", {}),
    "distilbert/distilbert-base-cased-distilled-squad": ("distilbert", "question-answering", {}),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": ("distilbert", "text-classification", {}),
    "distilbert/distilroberta-base": ("roberta", "fill-mask", {}),
    "facebook/detr-resnet-50-panoptic": ("segformer", "image-segmentation", {"image_size": 64}),
    "fxmarty/resnet-tiny-beans": ("resnet", "image-classification", {}),
    "google/vit-base-patch16-224": ("vit", "image-classification", {}),
    "hf-internal-testing/tiny-random-BartModel": ("bart", "text-classification", {}),
    "hf-internal-testing/tiny-random-bert": ("bert", "text-classification", _FIVE_LAYERS),
    "hf-internal-testing/tiny-random-big_bird": ("big_bird", "text-classification", {}),
    "hf-internal-testing/tiny-random-ClipModel": ("clip", "image-classification", {}),
    "hf-internal-testing/tiny-random-Dinov2Model": ("dinov2", "image-classification", {}),
    "hf-internal-testing/tiny-random-distilbert": ("distilbert", "text-classification", _FIVE_LAYERS),
    "hf-internal-testing/tiny-random-electra": ("electra", "text-classification", {}),
    "hf-internal-testing/tiny-random-gpt2": ("gpt2", "text-generation", _FIVE_LAYERS),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("llama", "text-generation", {}),
    "hf-internal-testing/tiny-random-LongT5ForConditionalGeneration": ("longt5", "text2text-generation", {}),
    "hf-internal-testing/tiny-random-m2m_100": ("m2m_100", "text2text-generation", {}),
    "hf-internal-testing/tiny-random-marian": ("marian", "text2text-generation", {}),
    "hf-internal-testing/tiny-random-mbart": ("mbart", "text2text-generation", {}),
    "hf-internal-testing/tiny-random-ModernBertForSequenceClassification": ("modernbert", "text-classification", {}),
    "hf-internal-testing/tiny-random-onnx-mt5": ("mt5", "text2text-generation", {}),
    "hf-internal-testing/tiny-random-roberta": ("roberta", "text-classification", _FIVE_LAYERS),
    "hf-internal-testing/tiny-random-SegformerModel": ("segformer", "image-segmentation", {"image_size": 64}),
    "hf-internal-testing/tiny-random-VitModel": ("vit", "image-classification", {}),
    "hf-internal-testing/tiny-xlm-roberta": ("xlm-roberta", "text-classification", {}),
    "HuggingFaceTB/SmolLM3-3B": ("gpt2", "text-generation", {}),
    "openai/clip-vit-base-patch32": ("clip", "zero-shot-image-classification", {}),
    "optimum-internal-testing/tiny-random-llama": ("llama", "text-generation", {}),
    "sparse-encoder-testing/splade-bert-tiny-nq": ("bert", "fill-mask", {}),
    "sshleifer/tiny-distilbert-base-cased-distilled-squad": ("distilbert", "question-answering", {}),
    "superb/wav2vec2-base-superb-ks": ("wav2vec2", "audio-classification", {}),
    "typeform/distilbert-base-uncased-mnli": (
        "distilbert",
        "text-classification",
        {
            "id2label": {0: "entailment", 1: "neutral", 2: "contradiction"},
            "label2id": {"entailment": 0, "neutral": 1, "contradiction": 2},
        },
    ),
}  # fmt: skip


def local(name: str, task: str | None = None, revision: str | None = None) -> str:
    """Return the local folder for a repository of the Hub. Any other name is returned unchanged.

    Args:
        name: Name of the repository, as in the test.
        task: Task of the class that loads the model, or `None` for the model's default task. The default task is
            sufficient to load its tokenizer.
        revision: Branch of the repository.
    """
    make: Callable[[Path], None]
    graphs = GRAPHS.get((name, revision)) or GRAPHS.get((name, None))
    if graphs is not None:
        make, where = graphs, f"{name}/{revision or 'main'}"
    else:
        entry = _REPOSITORIES.get(name) or (_word(name.removeprefix(LOCAL)) if name.startswith(LOCAL) else None)
        if entry is None:
            return name
        architecture, usual, settings = entry
        chosen_task = usual if task is None or not _class_for(architecture, task) else task
        make = functools.partial(_save_model, architecture, chosen_task, settings)
        where = f"{name}/{chosen_task}"
    folder = Path(os.environ[CACHE]) / "models" / where
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(folder.name + ".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(folder)
    return str(folder)


def task_of(cls: type[Any]) -> str | None:
    """Return the task of a model class of transformers or accel, or `None` for classes without a specific task."""
    task = getattr(cls, "task", None)
    if task:
        return str(task)
    if cls.__name__ == "AutoModel":
        return "feature-extraction"
    return next((spec.name for spec in all_tasks() if cls.__name__ in spec.auto_models), None)


def _word(word: str) -> Model:
    if word in _WORDS:
        return _WORDS[word]
    usual = next(task for task in _USUAL_TASKS if _class_for(word, task))
    return word, usual, {}


def _class_for(architecture: str, task: str) -> str | None:
    """Return the name of transformers' model class for an architecture and a task, or `None` if transformers has no
    such class.
    """
    try:
        names = task_spec(task).auto_models
    except TaskError:
        return None
    return next((class_name for name in names if (class_name := cases._table(name).get(architecture))), None)


def _save_model(architecture: str, task: str, settings: Mapping[str, Any] | Callable[[], Any], folder: Path) -> None:
    config = settings() if callable(settings) else small_config(architecture, **settings)
    model = _with_weights(getattr(transformers, str(_class_for(architecture, task))), config, task)
    model.save_pretrained(folder)
    for processor in _processors(model, architecture, task):
        processor.save_pretrained(folder)


def _with_weights(cls: Any, config: Any, task: str) -> Any:
    """Return a model with random weights that generates until its maximum length."""
    if task == "question-answering":
        config.num_labels = 2  # start and end are two outputs for each token
    if task == "text-generation" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # BART and similar architectures generate text only with this setting
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = BEGIN
    torch.manual_seed(0)
    model = cls(config).float()
    building.enliven(model)
    if model.can_generate():
        building._hide_the_last_token(model)
        generation = model.generation_config
        generation._from_model_config = False  # otherwise loading would replace these settings by the config's
        generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = (
            generation.suppress_tokens
        ) = None
        generation.pad_token_id, generation.bos_token_id = PAD, BEGIN
        if model.config.is_encoder_decoder:
            generation.decoder_start_token_id = BEGIN
        if config.model_type == "whisper":
            _say_words_of_whisper(generation)
    return model.eval()


def _processors(model: Any, architecture: str, task: str) -> list[Any]:
    """Return the tokenizer or the processors that create the inputs of a model."""
    config, reads = model.config, model.main_input_name
    if reads == "inputs":  # Perceiver's generic input name
        reads = "pixel_values" if "image" in task_spec(task).modalities else "input_ids"
    if architecture in PICTURES:
        return [tiny_processor(architecture)]
    if reads == "pixel_values":
        image_size = getattr(getattr(config, "encoder", config), "image_size", None)
        size = image_size if isinstance(image_size, int) else 64
        images = transformers.ViTImageProcessorPil(size={"height": size, "width": size})
        return [images, tiny_tokenizer()] if model.can_generate() else [images]
    if reads == "input_ids":
        return [_tokenizer(model)]
    if architecture == "whisper":
        seconds = config.max_source_positions // 50
        extractor = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=seconds)
        return [transformers.WhisperProcessor(extractor, _whisper_tokenizer())]
    if architecture == "audio-spectrogram-transformer":
        return [transformers.ASTFeatureExtractor(num_mel_bins=config.num_mel_bins, max_length=config.max_length)]
    if architecture == "speech_to_text":
        bins = config.input_feat_per_channel
        return [transformers.Speech2TextFeatureExtractor(feature_size=bins, num_mel_bins=bins), tiny_tokenizer()]
    return [transformers.Wav2Vec2FeatureExtractor(sampling_rate=_SPEECH), tiny_tokenizer()]


def _tokenizer(model: Any) -> Any:
    """Return the tiny tokenizer, which is set to return only inputs that the model accepts."""
    parameters = inspect.signature(model.forward).parameters
    two_kinds = "token_type_ids" in parameters and (getattr(model.config, "type_vocab_size", None) or 0) > 1
    names = ["input_ids", *(["token_type_ids"] if two_kinds else []), "attention_mask"]
    tiny = tiny_tokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.backend_tokenizer,
        model_input_names=[name for name in names if name == "input_ids" or name in parameters],
        model_max_length=POSITIONS // 2,
        **{**tiny.special_tokens_map, "eos_token": tiny.sep_token},
    )


def _whisper_tokenizer() -> Any:
    """Return a byte-level tokenizer with Whisper's special tokens for tasks, languages and timestamps."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = transformers.WhisperTokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    words = "startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps".split()
    tokenizer.add_tokens([AddedToken(f"<|{word}|>", special=True) for word in words])
    tokenizer.add_tokens([AddedToken(f"<|{0.02 * i:.2f}|>") for i in range(1501)])
    return tokenizer


def _say_words_of_whisper(generation: Any) -> None:
    number = _whisper_tokenizer().convert_tokens_to_ids
    generation.decoder_start_token_id = generation.bos_token_id = number("<|startoftranscript|>")
    generation.no_timestamps_token_id = number("<|notimestamps|>")
    generation.eos_token_id = generation.pad_token_id = number("<|endoftext|>")
    generation.begin_suppress_tokens, generation.is_multilingual = None, False


def _foreign() -> Path:
    """Return the folder that contains the unpacked model folders of Optimum."""
    folder = Path(os.environ[CACHE]) / "foreign"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tarfile.open(_FOREIGN) as archive:
                archive.extractall(folder.with_suffix(".part"), filter="data")
            folder.with_suffix(".part").rename(folder)
    return folder / "optimum"


def _optimums(folder: Path, *, source: str, files: Sequence[str]) -> None:
    """Copy files from the folders that Optimum wrote, and the config files of `source`. A file is given as `name` or as
    `name=new name`.
    """
    written = _foreign()
    folder.mkdir(parents=True)
    for path in (written / source).glob("*.json"):
        shutil.copy(path, folder)
    tiny_tokenizer().save_pretrained(folder)
    for file in files:
        name, _, new = file.partition("=")
        target = folder / (new or Path(name).name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(written / name, target)


def _below(make: Callable[[Path], None], subfolder: str, folder: Path) -> None:
    make(folder / subfolder)


def _exported(folder: Path, *, subfolder: str = "", weights: bool = False) -> None:
    """Export BERT to a graph without accel's metadata in the folder `subfolder`, with the config in the parent folder.
    The weights are optional.
    """
    import accel

    source = Path(local(f"{LOCAL}bert", "feature-extraction"))
    with tempfile.TemporaryDirectory() as out:
        accel.export(source, Path(out) / "own", task="feature-extraction")
        as_foreign(Path(out) / "own", Path(out) / "foreign")
        shutil.copytree(
            source, folder, ignore=shutil.ignore_patterns() if weights else shutil.ignore_patterns("*.safetensors")
        )
        (folder / subfolder).mkdir(exist_ok=True)
        for path in (Path(out) / "foreign").glob("*.onnx*"):
            shutil.copy(path, folder / subfolder)


def _graphs() -> dict[tuple[str, str | None], Callable[[Path], None]]:
    """Return functions that create the repositories with graphs, for each repository name and branch."""
    make = functools.partial
    bert = make(_optimums, source="bert-web")
    gpt2 = make(_optimums, source="gpt2-pair")
    t5 = make(_optimums, source="t5-past")
    small, plain = "optimum-internal-testing/tiny-random", "bert-web/onnx/model.onnx"
    first, following, merged = (
        f"gpt2-pair/decoder_{name}.onnx" for name in ("model", "with_past_model", "model_merged")
    )
    parts = [f"t5-past/{name}_model.onnx" for name in ("encoder", "decoder", "decoder_with_past")]
    optimized = ("gpt2-past/model.onnx", "gpt2-past/model.onnx=model_optimized.onnx")
    quantized = [
        f"t5-web/onnx/{name}_model_quantized.onnx={where}/{name}_model_quantized.onnx"
        for where in ("onnx", "subfolder")
        for name in ("encoder", "decoder", "decoder_with_past")
    ]
    return {
        ("fxmarty/onnx-tiny-random-gpt2-with-merge", None): make(gpt2, files=(merged,)),
        ("fxmarty/onnx-tiny-random-gpt2-without-merge", None): make(gpt2, files=(first, following)),
        ("fxmarty/tiny-bert-sst2-distilled-onnx-subfolder", None): make(_below, make(bert, files=(plain,)), "my_subfolder"),
        ("fxmarty/tiny-bert-sst2-distilled-subfolder", None): make(
            _below, make(_save_model, "bert", "text-classification", {}), "my_subfolder"
        ),
        ("optimum/distilbert-base-uncased-finetuned-sst-2-english", None): make(bert, files=(plain,)),
        ("optimum/sbert-all-MiniLM-L6-with-pooler", None): _exported,
        ("philschmid/distilbert-onnx", None): make(bert, files=(plain,)),
        ("sentence-transformers/all-MiniLM-L6-v2", None): make(_exported, subfolder="onnx"),
        ("sentence-transformers-testing/stsb-bert-tiny-onnx", None): make(_exported, subfolder="onnx", weights=True),
        (f"{small}-llama", "onnx"): make(gpt2, files=optimized),
        (f"{small}-llama", "merged-onnx"): make(
            gpt2,
            files=(
                optimized[1], first, following, "gpt2-past/model.onnx=subfolder/model.onnx",
                "gpt2-past/model.onnx=subfolder/model_optimized.onnx",
            ),
        ),
        (f"{small}-T5Model", None): make(t5, files=(*parts, "t5-past/decoder_model_merged.onnx")),
        (f"{small}-T5Model", "onnx-legacy"): make(t5, files=parts),
        (f"{small}-T5Model", "optimized"): make(t5, files=quantized),
    }  # fmt: skip


GRAPHS = _graphs()
