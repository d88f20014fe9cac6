"""Gets this stage's artifact onto this machine: seen on a shared path, found in the cache, or fetched.

A fetch resumes where the last attempt ended, whatever ended it. Attempts without a single byte, and downloads of
damaged files, are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple, Protocol

from relayline.stage.engine.loading import Load
from relayline.stage.joining.artifact_store import Slot, Writer, has_content, shared_path
from relayline.stage.joining.held_layers import HeldLayers
from relayline.stage.joining.replaced import remove_replaced
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import ArtifactError, RelaylineError, StageLostError
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")

FRUITLESS_ATTEMPTS_MAX = 8  # fetches in a row that brought nothing
DAMAGED_MAX = 3  # whole artifacts whose sha256 was wrong
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0
LOCK_LOOK_S = 0.5  # between looks whether another process has finished with the same artifact
REPORT_EVERY_S = 0.5  # progress to the coordinator
LOG_EVERY_S = 5.0  # progress on stderr


class Source(Protocol):
    """The one that needs an artifact and can fetch it: a membership, or one that is to have other layers."""

    peer: str
    lost: asyncio.Future[RelaylineError]

    @property
    def order(self) -> pb.JoinResponse:
        """The order that names the artifact."""

    def fetch(self, offset: int, sha256: str = "", end: int = 0) -> AsyncGenerator[pb.FetchResponse, None]:
        """Yield its bytes from one offset up to another, or up to 0: to the end; older coordinators send more.

        `sha256` names another file than the artifact.
        """

    async def report_progress(
        self, phase: pb.ArtifactPhase, done_bytes: int, total_bytes: int, trouble: str = ""
    ) -> None:
        """Say how far it is, and why it does not get on."""


class Files(NamedTuple):
    """The files of an order, on this machine."""

    artifact: Path
    """With pipeline.json next to it."""
    adapters: tuple[Adapter, ...] = ()
    """Of LoRA."""
    drafter: Path | None = None
    """An EAGLE-3 model, for the last stage."""


NO_FILES = Files(Path())  # before they are here


async def obtain(member: Source, cache: Path, load: Load, *, always_fetch: bool) -> Files:
    """Return the files of the member's order, complete and checked.

    Raises ArtifactError if it keeps arriving damaged or the coordinator has none, and StartError if the disk cannot
    take it. Raises ProtocolError for an order that names no artifact. If the coordinator is lost while bytes are
    missing, its loss is raised. Raises LoadStoppedError if the load is stopped while a file is read.
    """
    artifact = await _artifact(member, cache, load, always_fetch=always_fetch)
    adapters = [await _adapter(member, each, cache, load, always_fetch=always_fetch) for each in member.order.adapters]
    drafter = member.order.drafter
    path = await _whole(member, drafter.file, cache, load, always_fetch=always_fetch) if drafter.file.file else None
    return Files(artifact, tuple(adapters), path)


async def _artifact(member: Source, cache: Path, load: Load, *, always_fetch: bool) -> Path:
    artifact = member.order.artifact
    slot = Slot(cache, artifact)
    if not always_fetch:
        path = await asyncio.to_thread(shared_path, artifact, load)
        if path is not None:
            log.info("using the coordinator's own file of the artifact", extra={"fields": {"path": path}})
            return path
    pipeline_json = member.order.pipeline_json
    for_move = member.order.change.step == pb.LAYER_CHANGE_STEP_PREPARE
    await asyncio.to_thread(slot.prepare, pipeline_json, for_move=for_move)
    if for_move and not await asyncio.to_thread(slot.has_room):
        await asyncio.to_thread(remove_replaced, slot)  # else later, since layers may be copied from them
    await _fill(member, slot, load, held=await asyncio.to_thread(HeldLayers, cache, slot))
    if for_move:
        await asyncio.to_thread(slot.prepare, pipeline_json)  # to fetch it may have taken long
        await asyncio.to_thread(remove_replaced, slot)
    return slot.path


async def _adapter(member: Source, order: pb.AdapterFile, cache: Path, load: Load, *, always_fetch: bool) -> Adapter:
    path = await _whole(member, order.file, cache, load, always_fetch=always_fetch)
    return Adapter(order.name, path, order.scale, order.file.sha256, order.file.size_bytes)


async def _whole(member: Source, file: pb.ArtifactFile, cache: Path, load: Load, *, always_fetch: bool) -> Path:
    """Return the path of a file that is no artifact, complete and checked."""
    slot, path = Slot(cache, file), Path(file.path)
    if always_fetch or not file.path or not await asyncio.to_thread(has_content, path, file, load):
        await asyncio.to_thread(slot.prepare)
        await _fill(member, slot, load, file.sha256)
        path = slot.path
    return path


async def _fill(member: Source, slot: Slot, load: Load, sha256: str = "", held: HeldLayers | None = None) -> None:
    """Have a file in its slot, complete and checked; `sha256`: of one that is not the order's artifact.

    `held`: what of it this host has already.
    """
    with slot.using_disk():
        await _lock(slot)
    try:
        with slot.using_disk():
            is_complete = await asyncio.to_thread(slot.is_complete, load)
        if is_complete:
            log.info("artifact found in the cache", extra={"fields": {"path": slot.path}})
        else:
            slot.check_space()
            await _fetch_persistently(member, slot, load, sha256, held)
    finally:
        slot.unlock()


async def _lock(slot: Slot) -> None:
    """Take an artifact for writing. Raises OSError."""
    if not slot.try_lock():
        log.info("waiting: another process already fetches this artifact", extra={"fields": {"path": slot.path}})
        while not slot.try_lock():  # noqa: ASYNC110 - another process holds it, which no event of ours tells
            await asyncio.sleep(LOCK_LOOK_S)


async def _fetch_persistently(member: Source, slot: Slot, load: Load, sha256: str, held: HeldLayers | None) -> None:
    """Try until it is whole. The first wait is RETRY_FIRST_S, and each one more without a new byte twice the last."""
    fruitless, damaged, trouble = 0, 0, ""
    backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
    while True:
        before_bytes = slot.partial_bytes()
        try:
            await _fetch_once(_Progress(member, slot, trouble), load, sha256, held)
            return
        except ArtifactError as error:
            held = None  # perhaps what was copied is not what it should be
            damaged += 1
            if slot.partial_bytes() or damaged >= DAMAGED_MAX:
                raise  # the coordinator has no such file, or none that is whole
            log.warning("%s; fetching it again", error.message)
        except RelaylineError as error:
            fruitless = 0 if slot.partial_bytes() > before_bytes else fruitless + 1
            if not error.retryable or member.lost.done() or fruitless >= FRUITLESS_ATTEMPTS_MAX:
                raise
            if not fruitless:
                backoff.reset()
            fields = {"have_bytes": slot.partial_bytes(), "of_bytes": slot.artifact.size_bytes}
            log.warning("the fetch was interrupted and goes on: %s", error.message, extra={"fields": fields})
            trouble = error.message
            await _Progress(member, slot, trouble).report(slot.partial_bytes())
            await asyncio.sleep(backoff.next_s())


async def _fetch_once(show: _Progress, load: Load, sha256: str, held: HeldLayers | None) -> None:
    member, slot = show.member, show.slot
    with slot.using_disk():
        writer = await asyncio.to_thread(Writer, slot, load)
    show.begin(writer.n_bytes)
    log.info("fetching the artifact", extra={"fields": {"file": slot.artifact.file, "from_byte": writer.n_bytes,
                                                        "of_bytes": slot.artifact.size_bytes}})  # fmt: skip
    try:
        await show.report(writer.n_bytes)
        while writer.n_bytes < (until := slot.artifact.size_bytes):
            if held is not None and await asyncio.to_thread(_take, held, writer):
                await show.at(writer.n_bytes)
                continue
            if held is not None:
                until = held.fetch_until(writer.n_bytes)
            await _fetch_part(member, writer, until, sha256, show)
            if writer.n_bytes < until:
                raise StageLostError(f"{member.peer} ended the artifact after {writer.n_bytes} bytes")
        await asyncio.to_thread(writer.finish)
        await show.report(writer.n_bytes)
    finally:
        writer.close()
    log.info("artifact fetched", extra={"fields": {"path": slot.path, "took_s": f"{show.took_s():.1f}"}})


async def _fetch_part(member: Source, writer: Writer, until: int, sha256: str, show: _Progress) -> None:
    """Write the bytes that come next, up to an offset or up to where the coordinator ends."""
    async with contextlib.aclosing(member.fetch(writer.n_bytes, sha256, until)) as chunks:
        async for chunk in chunks:
            if chunk.offset >= until:
                return  # it is an older one, which sends all
            await asyncio.to_thread(writer.append, chunk.offset, chunk.data[: until - chunk.offset])
            await show.at(writer.n_bytes)


def _take(held: HeldLayers, writer: Writer) -> bool:
    """Copy what this host has of the bytes that come next. A copy that fails is no harm: the rest is fetched."""
    n_before = writer.n_bytes
    try:
        return held.take(writer)
    except OSError as error:
        log.warning("an artifact that was fetched before cannot be read: %s", error)
        held.forget()
        return writer.n_bytes > n_before


class _Progress:
    """Says now and then how far a fetch is: to the coordinator, and in the log."""

    def __init__(self, member: Source, slot: Slot, trouble: str) -> None:
        """`trouble`: what ended the last attempt; it is told until a byte has come."""
        self.member, self.slot, self._trouble = member, slot, trouble
        self._start_bytes = 0
        self._began_s = self._logged_s = time.monotonic()
        self._reported_s = 0.0

    def begin(self, n_bytes: int) -> None:
        """Note how much is here at first."""
        self._start_bytes = n_bytes

    def took_s(self) -> float:
        return time.monotonic() - self._began_s

    async def at(self, n_bytes: int) -> None:
        now_s, self._trouble = time.monotonic(), ""
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            await self.report(n_bytes)
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            total_bytes = self.slot.artifact.size_bytes
            rate = (n_bytes - self._start_bytes) / max(self.took_s(), 1e-9)
            text = f"{n_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB ({100 * n_bytes / total_bytes:.0f} %)"
            log.info("fetching: %s at %.0f MB/s", text, rate / 1e6)

    async def report(self, n_bytes: int) -> None:
        total_bytes = self.slot.artifact.size_bytes
        await self.member.report_progress(pb.ARTIFACT_PHASE_FETCHING, n_bytes, total_bytes, self._trouble)
