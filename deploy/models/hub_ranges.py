"""Reads parts of the hub's files, over connections that may break and addresses that expire."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relayline.coordinator.model.origin import Origin
from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_client import explain_refusal, first_line, headers_at, is_refusal, set_up_hub
from relayline.deploy.models.hub_patience import Patience, answer_text
from relayline.deploy.models.hub_reference import HubFile
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import ModelFileError, NotReadyError
from relayline.wire.common.texts import printable
from relayline.wire.model_files.gguf_header import HEADER_BYTES_MAX, Tensor

TRIES = 5  # in a row that bring nothing, where the network breaks
GIVE_UP_S = 5.0  # without a byte: after it no further request, where each takes long to fail
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0
NO_RUN = (-1, 0)
REQUEST_BYTES_MAX = 4 << 30  # the hub's stores answer with some 50 GB at most
_ETAG = re.compile(r"(?!\.+$)[^/\x00]{1,200}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
SKIPPED_BYTES_MAX = HEADER_BYTES_MAX  # of an answer that is the whole file, where a part was asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """A file of the hub: where its bytes are now, for some minutes, and what it is."""

    url: str
    headers: Mapping[str, Any]
    size_bytes: int | None
    etag: str
    commit: str


def locate(repo: str, file: str, revision: str) -> Located:
    """Ask the hub for a file, just once.

    Raises the errors of huggingface_hub and of the network, and ModelFileError for a name of its content that cannot
    be a file's, as caches need it.
    """
    set_up_hub()
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers

    url, headers = file_download.hf_hub_url(repo, file, revision=revision or None), build_hf_headers()
    facts = file_download.get_hf_file_metadata(url, headers=headers, retry_on_errors=False)
    if facts.etag is not None and not _ETAG.fullmatch(facts.etag):
        text = f"the hub's name for its content, {printable(facts.etag, 40)!r}, cannot be used; check HF_ENDPOINT"
        raise ModelFileError(f"{HUB_SCHEME}{repo}/{file}: {text}")
    headers = headers_at(facts.location, url, headers)
    return Located(facts.location, headers, facts.size, facts.etag or "", facts.commit_hash or revision)


def bytes_between(located: Located, start: int, end: int) -> Iterator[bytes]:
    """Yield some bytes of a file, in one request.

    Raises the errors of huggingface_hub and of the network, and ModelFileError for a hub that sends whole files only.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    asked = {**located.headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    # After a break inside the with block it would begin a second one, which no with block can do.
    with http_stream_backoff(
        "GET",
        located.url,
        headers=asked,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_status_codes=(),
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        _check_part(response, start, located.size_bytes)
        n_before = 0 if response.status_code == 206 else start  # a server that knows no ranges sends all from the start
        if n_before > SKIPPED_BYTES_MAX:
            raise ModelFileError("the hub sends no parts of this file; `relayline pull` downloads all of it")
        n_left = end - start
        for piece in response.iter_bytes():
            part = piece[n_before : n_before + n_left]
            n_before -= min(n_before, len(piece))
            n_left -= len(part)
            if part:
                yield part
            if not n_left:
                return
    raise ConnectionError(f"an answer ended {n_left} bytes too early")


def _check_part(response: Any, start: int, size_bytes: int | None) -> None:
    """Raise ConnectionError for an answer that is another part, or another file: a proxy may send a page of its own."""
    if response.status_code == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        is_right = found is not None and int(found[1]) == start and found[2] in ("*", str(size_bytes))
    else:
        length = response.headers.get("Content-Length", "")
        is_right = response.status_code == 200 and (not length or length == str(size_bytes))
    if not is_right:
        raise ConnectionError("something else answers in its place; check the proxy, if there is one")


class HubWeights:
    """The weights of a hollow model. Blocks; used by one thread.

    It tries again by itself for some seconds only: the stage that fetches does the same, and tells its user. A longer
    wish of the hub to be left alone ends a reading, so that the stage can tell it, and the next one begins after it.
    """

    def __init__(self, origins: Sequence[Origin], stopped: threading.Event, patience: Patience) -> None:
        """`origins`: of the model's files, in order. Once `stopped` is set, reading ends soon."""
        self._origins, self._stopped, self._patience = origins, stopped, patience
        self._located: dict[int, Located] = {}
        self._run: Iterator[bytes] = iter(())  # the answer to the open request
        self._at = NO_RUN  # the file, and the place in it of the next byte of the run
        self._run_end = 0  # the place in the file where the run ends
        self._rest = memoryview(b"")  # what the run has given already, up to that place
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)

    def read(self, tensor: Tensor, start: int, end: int, run_end: int) -> Iterator[bytes | memoryview]:
        """Yield a tensor's bytes, see WeightSource. Raises NotReadyError where the network breaks for longer, and
        ModelFileError where the hub refuses, or has another file now.
        """
        self._patience.wait(self._stopped)
        n_fruitless, begun_s = 0, time.monotonic()
        while start < end:
            try:
                part = self._next(tensor.file_index, start, end, run_end)
            except (ModelFileError, NotReadyError):
                raise
            except Exception as error:  # of the hub's client, of HTTP, of the network
                n_fruitless += 1
                self._failed(tensor.file_index, error, n_fruitless, time.monotonic() - begun_s)
                continue
            n_fruitless = 0
            self._backoff.reset()
            yield part
            begun_s = time.monotonic()
            start += len(part)

    def _next(self, index: int, start: int, end: int, run_end: int) -> memoryview:
        """Return the next bytes, at least one, of the request that is open or of a new one."""
        if self._stopped.is_set():
            raise NotReadyError("the fetch has ended")
        gap = start - (self._at[1] - len(self._rest))
        if index != self._at[0] or gap < 0 or start >= self._run_end or not self._skip(gap):
            if self._patience.left_s() > RETRY_MAX_S:  # another reading was asked for it
                raise NotReadyError(f"{_named(self._origins[index])}: {self._patience.why}")
            self._patience.wait(self._stopped)
            self._run_end = min(run_end, start + REQUEST_BYTES_MAX)
            self._run = bytes_between(self._where(index), start, self._run_end)
            self._at, self._rest = (index, start), memoryview(b"")
        if not self._rest:
            self._more()
        part, self._rest = self._rest[: end - start], self._rest[end - start :]
        return part

    def _more(self) -> None:
        try:
            self._rest = memoryview(next(self._run))
        except StopIteration:
            raise ConnectionError("an answer ended too early") from None
        self._at = (self._at[0], self._at[1] + len(self._rest))

    def _skip(self, n_bytes: int) -> bool:
        """Pass over some bytes; False where the open request does not reach so far."""
        while n_bytes > len(self._rest):
            n_bytes -= len(self._rest)
            try:
                self._more()
            except Exception:  # of HTTP, of the network: a new request tells
                return False
        self._rest = self._rest[n_bytes:]
        return True

    def _where(self, index: int) -> Located:
        if index not in self._located:
            origin = self._origins[index]
            located = locate(origin.repo, origin.file, origin.commit)
            if (located.etag, located.size_bytes) != (origin.etag, origin.size_bytes):
                raise ModelFileError(f"{_named(origin)}: the hub has another file there now; start the pipeline again")
            self._located[index] = located
        return self._located[index]

    def _failed(self, index: int, error: Exception, n_fruitless: int, fruitless_s: float) -> None:
        """Wait before the next request; raises where no further one is to be made."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        self._at, self._rest, self._run = NO_RUN, memoryview(b""), iter(())
        was_located = self._located.pop(index, None) is not None  # its address may have expired
        origin = self._origins[index]
        is_final = is_refusal(error) and not (was_located and n_fruitless == 1)
        if is_final or isinstance(error, OfflineModeIsEnabled):
            explain_refusal(HubFile(origin.repo, origin.file), origin.file, origin.commit, error)
        asked_s, wait_s = self._patience.heed(error), self._backoff.next_s()
        if asked_s > RETRY_MAX_S or n_fruitless >= TRIES or fruitless_s >= GIVE_UP_S:
            raise NotReadyError(f"{_named(origin)}: {_said(error)}") from error
        self._stopped.wait(max(asked_s, wait_s))


def _said(error: Exception) -> str:
    """Return what keeps the hub from sending, in few words."""
    return answer_text(error) or f"the hub cannot be reached: {first_line(error)}"


def _named(origin: Origin) -> str:
    return f"{HUB_SCHEME}{origin.repo}/{origin.file}"
