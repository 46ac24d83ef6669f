"""Tests of audio models: pipelines, padded batches, data, metrics and stages give the same results as PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import InputError, TaskError, ValidationError
from accel.interfaces.task_registry import fitting_task, infer_task, specs_for
from accel.models.inputs import InputConverter
from accel.testing.audio_models import CLAP, RATE, VITS, save_vits, tiny_sound

BACKENDS = ["cpu", "openvino", "pytorch"]
# An export takes seconds, so most tests run with the `cpu` and `openvino` backends only if thorough tests are selected.
SOME = [*(pytest.param(backend, marks=pytest.mark.thorough) for backend in ("cpu", "openvino")), "pytorch"]
AUTO = {
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
    "audio-frame-classification": "AutoModelForAudioFrameClassification",
    "audio-xvector": "AutoModelForAudioXVector",
}
SOUNDS = [tiny_sound(seconds, seed) for seed, seconds in enumerate((1.0, 0.613, 1.377))]


@pytest.fixture(scope="session")
def source(tiny_folder: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that returns transformers folders of tiny audio models."""
    return tiny_folder


@pytest.fixture(scope="session")
def artifact(
    tiny_artifact: Callable[..., Artifact], tiny_ir: Callable[..., Artifact], source: Any
) -> Callable[..., Any]:
    """Return a function that returns exports of tiny audio models. The `pytorch` backend uses the transformers folders
    directly.
    """

    def get(family: str, task: str, backend: str = "cpu") -> Any:
        return {"cpu": tiny_artifact, "openvino": tiny_ir, "pytorch": source}[backend](family, task)

    return get


def path_of(source: Any) -> Path:
    return Path(getattr(source, "path", source))


def original(folder: Path, task: str) -> Any:
    return getattr(transformers, AUTO[task]).from_pretrained(folder).eval()


def padded(folder: Path) -> dict[str, torch.Tensor]:
    """Return a padded batch of audio of different lengths, with its attention mask."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    return dict(extractor(SOUNDS, sampling_rate=RATE, padding=True, return_attention_mask=True, return_tensors="pt"))


def largest(outputs: Any, expected: Any, names: tuple[str, ...]) -> float:
    return max(float((outputs[name] - expected[name]).abs().max()) for name in names)


THOROUGH = {"marks": pytest.mark.thorough}
CASES = [
    *(("wav2vec2", "ctc", ("logits",), backend) for backend in BACKENDS if backend != "openvino"),
    pytest.param("wav2vec2", "ctc", ("logits",), "openvino", **THOROUGH),
    ("wav2vec2-layer", "audio-classification", ("logits",), "pytorch"),
    pytest.param("wav2vec2-layer", "audio-classification", ("logits",), "cpu", **THOROUGH),
    pytest.param("wav2vec2-layer", "audio-classification", ("logits",), "openvino", **THOROUGH),
    *(pytest.param("wavlm", "audio-xvector", ("logits", "embeddings"), backend, **THOROUGH) for backend in BACKENDS),
    *(pytest.param("hubert", "ctc", ("logits",), backend, **THOROUGH) for backend in BACKENDS),
    *(pytest.param("wav2vec2", "audio-frame-classification", ("logits",), backend, **THOROUGH) for backend in BACKENDS),
]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # transformers' WavLM causes this warning
@pytest.mark.parametrize(("family", "task", "names", "backend"), CASES)
def test_padded_batches_with_and_without_mask(
    family: str, task: str, names: tuple[str, ...], backend: str,
    source: Callable[..., Path], artifact: Callable[..., Artifact],
) -> None:  # fmt: skip
    inputs = padded(source(family, task))
    theirs = original(source(family, task), task)
    with (
        accel.ORTModel.from_pretrained(path_of(artifact(family, task, backend)), backend=backend) as ours,
        torch.inference_mode(),
    ):
        # The exported graph adds float32 numbers in a different order, which changes logits by about 1e-6. A missing
        # mask would change them by at least 0.1.
        assert largest(ours(**inputs), theirs(**inputs), names) < 1e-4
        # The feature extractors of models with group normalization return no mask, so calls without a mask must also
        # work.
        del inputs["attention_mask"]
        assert largest(ours(**inputs), theirs(**inputs), names) < 1e-4


# The tests below check pipelines.


@pytest.mark.parametrize("backend", ["cpu", pytest.param("openvino", marks=pytest.mark.thorough), "pytorch"])
def test_speech_recognition(backend: str, source: Callable[..., Path], artifact: Callable[..., Artifact]) -> None:
    folder = source("wav2vec2", "ctc")
    preprocessors: dict[str, Any] = {
        "feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    word = "automatic-speech-recognition"
    theirs = transformers.pipeline(word, model=original(folder, "ctc"), **preprocessors)
    model = accel.ORTModelForCTC.from_pretrained(path_of(artifact("wav2vec2", "ctc", backend)), backend=backend)
    ours = [transformers.pipeline(word, model=model, **preprocessors), accel.pipeline(word, model=model)]
    calls: list[Callable[[Any], Any]] = [
        lambda pipe: pipe(SOUNDS[0]),
        lambda pipe: pipe([{"array": sound, "sampling_rate": RATE} for sound in SOUNDS]),
        lambda pipe: pipe(SOUNDS[2], chunk_length_s=0.4, stride_length_s=0.1, return_timestamps="char"),
    ]
    for call in calls:
        expected = call(theirs)
        assert "" not in [result["text"] for result in (expected if isinstance(expected, list) else [expected])]
        for pipe in ours:
            assert call(pipe) == expected


@pytest.mark.parametrize("backend", SOME)
def test_audio_classification(backend: str, source: Callable[..., Path], artifact: Callable[..., Artifact]) -> None:
    task = "audio-classification"
    folder = source("wav2vec2-layer", task)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    theirs = transformers.pipeline(task, model=original(folder, task), feature_extractor=extractor)
    ours = accel.pipeline(task, model=path_of(artifact("wav2vec2-layer", task, backend)), backend=backend)
    for results, expected in zip(ours(SOUNDS), theirs(SOUNDS), strict=True):
        assert [result["label"] for result in results] == [result["label"] for result in expected]
        np.testing.assert_allclose(
            [result["score"] for result in results], [result["score"] for result in expected], atol=1e-4
        )


# The tests below check which audio task a model has: CTC models and encoder-decoders share one pipeline.


def test_speech_pipeline_supports_two_tasks(source: Callable[..., Path], artifact: Callable[..., Artifact]) -> None:
    word = "automatic-speech-recognition"
    assert [spec.name for spec in specs_for(word)] == [word, "ctc"]
    assert fitting_task(word, {"architectures": ["Wav2Vec2ForCTC"]}) == "ctc"
    assert fitting_task(word, {"architectures": ["WhisperForConditionalGeneration"]}) == word
    # These tasks share their architectures with another task, and add pooling or a score. Therefore the name that the
    # caller requests decides.
    for task in ("sentence-similarity", "text-ranking", "feature-extraction"):
        assert fitting_task(task, {"architectures": ["BertModel"]}) == task
    exported = artifact("wav2vec2", "ctc")
    assert type(accel.ORTModel.from_pretrained(exported.path, task=word)) is accel.ORTModelForCTC
    with pytest.raises(TaskError, match="ORTModelForCTC"):
        accel.ORTModelForSpeechSeq2Seq.from_pretrained(exported.path)
    with pytest.raises(TaskError, match="AutoModelForSpeechSeq2Seq of transformers has no class for wav2vec2"):
        accel.ORTModelForSpeechSeq2Seq.from_pretrained(source("wav2vec2", "ctc"))


@pytest.mark.parametrize("task", sorted(AUTO))
def test_task_is_inferred_from_the_architecture(task: str) -> None:
    table = getattr(transformers, AUTO[task])._model_mapping._model_mapping
    assert {name: infer_task({"architectures": [name]}) for name in table.values()} == dict.fromkeys(
        table.values(), task
    )


# The tests below check data and metrics.


@pytest.fixture(scope="module")
def spoken(source: Callable[..., Path]) -> list[dict[str, Any]]:
    """Return audio rows whose text is PyTorch's transcription. The last text has two additional words."""
    folder = source("wav2vec2", "ctc")
    preprocessors: dict[str, Any] = {
        "feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    hear = transformers.pipeline("automatic-speech-recognition", model=original(folder, "ctc"), **preprocessors)
    rows = [{"audio": {"array": sound, "sampling_rate": RATE}, "text": hear(sound.copy())["text"]} for sound in SOUNDS]
    rows[-1]["text"] += " and more"
    return rows


@pytest.mark.parametrize("backend", ["cpu", "pytorch"])
def test_word_error_rate(backend: str, spoken: list[dict[str, Any]], artifact: Callable[..., Artifact]) -> None:
    report = accel.evaluate(path_of(artifact("wav2vec2", "ctc", backend)), spoken, backend=backend)
    words = sum(len(row["text"].split()) for row in spoken)
    assert report.metric == "wer"
    assert report.value == pytest.approx(2 / words)
    assert report.scores["edits"] == 2


def test_calibration_with_audio_rows(
    spoken: list[dict[str, Any]], artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    quantized = accel.quantize(artifact("wav2vec2", "ctc"), tmp_path / "int8", scheme="static-int8", calibration=spoken)
    assert quantized.manifest.quantization is not None
    assert quantized.manifest.quantization.calibration["columns"] == {"audio": "audio"}
    inputs = {"input_values": torch.from_numpy(SOUNDS[0][None])}
    plain = accel.ORTModelForCTC(artifact("wav2vec2", "ctc"))(**inputs).logits
    logits = accel.ORTModelForCTC(quantized)(**inputs).logits
    # Quantization to 8 bits changes the logits by less than a tenth of the largest value.
    assert 0 < float((logits - plain).abs().max()) < 0.1 * float(plain.abs().max())


@pytest.mark.thorough
def test_speaker_verification_error_rate(artifact: Callable[..., Artifact]) -> None:
    """The model assigns audio with added noise to the same speaker, and different audio to another speaker."""
    draw = np.random.default_rng(0)
    noisy = [sound + 0.01 * draw.standard_normal(len(sound)).astype(np.float32) for sound in SOUNDS]
    pairs = [(sound, other, 1) for sound, other in zip(SOUNDS, noisy, strict=True)]
    pairs += [(sound, other, 0) for sound, other in zip(SOUNDS, reversed(SOUNDS), strict=True) if sound is not other]
    rows = [{"audio1": list(map(float, a)), "audio2": list(map(float, b)), "same": label} for a, b, label in pairs]
    report = accel.evaluate(artifact("wavlm", "audio-xvector").path, rows)
    assert (report.metric, report.value) == ("eer", 0.0)


def test_mask_for_a_graph_without_mask_input() -> None:
    """The graphs of other tools for models with group normalization have no mask input. A mask of ones is ignored, and
    a mask with zeros raises an error.
    """
    inputs = InputConverter(frozenset({"input_values"}), frozenset(), frozenset(), None)
    arrays = {"input_values": torch.zeros(2, 100), "attention_mask": torch.ones(2, 100, dtype=torch.int64)}
    assert set(inputs.read(arrays)[0]) == {"input_values"}
    arrays["attention_mask"][1, 50:] = 0
    with pytest.raises(InputError, match="no input 'attention_mask'"):
        inputs.read(arrays)


def test_invalid_audio_inputs_are_refused(artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForCTC(artifact("wav2vec2", "ctc"))
    with pytest.raises(InputError):
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    rows: list[Mapping[str, Any]] = [{"audio": "nowhere.wav", "text": "a"}]
    with pytest.raises(InputError, match="audio file .* does not exist"):
        accel.evaluate(model, copy.deepcopy(rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_short_audio_is_refused(backend: str, artifact: Callable[..., Artifact]) -> None:
    model: Any = accel.ORTModelForCTC.from_pretrained(path_of(artifact("wav2vec2", "ctc", backend)), backend=backend)
    with pytest.raises(InputError, match="the model needs at least") as error:
        model(torch.zeros(1, model._least - 1))
    assert error.value.fix
    assert model(torch.zeros(1, model._least)).logits.shape[:2] == (1, 1)


CLAP_TASK = "zero-shot-audio-classification"


@pytest.mark.parametrize(
    "backend", ["pytorch", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("cpu", "openvino"))]
)
def test_zero_shot_audio_in_transformers_pipeline(backend: str, artifact: Any, source: Callable[..., Path]) -> None:
    folder = source(CLAP, CLAP_TASK)
    ours = accel.ORTModelForZeroShotAudioClassification.from_pretrained(
        artifact(CLAP, CLAP_TASK, backend), backend=backend, task=CLAP_TASK
    )
    preprocessors = {
        "feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    reference = transformers.pipeline(
        CLAP_TASK, model=transformers.ClapModel.from_pretrained(folder).eval(), **preprocessors
    )
    names = ["my card", "a bank in london", "cash"]
    for stock in (transformers.pipeline(CLAP_TASK, model=ours, **preprocessors), accel.pipeline(CLAP_TASK, model=ours)):
        for sound in SOUNDS:
            expected, results = (pipe(sound, candidate_labels=names) for pipe in (reference, stock))
            assert len({round(result["score"], 3) for result in expected}) > 1
            assert [result["label"] for result in results] == [result["label"] for result in expected]
            assert max(abs(a["score"] - b["score"]) for a, b in zip(results, expected, strict=True)) <= 1e-3


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("cpu", marks=pytest.mark.thorough)])
def test_zero_shot_audio_is_measured_by_label_names(
    backend: str, artifact: Any, source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = source(CLAP, CLAP_TASK)
    hear = accel.pipeline(CLAP_TASK, model=folder, backend="pytorch")
    names = ["cash", "my card", "london"]
    rows = [{"audio": {"array": sound, "sampling_rate": RATE}} for sound in SOUNDS]
    for row in rows:
        row["label"] = hear(row["audio"]["array"], candidate_labels=names)[0]["label"]
    # The candidate labels are all label names in the data.
    rows += [{**rows[0], "label": name} for name in names]
    right = sum(row["label"] == rows[i if i < 3 else 0]["label"] for i, row in enumerate(rows)) / len(rows)
    exported = artifact(CLAP, CLAP_TASK, backend)
    report = accel.evaluate(path_of(exported), rows, backend=backend)
    assert (report.metric, report.value) == ("accuracy", pytest.approx(right))
    if backend == "pytorch":
        return
    calibration = [{**row, "text": name} for row, name in zip(rows, [*names, *names], strict=True)]
    small = accel.quantize(exported, tmp_path / "int8", scheme="static-int8", calibration=calibration)
    assert accel.evaluate(small.path, rows).value is not None


def test_clap_with_feature_fusion_is_refused() -> None:
    from accel.capture.sound_text_samples import sound_text_sample
    from accel.errors import ExportError

    model: Any = torch.nn.Module()
    model.config = transformers.ClapConfig(audio_config={"enable_fusion": True})
    with pytest.raises(ExportError, match="enable_fusion=true"):
        sound_text_sample(model, None)


SPEECH = "text-to-audio"


@pytest.mark.parametrize("backend", SOME)
def test_speech_synthesis_in_transformers_pipeline(backend: str, artifact: Any, source: Callable[..., Path]) -> None:
    """With the same seed, the generated audio is equal, because accel draws the noise in the same way as PyTorch."""
    folder = source(VITS, SPEECH)
    # Use an ONNX artifact with OpenVINO. OpenVINO's own converter gives a graph that is wrong for other text lengths
    # than the length of the trace, and the export rejects this graph.
    exported = artifact(VITS, SPEECH, "pytorch" if backend == "pytorch" else "cpu")
    ours = accel.ORTModelForTextToWaveform.from_pretrained(exported, backend=backend)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.VitsModel.from_pretrained(folder).eval()
    reference = transformers.pipeline(SPEECH, model=theirs, tokenizer=tokenizer)
    for stock in (transformers.pipeline(SPEECH, model=ours, tokenizer=tokenizer), accel.pipeline(SPEECH, model=ours)):
        for text in ("where is my card", "please help"):
            sounds = []
            for pipe in (reference, stock, stock):
                torch.manual_seed(7)
                sounds.append(pipe(text))
            expected, speech, again = sounds
            assert speech["sampling_rate"] == expected["sampling_rate"] == RATE
            assert speech["audio"].shape == expected["audio"].shape
            assert np.abs(speech["audio"] - expected["audio"]).max() <= 1e-3
            assert np.array_equal(speech["audio"], again["audio"])
            torch.manual_seed(8)
            other = stock(text)["audio"]
            assert other.shape != again["audio"].shape or np.abs(other - again["audio"]).max() > 1e-3


@pytest.mark.parametrize("backend", SOME)
def test_speech_of_padded_texts(backend: str, artifact: Any, source: Callable[..., Path]) -> None:
    folder = source(VITS, SPEECH)
    exported = artifact(VITS, SPEECH, "pytorch" if backend == "pytorch" else "cpu")
    model = accel.ORTModelForTextToWaveform.from_pretrained(exported, backend=backend)
    theirs = transformers.VitsModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["where is my card", "please"], padding=True, return_tensors="pt")
    outputs = []
    for variant in (theirs, model):
        torch.manual_seed(3)
        with torch.inference_mode():
            outputs.append(variant(**inputs, speaking_rate=0.5))
    assert torch.equal(outputs[0].sequence_lengths, outputs[1].sequence_lengths)
    assert outputs[1].sequence_lengths[0] > outputs[1].sequence_lengths[1]
    assert outputs[0].waveform.shape == outputs[1].waveform.shape
    assert outputs[0].spectrogram.shape == outputs[1].spectrogram.shape
    with pytest.raises(InputError, match="speaking_rate is 0"):
        model(**inputs, speaking_rate=0)
    with pytest.raises(InputError, match="shape"):
        model(input_ids=inputs["input_ids"][0])


@pytest.mark.parametrize("backend", SOME)
def test_speech_of_a_text_does_not_depend_on_longer_texts(
    backend: str, artifact: Any, source: Callable[..., Path]
) -> None:
    """Noise is disabled, because the noise for a text in a batch differs from the noise for the text alone. The end of
    the audio in PyTorch's own batches also differs.
    """
    folder = source(VITS, SPEECH)
    exported = artifact(VITS, SPEECH, "pytorch" if backend == "pytorch" else "cpu")
    model = accel.ORTModelForTextToWaveform.from_pretrained(exported, backend=backend)
    theirs = transformers.VitsModel.from_pretrained(folder).eval()
    for variant in (model, theirs):
        variant.noise_scale = variant.noise_scale_duration = 0.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["where is my card", "please", "please", "my card"]
    together = model(**tokenizer(texts, padding=True, return_tensors="pt"))
    for i, text in enumerate(texts):
        with torch.inference_mode():
            expected = theirs(**tokenizer(text, return_tensors="pt"))
        samples, frames = expected.waveform.shape[-1], expected.spectrogram.shape[-1]
        assert int(together.sequence_lengths[i]) == samples
        assert (
            together.waveform[i, :samples] - expected.waveform[0]
        ).abs().max() <= 1e-3 * expected.waveform.abs().max()
        spectrogram = together.spectrogram[i]
        spectrogram = (
            spectrogram[:, :frames] if spectrogram.shape[0] == expected.spectrogram.shape[1] else spectrogram[:frames]
        )
        assert (spectrogram - expected.spectrogram[0]).abs().max() <= 1e-3
        assert not together.waveform[i, samples:].any()


@pytest.mark.thorough
def test_speech_of_several_speakers(tmp_path: Path) -> None:
    folder = save_vits(tmp_path / "model", speakers=3)
    model = accel.ORTModelForTextToWaveform(accel.export(folder, tmp_path / "graph"))
    theirs = transformers.VitsModel.from_pretrained(folder).eval()
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("my card", return_tensors="pt")
    sounds = []
    for voice in (0, 2):
        pair = []
        for variant in (theirs, model):
            torch.manual_seed(3)
            with torch.inference_mode():
                pair.append(variant(**inputs, speaker_id=voice).waveform)
        assert (pair[0] - pair[1]).abs().max() <= 1e-3
        sounds.append(pair[1])
    assert sounds[0].shape != sounds[1].shape or not torch.equal(*sounds)
    for wrong in (None, 3, -1):
        with pytest.raises(InputError, match="voices"):
            model(**inputs, speaker_id=wrong)


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.thorough
def test_optimized_and_quantized_speech_synthesis(
    backend: str, artifact: Any, source: Callable[..., Path], tmp_path: Path
) -> None:
    graphs = artifact(VITS, SPEECH)
    inputs = transformers.AutoTokenizer.from_pretrained(source(VITS, SPEECH))("my card", return_tensors="pt")
    optimized = accel.optimize(graphs, tmp_path / "optimized", backend=backend)
    scheme = {"cpu": "dynamic-int8", "openvino": "weight-int8"}[backend]
    small = accel.quantize(graphs, tmp_path / "small", backend=backend, scheme=scheme)
    sounds = []
    for variant in (graphs, optimized, small):
        torch.manual_seed(3)
        sounds.append(accel.ORTModelForTextToWaveform(variant)(**inputs).waveform)
    assert (sounds[1] - sounds[0]).abs().max() <= 1e-3
    # With 8 bits, each token may be one frame longer. Measured with OpenVINO 2026.3: 12 of 44 frames for 15 tokens.
    assert abs(sounds[2].shape[1] - sounds[0].shape[1]) <= 0.3 * sounds[0].shape[1]
    assert sounds[2].isfinite().all()


@pytest.mark.thorough
def test_wrong_converted_graph_is_refused(source: Callable[..., Path], tmp_path: Path) -> None:
    """OpenVINO's converter creates a graph of VITS that is wrong for other text lengths than the length of the trace.
    The export raises an error that recommends ONNX.
    """
    with pytest.raises(ValidationError, match="export to ONNX"):
        accel.export(source(VITS, SPEECH), tmp_path / "graph", backend="openvino")
    assert not (tmp_path / "graph").exists()
