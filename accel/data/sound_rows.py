"""Read columns of sounds: arrays with a sampling rate, audio columns of `datasets`, or paths of audio files."""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .encoded_rows import EncodedRows, LazyColumn
from .rows import DatasetRows

Wave = npt.NDArray[np.float32]


def encode_sounds(rows: DatasetRows, processor: Any, max_length: int | None) -> EncodedRows:  # noqa: ARG001
    """Encode the sounds of the rows. For pairs, all sounds of the first column come before those of the second column."""
    import datasets

    extractor = getattr(processor, "feature_extractor", processor)
    rate, uses = int(extractor.sampling_rate), [use for use in ("audio", "audio_pair") if rows.has(use)]
    columns = []
    for use in uses:
        name, dataset = rows.name_of(use), rows.dataset
        if isinstance(dataset.features[name], datasets.Audio):
            # Read the raw bytes and decode them here: `datasets` needs torchcodec for decoding.
            dataset = dataset.cast_column(name, datasets.Audio(decode=False))
        columns.append(dataset[name])
    waves = LazyColumn(columns, lambda value, row, column: _wave_of_row(value, f"Row {row} ({uses[column]})", rate))
    return EncodedRows(
        media=(waves, functools.partial(extractor, sampling_rate=extractor.sampling_rate)),
        lengths=[len(wave) for wave in waves],
    )


def _wave_of_row(value: Any, place: str, rate: int) -> Wave:
    try:
        return wave_of(value, rate)
    except InputError as error:
        raise InputError(f"{place}: {error.message}", fix=error.fix) from error


def wave_of(value: Any, rate: int) -> Wave:
    """Return a sound as one channel, resampled to `rate`: `(samples,) float32`, amplitude from -1 to 1.

    Args:
        value: `{"array": ..., "sampling_rate": ...}`, `{"bytes": ...}` or `{"path": ...}` as in `datasets`; or a path; or samples
            that already have the rate `rate`.
        rate: Sampling rate of the result in samples per second.

    Raises:
        InputError: The value has another form, cannot be read, is empty or is not finite.
    """
    own_rate = rate
    if isinstance(value, str | Path):
        samples, own_rate = _read(Path(value))
    elif isinstance(value, Mapping) and value.get("array") is not None:
        samples, own_rate = np.asarray(value["array"]), int(value.get("sampling_rate") or rate)
    elif isinstance(value, Mapping) and value.get("bytes") is not None:
        samples, own_rate = _decoded(io.BytesIO(value["bytes"]), str(value.get("path") or "a sound in memory"))
    elif isinstance(value, Mapping) and value.get("path"):
        samples, own_rate = _read(Path(value["path"]))
    elif isinstance(value, Sequence | np.ndarray) and len(value) and np.ndim(value) <= 2:
        samples = np.asarray(value)
    else:
        raise InputError(
            f"A value of type {type(value).__name__} cannot be read as audio.",
            fix="pass {'array': samples, 'sampling_rate': rate}, the path of an audio file, or samples at the model's sampling rate.",
        )
    samples = _one_channel(np.asarray(samples, np.float32))
    if samples.size == 0 or not np.isfinite(samples).all():
        raise InputError(
            "The audio is empty or contains NaN or infinite samples.", fix="remove the row, or repair its audio."
        )
    if own_rate != rate:
        from scipy.signal import resample_poly

        shared = math.gcd(own_rate, rate)
        samples = np.asarray(resample_poly(samples, rate // shared, own_rate // shared), np.float32)
    return samples


def _one_channel(samples: Wave) -> Wave:
    """Return the mean over the channels of a sound.

    The shorter axis is the channel axis, because files give `(samples, channels)` and some decoders give `(channels, samples)`.
    """
    if samples.ndim < 2:
        return samples
    return np.asarray(samples.mean(axis=int(np.argmin(samples.shape))), np.float32)


def _read(path: Path) -> tuple[npt.NDArray[Any], int]:
    if not path.is_file():
        raise InputError(
            f"The audio file {str(path)!r} does not exist.",
            fix="use a path that is absolute or relative to the current folder.",
        )
    return _decoded(path, path.name)


def _decoded(file: Any, name: str) -> tuple[npt.NDArray[Any], int]:
    """Return the samples and the sampling rate of a sound file. Without soundfile installed, only WAV is supported.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        import soundfile
    except ImportError:
        return _wav(file, name)
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (soundfile.LibsndfileError, OSError, TypeError) as error:
        raise InputError(
            f"The audio file {name} cannot be read: {error}", fix="convert the file to WAV or FLAC."
        ) from error
    return samples, int(rate)


def _wav(file: Any, name: str) -> tuple[npt.NDArray[Any], int]:
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            # Ignore warnings about WAV chunks without samples, such as titles.
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(file)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(
            f"The audio file {name} cannot be read as WAV: {error}",
            fix="convert the file to WAV, or run `pip install soundfile` to read FLAC, OGG and MP3.",
        ) from error
    if samples.dtype.kind == "u":
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / float(np.iinfo(samples.dtype).max + 1)
    return samples, int(rate)
