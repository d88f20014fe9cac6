"""Images in the messages of a chat: extracted, replaced by a marker, or refused in one line."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from relayline.coordinator.images.parts import take_images
from relayline.wire.common.bounds import IMAGE_BYTES_MAX, IMAGES_PER_REQUEST_MAX
from relayline.wire.common.errors import InvalidRequestError

PNG = b"\x89PNG\r\n\x1a\n and more"


def image(data: bytes = PNG, head: str = "data:image/png;base64,") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": head + base64.b64encode(data).decode()}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]


def test_images_leave_marks_and_texts_alone_are_parted_by_lines() -> None:
    marked = take_images(chat(text("a"), text("b"), image(), text("c"), image(PNG + b"2"), image(PNG)))
    content = marked.messages[1]["content"]
    assert marked.shown(content) == "a\nb<__media__>c<__media__><__media__>"
    assert marked.split(content) == (["a\nb", "c", "", ""], [0, 1, 2])
    assert [each.data for each in marked.pictures] == [PNG, PNG + b"2", PNG]
    assert marked.pictures[1].sha256 == hashlib.sha256(PNG + b"2").digest()
    assert marked.pictures[1].param == "messages[1].content[4].image_url"
    assert marked.messages[0] == {"role": "system", "content": "s"}


def test_nobody_can_write_a_mark() -> None:
    first, second = (take_images(chat(text("x"), image())) for _ in range(2))
    assert first.mark != second.mark
    forged = take_images(chat(text(f"<{first.mark}-0>"), image()))
    assert forged.split(forged.messages[1]["content"])[0] == [f"<{first.mark}-0>", ""]


@pytest.mark.parametrize("rendered", ["", "{0}{0}"], ids=["left out", "twice"])
def test_a_template_that_does_not_write_each_image_once_is_refused(rendered: str) -> None:
    marked = take_images(chat(image()))
    with pytest.raises(InvalidRequestError, match="does not write each image"):
        marked.split(rendered.format(marked.messages[1]["content"]))


def test_content_without_images_stays_as_it_was() -> None:
    messages = chat(text("a"), text("b"))
    assert take_images(messages).messages == messages


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image(head="https://example.org/"), "fetches none from elsewhere"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,AAAA"}}, "fetches none from elsewhere"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "is not base64"),
        ({"type": "image_url", "image_url": {}}, "must be text"),
        (image(b"<svg/>"), "no PNG, JPEG, WebP or GIF"),
        (image(b"\x89PNG\r\n\x1a\n" + bytes(IMAGE_BYTES_MAX)), f"at most {IMAGE_BYTES_MAX} bytes"),
    ],
)
def test_a_file_that_is_no_image_is_refused(part: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        take_images(chat(text("a"), part))
    assert caught.value.param == "messages[1].content[1].image_url"


def test_unknown_parts_and_too_many_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="only parts of type text and image_url"):
        take_images(chat(image(), {"type": "input_audio"}))
    take_images(chat(*[image()] * IMAGES_PER_REQUEST_MAX))
    with pytest.raises(InvalidRequestError, match=f"at most {IMAGES_PER_REQUEST_MAX} images"):
        take_images(chat(*[image()] * (IMAGES_PER_REQUEST_MAX + 1)))
