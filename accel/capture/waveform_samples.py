"""Models that speak in one go (VITS), as two graphs: what is said of each token and how long, and the sound of all frames.

Noise is drawn, and frames are laid out, between the two: a graph that did it would answer otherwise each time, with sizes that it
learns while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ExportError
from ..interfaces.wrapper import Tensors, Wrapper
from .samples import SAMPLE_BATCH, SAMPLE_SEQUENCE, Axes, resize, same_draws, text_inputs
from .source import Source

TEXT_ENCODER, SPEAKER = "text_encoder", "speaker_id"
WAVEFORM_DECODER = "waveform_decoder"
NOISE, LATENTS, FRAMES = "duration_noise", "latents", "frame_mask"
_FRAMES = 17  # of the example that is traced
_VITS = "vits"


def waveform_sample(module: torch.nn.Module, folder: Path | None) -> tuple[Tensors, Axes, tuple[str, ...]]:
    """Two texts, `input_ids` and `attention_mask: (batch, sequence)`, and who speaks where there are several: `speaker_id: (batch,)`.

    Raises:
        ExportError: The model writes its sound in steps, or lays out its frames one by one.
    """
    config: Any = module.config
    inner = module.unwrapped if isinstance(module, Wrapper) else module
    if getattr(config, "model_type", "") != _VITS:
        raise ExportError(
            f"A {type(inner).__name__} is no VITS, of whose parts graphs are made.", fix="run it with transformers."
        )
    names, unused = text_inputs(module, config, folder)
    # At the length of its window of relative positions a text is neither padded nor cut to it.
    length = SAMPLE_SEQUENCE + int(config.window_size or 0)
    ones = {name: torch.ones((SAMPLE_BATCH, length), dtype=torch.int64) for name in names}
    axes: dict[str, dict[int, str]] = {name: {0: "batch", 1: "sequence"} for name in names}
    sample = resize(ones, axes, {"batch": SAMPLE_BATCH, "sequence": length}, config, seed=0)
    if config.num_speakers > 1:
        sample[SPEAKER] = torch.arange(SAMPLE_BATCH) % config.num_speakers
        axes[SPEAKER] = {0: "batch"}
    return sample, axes, unused


@same_draws()
def waveform_parts(source: Source) -> tuple[Source, ...]:
    """The two graphs of a model."""
    config: Any = source.config
    text, latents = dict(source.example), torch.randn((SAMPLE_BATCH, config.flow_size, _FRAMES))
    text_axes: dict[str, Mapping[int, str]] = dict(source.axes)
    if config.use_stochastic_duration_prediction:
        text[NOISE] = torch.randn((SAMPLE_BATCH, 2, text["input_ids"].shape[1]))
        text_axes[NOISE] = {0: "batch", 2: "sequence"}
    mask = torch.ones((SAMPLE_BATCH, _FRAMES), dtype=torch.int64)
    mask[1::2, (_FRAMES + 1) // 2 :] = 0
    frames: Tensors = {LATENTS: latents, FRAMES: mask}
    frame_axes: dict[str, Mapping[int, str]] = {LATENTS: {0: "batch", 2: "frames"}, FRAMES: {0: "batch", 1: "frames"}}
    if SPEAKER in text:
        frames[SPEAKER], frame_axes[SPEAKER] = text[SPEAKER], {0: "batch"}
    return (
        replace(source, model=_TextEncoder(source.model).eval(), name=TEXT_ENCODER, example=text, axes=text_axes),
        replace(
            source, model=_Waveforms(source.model).eval(), name=WAVEFORM_DECODER, example=frames, axes=frame_axes, max_sizes={}
        ),
    )  # fmt: skip


def laid_out(per_token: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
    """Values of tokens `(batch, sequence, channels)` as those of frames `(batch, frames, channels)`, each as long as its token lasts;
    rows that end earlier are zero behind their end.
    """
    ends = durations.cumsum(-1)
    lengths = lengths_of(durations)
    frames = torch.arange(int(lengths.max()), device=per_token.device)
    # How many tokens have ended at a frame is which token it is of.
    token = (ends[:, None, :] <= frames[None, :, None]).sum(-1).clamp(max=per_token.shape[1] - 1)
    found = per_token.gather(1, token[..., None].expand(-1, -1, per_token.shape[-1]))
    # A row of no duration at all still has one frame, which is of no token.
    return found * (frames < ends[:, -1:]).unsqueeze(-1)


def lengths_of(durations: torch.Tensor) -> torch.Tensor:
    """How many frames each row has, `(batch,)`; one at least."""
    return durations.sum(-1).clamp(min=1).long()


class _GivenNoise(TorchFunctionMode):
    """Normal noise that is drawn inside of a model is what its graph was given."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or give the noise."""
        return self._noise if func is torch.randn else func(*args, **(kwargs or {}))


@contextmanager
def _noise(noise: torch.Tensor | None) -> Iterator[None]:
    if noise is None:
        yield
        return
    with _GivenNoise(noise):
        yield


@contextmanager
def _splines_of_all_values() -> Iterator[None]:
    """In a trace, VITS' splines of every value, of which those beyond the spline's ends are left as they are. Its own code takes
    apart what is inside and what is not, with sizes that depend on the values.
    """
    if not torch.compiler.is_exporting():
        yield
        return
    from transformers.models.vits import modeling_vits

    own: Any = modeling_vits

    def spline(
        inputs: torch.Tensor,
        widths: torch.Tensor,
        heights: torch.Tensor,
        derivatives: torch.Tensor,
        reverse: bool = False,
        tail_bound: float = 5.0,
        min_bin_width: float = 1e-3,
        min_bin_height: float = 1e-3,
        min_derivative: float = 1e-3,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # So that the slope is 1 at both ends.
        end = torch.full_like(derivatives[..., :1], math.log(math.exp(1 - min_derivative) - 1))
        found, determinant = own._rational_quadratic_spline(
            inputs=inputs.clamp(-tail_bound, tail_bound), unnormalized_widths=widths, unnormalized_heights=heights,
            unnormalized_derivatives=torch.cat([end, derivatives, end], dim=-1), reverse=reverse, tail_bound=tail_bound,
            min_bin_width=min_bin_width, min_bin_height=min_bin_height, min_derivative=min_derivative,
        )  # fmt: skip
        inside = inputs.abs() <= tail_bound
        return torch.where(inside, found, inputs), torch.where(inside, determinant, torch.zeros_like(determinant))

    before = own._unconstrained_rational_quadratic_spline
    own._unconstrained_rational_quadratic_spline = spline
    try:
        yield
    finally:
        own._unconstrained_rational_quadratic_spline = before


class _Speaking(Wrapper):
    def speaker(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """`(batch, size, 1)` of who speaks; `None` where there is one voice."""
        if SPEAKER not in inputs:
            return None
        embed: Callable[..., torch.Tensor] = self.model.embed_speaker  # type: ignore[assignment]
        return embed(inputs[SPEAKER]).unsqueeze(-1)


class _TextEncoder(_Speaking):
    """Tokens to `prior_means` and `prior_log_variances: (batch, sequence, channels)` and `log_durations: (batch, sequence)`."""

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Encode texts; noise `(batch, 2, sequence)` is scaled already."""
        model: Any = self.model
        ids, mask, noise = inputs["input_ids"], inputs["attention_mask"], inputs.get(NOISE)
        real = mask.unsqueeze(-1).to(model.text_encoder.embed_tokens.weight.dtype)
        encoded = model.text_encoder(input_ids=ids, padding_mask=real, attention_mask=mask, return_dict=True)
        hidden, across = encoded.last_hidden_state.transpose(1, 2), real.transpose(1, 2)
        settings = {} if noise is None else {"reverse": True, "noise_scale": 1.0}
        with _noise(noise), _splines_of_all_values():
            durations = model.duration_predictor(hidden, across, self.speaker(inputs), **settings)
        return {
            "prior_means": encoded.prior_means,
            "prior_log_variances": encoded.prior_log_variances,
            "log_durations": durations.squeeze(1),
        }


class _Waveforms(_Speaking):
    """Frames `(batch, channels, frames)` to `waveform: (batch, samples)` and `spectrogram: (batch, channels, frames)`."""

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Sound frames."""
        model: Any = self.model
        speaker = self.speaker(inputs)
        mask = inputs[FRAMES].unsqueeze(1).to(inputs[LATENTS].dtype)
        spectrogram = model.flow(inputs[LATENTS], mask, speaker, reverse=True) * mask
        return {"waveform": model.decoder(spectrogram, speaker).squeeze(1), "spectrogram": spectrogram}
