"""Columns of sounds as model inputs: arrays with their rate, `datasets`' audio, or files, read when their batch is made."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .batches import Encoded
from .rows import Rows

if TYPE_CHECKING:
    import torch

Wave = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sounds(Encoded):
    """Rows of sounds. Those of unequal length share no batch: padding changes the answers of models whose feature extractor gives
    no mask, and puts letters behind the end of a transcript.

    Attributes:
        waves: What makes the samples of row `i`; a wave is `(samples,) float32` at the extractor's rate.
        extractor: What turns waves into inputs.
    """

    waves: _Waves | None = None
    extractor: Any = None
    lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.waves or ())

    def plan(self, batch_size: int, *, by_length: bool = True) -> list[list[int]]:
        """Row numbers batch by batch: equal lengths together in any case, shortest first."""
        assert self.waves is not None
        if not self.lengths:
            self.lengths.extend(len(self.waves[i]) for i in range(len(self.waves)))
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        return [
            same[i : i + batch_size]
            for _, group in itertools.groupby(order, key=self.lengths.__getitem__)
            for same in [list(group)]
            for i in range(0, len(same), batch_size)
        ]

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """The inputs of some rows: `input_values: (rows, samples)` or `input_features: (rows, frames, bins)`, and their mask."""
        assert self.waves is not None
        waves = [self.waves[i] for i in rows]
        made = self.extractor(waves, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        return dict(made)


def encode_sounds(rows: Rows, processor: Any, max_length: int | None) -> Encoded:  # noqa: ARG001
    """Sounds, which are read when their batch is made; of pairs, the first ones before the second ones."""
    extractor = getattr(processor, "feature_extractor", processor)
    uses = [use for use in ("audio", "audio_pair") if rows.has(use)]
    return Sounds(waves=_Waves(rows, uses, int(extractor.sampling_rate)), extractor=extractor)


class _Waves(Sequence[Wave]):
    """Columns of sounds, one behind the other, each read when it is asked for."""

    def __init__(self, rows: Rows, uses: Sequence[str], rate: int) -> None:
        import datasets

        assert rows.sample.columns is not None
        self._count, self._rate, self._columns = len(rows), rate, []
        for use in uses:
            name, dataset = rows.sample.columns[use], rows.dataset
            if isinstance(dataset.features[name], datasets.Audio):
                # Decoded here: `datasets` needs torchcodec for it.
                dataset = dataset.cast_column(name, datasets.Audio(decode=False))
            self._columns.append((use, dataset[name]))

    def __len__(self) -> int:
        return self._count * len(self._columns)

    def __getitem__(self, index: Any) -> Any:
        use, column = self._columns[index // self._count]
        row = index % self._count
        try:
            return wave_of(column[row], self._rate)
        except InputError as error:
            raise InputError(f"Row {row} ({use}): {error.message}", fix=error.fix) from error


def wave_of(value: Any, rate: int) -> Wave:
    """A sound at a rate, as one channel: `(samples,) float32`, full scale from -1 to 1.

    Args:
        value: `{"array": ..., "sampling_rate": ...}`, `{"bytes": ...}` or `{"path": ...}` as `datasets` has them, a path, or samples
            that are at this rate already.
        rate: Samples a second that are wanted.

    Raises:
        InputError: It is none of these, cannot be read, is empty or is not finite.
    """
    found = rate
    if isinstance(value, str | Path):
        samples, found = _read(Path(value))
    elif isinstance(value, Mapping) and value.get("array") is not None:
        samples, found = np.asarray(value["array"]), int(value.get("sampling_rate") or rate)
    elif isinstance(value, Mapping) and value.get("bytes") is not None:
        samples, found = _decoded(io.BytesIO(value["bytes"]), str(value.get("path") or "a sound in memory"))
    elif isinstance(value, Mapping) and value.get("path"):
        samples, found = _read(Path(value["path"]))
    elif isinstance(value, Sequence | np.ndarray) and len(value) and np.ndim(value) <= 2:
        samples = np.asarray(value)
    else:
        raise InputError(
            f"{type(value).__name__} is no sound.",
            fix="give {'array': samples, 'sampling_rate': rate}, the path of a sound file, or samples at the model's rate.",
        )
    samples = _one_channel(np.asarray(samples, np.float32))
    if samples.size == 0 or not np.isfinite(samples).all():
        raise InputError("The sound is empty, or has samples that are not finite.", fix="remove it.")
    if found != rate:
        from scipy.signal import resample_poly

        shared = math.gcd(found, rate)
        samples = np.asarray(resample_poly(samples, rate // shared, found // shared), np.float32)
    return samples


def _one_channel(samples: Wave) -> Wave:
    """The mean of channels, which are the shorter axis: `(samples, channels)` of files, `(channels, samples)` of decoders."""
    if samples.ndim < 2:
        return samples
    return np.asarray(samples.mean(axis=int(np.argmin(samples.shape))), np.float32)


def _read(path: Path) -> tuple[npt.NDArray[Any], int]:
    if not path.is_file():
        raise InputError(
            f"There is no sound file {str(path)!r}.",
            fix="give a path that is absolute or relative to the working folder.",
        )
    return _decoded(path, path.name)


def _decoded(file: Any, name: str) -> tuple[npt.NDArray[Any], int]:
    """Samples and rate of a file: any format that soundfile reads where that is installed, else WAV.

    Raises:
        InputError: It cannot be read.
    """
    try:
        import soundfile
    except ImportError:
        return _wav(file, name)
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (soundfile.LibsndfileError, OSError, TypeError) as error:
        raise InputError(f"{name} cannot be read: {error}", fix="convert it to WAV or FLAC.") from error
    return samples, int(rate)


def _wav(file: Any, name: str) -> tuple[npt.NDArray[Any], int]:
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            # Chunks that hold no samples: titles and the like.
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(file)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(
            f"{name} cannot be read as WAV: {error}",
            fix="convert it to WAV, or install soundfile, which reads FLAC, OGG and MP3.",
        ) from error
    if samples.dtype.kind == "u":
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / float(np.iinfo(samples.dtype).max + 1)
    return samples, int(rate)
