"""Images in the messages of a chat: out of the message, into bytes; a mark stays where each was.

Pure, and for a body's worker: its cost grows with the body.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from relayline.coordinator.text.places import place_of
from relayline.wire.common.bounds import IMAGE_BYTES_MAX, IMAGES_PER_REQUEST_MAX
from relayline.wire.common.errors import InvalidRequestError

_HEAD = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
# The first bytes of the formats that are read.
_FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
MARKER = "<__media__>"  # as llama-server shows the place of an image


class Picture(Struct):
    """One image, as its client sent it."""

    data: bytes  # a file
    sha256: bytes
    param: str  # where in the body it is


class Marked(Struct):
    """The messages of a chat with marks in place of its images."""

    messages: list[dict[str, Any]]
    pictures: list[Picture]
    mark: str  # what each mark begins with; no client could guess it

    def split(self, rendered: str) -> tuple[list[str], list[int]]:
        """Return the texts around the images of a rendered chat, one more than images, and the numbers of these.

        Raises InvalidRequestError where the template left one out or wrote it twice.
        """
        found = re.split(rf"<{self.mark}-(\d+)>", rendered)
        texts, numbers = found[::2], [int(number) for number in found[1::2]]
        if sorted(numbers) != list(range(len(self.pictures))):
            text = "the model's chat template does not write each image of this chat once"
            raise InvalidRequestError.of_field("messages", text)
        return texts, numbers

    def shown(self, rendered: str) -> str:
        """Return a rendered chat with llama.cpp's marker in place of each image."""
        return re.sub(rf"<{self.mark}-\d+>", MARKER, rendered) if self.pictures else rendered


def take_images(messages: Sequence[dict[str, Any]]) -> Marked:
    """Take the images out of the messages of a chat. Raises InvalidRequestError for one that cannot be read."""
    marked = Marked([], [], secrets.token_hex(8))
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, Sequence) and any(_is_image(part) for part in content):
            message = {**message, "content": _text_of(content, f"messages[{at}].content", marked)}
        marked.messages.append(message)
    return marked


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def _text_of(parts: Sequence[Any], param: str, marked: Marked) -> str:
    """Return the parts of a message as one text. As in llama.cpp, a new line stands between two texts alone."""
    text, is_after_text = "", False
    for at, part in enumerate(parts):
        where = f"{param}[{at}]"
        if _is_image(part):
            place = place_of(part) or f"{where}.image_url"
            if len(marked.pictures) == IMAGES_PER_REQUEST_MAX:
                raise InvalidRequestError.of_field(place, f"a request has at most {IMAGES_PER_REQUEST_MAX} images")
            text += f"<{marked.mark}-{len(marked.pictures)}>"
            marked.pictures.append(_picture(part, place))
            is_after_text = False
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError.of_field(where, "only parts of type text and image_url are supported")
        text += "\n" + part["text"] if is_after_text else part["text"]
        is_after_text = True
    return text


def _picture(part: Mapping[str, Any], param: str) -> Picture:
    image_url = part.get("image_url")
    url = image_url.get("url") if isinstance(image_url, Mapping) else image_url
    if not isinstance(url, str):
        raise InvalidRequestError.of_field(param, "must be text")
    if (head := _HEAD.match(url)) is None:
        text = "an image is sent itself, as data:image/png;base64,...; this server fetches none from elsewhere"
        raise InvalidRequestError.of_field(param, text)
    if len(url) > head.end() + IMAGE_BYTES_MAX * 4 // 3 + 4:
        raise InvalidRequestError.of_field(param, f"an image has at most {IMAGE_BYTES_MAX} bytes")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError.of_field(param, "it is not base64") from None
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not (is_webp or data.startswith(_FORMATS)):
        raise InvalidRequestError.of_field(param, "it is no PNG, JPEG, WebP or GIF")
    return Picture(data, hashlib.sha256(data).digest(), param)
