"""Family of VITS, a text-to-speech model that is exported as two graphs.

The text encoder also predicts the duration of each token. The waveform decoder turns audio frames into a waveform. Between the two
graphs, the caller draws random noise and repeats each token for its number of frames. A single graph would draw different noise in
each call, and the sizes of its tensors would depend on the predicted durations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..interfaces.family import Axes, Family, ModelPart, Replacement
from ..interfaces.graph_and_tensor_names import FRAMES, LATENTS, NOISE, SPEAKER, TEXT_ENCODER, WAVEFORM_DECODER
from ..interfaces.tracing_wrapper import Tensors, Wrapper

_FRAMES = 17  # Number of audio frames in the sample inputs of the trace.


def _spline(
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
    """Evaluate VITS' spline at every value. Values outside of the range of the spline do not change.

    transformers evaluates the spline only for the values inside the range. The number of these values depends on the data, so a trace
    cannot follow transformers' code.
    """
    from transformers.models.vits import modeling_vits

    # With this derivative, the spline has the slope 1 at both ends of its range.
    end = torch.full_like(derivatives[..., :1], math.log(math.exp(1 - min_derivative) - 1))
    values, determinant = modeling_vits._rational_quadratic_spline(
        inputs=inputs.clamp(-tail_bound, tail_bound), unnormalized_widths=widths, unnormalized_heights=heights,
        unnormalized_derivatives=torch.cat([end, derivatives, end], dim=-1), reverse=reverse, tail_bound=tail_bound,
        min_bin_width=min_bin_width, min_bin_height=min_bin_height, min_derivative=min_derivative,
    )  # fmt: skip
    inside = inputs.abs() <= tail_bound
    return torch.where(inside, values, inputs), torch.where(inside, determinant, torch.zeros_like(determinant))


class _FixedNoise(TorchFunctionMode):
    """Replace the result of `torch.randn` by the noise that the caller passed as a graph input."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or return the noise."""
        return self._noise if func is torch.randn else func(*args, **(kwargs or {}))


@contextmanager
def _noise(noise: torch.Tensor | None) -> Iterator[None]:
    if noise is None:
        yield
        return
    with _FixedNoise(noise):
        yield


class _SpeakerConditionedWrapper(Wrapper):
    def speaker(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the speaker's embedding `(batch, size, 1)`, or `None` if the model has only one speaker."""
        if SPEAKER not in inputs:
            return None
        embed: Callable[..., torch.Tensor] = self.model.embed_speaker  # type: ignore[assignment]
        return embed(inputs[SPEAKER]).unsqueeze(-1)


class _TextEncoder(_SpeakerConditionedWrapper):
    """Text encoder: tokens to `prior_means` and `prior_log_variances: (batch, sequence, channels)`, and `log_durations`.

    `log_durations` is `(batch, sequence)`.
    """

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Encode texts. The input with the noise, `(batch, 2, sequence)`, is already multiplied by the noise scale."""
        model: Any = self.model
        ids, mask, noise = inputs["input_ids"], inputs["attention_mask"], inputs.get(NOISE)
        real = mask.unsqueeze(-1).to(model.text_encoder.embed_tokens.weight.dtype)
        encoded = model.text_encoder(input_ids=ids, padding_mask=real, attention_mask=mask, return_dict=True)
        hidden, across = encoded.last_hidden_state.transpose(1, 2), real.transpose(1, 2)
        settings = {} if noise is None else {"reverse": True, "noise_scale": 1.0}
        with _noise(noise):
            durations = model.duration_predictor(hidden, across, self.speaker(inputs), **settings)
        return {
            "prior_means": encoded.prior_means,
            "prior_log_variances": encoded.prior_log_variances,
            "log_durations": durations.squeeze(1),
        }


class _WaveformDecoder(_SpeakerConditionedWrapper):
    """Waveform decoder: frames `(batch, channels, frames)` to `waveform: (batch, samples)` and `spectrogram`.

    `spectrogram` is `(batch, channels, frames)`.
    """

    def forward(self, **inputs: torch.Tensor) -> Tensors:
        """Decode frames to waveforms."""
        model: Any = self.model
        speaker = self.speaker(inputs)
        mask = inputs[FRAMES].unsqueeze(1).to(inputs[LATENTS].dtype)
        spectrogram = model.flow(inputs[LATENTS], mask, speaker, reverse=True) * mask
        return {"waveform": model.decoder(spectrogram, speaker).squeeze(1), "spectrogram": spectrogram}


class Vits(Family):
    """Family of VITS."""

    def tokens_at_once(self, config: Any) -> int:
        """Return the window size of the relative positions, because the model's code branches on texts shorter than the window."""
        return int(config.window_size or 0)

    def replacements(self, model: Any) -> list[Replacement]:
        """Replace transformers' evaluation of splines by code that can be traced."""
        from transformers.models.vits import modeling_vits

        return [(modeling_vits, "_unconstrained_rational_quadratic_spline", _spline)]

    def parts(self, model: torch.nn.Module, example: Tensors, axes: Axes) -> tuple[ModelPart, ...]:
        """Return the text encoder and the waveform decoder."""
        config: Any = model.config
        batch, length = example["input_ids"].shape
        text: Tensors = dict(example)
        text_axes: dict[str, Mapping[int, str]] = dict(axes)
        frames: Tensors = {
            LATENTS: torch.randn((batch, config.flow_size, _FRAMES)),
            FRAMES: torch.ones((batch, _FRAMES), dtype=torch.int64),
        }
        frames[FRAMES][1::2, (_FRAMES + 1) // 2 :] = 0
        frame_axes: dict[str, Mapping[int, str]] = {
            LATENTS: {0: "batch", 2: "frames"},
            FRAMES: {0: "batch", 1: "frames"},
        }
        if config.num_speakers > 1:
            text[SPEAKER] = frames[SPEAKER] = torch.arange(batch) % config.num_speakers
            text_axes[SPEAKER] = frame_axes[SPEAKER] = {0: "batch"}
        if config.use_stochastic_duration_prediction:
            text[NOISE] = torch.randn((batch, 2, length))
            text_axes[NOISE] = {0: "batch", 2: "sequence"}
        return (
            ModelPart(name=TEXT_ENCODER, model=_TextEncoder(model).eval(), example=text, axes=text_axes),
            ModelPart(name=WAVEFORM_DECODER, model=_WaveformDecoder(model).eval(), example=frames, axes=frame_axes),
        )


FAMILY = Vits()
