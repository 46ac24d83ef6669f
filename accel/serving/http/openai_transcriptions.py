"""OpenAI's `/v1/audio/transcriptions`: the text of a recording, for Whisper and CTC models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from email.message import Message
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError
from starlette.responses import PlainTextResponse, Response

from ...data.sound_rows import wave_of
from ...models.processors import companion_of
from .bodies import Body, invalid
from .endpoints import Endpoint, HttpCall
from .replies import HttpError, JsonReply, openai_error


class TranscriptionBody(Body):
    """Fields of a request to `/v1/audio/transcriptions`, without the file."""

    model: str | None = None
    language: str | None = Field(default=None, pattern="^[a-z]{2,3}$")
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Literal["0", "0.0", None] = None

    refused: ClassVar[Mapping[str, str]] = {
        "chunking_strategy": "remove chunking_strategy: long recordings are always divided into parts.",
        "include": "remove include: this server returns no log-probabilities of transcriptions.",
        "known_speaker_names": "remove known_speaker_names: this server does not recognize speakers.",
        "known_speaker_references": "remove known_speaker_references: this server does not recognize speakers.",
        "prompt": "remove prompt: this server transcribes without a text before the recording.",
        "stream": "remove stream: this server sends the complete text.",
        "timestamp_granularities": "use the response_format verbose_json, which has the times of segments.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "temperature": "remove temperature, or send 0: the likeliest text is returned.",
        "language": "send a language code such as en.",
    }


class TranscriptionForm(TranscriptionBody):
    """Fields of a request to `/v1/audio/transcriptions`."""

    file: bytes


def form_fields(content_type: str, body: bytes) -> dict[str, bytes]:
    """Return the fields of a form of the type `multipart/form-data` by name.

    Raises:
        HttpError: 400: the body is not such a form, or it has a field twice.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise _malformed("The request is not a form of the type multipart/form-data.")
    mark = b"--" + boundary.encode("latin-1", "replace")
    first, *parts = (b"\r\n" + body).split(b"\r\n" + mark)
    if first or not parts or not parts[-1].startswith(b"--"):
        raise _malformed("The form is incomplete.")
    fields: dict[str, bytes] = {}
    for part in parts[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        description = Message()
        for line in head.decode("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                description["content-disposition"] = value.strip()
        field = description.get_param("name", header="content-disposition")
        if not separator or not isinstance(field, str) or field in fields:
            raise _malformed("A part of the form has no name, no content, or the name of another part.")
        fields[field] = content
    return fields


def _malformed(message: str) -> HttpError:
    return HttpError(400, message, kind="invalid_form", fix="send the fields as a form, as OpenAI's clients do.")


async def _transcribe(call: HttpCall, operation: str) -> Response:
    fields = form_fields(call.request.headers.get("content-type", ""), await call.read())
    file = fields.pop("file", None)
    if not file:
        raise HttpError(
            422, "`file` is missing: expected a recording.", param="file", fix="send the recording as `file`."
        )
    values = {name.removesuffix("[]"): value.decode("utf-8", "replace") for name, value in fields.items()}
    try:
        body = TranscriptionBody.model_validate(values)
    except ValidationError as error:
        raise invalid(error, TranscriptionBody, values) from error
    name = call.server.model_for(body.model, operation)
    model = call.engine.models[name]
    seq2seq = model.can_generate()
    timed = body.response_format in ("verbose_json", "srt", "vtt")
    whisper = seq2seq and getattr(model.generation_config, "no_timestamps_token_id", None) is not None
    options: dict[str, Any] = {}
    if timed:
        if seq2seq and not whisper:
            raise HttpError(
                422, "The model returns no times.", param="response_format", fix="use the response_format json or text."
            )
        options["return_timestamps"] = True if whisper else "word"
    if body.language is not None:
        if not whisper or not getattr(model.generation_config, "is_multilingual", False):
            raise HttpError(422, "The model has one language only.", param="language", fix="remove language.")
        options["generate_kwargs"] = {"language": body.language}
    extractor = await asyncio.to_thread(companion_of, model, "AutoFeatureExtractor")
    rate = int(extractor.sampling_rate)
    samples = await asyncio.to_thread(wave_of, {"bytes": file}, rate)
    if whisper and len(samples) > extractor.chunk_length * rate:
        # Whisper needs timestamps to continue after its window.
        options["return_timestamps"] = True
    result = await call.ask({"raw": samples, "sampling_rate": rate}, operation=operation, model=name, **options)
    text, seconds = result["text"].strip(), len(samples) / rate
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    if body.response_format == "json":
        return JsonReply({"text": text, "usage": {"type": "duration", "seconds": round(seconds)}})
    segments = [
        (start or 0.0, seconds if end is None else end, chunk["text"].strip())
        for chunk in result["chunks"]
        for start, end in [chunk["timestamp"]]
    ]
    if body.response_format == "verbose_json":
        listed = [{"id": i, "start": start, "end": end, "text": part} for i, (start, end, part) in enumerate(segments)]
        language = {"language": body.language} if body.language else {}
        return JsonReply({"task": "transcribe", **language, "duration": seconds, "text": text, "segments": listed})
    return PlainTextResponse(_subtitles(segments, body.response_format))


def _subtitles(segments: list[tuple[float, float, str]], kind: str) -> str:
    """Return the segments in the subtitle format `srt` or `vtt`."""
    comma = "," if kind == "srt" else "."

    def time(seconds: float) -> str:
        milliseconds = round(seconds * 1000)
        minutes, milliseconds = divmod(milliseconds, 60_000)
        return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{comma}{milliseconds % 1000:03}"

    lines = [
        (f"{number}\n" if kind == "srt" else "") + f"{time(start)} --> {time(end)}\n{text}\n"
        for number, (start, end, text) in enumerate(segments, 1)
    ]
    return "\n".join(lines if kind == "srt" else ["WEBVTT\n", *lines])


def transcription_endpoint(operation: str) -> Endpoint:
    """Return the endpoint `/v1/audio/transcriptions`, which calls the operation of this name."""

    async def answer(call: HttpCall, _: Any) -> Response:
        return await _transcribe(call, operation)

    return Endpoint(
        path="/v1/audio/transcriptions", answer=answer, summary="Transcribe a recording", tag="openai", error=openai_error,
        operation=operation, body=TranscriptionForm, raw=True, media_type="multipart/form-data",
    )  # fmt: skip
