"""Generation for a single prompt with streamed output and speed measurement, for `accel generate`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from ..artifact.hub import HubOptions
from ..backends.plan import RunPreferences, make_plan
from ..data.sound_rows import wave_of
from ..decoding.stop_text import TextPieces, byte_tokens
from ..errors import AccelError, ConfigError, InputError, TaskError
from ..interfaces.task_registry import task_spec
from ..stages.resolution import resolve
from .base import ORTModel
from .processors import companion_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedAnswer:
    """Generated text with its token counts and speed.

    Attributes:
        text: The generated text, without the prompt.
        prompt_tokens: Number of prompt tokens.
        new_tokens: Number of generated tokens.
        first_token_s: Seconds until the first token (prefill).
        tokens_per_s: Tokens per second after the first token; 0 for a single token.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    tokens_per_s: float


class _TimedText(BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
    """Streamer that passes pieces of text to a function as soon as they are final, and records the time of each token.

    Args:
        tokenizer: The model's tokenizer.
        on_text: Function that receives the pieces of text.
        skip_prompt: Whether the first tokens are the prompt; if not, they are the start of the generated text.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, skip_prompt: bool) -> None:
        self.times: list[float] = []
        self._pieces = TextPieces(tokenizer, byte_tokens=byte_tokens(tokenizer))
        self._on_text, self._skip, self._first = on_text, skip_prompt, True

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt in the first call, then each new token."""
        first, self._first = self._first, False
        if not first:
            self.times.append(time.perf_counter())
        elif self._skip:
            return
        for token in value.flatten().tolist():
            self._on_text(self._pieces.push(token))

    def end(self) -> None:
        """Forward the remaining text."""
        self._on_text(self._pieces.finish())


def open_generator(
    model: str,
    *,
    task: str | None,
    backend: str | None,
    device: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> ORTModel:
    """Open a generating model from a Hub id or folder.

    Raises:
        TaskError: The model's task does not generate.
    """
    resolved = resolve(model, task=task, hub=HubOptions(revision=revision, trust_remote_code=trust_remote_code))
    if not task_spec(resolved.task).generates:
        raise TaskError(
            f"The model {model} has the task {resolved.task!r}, which does not generate text.",
            fix="pass a model for text-generation, text2text-generation or another generating task, or pass --task.",
        )
    return ORTModel.from_plan(make_plan(resolved, RunPreferences(backend=backend, device=device)))


def prompt_inputs(
    model: ORTModel,
    tokenizer: Any,
    prompt: str,
    *,
    system: str | None = None,
    chat: bool | None = None,
    image: Path | None = None,
    audio: Path | None = None,
) -> Mapping[str, torch.Tensor]:
    """Convert a prompt to the model's inputs: a batch of one row, `(1, tokens)`, and pixels or audio features.

    Args:
        model: A generating model.
        tokenizer: The model's tokenizer.
        prompt: Text to continue, answer or transform.
        system: System message, for chat models.
        chat: Whether to apply the tokenizer's chat template; `None` applies it if the tokenizer has one.
        image: Image file, for models that read an image.
        audio: Audio file, for speech models: WAV, FLAC or another format that soundfile supports.

    Raises:
        ConfigError: A chat was requested but there is no chat template, or a required file is missing.
        InputError: The prompt is empty.
    """
    if model.main_input_name in ("pixel_values", "flattened_patches"):
        if image is None:
            raise ConfigError(
                "The model generates text from an image, but no image was passed.", fix="pass --image FILE."
            )
        processor = companion_of(model, "AutoImageProcessor")
        question = asked_of(processor, prompt) if getattr(processor, "is_vqa", False) else {}
        return dict(processor(transformers.image_utils.load_image(str(image)), return_tensors="pt", **question))
    if model.main_input_name in ("input_features", "input_values"):
        if audio is None:
            raise ConfigError(
                "The model transcribes a recording, but no recording was passed.", fix="pass --audio FILE."
            )
        extractor = companion_of(model, "AutoFeatureExtractor")
        samples = wave_of(audio, extractor.sampling_rate)
        return dict(extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt"))
    decoder_only = not model.config.is_encoder_decoder
    reads_images = decoder_only and "pixel_values" in inspect.signature(model.forward).parameters
    picture = transformers.image_utils.load_image(str(image)) if reads_images and image is not None else None
    if picture is None and not prompt.strip():
        raise InputError("The prompt is empty.", fix="pass --prompt TEXT, or send text to standard input.")
    reader = tokenizer if picture is None else companion_of(model, "AutoProcessor")
    has_template = bool(getattr(reader, "chat_template", None))
    if (chat or system) and not has_template:
        raise ConfigError(
            f"The model's {'tokenizer' if picture is None else 'processor'} has no chat template, which --chat and --system need.",
            fix="leave --chat and --system out, or use a model that was trained for chat.",
        )
    if has_template and chat is not False and decoder_only and (picture is not None or not reads_images):
        turns = [("system", system)] if system else []
        messages: list[Any] = [{"role": role, "content": text} for role, text in (*turns, ("user", prompt))]
        if picture is not None:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
            messages[-1]["content"].insert(0, {"type": "image", "image": picture})
        encoded = reader.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    elif picture is not None:
        text = prompt if reader.image_token in prompt else f"{reader.image_token}\n{prompt}"
        encoded = reader(images=picture, text=text, return_tensors="pt")
    else:
        encoded = reader(prompt, return_tensors="pt")
    read = ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")
    return {name: encoded[name] for name in read if name in encoded}


def asked_of(processor: Any, question: str | None) -> dict[str, str]:
    """Return the arguments with which an image processor receives a question about the image.

    Some Pix2Struct processors draw the question above the image. Other processors have no question.

    Raises:
        ConfigError: A question was passed but the processor does not support questions, or a required question is missing.
    """
    if getattr(processor, "is_vqa", False):
        if not question:
            raise ConfigError(
                "The model answers a question about an image, but no question was passed.",
                fix="pass the question as the prompt.",
            )
        return {"header_text": question}
    if question is not None:
        raise ConfigError(
            f"The prompt {question!r:.100} was passed, but the model generates text from images only and accepts no prompt.",
            fix="leave the prompt out, or use a model for the pipeline 'image-text-to-text', which accepts an image and a prompt.",
        )
    return {}


def answer(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    on_text: Callable[[str], None],
    **generate: Any,
) -> GeneratedAnswer:
    """Generate text from one prompt.

    Args:
        model: A generating model.
        tokenizer: The model's tokenizer.
        inputs: Result of `prompt_inputs`, one row: `(1, tokens)`.
        on_text: Called with each piece of text as soon as it is final; with beam search only once, at the end.
        **generate: Arguments of `generate`.

    Raises:
        ConfigError: transformers rejects the settings.
    """
    decoder_only = not model.config.is_encoder_decoder
    streams = generate.get("num_beams", 1) in (None, 1)
    streamer = _TimedText(tokenizer, on_text, skip_prompt=decoder_only) if streams else None
    started = time.perf_counter()
    with torch.inference_mode():
        try:
            tokens = model.generate(**inputs, streamer=streamer, **generate)
        # transformers raises these errors for invalid settings. Errors of accel's model are also ValueErrors and are raised unchanged.
        except (ValueError, ZeroDivisionError) as error:
            if isinstance(error, AccelError):
                raise
            raise ConfigError(
                f"transformers rejected the generation settings: {error}",
                fix="use temperature > 0, 0 < top_p <= 1, top_k >= 0 and num_beams >= 1.",
            ) from error
    seconds = time.perf_counter() - started
    prompt_tokens = int(inputs["input_ids"].shape[1]) if decoder_only else 1
    new = tokens[0, prompt_tokens:]
    text, count = tokenizer.decode(new, skip_special_tokens=True), int(new.numel())
    first_s, speed = 0.0, count / seconds
    if streamer is None:
        on_text(text)
    else:
        times = streamer.times
        first_s = times[0] - started if times else seconds
        speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return GeneratedAnswer(
        text=text, prompt_tokens=prompt_tokens, new_tokens=count, first_token_s=first_s, tokens_per_s=speed
    )
