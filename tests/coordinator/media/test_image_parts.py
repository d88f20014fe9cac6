"""Images in the messages of a chat: extracted, replaced by a marker, or refused in one line."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from relayline.coordinator.media.parts import Takes, take_media
from relayline.wire.common.bounds import MEDIA_BYTES_MAX, MEDIA_PER_REQUEST_MAX
from relayline.wire.common.errors import InvalidRequestError

PNG = b"\x89PNG\r\n\x1a\n and more"
IMAGES = Takes(images=True)


def image(data: bytes = PNG, head: str = "data:image/png;base64,") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": head + base64.b64encode(data).decode()}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]


def test_images_leave_marks_and_texts_alone_are_parted_by_lines() -> None:
    marked = take_media(chat(text("a"), text("b"), image(), text("c"), image(PNG + b"2"), image(PNG)), IMAGES)
    content = marked.messages[1]["content"]
    assert marked.shown(content) == "a\nb<__media__>c<__media__><__media__>"
    assert marked.split(content) == (["a\nb", "c", "", ""], [0, 1, 2])
    assert [each.data for each in marked.media] == [PNG, PNG + b"2", PNG]
    assert marked.media[1].sha256 == hashlib.sha256(PNG + b"2").digest()
    assert marked.media[1].param == "messages[1].content[4].image_url"
    assert marked.messages[0] == {"role": "system", "content": "s"}


def test_nobody_can_write_a_mark() -> None:
    first, second = (take_media(chat(text("x"), image()), IMAGES) for _ in range(2))
    assert first.mark != second.mark
    forged = take_media(chat(text(f"<{first.mark}-0>"), image()), IMAGES)
    assert forged.split(forged.messages[1]["content"])[0] == [f"<{first.mark}-0>", ""]


@pytest.mark.parametrize("rendered", ["", "{0}{0}"], ids=["left out", "twice"])
def test_a_template_that_does_not_write_each_image_once_is_refused(rendered: str) -> None:
    marked = take_media(chat(image()), IMAGES)
    with pytest.raises(InvalidRequestError, match="does not write each image"):
        marked.split(rendered.format(marked.messages[1]["content"]))


def test_content_without_images_stays_as_it_was() -> None:
    messages = chat(text("a"), text("b"))
    assert take_media(messages, IMAGES).messages == messages


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image(head="https://example.org/"), "fetches none from elsewhere"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,AAAA"}}, "fetches none from elsewhere"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "is not base64"),
        ({"type": "image_url", "image_url": {}}, "must be text"),
        (image(b"<svg/>"), "no PNG, JPEG, WebP or GIF"),
        (image(b"\x89PNG\r\n\x1a\n" + bytes(MEDIA_BYTES_MAX)), f"at most {MEDIA_BYTES_MAX} bytes"),
    ],
)
def test_a_file_that_is_no_image_is_refused(part: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        take_media(chat(text("a"), part), IMAGES)
    assert caught.value.param == "messages[1].content[1].image_url"


def test_unknown_parts_and_too_many_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="only parts of type text, image_url, input_audio and video_url"):
        take_media(chat(image(), {"type": "input_smell"}), IMAGES)
    take_media(chat(*[image()] * MEDIA_PER_REQUEST_MAX), IMAGES)
    with pytest.raises(InvalidRequestError, match=f"at most {MEDIA_PER_REQUEST_MAX} images"):
        take_media(chat(*[image()] * (MEDIA_PER_REQUEST_MAX + 1)), IMAGES)
