"""One epoch of a pipeline: every stage checked and configured, its streams open. Rebuilt after any loss."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence, Sized
from typing import Any

from relayline.coordinator.engine.descriptions import check_stages, described_costs, merge, stage_cost
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.heartbeat import Heartbeat
from relayline.coordinator.engine.noting import Noting
from relayline.coordinator.engine.revoking import check_servers, push_revocations, tell
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.schedule.overhead import HOST_STEP_NS, Held
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.prefixes import held_by_all
from relayline.coordinator.sessions.silence import LOOK_EVERY_S, TRANSIT_MAX_S, Silence, UnderWay, Work
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError, StageLostError
from relayline.wire.common.tasks import cancel_all, end_task
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.model_files.adapters import NO_ADAPTERS
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")

PASS_BYTES = 16
CURVE_REFRESH_S = 1.0  # between polls of the stages' measurements; batches never wait for it
TakesCosts = Callable[[list[StageCost], list[Held]], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """The stages that an epoch is made with: where they are, who they are, and what people call them.

    All in layer order.
    """

    addresses: Sequence[str]
    """host:port of each."""
    security: LinkSecurity = PLAINTEXT
    identities: Sequence[Identity | None] = ()
    """What each one's credential has to state, None for any; empty: any for all."""
    revocations: Revocations | None = None
    """Credentials that are refused; None: no list is kept."""
    pipeline_name: str = ""
    stage_names: Sequence[str] = ()
    """Empty where the stages have no names."""

    def clients(self) -> list[StageClient]:
        """Return a client for each stage; nothing is connected yet. Raises ValueError if identities are missing."""
        known = self.revocations
        return [
            StageClient(address, self.security, identity, known.generation(identity) if known and identity else 0)
            for address, identity in zip(self.addresses, self.identities or [None] * len(self.addresses), strict=True)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class EpochTerms:
    """The terms of an epoch, settled before its stages are asked."""

    route_id: int
    epoch: int
    wire_dtype: int
    """Dtype of the rows between stages (wire.envelopes.dtypes)."""
    wants_rows: bool = False
    """Whether stage 0 gets rows of images."""
    known_prefixes: Collection[int] = ()
    """Keys of stored prefixes on which no notes are wanted."""
    gives_grants: bool = False
    """Whether the last stage links to stage 0."""
    adapters: tuple[str, ...] = NO_ADAPTERS
    """A key of each choice of LoRA adapters, which all stages are to have."""
    inner_layers: tuple[int, ...] = ()
    """Layers whose inputs all stages are to hand on."""


@dataclasses.dataclass(frozen=True, slots=True)
class EpochEvents:
    """Receivers of the events of an epoch."""

    on_return: Callable[[pb.ReturnResponse], None]
    """Called with every message of a stage."""
    on_lost: Callable[[RelaylineError], None]
    """Called when a stream breaks or a message is missing: the epoch is over."""
    on_heard: Callable[[int], None] = lambda index: None
    """Called with the index of a stage whenever it sends a heartbeat."""


class Connection:
    """All streams of one epoch. Make it with `Connection.open`."""

    def __init__(
        self,
        terms: EpochTerms,
        events: EpochEvents,
        stages: Sequence[StageClient],
        facts: Sequence[pb.DescribeResponse],
        held: Sequence[Mapping[int, int]],
    ) -> None:
        """`held` has, for each stage, the sessions of the last epoch: {session id: tokens of its history}."""
        self.route_id, self.epoch, self._events = terms.route_id, terms.epoch, events
        self._wire_dtype = terms.wire_dtype
        self.stages, self.facts = stages, facts
        self.held = held_by_all(held)
        self.link: RelayLink
        self.heartbeat = Heartbeat(stages)
        self.notes: Mapping[int, bytes] = {}
        """On stored prefixes, by key, as stage 0 has them; only where some were not known."""
        self.noting = Noting(stages[0])
        self._tasks: list[asyncio.Task[None]] = []

    def merged(self) -> EpochFacts:
        """Return what the stages' descriptions say together."""
        return merge(self.facts, self.held, self.stage_costs(), self._wire_dtype, self.notes)

    def stage_costs(self) -> list[StageCost]:
        """Return each stage's speed, as it was when it was described."""
        return described_costs([stage.address for stage in self.stages], self.facts)

    @classmethod
    async def open(cls, peers: Peers, pipeline: PipelineFile, terms: EpochTerms, events: EpochEvents) -> Connection:
        """Check, configure (downstream first) and connect every stage.

        Raises HandshakeError when stages do not fit the pipeline or each other, StageLostError when one cannot be
        reached, UnauthenticatedError when either side refuses the other, NotReadyError when one stops or restarts in
        the meantime. After an error nothing stays open.
        """
        stages = peers.clients()
        revocations, security, addresses = peers.revocations, peers.security, peers.addresses
        n_passes = len(stages) + (terms.gives_grants and len(stages) > 1)  # the last one is of the link back to stage 0
        passes = [secrets.token_hex(PASS_BYTES) for _ in range(n_passes)]
        try:
            if revocations is not None:
                await check_servers(addresses, security, revocations, events.on_heard)
            facts = await _describe_all(stages, events.on_heard)
            check_stages(
                addresses,
                facts,
                pipeline,
                wants_rows=terms.wants_rows,
                adapters=terms.adapters,
                inner_layers=terms.inner_layers,
            )
            if revocations is not None:
                await tell(stages, revocations)
            held: list[dict[int, int]] = []
            for index in reversed(range(len(stages))):
                answer = await stages[index].configure(_order(index, peers, facts, pipeline, passes, terms))
                held.append({session.session_id: session.n_tokens for session in answer.held})
                if answer.stored:
                    facts[index].ClearField("stored")
                    facts[index].stored.extend(answer.stored)
            connection = cls(terms, events, stages, facts, held)
            listening = (connection._listen(index, passes[index]) for index in range(len(stages)))
            await _together(connection._learn(terms.known_prefixes), *listening)
            hello = _hello(pipeline, terms)
            connection.link = await RelayLink.open(
                addresses[0],
                hello,
                events.on_lost,
                security,
                passes[0],
                is_watched=False,
                media_width=pipeline.media_width,
            )
            await connection._begin(revocations, security)
        except BaseException:
            await asyncio.gather(*(stage.close() for stage in stages), return_exceptions=True)
            raise
        return connection

    async def _begin(self, revocations: Revocations | None, security: LinkSecurity) -> None:
        """Do what lasts as long as the link; closes it if that fails."""
        try:
            self._keep(self.noting.keep())
            if revocations is not None:
                self._keep(push_revocations(revocations, self.stages, security, self._events.on_lost))
            await self.heartbeat.first()
        except BaseException:
            await self._end()
            raise

    async def _learn(self, known: Collection[int]) -> None:
        """Ask stage 0 for its notes, if it has stored what is not known."""
        first = self.facts[0]
        if first.keeps_notes and any(stored.key not in known for stored in first.stored):
            self.notes = await self.stages[0].notes()

    async def _listen(self, index: int, upstream_pass: str) -> None:
        """Subscribe to what a stage returns."""
        await self.stages[index].listen(
            pb.ReturnRequest(route_id=self.route_id, epoch=self.epoch),
            self._events.on_return,
            functools.partial(_lost_at, index, self._events.on_lost),
            functools.partial(self._events.on_heard, index),
            upstream_pass,
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run for as long as this connection stands."""
        self._tasks.append(asyncio.create_task(work))

    def keep_costs(self, audiences: Sized, update: TakesCosts) -> None:
        """Let `refresh_costs` and the heartbeat run for as long as this connection stands."""
        self._keep(refresh_costs(self, audiences, update))
        self._keep(self.heartbeat.keep(audiences))

    async def statuses(self) -> list[pb.StatusResponse | None]:
        """Ask every stage for its counters and its latest steps; None: no answer."""
        asking = (stage.status(with_recent=False, with_steps=True) for stage in self.stages)
        return list(await asyncio.gather(*asking))

    def keep_watch(
        self, under_way: Callable[[], UnderWay], is_idle: Callable[[], bool], on_silent: Callable[[set[int]], None]
    ) -> None:
        """Let `watch_silence` run for as long as this connection stands."""
        self._keep(watch_silence(self, under_way, is_idle, on_silent, self._events.on_lost))

    async def close(self) -> None:
        """Close every stream of this epoch; what sessions hold stays at the stages for a while."""
        await self._end()
        await asyncio.gather(*(stage.close() for stage in self.stages), return_exceptions=True)

    async def _end(self) -> None:
        await asyncio.gather(*map(end_task, self._tasks))
        await self.link.close()


def _order(
    index: int,
    peers: Peers,
    facts: Sequence[pb.DescribeResponse],
    pipeline: PipelineFile,
    passes: Sequence[str],
    terms: EpochTerms,
) -> pb.ConfigureRequest:
    """Return a stage's place in the pipeline: its neighbours, and the credentials that they show each other.

    passes: one for each stage, and one more if the last stage is to send tokens back to stage 0.
    """
    addresses, names = peers.addresses, peers.stage_names
    is_first, is_last = index == 0, index + 1 == len(addresses)
    links_back = len(passes) > len(addresses)
    return pb.ConfigureRequest(
        protocol_version=bounds.PROTOCOL_VERSION,
        route_id=terms.route_id,
        epoch=terms.epoch,
        pipeline_id=pipeline.pipeline_id,
        pipeline_name=peers.pipeline_name,
        stage_index=index,
        stage_name=names[index] if index < len(names) else "",
        next_address="" if is_last else addresses[index + 1],
        wire_dtype=pb.Dtype.Name(terms.wire_dtype),
        instance_id=facts[index].instance_id,
        upstream_pass=passes[index],
        next_pass="" if is_last else passes[index + 1],
        upstream_name=facts[index - 1].name if index else "",
        back_pass=passes[-1] if links_back and (is_first or is_last) else "",
        first_address=addresses[0] if links_back and is_last else "",
        last_name=facts[-1].name if links_back and is_first else "",
    )


def _hello(pipeline: PipelineFile, terms: EpochTerms) -> pb.LinkOpen:
    """Return the coordinator's first message on its stream to stage 0."""
    return pb.LinkOpen(
        protocol_version=bounds.PROTOCOL_VERSION,
        route_id=terms.route_id,
        epoch=terms.epoch,
        pipeline_id=pipeline.pipeline_id,
        source_sha256=pipeline.source.sha256,
        next_layer=0,
        n_embd=pipeline.n_embd,
        dtype=pb.DTYPE_TOKENS,
    )


def _lost_at(index: int, on_lost: Callable[[RelaylineError], None], error: RelaylineError) -> None:
    error.stage_index = index
    on_lost(error)


async def _describe_all(stages: Sequence[StageClient], on_heard: Callable[[int], None]) -> list[pb.DescribeResponse]:
    """Ask every stage, and hear them all out before the first failure is raised: each may have its own to tell.

    Meanwhile, those that have answered keep sending heartbeats. Nothing else asks them while one stage is waited for,
    and their silence would be taken for their own.
    """
    asking = [asyncio.create_task(stage.describe()) for stage in stages]

    async def hear(index: int) -> None:
        await asking[index]
        on_heard(index)
        while True:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            if await stages[index].beat(pb.BeatRequest()) is not None:
                on_heard(index)

    hearing = [asyncio.create_task(hear(index)) for index in range(len(stages))]
    try:
        await asyncio.wait(asking)
        return [task.result() for task in asking]
    finally:
        await cancel_all((*asking, *hearing))


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    """Do all at once. If one fails, the others end before its error is raised, so none begins anything after it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def refresh_costs(connection: Connection, audiences: Sized, update: TakesCosts) -> None:
    """Plan with the speeds that the stages have measured since, as long as the connection is used.

    Runs only while there are audiences. `update` gets every stage's cost and, if all of them answered, how long they
    have held frames. Ends only by cancellation; an error is logged, and the next poll may succeed.
    """
    is_failing = False
    while True:
        await asyncio.sleep(CURVE_REFRESH_S)
        if not audiences:
            continue  # an idle pipeline learns nothing
        try:
            await update(*await _costs_now(connection))
        except Exception:  # a bug of ours; streams continue with the earlier plans
            if not is_failing:  # each second would fill the log
                log.exception("reading the stages' measured speeds failed; trying again")
            is_failing = True
        else:
            is_failing = False


async def watch_silence(
    connection: Connection,
    under_way: Callable[[], UnderWay],
    is_idle: Callable[[], bool],
    on_silent: Callable[[set[int]], None],
    on_lost: Callable[[RelaylineError], None],
) -> None:
    """Look forever for sessions that wait for an answer no stage will send, see coordinator.sessions.silence.

    `is_idle` says whether nothing is queued for stage 0. Lost sessions go to `on_silent`; a link that lost a message
    goes to `on_lost`.
    """
    silence = Silence()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        silent = silence.silent(under_way(), time.monotonic_ns())
        if not silent:
            continue
        works = await _works_now(connection)
        silent &= silence.silent(under_way(), now_ns := time.monotonic_ns())
        if works is None or not is_idle():
            continue
        sent = connection.link.envelopes_sent
        if lost := silence.lost(silent, sent, works):
            on_silent(lost)
        if (broken := silence.broken_way(sent, works, now_ns)) is not None:
            way, index = ("to", broken) if broken < len(works) else ("back from", broken - len(works))
            text = f"a message on its way {way} stage {index} has not arrived for {TRANSIT_MAX_S:.0f} s"
            on_lost(StageLostError(f"{text}, though its link stands"))


async def _works_now(connection: Connection) -> list[Work] | None:
    """Ask every stage for its state of the route; None unless all answer, in this epoch."""
    asked = (stage.status(with_recent=False, route_id=connection.route_id) for stage in connection.stages)
    statuses = await asyncio.gather(*asked)
    works: list[Work] = []
    for stage, status in zip(connection.stages, statuses, strict=True):
        if status is None or status.route.epoch != connection.epoch:
            return None
        route = status.route
        counts = (route.envelopes_in, route.envelopes_out, route.returned, stage.returns.n_messages)
        works.append(Work(*counts, route.is_sending, frozenset(route.session_ids)))
    return works


async def _costs_now(connection: Connection) -> tuple[list[StageCost], list[Held]]:
    """Ask every stage for its speed. A stage that does not answer keeps the speed it reported on connecting."""
    statuses = await asyncio.gather(*(stage.status(with_recent=False) for stage in connection.stages))
    costs = connection.stage_costs()
    held: list[Held] = []
    for index, status in enumerate(statuses):
        if status is not None:
            known = costs[index]
            fresh = stage_cost(status, known.rows_max, is_per_lane=known.is_per_lane)
            costs[index] = dataclasses.replace(fresh, shares_host=known.shares_host, device=known.device)
            n_frames = status.n_decode_frames
            held.append(Held(n_frames, status.decode_held_ns + n_frames * HOST_STEP_NS))
    return costs, held if len(held) == len(statuses) else []
