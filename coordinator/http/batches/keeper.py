"""Keeps the files and batches of a coordinator: starts a process for each batch that runs, and knows how it goes.

The processes ask this coordinator's own API, over a Unix socket that nobody else may open. So a batch's request is one
like any other, but for its tenant: a line of its own for each key's batches, below all other requests, with at most so
many lanes. Its tokens are the key's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from relayline.coordinator.batches.asking import streams_for
from relayline.coordinator.batches.message_lines import CANCELLED, EXPIRED, FAILED
from relayline.coordinator.batches.store import BatchStore, Problem, Status, StoredBatch, StoredFile
from relayline.coordinator.batches.worker import Order, Told
from relayline.coordinator.http.batches.room import keep_new
from relayline.coordinator.http.edge.clients import BATCH, CLIENT, PAYER, TENANT, Payer
from relayline.coordinator.http.edge.inside import Inside
from relayline.coordinator.sessions.generation import Generator
from relayline.coordinator.sessions.tenants import Level, Tenant
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.tasks import set_within
from relayline.wire.common.texts import file_error_text
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.batches")

BATCH_HEADER = "x-relayline-batch"
LINE_NAME = "(batch)"  # of a key's batches among the tenants, before the key's name
LOOK_S = 1.0  # between two looks whether the pipeline is ready, while batches wait for it
SWEEP_S = 60.0  # between two looks for what has expired
ENDINGS_MAX = 4  # batches that are ended without a place among those that run
DEATHS_MAX = 5  # of the process of one batch, in a row without an answer
DEATH_PAUSE_S = 2.0
MARKS_MAX = 2  # tries to name what was not asked: the first one ends early where the batch is cancelled meanwhile
TOLD_BYTES_MAX = 1 << 20
_MARKS: dict[Status, str] = {"expired": EXPIRED, "cancelled": CANCELLED, "failed": FAILED}
_WORKER = "relayline.coordinator.batches.worker"

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Work:
    """One batch that is worked on."""

    task: asyncio.Task[None] | None = None
    stop: Callable[[], None] = lambda: None
    """Ends its process in order."""


class Keeper:
    """The files and batches of one coordinator."""

    def __init__(self, store: BatchStore, serving: ServingSettings, generator: Generator, inside: Inside) -> None:
        self.store, self.limits = store, serving
        self._generator, self._inside = generator, inside
        self._io = ThreadPoolExecutor(1, "batches")
        self._working: dict[str, _Work] = {}
        self._changed = asyncio.Event()
        self._socket = Path()
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._turns: dict[str, int] = {}  # by owner, of those that have batches: when one of theirs began last
        self._swept_s = -SWEEP_S

    # --- what the routes use ------------------------------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run one of the store's calls, after those that were asked for before. Raises NotReadyError once it is closed:
        the API answers for longer, until its running requests have ended.
        """
        if self._is_closed:
            raise NotReadyError("the coordinator ends, and the next one has its files and batches")
        return await asyncio.get_running_loop().run_in_executor(self._io, function, *arguments)

    async def begin(self, batch: StoredBatch, file: StoredFile | None = None) -> None:
        """Keep a new batch, and work on it when its turn comes. Raises InvalidRequestError where there is no place.

        `file`: of its requests, where that is not kept yet.
        """
        await self.call(keep_new, self.store, self.limits, batch, file)
        self._changed.set()

    async def cancel(self, batch: StoredBatch) -> None:
        """Begin to cancel a batch that is not ended; it is cancelled once its requests are."""
        try:
            if batch.ending is None:
                await self._move(batch, "cancelling")
        finally:
            work = self._working.get(batch.id)
            if work is not None:
                work.stop()
            self._changed.set()

    def user_of(self, file: StoredFile) -> str:
        """Return the id of a batch that still needs a file, empty for none."""
        unended = list(self.store.unended.values())
        return next((batch.id for batch in unended if batch.input_id == file.id and not batch.is_ending), "")

    async def drop_unkept(self, file_id: str) -> None:
        """Take away what was received under an id that was not kept; done even if the caller is cancelled."""
        with contextlib.suppress(OSError, NotReadyError):  # it goes at the next start
            await asyncio.shield(asyncio.ensure_future(self.call(self.store.drop_unkept, file_id)))

    def figures(self) -> dict[str, int]:
        """Return the counts for GET /v1/pipeline: batches by their state, and requests of those that are not ended."""
        unended = list(self.store.unended.values())
        n_done = sum(batch.n_answered + batch.n_failed for batch in unended)
        return {
            "running": len(self._working),
            "waiting": sum(batch.id not in self._working for batch in unended),
            "ended": len(self.store.batches) - len(unended),
            "requests_waiting": sum(batch.n_requests for batch in unended) - n_done,
            "requests_done": n_done,
            "requests_failed": sum(batch.n_failed for batch in unended),
            "files": len(self.store.files),
            "file_bytes": self.store.n_bytes,
        }

    # --- the door for its own requests --------------------------------------------------------------------------------

    def let_in(self, request: web.Request, batch_id: str) -> None:
        """Mark a request of a batch with whom it is for."""
        batch = self.store.batches.get(batch_id)
        if batch is None or batch.is_ended:
            return
        request[PAYER] = Payer(batch.payer, batch.behalf)
        request[CLIENT], request[BATCH] = batch.client, batch.id
        name = f"{LINE_NAME} {batch.owner}".rstrip()
        n_lanes = self._lanes_of_each()
        request[TENANT] = Tenant(name, streams_max=n_lanes, level=Level.BATCH, models=frozenset(batch.models))

    def _lanes_of_each(self) -> int:
        """Return the lanes that the batches of one owner may have now."""
        return max(1, self._lanes() // max(1, len(self._n_running())))

    def _lanes(self) -> int:
        """Return the lanes that all batches together may have."""
        n_all = len(self._generator.slots())
        return max(1, min(n_all, self.limits.batch_lanes) if self.limits.batch_lanes else n_all - 1)

    def _n_running(self) -> Counter[str]:
        """Return the owners of the batches that are worked on, each with how many these are."""
        found = (self.store.batches.get(batch_id) for batch_id in self._working)
        return Counter(batch.owner for batch in found if batch is not None)

    # --- the work -----------------------------------------------------------------------------------------------------

    def start(self, socket: Path) -> None:
        """Begin with what is not ended. `socket`: of this API, which only this user may open."""
        self._socket = socket
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End all processes; what they have not done is done after the next start."""
        for task in (self._running, *[work.task for work in self._working.values()]):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._running, self._is_closed = None, True
        self._io.shutdown()
        self.store.close()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._forget_expired()
                while (batch := self._next()) is not None:
                    work = self._working[batch.id] = _Work()
                    self._turns[batch.owner] = max(self._turns.values(), default=0) + 1
                    work.task = asyncio.create_task(self._attend(batch, work))
            except Exception:
                log.exception("batches that wait are looked at again")
                await asyncio.sleep(SWEEP_S)
                continue
            is_held = any(batch_id not in self._working for batch_id in list(self.store.unended))
            await set_within(self._changed, LOOK_S if is_held else SWEEP_S)

    def _next(self) -> StoredBatch | None:
        """Return the batch to begin with now: of the owner with the fewest running, who has waited longest for one."""
        unended = list(self.store.unended.values())
        owners = {batch.owner for batch in unended}
        self._turns = {owner: turn for owner, turn in self._turns.items() if owner in owners}
        n_running, n_places = self._n_running(), self.limits.batches - len(self._working)
        if n_places <= -ENDINGS_MAX:
            return None
        waiting = [
            batch
            for batch in unended
            if batch.id not in self._working
            and (_needs_only_its_end(batch) or (n_places > 0 and self._may_begin(batch, n_running)))
        ]
        return min(waiting, key=lambda each: (n_running[each.owner], self._turns.get(each.owner, 0)), default=None)

    def _may_begin(self, batch: StoredBatch, n_running: Counter[str]) -> bool:
        """Return whether there are lanes for it."""
        has_lane = batch.owner in n_running or len(n_running) < self._lanes()
        return has_lane and self._generator.phase.takes_requests

    async def _forget_expired(self) -> None:
        now_s = time.time()
        if time.monotonic() - self._swept_s < SWEEP_S:
            return
        self._swept_s = time.monotonic()
        for file in list(self.store.files.values()):
            if file.expires_at is None or file.expires_at > now_s or self.user_of(file):
                continue
            try:
                await self.call(self.store.delete_file, file.id)
            except OSError as error:
                text = "%s has expired and cannot be deleted, which is tried again: %s"
                log.warning(text, file.id, file_error_text(error))

    async def _attend(self, batch: StoredBatch, work: _Work) -> None:
        """Bring one batch to its end."""
        try:
            await self._finish(batch, batch.ending or await self._end_of(batch, work))
        except OSError as error:  # of the store, as of a full disk
            log.warning("%s is tried again: %s", batch.id, file_error_text(error))
            await asyncio.sleep(SWEEP_S)
        except Exception:
            log.exception("%s is tried again", batch.id)
            await asyncio.sleep(SWEEP_S)
        finally:
            del self._working[batch.id]
            self._changed.set()

    async def _end_of(self, batch: StoredBatch, work: _Work) -> Status:
        """Work on a batch until it needs no more than to be finished; returns how it ends.

        Requests that were not asked get a line that says why. Of OpenAI's batches only those have one that expired.
        """
        status: Status = "cancelled"
        if batch.status != "cancelling":
            try:
                async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                    status = await self._asked(batch, work)
            except TimeoutError:
                status = "expired"
        mark = _MARKS.get(status, "")
        if mark and (batch.form == "messages" or status == "expired"):
            for _ in range(MARKS_MAX):
                if await self._told(batch, work, mark) is not None:
                    break
        return status

    async def _asked(self, batch: StoredBatch, work: _Work) -> Status:
        n_deaths = 0
        while True:
            n_before = batch.n_answered + batch.n_failed
            told = await self._told(batch, work)
            if batch.status == "cancelling":
                return "cancelled"
            if told is not None and told.problems is not None:
                batch.problems = [Problem("invalid_line", text, line or None) for line, text in told.problems]
                return "failed"
            if told is not None and told.ended is not None:
                batch.problems = [Problem("batch_failed", told.ended)] if told.ended else []
                return "failed" if told.ended else "completed"
            n_deaths = 1 if batch.n_answered + batch.n_failed > n_before else n_deaths + 1
            log.warning("the process of %s has died", batch.id)
            if n_deaths >= DEATHS_MAX:
                batch.problems = [Problem("batch_failed", f"the process that worked on it has died {n_deaths} times")]
                return "failed"
            await asyncio.sleep(DEATH_PAUSE_S)

    async def _told(self, batch: StoredBatch, work: _Work, mark: str = "") -> Told | None:
        """Let a process work on a batch; returns its last word, None if it died before that."""
        last: Told | None = None
        process = await asyncio.create_subprocess_exec(
            *module_command(_WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=TOLD_BYTES_MAX,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        work.stop = process.stdin.close
        try:
            process.stdin.write(msgspec.json.encode(self._order(batch, mark)) + b"\n")
            if batch.status == "cancelling" and not mark:  # meanwhile
                return None
            async for line in process.stdout:
                last = msgspec.json.decode(line, type=Told)
                await self._note(batch, last)
            await process.wait()
        finally:
            work.stop = lambda: None
            process.stdin.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        is_last = last is not None and (last.ended is not None or last.problems is not None)
        return last if is_last else None

    def _order(self, batch: StoredBatch, mark: str) -> Order:
        answers, errors = self.store.work_paths(batch)
        return Order(
            input=str(self.store.path_of(batch.input_id)),
            output=str(answers),
            errors=str(errors),
            url=batch.endpoint,
            socket=str(self._socket),
            headers=self._inside.headers(BATCH_HEADER, batch.id),
            n_streams=streams_for(self._lanes_of_each()),
            n_max=self.limits.batch_requests,
            wait_s=max(1.0, batch.expires_at - batch.created_at),
            mark=mark,
        )

    async def _note(self, batch: StoredBatch, told: Told) -> None:
        batch.n_answered = batch.n_answered if told.answered is None else told.answered
        batch.n_failed = batch.n_failed if told.failed is None else told.failed
        if told.total is not None:
            batch.n_requests = told.total
            if batch.status == "validating":
                await self._move(batch, "in_progress")

    async def _finish(self, batch: StoredBatch, status: Status) -> None:
        """Make its files. `ending` is on the disk before: a work file that has moved must not look like none."""
        batch.ending = status
        await self._move(batch, "finalizing" if status == "completed" else batch.status)
        await self.call(self.store.publish, batch, int(time.time()))
        if batch.form == "messages":  # its client knows no files
            with contextlib.suppress(OSError):  # it goes with the batch
                await self.call(self.store.delete_file, batch.input_id)
        await self._move(batch, status)
        log.info("%s: %s, %d answered, %d failed", batch.id, status, batch.n_answered, batch.n_failed)

    async def _move(self, batch: StoredBatch, status: Status) -> None:
        batch.status = status
        batch.moments.setdefault(status, int(time.time()))
        await self.call(self.store.keep_batch, batch)


def _needs_only_its_end(batch: StoredBatch) -> bool:
    """Return whether no request of a batch is asked any more, so that it needs no lane and no place."""
    return batch.is_ending or batch.expires_at <= time.time()
