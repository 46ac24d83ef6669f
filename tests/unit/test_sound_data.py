"""Tests of audio from arrays, files and `datasets` columns, which all become the same waveform; and of the metrics of
audio tasks.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from scipy.io import wavfile

from accel.data.columns import map_columns
from accel.data.rows import load_rows
from accel.data.sound_rows import encode_sounds, wave_of
from accel.errors import InputError
from accel.measuring.accuracy.predictors import metric_for
from accel.tasks.audio_frame_classification import FramePredictor
from accel.tasks.audio_xvector import SpeakerSimilarityPredictor
from accel.tasks.ctc import TranscriptPredictor
from accel.tasks.text_ranking import RankingPredictor
from accel.testing.audio_models import RATE, tiny_sound

WAVE = tiny_sound(0.5)


@pytest.fixture(params=[True, False], ids=["soundfile", "scipy"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with both readers of audio files. The soundfile reader is tested only if soundfile is installed."""
    if request.param:
        pytest.importorskip("soundfile", reason="soundfile is not installed")
    else:
        monkeypatch.setitem(sys.modules, "soundfile", None)


def saved(path: Path, wave: Any, rate: int = RATE) -> Path:
    wavfile.write(path, rate, wave)
    return path


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("kind", "scale", "middle"), [("int16", 2**15, 0), ("int32", 2**31, 0), ("uint8", 2**7, 2**7)])
def test_integer_wav_files(kind: str, scale: float, middle: float, tmp_path: Path) -> None:
    peak = WAVE / (2 * np.abs(WAVE).max())
    path = saved(tmp_path / "one.wav", np.round(peak.astype(np.float64) * scale + middle).astype(kind))
    wave = wave_of(path, RATE)
    assert wave.dtype == np.float32
    np.testing.assert_allclose(wave, peak, atol=1.01 / scale)


@pytest.mark.usefixtures("reader")
def test_every_kind_of_audio_gives_the_same_waveform(tmp_path: Path) -> None:
    path = saved(tmp_path / "one.wav", WAVE)
    forms: list[Any] = [
        path,
        str(path),
        {"path": str(path)},
        {"path": None, "bytes": path.read_bytes()},
        {"array": WAVE, "sampling_rate": RATE},
        {"array": WAVE.tolist(), "sampling_rate": RATE},
        WAVE.tolist(),
        WAVE,
    ]
    for form in forms:
        np.testing.assert_array_equal(wave_of(form, RATE), WAVE)


def test_channels_are_averaged(tmp_path: Path) -> None:
    both = np.stack([WAVE, 0.5 * WAVE], axis=1)
    path = saved(tmp_path / "stereo.wav", both)
    np.testing.assert_allclose(wave_of(path, RATE), 0.75 * WAVE, atol=1e-6)
    np.testing.assert_allclose(wave_of({"array": both.T, "sampling_rate": RATE}, RATE), 0.75 * WAVE, atol=1e-6)


def test_resampling_keeps_pitch_and_duration() -> None:
    """Resampling keeps the pitch of a tone and its duration in seconds."""
    tone = np.sin(2 * np.pi * 50 * np.arange(2000) / 2000).astype(np.float32)
    wave = wave_of({"array": tone, "sampling_rate": 2000}, RATE)
    expected = np.sin(2 * np.pi * 50 * np.arange(1000) / 1000)
    # Skip both ends of the audio, where the resampling filter oscillates.
    np.testing.assert_allclose(wave[50:-50], expected[50:-50], atol=0.01)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere.wav", "audio file .* does not exist"),
        (None, "NoneType cannot be read as audio"),
        ({"array": [0.0, float("nan")], "sampling_rate": RATE}, "NaN or infinite"),
        ({"array": [], "sampling_rate": RATE}, "empty"),
        ({"path": None, "bytes": b"RIFF and no more"}, "cannot be read"),
    ],
)
def test_invalid_audio_raises(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wave_of(value, RATE)


class Extractor:
    """Minimal feature extractor, which has a sampling rate and returns its waveforms unchanged."""

    sampling_rate = RATE

    def __call__(self, waves: list[Any], **_: Any) -> dict[str, Any]:
        return {"input_values": np.stack(waves)}


def test_audio_features_of_datasets_need_no_torchcodec(tmp_path: Path) -> None:
    paths = [str(saved(tmp_path / f"{i}.wav", tiny_sound(0.2 + 0.1 * (i % 2), i))) for i in range(4)]
    data = datasets.Dataset.from_dict({"clip": paths, "intent": [0, 1, 0, 1]}).cast_column("clip", datasets.Audio())
    rows = map_columns(load_rows(data), "audio-classification")
    assert rows.sample.columns == {"label": "intent", "audio": "clip"}
    encoded = encode_sounds(rows, Extractor(), None)
    # A batch contains only audio of equal length. The extractor returns no mask, so a model would process padding as
    # audio.
    assert encoded.plan(8) == [[0, 2], [1, 3]]
    waves: Any = encoded.batch([1, 3])["input_values"]
    np.testing.assert_array_equal(waves, [tiny_sound(0.3, 1), tiny_sound(0.3, 3)])


def test_audio_columns_are_recognized() -> None:
    row = {"audio": {"array": WAVE.tolist(), "sampling_rate": RATE}, "transcription": "a b", "id": 3}
    assert map_columns(load_rows([row]), "ctc").sample.columns == {"text": "transcription", "audio": "audio"}
    pair = {"audio1": WAVE.tolist(), "audio2": WAVE.tolist(), "label": 1}
    mapping = map_columns(load_rows([pair]), "audio-xvector").sample.columns
    assert mapping == {"label": "label", "audio": "audio1", "audio_pair": "audio2"}
    with pytest.raises(InputError, match="is the 'audio' column"):
        map_columns(load_rows([{"number": 3, "label": 0}]), "audio-classification")


def test_wav_without_samples_is_refused() -> None:
    file = io.BytesIO()
    wavfile.write(file, RATE, np.zeros(0, np.float32))
    with pytest.raises(InputError):
        wave_of({"bytes": file.getvalue(), "path": None}, RATE)


# The tests below check metrics.


@pytest.mark.parametrize(
    ("predicted", "true", "wer", "cer"),
    [
        (["the cat sat"], ["the cat sat"], 0.0, 0.0),
        (["the bat sat"], ["the cat sat"], 1 / 3, 1 / 11),
        (["cat sat down"], ["the cat sat"], 2 / 3, None),
        (["", "a b c d"], ["a b", "a b"], 4 / 4, None),
        (["a a a"], ["a"], 2.0, 4.0),
    ],
)
def test_error_rates(predicted: list[str], true: list[str], wer: float, cer: float | None) -> None:
    """The error rates equal values computed by hand: the number of edits divided by the length of the reference."""
    assert metric_for(None, TranscriptPredictor).compute(predicted, true)["wer"] == pytest.approx(wer)
    if cer is not None:
        assert metric_for("cer", TranscriptPredictor).compute(predicted, true)["cer"] == pytest.approx(cer)


def test_equal_error_rate() -> None:
    eer = metric_for(None, SpeakerSimilarityPredictor)
    assert eer.compute([0.9, 0.8, 0.2, 0.1], [1, 1, 0, 0])["eer"] == pytest.approx(0.0)
    # At any threshold between 0.4 and 0.6, one of the four positive pairs and one of the four negative pairs are
    # misclassified.
    scores = [0.9, 0.8, 0.7, 0.4, 0.6, 0.3, 0.2, 0.1]
    assert eer.compute(scores, [1, 1, 1, 1, 0, 0, 0, 0])["eer"] == pytest.approx(0.25)
    assert eer.compute([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0])["eer"] == pytest.approx(1.0)
    assert np.isnan(eer.compute([0.1, 0.2], [1, 1])["eer"])


def test_frame_accuracy_ignores_unlabelled_frames() -> None:
    rates = metric_for(None, FramePredictor).compute([[0, 1, 2], [1]], [[0, 2, -100], [1]])
    assert rates["accuracy"] == pytest.approx(2 / 3)


def test_ranking_metrics() -> None:
    """nDCG equals scikit-learn's value, and the two other metrics equal values computed by hand."""
    from sklearn.metrics import ndcg_score

    rows = [([0.9, 0.1, 0.5, 0.3], [0.0, 1.0, 1.0, 0.0]), ([0.2, 0.8], [0.0, 1.0])]
    scores = metric_for(None, RankingPredictor).compute([row[0] for row in rows], [row[1] for row in rows])
    expected = np.mean([ndcg_score([true], [predicted], k=10) for predicted, true in rows])
    assert scores["ndcg@10"] == pytest.approx(expected)
    assert scores["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert scores["map"] == pytest.approx(((1 / 2 + 2 / 4) / 2 + 1) / 2)


@pytest.mark.parametrize("name", ["ndcg@10", "mrr@10", "map"])
def test_equal_scores_give_a_low_ranking_metric(name: str) -> None:
    metric = metric_for(name, RankingPredictor)
    assert (
        metric.compute([[0.5] * 3], [[1.0, 0.0, 0.0]])[name]
        < metric.compute([[0.5, 0.1, 0.1]], [[1.0, 0.0, 0.0]])[name]
    )
