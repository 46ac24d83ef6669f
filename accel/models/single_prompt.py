"""One prompt and its answer, printed and measured while it is generated: `accel generate`."""

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
from ..backends.plan import RunSettings, make_plan
from ..decoding.stop_text import TextPieces, byte_tokens
from ..errors import AccelError, ConfigError, InputError, TaskError
from ..interfaces.task_registry import task_spec
from ..stages.resolution import resolve
from .base import ORTModel
from .processors import companion_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model generated, and how fast.

    Attributes:
        text: The answer, without the prompt.
        prompt_tokens: Tokens read.
        new_tokens: Tokens generated.
        first_token_s: Seconds until the first token (prefill).
        tokens_per_s: Tokens a second after the first; 0 for a single token.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    tokens_per_s: float


class _TimedText(BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
    """Passes final pieces of text on and notes when tokens came.

    Args:
        tokenizer: The model's.
        on_text: Gets the pieces.
        skip_prompt: Whether the first tokens are the prompt; else they begin the answer.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, skip_prompt: bool) -> None:
        self.times: list[float] = []
        self._pieces = TextPieces(tokenizer, byte_tokens=byte_tokens(tokenizer))
        self._on_text, self._skip, self._first = on_text, skip_prompt, True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then each new token."""
        first, self._first = self._first, False
        if not first:
            self.times.append(time.perf_counter())
        elif self._skip:
            return
        for token in value.flatten().tolist():
            self._on_text(self._pieces.push(token))

    def end(self) -> None:
        """Pass the rest of the text on."""
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
    """A generating model by id or folder.

    Raises:
        TaskError: The model does not generate.
    """
    resolved = resolve(model, task=task, hub=HubOptions(revision=revision, trust_remote_code=trust_remote_code))
    if not task_spec(resolved.task).generates:
        raise TaskError(
            f"{model} does not generate.", fix="name a model for text-generation or another generating task."
        )
    return ORTModel.from_plan(make_plan(resolved, RunSettings(backend=backend, device=device)))


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
    """A prompt as the model's inputs: a batch of one row, `(1, tokens)`, with the pixels or features beside it.

    Args:
        model: A generating model.
        tokenizer: Its tokenizer.
        prompt: What to continue, answer or transform.
        system: A system message, for chat models.
        chat: Whether to wrap the prompt in the tokenizer's chat template; `None` where it has one.
        image: A picture, for models that read one.
        audio: A recording, for speech models: WAV, FLAC and what else soundfile reads.

    Raises:
        ConfigError: A chat was asked for and the tokenizer has no template, or a file is missing.
        InputError: An empty prompt.
    """
    if model.main_input_name in ("pixel_values", "flattened_patches"):
        if image is None:
            raise ConfigError("This model describes an image and was given none.", fix="pass --image FILE.")
        processor = companion_of(model, "AutoImageProcessor")
        asked = asked_of(processor, prompt) if getattr(processor, "is_vqa", False) else {}
        return dict(processor(transformers.image_utils.load_image(str(image)), return_tensors="pt", **asked))
    if model.main_input_name in ("input_features", "input_values"):
        if audio is None:
            raise ConfigError("This model transcribes a recording and was given none.", fix="pass --audio FILE.")
        extractor = companion_of(model, "AutoFeatureExtractor")
        samples = transformers.audio_utils.load_audio(str(audio), sampling_rate=extractor.sampling_rate)
        return dict(extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt"))
    decoder_only = not model.config.is_encoder_decoder
    reads_images = decoder_only and "pixel_values" in inspect.signature(model.forward).parameters
    if reads_images and image is not None:
        return _image_prompt(model, prompt, image, system=system, chat=chat)
    if not prompt.strip():
        raise InputError("The prompt is empty.", fix="pass --prompt TEXT, or text on standard input.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if (chat or system) and not has_template:
        raise ConfigError("The tokenizer has no chat template.", fix="leave --chat and --system out.")
    if has_template and chat is not False and decoder_only and not reads_images:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        return dict(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        )
    encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def asked_of(processor: Any, question: str | None) -> dict[str, str]:
    """What an image processor is given besides an image: a question for those that write it above, as some of Pix2Struct's do.

    Raises:
        ConfigError: A question for one that does not, or none for one that does.
    """
    if getattr(processor, "is_vqa", False):
        if not question:
            raise ConfigError("This model answers a question about an image and was given none.", fix="pass a prompt.")
        return {"header_text": question}
    if question is not None:
        raise ConfigError(
            "An encoder-decoder of images reads no prompt.",
            fix="leave prompt out, or use a model of images and text with the pipeline 'image-text-to-text'.",
        )
    return {}


def _image_prompt(
    model: ORTModel, prompt: str, image: Path, *, system: str | None, chat: bool | None
) -> Mapping[str, torch.Tensor]:
    """A prompt with a picture before the text, as the model's processor makes it."""
    processor = companion_of(model, "AutoProcessor")
    picture = transformers.image_utils.load_image(str(image))
    template = bool(getattr(processor, "chat_template", None))
    if (chat or system) and not template:
        raise ConfigError("The processor has no chat template.", fix="leave --chat and --system out.")
    if template and chat is not False:
        messages = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
        content = [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]
        messages.append({"role": "user", "content": content})
        made = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    else:
        marker = processor.image_token
        text = prompt if marker in prompt else f"{marker}\n{prompt}"
        made = processor(images=picture, text=text, return_tensors="pt")
    read = ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")
    return {name: made[name] for name in read if name in made}


def answer(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    on_text: Callable[[str], None],
    **generate: Any,
) -> Answer:
    """Generate from one prompt.

    Args:
        model: A generating model.
        tokenizer: Its tokenizer.
        inputs: From `prompt_inputs`, one row: `(1, tokens)`.
        on_text: Called with each piece of text as soon as it is final; not with beams, which change their minds.
        **generate: Arguments of `generate`.

    Raises:
        ConfigError: Settings that transformers refuses.
    """
    decoder_only = not model.config.is_encoder_decoder
    streams = generate.get("num_beams", 1) in (None, 1)
    streamer = _TimedText(tokenizer, on_text, skip_prompt=decoder_only) if streams else None
    started = time.perf_counter()
    with torch.inference_mode():
        try:
            tokens = model.generate(**inputs, streamer=streamer, **generate)
        # What transformers raises for settings; the model's own errors are AccelError.
        except (ValueError, ZeroDivisionError) as error:
            if isinstance(error, AccelError):
                raise
            raise ConfigError(
                f"transformers refuses these settings: {error}",
                fix="temperature above 0, top_p from 0 to 1, top_k from 0 on, num_beams from 1 on.",
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
    return Answer(text=text, prompt_tokens=prompt_tokens, new_tokens=count, first_token_s=first_s, tokens_per_s=speed)
