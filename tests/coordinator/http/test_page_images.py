"""Images in the page's chat, in a real browser: chosen by keyboard, pasted, dropped, removed, sent, scaled down."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relayline.coordinator.media.encoder import Encoder, Segment
from relayline.coordinator.media.parts import Takes
from relayline.coordinator.media.projector import pixels_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import MEDIA_PER_REQUEST_MAX
from tests.support.browser import Tab, browsing, chromium
from tests.support.page_support import served
from tests.support.tiny_audio import sound
from tests.support.tiny_videos import needs_video, video

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]
SENT_BYTES_MAX = 512 * 1024
IMAGES = Takes(images=True)
N_SHOWN = "document.querySelectorAll('.attached img').length"
BUTTON = "[...document.querySelectorAll('.compose button')].find((b) => b.textContent === 'Attach image')"


class Seeing(Encoder):
    """Two rows of each image; remembers the files."""

    def __init__(self, takes: Takes = IMAGES) -> None:
        self.n_embd, self.identity, self.are_mutual = 4, b"seeing", False
        self.takes = takes
        self.files: list[bytes] = []

    def encode(
        self, data: bytes, rows_max: int, *, is_video: bool = False
    ) -> tuple[list[Segment], np.ndarray[Any, Any]]:
        if rows_max:
            self.files.append(data)
        return [2], np.zeros((2 if rows_max else 0, 4), np.float32)

    def close(self) -> None:
        """There is nothing to end."""


def noise(width: int, height: int, kind: str = "PNG") -> bytes:
    """Return an image that compresses badly in every format."""
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    found = io.BytesIO()
    Image.fromarray(pixels).save(found, kind)
    return found.getvalue()


async def give(tab: Tab, event: str, *files: tuple[str, bytes]) -> None:
    """Paste or drop files."""
    given = json.dumps([[name, base64.b64encode(data).decode()] for name, data in files])
    kind, data = ("ClipboardEvent", "clipboardData") if event == "paste" else ("DragEvent", "dataTransfer")
    await tab.value(f"""(() => {{
      const data = new DataTransfer();
      for (const [name, text] of {given}) {{
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        const type = {{ txt: "text/plain", wav: "audio/wav", ebm: "video/webm" }}[name.slice(-3)] || "image/png";
        data.items.add(new File([bytes], name, {{ type }}));
      }}
      document.querySelector(".compose textarea").dispatchEvent(
        new {kind}({event!r}, {{ {data}: data, bubbles: true, cancelable: true }}));
    }})()""")


async def send(tab: Tab, text: str, n_turns: int) -> None:
    await tab.value(f"""(() => {{
      document.querySelector(".compose textarea").value = {text!r};
      document.querySelector(".compose").requestSubmit();
    }})()""")
    shown = f"document.querySelectorAll('.turn').length === {n_turns}"
    await tab.until(f"{shown} && !document.querySelector('.compose [type=submit]').disabled")


async def test_a_person_attaches_images_and_asks_about_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder, first, large = Seeing(), noise(40, 30), noise(2100, 120)
    (tmp_path / "first.png").write_bytes(first)
    async with served(tokenizer, encoder=encoder) as world, browsing() as tab:
        await tab.look()
        await tab.go(f"{world.url}/#/chat")
        await tab.until(f"{BUTTON} && !{BUTTON}.hidden")
        await tab.ask("Page.setInterceptFileChooserDialog", enabled=True)
        await tab.value("document.querySelector('.compose textarea').focus()")
        await tab.press("Tab")
        assert await tab.value(f"document.activeElement === {BUTTON}"), "the keyboard reaches it"
        await tab.press("Enter")
        await tab.choose([str(tmp_path / "first.png")])
        await tab.until(f"{N_SHOWN} === 1 && document.querySelector('.attached img').naturalWidth === 40")
        await give(tab, "paste", ("pasted.png", noise(20, 20)))
        await tab.until(f"{N_SHOWN} === 2")
        await give(tab, "drop", ("large.png", large), ("notes.txt", b"not an image"))
        await tab.until(f"{N_SHOWN} === 3")
        assert (
            await tab.value("document.querySelector('.compose [role=status]').textContent") == "large.png is attached"
        )
        await tab.value("document.querySelector('[aria-label=\"Remove pasted.png\"]').click()")
        await tab.until(f"{N_SHOWN} === 2")
        await give(tab, "drop", ("broken.png", b"no image"))
        await tab.until("document.querySelector('.bad').innerText.includes('broken.png is not an image')")
        await send(tab, "what is this?", 2)
        assert await tab.value("document.querySelectorAll('.turn .seen img').length") == 2
        assert await tab.value(N_SHOWN) == 0
        await give(tab, "paste", *[(f"{at}.png", noise(8 + at, 8)) for at in range(MEDIA_PER_REQUEST_MAX)])
        await tab.until(f"document.querySelector('.bad').innerText.includes('at most {MEDIA_PER_REQUEST_MAX} images')")
        assert await tab.value(N_SHOWN) == MEDIA_PER_REQUEST_MAX - 2
        await send(tab, "", 4)
        assert tab.problems == []
    assert encoder.files[0] == first, "it fits, and is sent as it is"
    assert len(encoder.files[1]) <= SENT_BYTES_MAX < len(large)
    height, width, _ = pixels_of(encoder.files[1]).shape
    assert abs(width / height - 2100 / 120) < 0.1, "smaller, and of the same shape"
    asked = world.generator.requests
    assert [len(request.images) for request in asked] == [2, MEDIA_PER_REQUEST_MAX]
    assert len(encoder.files) == MEDIA_PER_REQUEST_MAX, "those of the turn before are not encoded again"


async def test_without_a_projector_the_page_shows_a_reason_and_no_button(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world, browsing() as tab:
        await tab.go(f"{world.url}/#/chat")
        await tab.until("document.querySelector('#phase').textContent === 'ready'")
        assert await tab.value(f"{BUTTON}.hidden")
        await give(tab, "paste", ("pasted.png", noise(8, 8)))
        await tab.until("document.querySelector('.bad').innerText.includes('served without a projector')")
        assert tab.problems == []


async def test_a_person_attaches_audio_where_the_projector_takes_it(tokenizer: Tokenizer) -> None:
    encoder, file = Seeing(Takes(audio=True)), sound(1)
    attach = "[...document.querySelectorAll('.compose button')].find((b) => b.textContent === 'Attach audio')"
    async with served(tokenizer, encoder=encoder) as world, browsing() as tab:
        await tab.go(f"{world.url}/#/chat")
        await tab.until(f"{attach} && !{attach}.hidden")
        await give(tab, "paste", ("picture.png", noise(8, 8)))
        await tab.until("document.querySelector('.bad').innerText.includes('takes no images')")
        await give(tab, "drop", ("said.wav", file))
        await tab.until("document.querySelectorAll('.attached audio').length === 1")
        await tab.until("document.querySelector('.attached audio').readyState > 0")
        await send(tab, "what is said?", 2)
        assert await tab.value("document.querySelectorAll('.turn .seen audio').length") == 1
        assert tab.problems == []
    assert encoder.files == [file]
    assert [len(request.images) for request in world.generator.requests] == [1]


@needs_video
async def test_a_person_attaches_a_video_where_images_are_taken(tokenizer: Tokenizer) -> None:
    encoder, file = Seeing(Takes(images=True, video=True)), video(1, container="webm", coding="libvpx")
    attach = "[...document.querySelectorAll('.compose button')].find((b) => b.textContent === 'Attach image or video')"
    async with served(tokenizer, encoder=encoder) as world, browsing() as tab:
        await tab.go(f"{world.url}/#/chat")
        await tab.until(f"{attach} && !{attach}.hidden")
        await give(tab, "drop", ("moves.webm", file))
        await tab.until("document.querySelectorAll('.attached video').length === 1")
        await send(tab, "what moves?", 2)
        assert await tab.value("document.querySelectorAll('.turn .seen video').length") == 1
        assert tab.problems == []
    assert encoder.files == [file]
