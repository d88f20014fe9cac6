"""The orders that stages get when they join and when layers move, and the bytes of their artifacts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from relayline.coordinator.engine.moves import Fetch
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.engine.whereabouts import whereabouts
from relayline.coordinator.joining.artifact_reader import Chunks, read_chunks, read_unread
from relayline.coordinator.joining.config import JoinConfig, JoiningStage, check_names, engine_message
from relayline.coordinator.joining.hand_over import changing_hands, hand_over_orders
from relayline.coordinator.joining.members import Context, MemberService, OpenMembership
from relayline.coordinator.joining.resting import Resting
from relayline.coordinator.joining.used_splits import UsedSplits
from relayline.coordinator.model.pipeline_file import PIPELINE_NAME, PipelineFile, StageFile
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ArtifactError,
    HandshakeError,
    NotReadyError,
    RelaylineError,
)
from relayline.wire.links import rpc
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, address_of
from relayline.wire.model_files.adapters import CACHED_NAME, Adapter
from relayline.wire.model_files.eagle3 import CACHED_NAME as DRAFTER_NAME
from relayline.wire.model_files.eagle3 import Drafter
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.coordinator")


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A finished split on this machine's disk, with the very bytes of its description. Blocks while it is made."""

    directory: Path
    file: PipelineFile
    pipeline_json: bytes

    @classmethod
    def at(cls, directory: Path, file: PipelineFile) -> Split:
        """Return the split in a directory."""
        return cls(directory, file, (directory / PIPELINE_NAME).read_bytes())


class ChangeListener(Protocol):
    """The receiver of the stages' reports of a planned change."""

    def prepared(self, number: int, index: int) -> None:
        """A stage is ready to switch."""

    def fetching(self, number: int, index: int, fetch: Fetch) -> None:
        """A stage is that far with its new layers."""

    def failed(self, number: int, why: str) -> None:
        """A stage cannot be."""

    def left(self, index: int) -> None:
        """A membership has ended, or the same stage began another."""

    def came(self, index: int) -> None:
        """A membership has begun, and has its order."""


class JoinService(MemberService):
    """All calls of relayline.v1.PipelineService, of a pipeline that has its split."""

    def __init__(
        self,
        config: JoinConfig,
        directory: Path,
        file: PipelineFile,
        roster: JoinedRoster,
        security: LinkSecurity = PLAINTEXT,
    ) -> None:
        """`security` is that of links to the stages; its identity is what this coordinator's certificate states."""
        super().__init__(config, roster, security)
        self._own = security.identity.uri if security.identity is not None else ""
        self._security = security
        self._split = Split.at(directory, file)
        self._places = list(config.stages)
        self._next: Split | None = None  # of a planned change, until the switch
        self._next_holders: tuple[int, ...] = ()
        self.used = UsedSplits(directory)
        self.changes: ChangeListener | None = None
        self.resting = Resting(roster, self._members, self._say)
        self._fetches = asyncio.Semaphore(config.fetches_max)
        # A setting that cannot be sent is the operator's mistake: report it now, not to the first stage that joins.
        for index in range(len(self._places)):
            self._order(index, b"")

    def _check_hello(self, hello: pb.StageHello) -> None:
        if not hello.takes_unread and any(stage.unread for stage in self._split.file.stages):
            text = f"{hello.name}: its version cannot fetch layers that the hub has; upgrade it, or start the pipeline"
            raise HandshakeError(f"{text} with `download: whole`")

    def _settle(self, member: OpenMembership) -> None:
        """From its first order on a member takes part in changes."""
        place = self._roster.place_of(member.ticket)
        if place is None:
            return
        if member.index not in self._roster.holders:
            self._roster.stands_by(place)
        if self.changes is not None:
            self.changes.came(member.index)

    def _tell_left(self, index: int) -> None:
        self.resting.left(index)
        if self.changes is not None:
            self.changes.left(index)

    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        order = self._order(member.index, member.secret, beats=member.beats)
        return order if order.stands_by else self.resting.first(member, order)

    def _order(self, index: int, secret: bytes, *, beats: bool = False, is_next: bool = False) -> pb.JoinResponse:
        """Return the order of a place; `is_next`: the one that holds after the change."""
        split, holders = self._split, self._roster.holders
        if is_next and self._next is not None:
            split, holders = self._next, self._next_holders
        settings = self._places[index]
        # Only the last stage has such layers, and older releases do not know the setting.
        engine = settings.engine
        if engine.mtp_drafts and holders[-1] != index:
            engine = dataclasses.replace(engine, mtp_drafts=0)
        order = pb.JoinResponse(
            stage_count=len(split.file.stages),
            pipeline_id=split.file.pipeline_id,
            engine=engine_message(engine),
            telemetry=settings.telemetry.message(),
            ticket=secret,
            beats=beats,
            coordinator=self._own,
            listen_port=settings.listen_port,
        )
        if index not in holders:
            order.stands_by = True
            return order
        order.stage_index = holders.index(index)
        stage = split.file.stages[order.stage_index]
        order.artifact.CopyFrom(
            pb.ArtifactFile(file=stage.file, size_bytes=stage.size_bytes, sha256=stage.sha256, unread=stage.unread)
        )
        if self._config.offer_path and not stage.unread:
            order.artifact.path = str((split.directory / stage.file).resolve())
        order.pipeline_json = split.pipeline_json
        if self._config.drafter is not None:
            is_last = order.stage_index == order.stage_count - 1
            order.drafter.CopyFrom(
                _drafter_message(self._config.drafter, is_last=is_last, offers_path=self._config.offer_path)
            )
        order.adapters.extend(
            [_adapter_message(each, offers_path=self._config.offer_path) for each in self._config.adapters]
        )
        return order

    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        kind = report.WhichOneof("report")
        if kind == "serving" and 0 < report.serving.port <= 65_535:
            address = await self._whereabouts(member, report.serving, peer_of(context.peer())[0])
            self._roster.serving(member.ticket, address, report.serving.instance_id)
            self.resting.answered(member.index)
        elif kind == "prepared":
            self._on_prepared(member.index, report.prepared)
        elif kind == "sleeping":
            self.resting.sleeps(member, report.sleeping)
        else:
            return False
        return True

    async def _whereabouts(self, member: OpenMembership, serving: pb.StageServing, seen: str) -> str:
        if member.is_relayed:
            await self.relay.check_port(self._places[member.index].name, serving.port)
            identity = self._security.identity if self._security.is_tls else None
            host = identity.host if identity is not None else self._config.relay.advertise or serving.host
            return address_of(host, serving.port)
        name = self._places[member.index].name
        address, line = await whereabouts(name, serving.host, seen, serving.port, self._security, member.owner)
        if line:
            log.warning("%s", line)
            if member.beats:
                await self._say(member, pb.JoinResponse(beats=True, notice=line))
        return address

    # --- planned changes ----------------------------------------------------------------------------------------------

    @property
    def split(self) -> Split:
        """The split that the stages have, or are to have at once."""
        return self._split

    def place(self, index: int) -> JoiningStage:
        """Return the facts about a place."""
        return self._places[index]

    def add(self, stage: JoiningStage) -> int:
        """Add a place that holds no layers; returns its index. Raises UsageError for a name that cannot be one."""
        check_names([*(place.name for place in self._places), stage.name])
        self._places.append(stage)
        return self._roster.add(stage.name).index

    @property
    def roster(self) -> JoinedRoster:
        """The places and their members."""
        return self._roster

    def unmovable(self, holders: tuple[int, ...] = ()) -> list[str]:
        """Return the names of places that keep layers from moving to `holders`, by default the present ones.

        They are to hold layers and are not here, or are of a version that takes no such order.
        """
        members, holders = self._members, holders or self._roster.holders
        lost = [index for index in holders if (member := members.get(index)) is None or not member.moves]
        freed = set(self._roster.holders) - set(holders)
        lost += [index for index in freed if (member := members.get(index)) is not None and not member.stands_by]
        return [self._places[index].name for index in lost]

    async def prepare(self, number: int, split: Split, keeps: Sequence[bool], holders: tuple[int, ...] = ()) -> None:
        """Have every holder fetch and load its slice of another split, next to the one that it serves."""
        self._next, self._next_holders = split, holders or self._roster.holders
        kept = dict(zip(self._next_holders, keeps, strict=True))
        self.used.prepare(split.directory, (index for index in kept if kept[index]))
        hand_overs = self._hand_overs(split, keeps)
        for index in self._involved():
            if self._next is not split:  # the change was given up while another stage was told
                return
            change = pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_PREPARE, keeps=kept.get(index, False))
            if (member := self._members.get(index)) is not None:
                order = self._order(index, member.secret, is_next=True)
                order.change.CopyFrom(change)
                if index in hand_overs:
                    order.change.hand_over.CopyFrom(hand_overs[index])
                await self._say(member, order)

    def _hand_overs(self, split: Split, keeps: Sequence[bool]) -> dict[int, pb.HandOver]:
        """Return by place which layers' lanes change hands at the switch."""
        before, after = (self._split.file, self._roster.holders), (split.file, self._next_holders)
        able = [index for index, member in self._members.items() if member.hands_over]
        addresses = {index: self._roster.places[index].address for index in able}
        return hand_over_orders(changing_hands(before, after, keeps), self._roster.names(), addresses)

    def _involved(self) -> list[int]:
        """Return the places that hold layers before the change, after it, or both."""
        return sorted({*self._roster.holders, *self._next_holders})

    async def drop(self, number: int) -> None:
        """Have every stage drop its prepared slice."""
        self._next = None
        self.used.drop()
        change = pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_DROP)
        await self._say_all(change, self._involved())

    def switch(self) -> list[int]:
        """From now on the prepared split is the one that stages have: also those that join later.

        Returns the places that need a message.
        """
        assert self._next is not None
        involved = self._involved()
        self._split, self._next = self._next, None
        self.used.switch()
        self._roster.switching(self._next_holders)
        return involved

    async def tell_switch(self, number: int, places: Iterable[int], hand_over_ns: int = 0) -> None:
        """Notify the members of these places. Lanes may change hands for hand_over_ns.

        A member that cannot be reached, or had not prepared, joins again and gets its order then.
        """
        step, hand_over_ms = pb.LAYER_CHANGE_STEP_SWITCH, hand_over_ns // 1_000_000
        await self._say_all(pb.LayerChange(number=number, step=step, hand_over_ms=hand_over_ms), places)

    async def _say_all(self, change: pb.LayerChange, places: Iterable[int]) -> None:
        members = [member for index in places if (member := self._members.get(index)) is not None]
        await asyncio.gather(*(self._say(member, pb.JoinResponse(change=change)) for member in members))

    async def _say(self, member: OpenMembership, order: pb.JoinResponse) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await member.write(order)  # else its call has ended, which its reader notices

    def _on_prepared(self, index: int, report: pb.StagePrepared) -> None:
        if self.changes is None:
            return
        if report.HasField("failure"):
            name = self._places[index].name
            self.changes.failed(report.change, f"{name}: {report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX]}")
        elif report.is_ready:
            self.changes.prepared(report.change, index)
        elif report.total_bytes:
            self.changes.fetching(report.change, index, Fetch(report.done_bytes, report.total_bytes, report.trouble))

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send the caller's own artifact, an adapter or a draft model, from an offset on."""
        try:
            member = self._member_of(request)
            size_bytes, chunks = self._file_of(member.index, request)
            if (beyond := max(request.offset, request.end)) > size_bytes:
                raise ArtifactError(f"offset {beyond} is beyond the artifact's {size_bytes} bytes")
            if member.fetching:
                raise NotReadyError("this stage's artifact is already being sent")
            member.fetching = True
            try:
                async with self._fetches, contextlib.aclosing(chunks):
                    async for offset, data in chunks:
                        if self._members.get(member.index) is not member or self._closing.is_set():
                            raise NotReadyError("this membership has ended")
                        await context.write(pb.FetchResponse(offset=offset, data=data))
            finally:
                member.fetching = False
        except RelaylineError as error:
            await rpc.abort(context, error)

    def _file_of(self, index: int, request: pb.FetchRequest) -> tuple[int, Chunks]:
        """Return the size of the requested file, and what reads the requested bytes.

        A request names a file by its content, and only the stage's own files, the adapters and the draft model can be
        had.
        """
        sha256, offset, end = request.sha256, request.offset, request.end
        whole: list[Adapter | Drafter] = [*self._config.adapters]
        whole += [self._config.drafter] if self._config.drafter is not None else []
        for file in whole:
            if sha256 == file.sha256:
                return file.size_bytes, read_chunks(file.path, offset, file.size_bytes, end)
        split, stage = self._part_of(index, sha256)
        if stage is None or sha256 not in ("", stage.sha256):
            raise ArtifactError("that artifact is not for this stage; a planned change was cancelled")
        if not stage.unread:
            return stage.size_bytes, read_chunks(split.directory / stage.file, offset, stage.size_bytes, end)
        if (open_unread := self._config.open_unread) is None:
            text = "the weights of this split are on the hub; give the coordinator its manifest or --model"
            raise ArtifactError(text)
        end = end or stage.size_bytes
        return stage.size_bytes, read_unread(
            functools.partial(open_unread, split.file, stage, offset, end), offset, end
        )

    def _part_of(self, index: int, sha256: str) -> tuple[Split, StageFile | None]:
        """Return the split and the slice of a place: those of the next change if it requests them, otherwise the
        present ones."""
        if self._next is not None and index in self._next_holders:
            stage = self._next.file.stages[self._next_holders.index(index)]
            if sha256 == stage.sha256:
                return self._next, stage
        holders = self._roster.holders
        return self._split, self._split.file.stages[holders.index(index)] if index in holders else None


def _drafter_message(drafter: Drafter, *, is_last: bool, offers_path: bool) -> pb.Drafter:
    message = pb.Drafter(layers=drafter.layers)
    if is_last:
        path = str(drafter.path) if offers_path else ""
        file = pb.ArtifactFile(file=DRAFTER_NAME, size_bytes=drafter.size_bytes, sha256=drafter.sha256, path=path)
        message.file.CopyFrom(file)
    return message


def _adapter_message(adapter: Adapter, *, offers_path: bool) -> pb.AdapterFile:
    path = str(adapter.path) if offers_path else ""
    file = pb.ArtifactFile(file=CACHED_NAME, size_bytes=adapter.size_bytes, sha256=adapter.sha256, path=path)
    return pb.AdapterFile(file=file, name=adapter.name, scale=adapter.scale)
