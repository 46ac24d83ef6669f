"""Task `text-to-audio`: generation of speech and other sounds from texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..capture.generation_graphs import family_parts
from ..errors import InputError
from ..interfaces.graph_and_tensor_names import FRAMES, LATENTS, NOISE, SPEAKER, TEXT_ENCODER, WAVEFORM_DECODER
from ..interfaces.task import Task
from ..models.modality_models import TwoGraphModel
from ..models.outputs import fast_output, numpy_too


@dataclass
class WaveformOutput(ModelOutput):  # type: ignore[misc]  # transformers is untyped here
    """Output of a text-to-speech model.

    Attributes:
        waveform: Samples `(batch, samples)` at the config's `sampling_rate`.
        sequence_lengths: Number of samples of each row without padding, `(batch,)`.
        spectrogram: Spectrogram `(batch, channels, frames)`.
    """

    waveform: torch.Tensor | None = None
    sequence_lengths: torch.Tensor | None = None
    spectrogram: torch.Tensor | None = None


class ORTModelForTextToWaveform(TwoGraphModel):
    """Model that converts texts to sounds: `waveform: (batch, samples)`.

    PyTorch generates the noise, so a call after `torch.manual_seed(...)` returns the same sound as the PyTorch model on a CPU with the same
    seed. The initial values of the attributes are from the model's config.

    Attributes:
        speaking_rate: Speed of the speech; larger is faster.
        noise_scale: Scale of the noise in the sound.
        noise_scale_duration: Scale of the noise in the durations of the tokens.
    """

    task = "text-to-audio"
    output_class = WaveformOutput
    components = (TEXT_ENCODER, WAVEFORM_DECODER)

    def _open(self) -> None:
        super()._open()
        self.speaking_rate = float(self.config.speaking_rate)
        self.noise_scale = float(self.config.noise_scale)
        self.noise_scale_duration = float(self.config.noise_scale_duration)

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """Modality of the output, `audio`."""
        return ("audio",)

    @numpy_too
    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        speaker_id: Any = None,
        speaking_rate: float | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Generate sounds from texts.

        Args:
            input_ids: Token ids `(batch, sequence)`.
            attention_mask: Mask `(batch, sequence)`; all ones when `None`.
            speaker_id: Index of the voice, or one index per row `(batch,)`; required if the model has several voices.
            speaking_rate: Speed of the speech; the attribute `speaking_rate` when `None`.
            return_dict: `False` returns a tuple.
            **others: Further inputs of the graph.

        Raises:
            InputError: The model has several voices but no speaker was chosen, the speaker does not exist, or the rate is not above 0.
        """
        self._check_fork()
        rate = self.speaking_rate if speaking_rate is None else float(speaking_rate)
        if not (rate > 0 and math.isfinite(rate)):
            raise InputError(
                f"speaking_rate is {rate}, but it must be a finite number above 0.",
                fix="pass a positive number, such as speaking_rate=1.0.",
            )
        ids = torch.as_tensor(input_ids)
        if ids.ndim != 2:
            raise InputError(
                f"input_ids has shape {tuple(ids.shape)}; its shape must be (batch, sequence).",
                fix="tokenize a list of texts: model(**tokenizer([text], return_tensors='pt')).",
            )
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        speaker = self._speaker(speaker_id, len(ids))
        feeds = {"input_ids": ids, "attention_mask": mask, **speaker, **others}
        if any(spec.name == NOISE for spec in self._session.inputs):
            noise = torch.randn(ids.shape[0], 2, ids.shape[1]).to(device=ids.device, dtype=self.dtype)
            feeds[NOISE] = noise * self.noise_scale_duration
        encoded = self._run(feeds)
        durations = torch.ceil(torch.exp(encoded["log_durations"]) * mask * (1 / rate))
        means, variances = (_laid_out(encoded[name], durations).transpose(1, 2) for name in _PRIORS)
        latents = means + torch.randn_like(means) * torch.exp(variances) * self.noise_scale
        lengths = _lengths_of(durations)
        sound = self._decode(latents, lengths, speaker)
        values = {
            "waveform": sound["waveform"],
            "sequence_lengths": lengths * math.prod(self.config.upsample_rates),
            "spectrogram": sound["spectrogram"],
        }
        return tuple(values.values()) if return_dict is False else fast_output(WaveformOutput, values)

    def _decode(
        self, latents: torch.Tensor, lengths: torch.Tensor, speaker: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Decode rows of equal length together, and pad the results with zeros.

        Rows of different length are decoded separately, because the decoder's convolutions have biases: padding frames would change the end
        of shorter rows.
        """
        parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero()[:, 0]
            feeds = {LATENTS: latents[rows, :, :length].contiguous(), FRAMES: lengths.new_ones(len(rows), length)}
            feeds |= {name: values[rows.to(values.device)] for name, values in speaker.items()}
            for name, value in self._decoder.run(feeds).items():
                parts.setdefault(name, []).append((rows, value))
        if all(len(of_name) == 1 for of_name in parts.values()):
            return {name: value for name, ((_, value),) in parts.items()}
        decoded = {}
        for name, of_name in parts.items():
            longest = of_name[-1][1]
            batch = longest.new_zeros(len(lengths), *longest.shape[1:])
            for rows, value in of_name:
                batch[rows.to(batch.device), ..., : value.shape[-1]] = value
            decoded[name] = batch
        return decoded

    def _speaker(self, speaker_id: Any, rows: int) -> dict[str, torch.Tensor]:
        voices = int(self.config.num_speakers)
        if voices <= 1:
            return {}
        if speaker_id is None:
            raise InputError(
                f"The argument speaker_id is missing; the model has {voices} voices.",
                fix=f"pass speaker_id, an index from 0 to {voices - 1}.",
            )
        ids = torch.as_tensor(speaker_id).long().reshape(-1)
        if len(ids) not in (1, rows) or not bool(((ids >= 0) & (ids < voices)).all()):
            raise InputError(
                f"speaker_id is {ids.tolist()} for a batch of {rows} rows; the model has the voices 0 to {voices - 1}.",
                fix="pass one index for all rows, or one index for each row.",
            )
        return {SPEAKER: ids.expand(rows).contiguous()}


_PRIORS = ("prior_means", "prior_log_variances")


def _laid_out(per_token: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
    """Repeat each token's values for its duration: `(batch, sequence, channels)` becomes `(batch, frames, channels)`.

    Shorter rows are padded with zeros at the end.
    """
    ends = durations.cumsum(-1)
    lengths = _lengths_of(durations)
    frames = torch.arange(int(lengths.max()), device=per_token.device)
    # The number of tokens that end before or at a frame is the index of the frame's token.
    token = (ends[:, None, :] <= frames[None, :, None]).sum(-1).clamp(max=per_token.shape[1] - 1)
    frame_values = per_token.gather(1, token[..., None].expand(-1, -1, per_token.shape[-1]))
    # A row has at least one frame, even if its total duration is zero. This frame belongs to no token, so its values are set to zero.
    return frame_values * (frames < ends[:, -1:]).unsqueeze(-1)


def _lengths_of(durations: torch.Tensor) -> torch.Tensor:
    """Return the number of frames of each row, `(batch,)`; at least one."""
    return durations.sum(-1).clamp(min=1).long()


class TextToAudio(Task):
    """The task `text-to-audio`: generation of speech and other sounds from texts."""

    model = ORTModelForTextToWaveform

    def parts(self, source: Any, fusion: Any) -> Sequence[Any] | None:
        return family_parts(source)
