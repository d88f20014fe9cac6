"""From the form of POST /v1/audio/transcriptions to a chat. Pure, and for a body's worker."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from relayline.coordinator.http.requests.inner_form import Fields, Inner, chat_of, renamed
from relayline.coordinator.http.requests.multipart import fields_of
from relayline.coordinator.media.parts import audio_file
from relayline.coordinator.text.places import PLACE
from relayline.wire.common.bounds import MEDIA_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError

INSTRUCTION = "Transcribe audio to text"  # llama-server's; a `prompt` takes its place
_FORMATS = ("json", "text")
_TIMED = ("verbose_json", "srt", "vtt", "diarized_json")
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_TEXTS = ("file", "model", "language", "prompt", "response_format", "stream")
# A chat's fields -> those of this form, for errors.
_NAMES = {"messages": "file"}


class TranscriptionForm(Struct):
    """POST /v1/audio/transcriptions: the fields as the description of the API has them; in a form all are texts."""

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text"] = "json"
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


class AnswerOptions(Struct):
    """The form of the answer."""

    response_format: str


def read(raw: bytes | bytearray) -> Inner:
    """Return a form as a chat. Raises InvalidRequestError."""
    form = fields_of(raw)
    if "file" not in form:
        raise InvalidRequestError.of_field("file", "required field is missing")
    data = form.pop("file")
    if len(data) > MEDIA_BYTES_MAX:
        raise InvalidRequestError.of_field("file", f"an audio file has at most {MEDIA_BYTES_MAX} bytes")
    audio_file(data, "file")
    sent = {name: value.decode("utf-8", "replace") for name, value in form.items()}
    response_format = _format(sent)
    text = sent.get("prompt") or INSTRUCTION
    if language := sent.get("language"):
        text += f" (language: {language})"
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}, PLACE: "file"}
    fields: Fields = {"temperature": 0, **_numbers(sent)}
    if "model" in sent:
        fields["model"] = sent["model"]
    if _is_streamed(sent):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    fields["messages"] = [{"role": "user", "content": [{"type": "text", "text": text}, audio]}]
    return Inner(chat_of(fields, {}), msgspec.msgpack.encode(AnswerOptions(response_format)))


def rename(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about the chat as one about the form."""
    return renamed(error, _NAMES)


def _format(sent: Mapping[str, str]) -> str:
    found = sent.get("response_format") or "json"
    if found in _TIMED or any(name.startswith("timestamp_granularities") for name in sent):
        text = "times of words or speakers are not computed here; json and text are served"
        raise InvalidRequestError.of_field("response_format", text)
    if found not in _FORMATS:
        raise InvalidRequestError.of_field("response_format", f"must be one of {', '.join(_FORMATS)}")
    if any(name.startswith("include") and "logprobs" in value for name, value in sent.items()):
        raise InvalidRequestError.of_field("include", "log probabilities are not served for transcriptions")
    return found


def _is_streamed(sent: Mapping[str, str]) -> bool:
    found = _BOOLS.get((sent.get("stream") or "false").lower())
    if found is None:
        raise InvalidRequestError.of_field("stream", "must be true or false")
    return found


def _numbers(sent: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name in TranscriptionForm.__struct_fields__:
        if name not in _TEXTS and (text := sent.get(name)):
            try:
                found[name] = msgspec.json.decode(text, type=int | float)
            except msgspec.DecodeError:
                raise InvalidRequestError.of_field(name, "must be a number") from None
    return found
