"""The images of requests: counted, encoded in a child process, and put into prompts. Fair between clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence

from relayline.coordinator.http.workers.fair_line import FairLine, Ticket
from relayline.coordinator.images.encoded import Encoded, EncodedImages, Filled, n_tokens_of, put_in
from relayline.coordinator.images.encoder import Encoder
from relayline.coordinator.images.parts import Picture
from relayline.coordinator.images.segments import Segment, n_rows_in
from relayline.wire.common.bounds import IMAGES_PER_REQUEST_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, OverloadedError


class Images:
    """The images of one application. Event loop only; encoding itself runs elsewhere, one image at a time."""

    per_request_max = IMAGES_PER_REQUEST_MAX

    def __init__(self, encoder: Encoder) -> None:
        """The encoder has been started."""
        self._encoder, self._row_bytes = encoder, 4 * encoder.n_embd
        self._encoded = EncodedImages()
        self._line = FairLine(1)
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Encoded | None]] = set()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "images")

    async def count(self, client: str, pictures: Sequence[Picture]) -> int:
        """Return how many tokens of a prompt some images take. Raises InvalidRequestError."""
        return sum([n_tokens_of(await self._layout(client, picture)) for picture in pictures])

    async def fill(self, client: str, tokens: Sequence[int], pictures: Sequence[Picture], ctx_tokens: int) -> Filled:
        """Return a prompt with its images in it; see `put_in` for the places of these.

        Raises ContextLengthError before anything is encoded where it cannot fit, InvalidRequestError for an image that
        cannot be read, OverloadedError where requests hold too many, InternalError where encoding fails.
        """
        n_tokens = len(tokens) - len(pictures) + await self.count(client, pictures)
        if n_tokens > ctx_tokens:
            raise ContextLengthError.of_prompt(ctx_tokens, f"{n_tokens} tokens", "messages")
        encoded = [await self._image(client, picture) for picture in pictures]
        return put_in(tokens, encoded, are_mutual=self._encoder.are_mutual)

    async def close(self) -> None:
        """End the process that encodes."""
        self._encoder.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _layout(self, client: str, picture: Picture) -> list[Segment]:
        if (found := self._encoded.layout(self._key(picture))) is not None:
            return found
        ticket = await self._turn(client, picture)
        if (found := self._encoded.layout(self._key(picture))) is not None:  # counted for another in the meantime
            self._leave(ticket)
            return found
        await self._work(ticket, picture, 0)
        found = self._encoded.layout(self._key(picture))
        assert found is not None
        return found

    async def _image(self, client: str, picture: Picture) -> Encoded:
        if (found := self._encoded.get(self._key(picture))) is not None:
            return found
        n_rows = sum(n_rows_in(each) for each in await self._layout(client, picture))
        ticket = await self._turn(client, picture)
        try:
            found = self._encoded.get(self._key(picture))  # perhaps encoded for another request in the meantime
            if found is None:
                self._encoded.check_room(n_rows * self._row_bytes)
        except OverloadedError:
            self._leave(ticket)
            raise
        if found is not None:
            self._leave(ticket)
            return found
        encoded = await self._work(ticket, picture, n_rows)
        assert encoded is not None
        return encoded

    def _key(self, picture: Picture) -> bytes:
        return self._encoder.identity + picture.sha256

    async def _turn(self, client: str, picture: Picture) -> Ticket:
        """Wait for the turn of an image, in a line that is fair between clients."""
        ticket = self._line.enter(client, len(picture.data))
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._begin()
        try:
            await turn
        except BaseException:
            self._leave(ticket)
            raise
        return ticket

    async def _work(self, ticket: Ticket, picture: Picture, rows_max: int) -> Encoded | None:
        """Count an image, or encode it. One whose client has gone keeps its turn until it is done."""
        task = asyncio.create_task(self._encode(ticket, picture, rows_max))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except InvalidRequestError as error:
            raise InvalidRequestError.of_field(picture.param, error.message) from None

    async def _encode(self, ticket: Ticket, picture: Picture, rows_max: int) -> Encoded | None:
        loop = asyncio.get_running_loop()
        try:
            segments, rows = await loop.run_in_executor(self._thread, self._encoder.encode, picture.data, rows_max)
            self._encoded.note(self._key(picture), segments)
            return self._encoded.put(self._key(picture), segments, rows) if rows_max else None
        finally:
            self._leave(ticket)

    def _begin(self) -> None:
        for ticket in self._line.begin():
            turn = self._turns[ticket]
            if not turn.done():  # one that was cancelled is about to leave
                turn.set_result(None)

    def _leave(self, ticket: Ticket) -> None:
        del self._turns[ticket]
        self._line.leave(ticket)
        self._begin()

    def _done(self, task: asyncio.Task[Encoded | None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps no request waits for it any more
