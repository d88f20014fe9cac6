"""Images, audio and videos of requests: counted, encoded in a child process, put into prompts. Fair between clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence

from relayline.coordinator.http.workers.fair_line import Ticket
from relayline.coordinator.http.workers.turns import Turns
from relayline.coordinator.media.encoded import Encoded, EncodedMedia, Filled, n_tokens_of, put_in
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.fetching import Fetcher, LookUp
from relayline.coordinator.media.parts import AUDIO, VIDEO, MediaFile
from relayline.coordinator.media.segments import Segment, n_rows_in
from relayline.coordinator.sessions.media_record import FileRecord, MediaRecord
from relayline.wire.common.bounds import MEDIA_FETCHING_MAX, MEDIA_PER_REQUEST_MAX, MEDIA_ROWS_BYTES_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, OverloadedError
from relayline.wire.common.units import bytes_text
from relayline.wire.telemetry import names


class Media:
    """Images, audio and videos of one application. Event loop only; encoding runs elsewhere, one file at a time."""

    per_request_max = MEDIA_PER_REQUEST_MAX

    def __init__(self, encoder: Encoder, hosts: Sequence[str] = ()) -> None:
        """The encoder has been started. `hosts`: from which files may be fetched, see `Fetcher`."""
        self.takes = encoder.takes
        self._encoder, self._row_bytes = encoder, 4 * encoder.n_embd
        self._encoded = EncodedMedia()
        self._turns = Turns(1)
        self._fetcher = Fetcher(hosts)
        self._fetching = Turns(MEDIA_FETCHING_MAX)
        self._tasks: set[asyncio.Task[Encoded | None]] = set()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "media")

    async def count(self, client: str, media: Sequence[MediaFile]) -> int:
        """Return how many tokens of a prompt some files take. Raises InvalidRequestError."""
        seen = [_record_of(file) for file in media]
        async with self._here(client, media, seen) as files:
            return sum(map(n_tokens_of, await self._layouts(client, files, seen)))

    async def fill(
        self,
        client: str,
        tokens: Sequence[int],
        media: Sequence[MediaFile],
        ctx_tokens: int,
        record: MediaRecord | None = None,
    ) -> Filled:
        """Return a prompt with its media in it; see `put_in` for the places of these. `record` gets its files.

        Raises ContextLengthError before anything is encoded where it cannot fit, InvalidRequestError for a file that
        cannot be read, OverloadedError where requests hold too many, InternalError where encoding fails.
        """
        seen = [_record_of(file) for file in media]
        if record is not None:
            record.files = seen
        async with self._here(client, media, seen) as files:
            layouts = await self._layouts(client, files, seen)
            n_tokens = len(tokens) - len(files) + sum(map(n_tokens_of, layouts))
            if n_tokens > ctx_tokens:
                raise ContextLengthError.of_prompt(ctx_tokens, f"{n_tokens} tokens", "messages")
            self._check_rows(layouts)
            encoded = [await self._one(client, *each) for each in zip(files, seen, strict=True)]
        return put_in(tokens, encoded)

    async def close(self) -> None:
        """End the process that encodes, and connections to other hosts."""
        self._encoder.close()
        self._fetcher.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def _here(
        self, client: str, media: Sequence[MediaFile], seen: Sequence[FileRecord]
    ) -> AsyncIterator[Sequence[MediaFile]]:
        """Give files that are here. Those that have an address are fetched, and only some requests hold such files."""
        if not any(file.address for file in media):
            yield media
            return
        ticket = await self._fetching.enter(client, 0)
        look_ups: set[LookUp] = set()
        try:
            yield await self._fetcher.all_here(media, look_ups, seen)
        finally:
            self._leave(ticket, [each for each in look_ups if not each.done()])

    def _leave(self, ticket: Ticket, look_ups: list[LookUp]) -> None:
        """Give a place back once the look-ups that a request began are over: so one client cannot pile them up."""
        if not look_ups:
            self._fetching.leave(ticket)
            return
        look_ups.pop().add_done_callback(lambda _: self._leave(ticket, [each for each in look_ups if not each.done()]))

    def _check_rows(self, layouts: Sequence[Sequence[Segment]]) -> None:
        """Raise InvalidRequestError where the rows of one request are more than all requests may hold."""
        n_bytes = self._row_bytes * sum(n_rows_in(each) for segments in layouts for each in segments)
        if n_bytes > MEDIA_ROWS_BYTES_MAX:
            text = f"its images, audio and videos become rows of {bytes_text(n_bytes)}, and a request has at most"
            remedy = "send fewer, or serve with a smaller --image-max-tokens or --video-max-frames"
            raise InvalidRequestError.of_field("messages", f"{text} {bytes_text(MEDIA_ROWS_BYTES_MAX)}; {remedy}")

    async def _layouts(
        self, client: str, files: Sequence[MediaFile], seen: Sequence[FileRecord]
    ) -> list[list[Segment]]:
        layouts = [await self._layout(client, *each) for each in zip(files, seen, strict=True)]
        for record, layout in zip(seen, layouts, strict=True):
            record.n_rows = sum(map(n_rows_in, layout))
        return layouts

    async def _layout(self, client: str, file: MediaFile, seen: FileRecord) -> list[Segment]:
        if (found := self._encoded.layout(self._key(file))) is not None:
            return found
        ticket = await self._turn(client, file, seen)
        if (found := self._encoded.layout(self._key(file))) is not None:  # counted for another in the meantime
            self._turns.leave(ticket)
            return found
        await self._work(ticket, file, 0, seen)
        found = self._encoded.layout(self._key(file))
        assert found is not None
        return found

    async def _one(self, client: str, file: MediaFile, seen: FileRecord) -> Encoded:
        if (found := self._encoded.get(self._key(file))) is not None:
            seen.is_kept = True
            return found
        n_rows = sum(n_rows_in(each) for each in await self._layout(client, file, seen))
        ticket = await self._turn(client, file, seen)
        try:
            found = self._encoded.get(self._key(file))  # perhaps encoded for another request in the meantime
            if found is None:
                self._encoded.check_room(n_rows * self._row_bytes)
        except OverloadedError:
            self._turns.leave(ticket)
            raise
        if found is not None:
            self._turns.leave(ticket)
            seen.is_kept = True
            return found
        encoded = await self._work(ticket, file, n_rows, seen)
        assert encoded is not None
        return encoded

    async def _turn(self, client: str, file: MediaFile, seen: FileRecord) -> Ticket:
        asked_ns = time.monotonic_ns()
        try:
            return await self._turns.enter(client, len(file.data))
        finally:
            seen.wait_ns += time.monotonic_ns() - asked_ns

    def _key(self, file: MediaFile) -> bytes:
        how = repr(self._encoder.sampling).encode() if file.kind == VIDEO else b""  # a GIF may be an image as well
        return self._encoder.identity + how + file.sha256

    async def _work(self, ticket: Ticket, file: MediaFile, rows_max: int, seen: FileRecord) -> Encoded | None:
        """Count a file, or encode it. One whose client has gone keeps its turn until it is done."""
        start_ns = time.monotonic_ns()
        task = asyncio.create_task(self._encode(ticket, file, rows_max))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except InvalidRequestError as error:
            raise InvalidRequestError.of_field(file.param, error.message) from None
        finally:
            seen.steps[names.SPAN_ENCODE if rows_max else names.SPAN_COUNT] = start_ns, time.monotonic_ns()

    async def _encode(self, ticket: Ticket, file: MediaFile, rows_max: int) -> Encoded | None:
        loop = asyncio.get_running_loop()
        try:
            encode = functools.partial(self._encoder.encode, file.data, rows_max, is_video=file.kind == VIDEO)
            segments, rows = await loop.run_in_executor(self._thread, encode)
            self._encoded.note(self._key(file), segments)
            are_mutual = self._encoder.are_mutual and file.kind != AUDIO
            return self._encoded.put(self._key(file), segments, rows, are_mutual=are_mutual) if rows_max else None
        finally:
            self._turns.leave(ticket)

    def _done(self, task: asyncio.Task[Encoded | None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps no request waits for it any more


def _record_of(file: MediaFile) -> FileRecord:
    return FileRecord(file.kind, len(file.data))
