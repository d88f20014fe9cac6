"""Images, audio and videos in the messages of a chat: out of the message, into bytes; a mark stays where each was.

Pure, and for a body's worker: its cost grows with the body.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from relayline.coordinator.media.addresses import host_of, url_of
from relayline.coordinator.text.places import place_of
from relayline.wire.common.bounds import MEDIA_ADDRESS_CHARS_MAX, MEDIA_BYTES_MAX, MEDIA_PER_REQUEST_MAX
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.texts import printable
from relayline.wire.settings.media_hosts import may_be_asked

_IMAGE_HEAD = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_VIDEO_HEAD = re.compile(r"data:(video/[a-z0-9.+-]{1,40}|image/gif);base64,", re.IGNORECASE)
_AUDIO_HEAD = re.compile(r"data:audio/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
# The first bytes of the formats that are read.
_IMAGE_FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
_AUDIO_FORMATS = (b"ID3", b"fLaC")
_VIDEO_BOXES = (b"ftyp", b"moov", b"mdat", b"wide")  # of MP4 and MOV: the first, behind its size
_MATROSKA = b"\x1aE\xdf\xa3"  # and WebM
MARKER = "<__media__>"  # as llama-server shows the place of an image or of audio
NO_AUDIO_FORMAT = "it is no WAV, MP3 or FLAC"
_NO_ADDRESS = "an address is https://HOST/... or https://HOST:PORT/..., without a user's name or password"
_NO_IMAGE_FORMAT = "it is no PNG, JPEG, WebP or GIF"
NO_VIDEO_FORMAT = "it is no MP4, MOV, WebM, MKV, AVI or GIF"
NO_VIDEO_LIBRARY = "videos need the library PyAV on this server; its operator runs: pip install 'relayline[video]'"
IMAGE, AUDIO, VIDEO = "image", "audio", "video"  # kinds of files


class Takes(NamedTuple):
    """What a model's projector encodes."""

    images: bool = False
    audio: bool = False
    video: bool = False  # images as well, and the library that unpacks videos is installed


TEXT_ALONE = Takes()


class MediaFile(Struct):
    """One image, audio or video file, as its client sent it."""

    data: bytes  # a file
    sha256: bytes
    param: str  # where in the body it is
    kind: str = IMAGE
    address: str = ""  # from which it is to be fetched; there are no bytes yet


class Marked(Struct):
    """The messages of a chat with marks in place of its images and audio."""

    messages: list[dict[str, Any]]
    media: list[MediaFile]
    mark: str  # what each mark begins with; no client could guess it

    def split(self, rendered: str) -> tuple[list[str], list[int]]:
        """Return the texts around the media of a rendered chat, one more than files, and the numbers of these.

        Raises InvalidRequestError where the template left one out or wrote it twice.
        """
        found = re.split(rf"<{self.mark}-(\d+)>", rendered)
        texts, numbers = found[::2], [int(number) for number in found[1::2]]
        if sorted(numbers) != list(range(len(self.media))):
            kinds = {each.kind for each in self.media}
            what = _NOUNS[kinds.pop()] if len(kinds) == 1 else "file"
            text = f"the model's chat template does not write each {what} of this chat once"
            raise InvalidRequestError.of_field("messages", text)
        return texts, numbers

    def shown(self, rendered: str) -> str:
        """Return a rendered chat with llama.cpp's marker in place of each file."""
        return re.sub(rf"<{self.mark}-\d+>", MARKER, rendered) if self.media else rendered


def take_media(messages: Sequence[dict[str, Any]], takes: Takes, hosts: Sequence[str] = ()) -> Marked:
    """Take images, audio and videos out of the messages of a chat. Those at an address of a host have that alone.

    Raises InvalidRequestError for a file that cannot be read, or is of a kind that the projector does not take.
    """
    marked = Marked([], [], secrets.token_hex(8))
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, Sequence) and any(kind_of(part) for part in content):
            message = {**message, "content": _text_of(content, f"messages[{at}].content", marked, takes, hosts)}
        marked.messages.append(message)
    return marked


_KINDS = {"image_url": IMAGE, "input_audio": AUDIO, "audio_url": AUDIO, "input_video": VIDEO, "video_url": VIDEO}
_NOUNS = {IMAGE: "image", AUDIO: "audio file", VIDEO: "video"}


def kind_of(part: Any) -> str:
    """Return `image`, `audio` or `video` for a part of a message that is one; empty for others."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _KINDS.get(kind, "") if isinstance(kind, str) else ""


def is_audio_file(data: bytes) -> bool:
    """Whether a file begins like a WAV, an MP3 or a FLAC, as llama.cpp tells them from images."""
    is_wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_mpeg = len(data) >= 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    return len(data) >= 12 and (is_wave or is_mpeg or data.startswith(_AUDIO_FORMATS))


def video_format(data: bytes) -> str:
    """Return the format of a file that begins like a video, as FFmpeg names it; empty for others."""
    if data[4:8] in _VIDEO_BOXES:
        return "mov"
    if data.startswith(_MATROSKA):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return "gif" if data.startswith(b"GIF8") else ""


def _text_of(parts: Sequence[Any], param: str, marked: Marked, takes: Takes, hosts: Sequence[str]) -> str:
    """Return the parts of a message as one text. As in llama.cpp, a new line stands between two texts alone."""
    text, is_after_text = "", False
    for at, part in enumerate(parts):
        where = f"{param}[{at}]"
        if kind := kind_of(part):
            place = place_of(part) or f"{where}.{part['type']}"
            if len(marked.media) == MEDIA_PER_REQUEST_MAX:
                most = f"a request has at most {MEDIA_PER_REQUEST_MAX} images, audio files and videos"
                raise InvalidRequestError.of_field(place, most)
            text += f"<{marked.mark}-{len(marked.media)}>"
            marked.media.append(_READERS[kind](part, place, takes, hosts))
            is_after_text = False
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kinds = "text, image_url, input_audio and video_url"
            raise InvalidRequestError.of_field(where, f"only parts of type {kinds} are supported")
        text += "\n" + part["text"] if is_after_text else part["text"]
        is_after_text = True
    return text


def _picture(part: Mapping[str, Any], param: str, takes: Takes, hosts: Sequence[str]) -> MediaFile:
    if not takes.images:
        raise InvalidRequestError.of_field(param, "this model's projector takes audio, and no images")
    image_url = part.get("image_url")
    url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
    if not isinstance(url, str):
        raise InvalidRequestError.of_field(param, "must be text")
    if (head := _IMAGE_HEAD.match(url)) is None:
        return _elsewhere(url, param, "an image is sent itself, as data:image/png;base64,...", hosts, IMAGE)
    return _image_file(_bytes_of(url, head.end(), param, "an image"), param)


def _is_image_file(data: bytes) -> bool:
    """Whether it begins like an image file that the encoder reads."""
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return is_webp or data.startswith(_IMAGE_FORMATS)


def _image_file(data: bytes, param: str) -> MediaFile:
    if not _is_image_file(data):
        raise InvalidRequestError.of_field(param, _NO_IMAGE_FORMAT)
    return MediaFile(data, hashlib.sha256(data).digest(), param)


def _audio(part: Mapping[str, Any], param: str, takes: Takes, hosts: Sequence[str]) -> MediaFile:
    """Return an audio file: of `input_audio` its `data`, base64 or a data: address; of `audio_url` its `url`."""
    if not takes.audio:
        raise InvalidRequestError.of_field(param, "this model's projector takes images, and no audio")
    sent = _sent_in(part, param, "needs `data`, the audio file in base64")
    head = _AUDIO_HEAD.match(sent)
    if head is None and (part["type"] == "audio_url" or ":" in sent[:40]):  # an address
        return _elsewhere(sent, param, "audio is sent itself, in base64", hosts, AUDIO)
    data = _bytes_of(sent, head.end() if head else 0, param, "an audio file")
    return audio_file(data, param)


def _sent_in(part: Mapping[str, Any], param: str, needs: str) -> str:
    """Return the text of a part: base64 or an address. Raises InvalidRequestError, with what it `needs`, for none."""
    inner = part.get(part["type"])
    sent = inner.get("data", inner.get("url")) if isinstance(inner, Mapping) else inner
    if not isinstance(sent, str):
        raise InvalidRequestError.of_field(param, needs)
    return sent


def audio_file(data: bytes, param: str) -> MediaFile:
    """Return an audio file for the encoder. Raises InvalidRequestError for one that does not begin like one."""
    if not is_audio_file(data):
        raise InvalidRequestError.of_field(param, NO_AUDIO_FORMAT)
    return MediaFile(data, hashlib.sha256(data).digest(), param, AUDIO)


def _video(part: Mapping[str, Any], param: str, takes: Takes, hosts: Sequence[str]) -> MediaFile:
    """Return a video: of `input_video` its `data`, base64 or a data: address; of `video_url` its `url`."""
    if not takes.video:
        text = NO_VIDEO_LIBRARY if takes.images else "this model's projector takes audio, and no images or videos"
        raise InvalidRequestError.of_field(param, text)
    sent = _sent_in(part, param, "needs `url`, an address, or `data`, the video in base64")
    head = _VIDEO_HEAD.match(sent)
    if head is None and (part["type"] == "video_url" or ":" in sent[:40]):  # an address
        return _elsewhere(sent, param, "a video is sent itself, as data:video/mp4;base64,...", hosts, VIDEO)
    return _video_file(_bytes_of(sent, head.end() if head else 0, param, "a video"), param)


def _video_file(data: bytes, param: str) -> MediaFile:
    if not video_format(data):
        raise InvalidRequestError.of_field(param, NO_VIDEO_FORMAT)
    return MediaFile(data, hashlib.sha256(data).digest(), param, VIDEO)


_READERS = {IMAGE: _picture, AUDIO: _audio, VIDEO: _video}
_FORMATS: dict[str, tuple[Callable[[bytes], object], str]] = {
    IMAGE: (_is_image_file, _NO_IMAGE_FORMAT),
    AUDIO: (is_audio_file, NO_AUDIO_FORMAT),
    VIDEO: (video_format, NO_VIDEO_FORMAT),
}


def fetched_file(asked: MediaFile, data: bytes, shown: str) -> MediaFile:
    """Return a file that was fetched from the address `shown`; hashes all its bytes.

    Raises InvalidRequestError, without the file's place in the request, where it is none of its kind.
    """
    is_one, problem = _FORMATS[asked.kind]
    if not is_one(data):
        raise InvalidRequestError(f"{shown}: {problem}")
    return MediaFile(data, hashlib.sha256(data).digest(), asked.param, asked.kind)


def _elsewhere(sent: str, param: str, wanted: str, hosts: Sequence[str], kind: str) -> MediaFile:
    """Return a file that is to be fetched. Raises InvalidRequestError where its host may not be asked."""
    if hosts and sent[:8].lower().startswith(("http://", "https://")):
        if len(sent) > MEDIA_ADDRESS_CHARS_MAX:
            raise InvalidRequestError.of_field(param, f"an address has at most {MEDIA_ADDRESS_CHARS_MAX} characters")
        if url_of(sent) is None:
            raise InvalidRequestError.of_field(param, _NO_ADDRESS)
    host = host_of(url_of(sent)) if len(sent) <= MEDIA_ADDRESS_CHARS_MAX else ""
    if not may_be_asked(host, hosts):
        where = printable(host)[:100] if hosts and host else "elsewhere"
        raise InvalidRequestError.of_field(param, f"{wanted}; this server fetches none from {where}, see --media-hosts")
    return MediaFile(b"", b"", param, kind, sent)


def _bytes_of(sent: str, start: int, param: str, what: str) -> bytes:
    if len(sent) > start + MEDIA_BYTES_MAX * 4 // 3 + 4:
        raise InvalidRequestError.of_field(param, f"{what} has at most {MEDIA_BYTES_MAX} bytes")
    try:
        return base64.b64decode(sent[start:], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError.of_field(param, "it is not base64") from None
