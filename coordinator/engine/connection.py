"""One epoch of a pipeline: every stage checked and configured, its streams open. Rebuilt after any loss."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Sized

from relayline.coordinator.engine.heartbeat import Heartbeat
from relayline.coordinator.engine.revoking import check_servers, push_revocations, tell
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.schedule.overhead import HOST_STEP_NS, Held
from relayline.coordinator.schedule.shared_devices import Place, device_numbers, sharing
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.prefixes import held_by_all
from relayline.coordinator.sessions.silence import LOOK_EVERY_S, TRANSIT_MAX_S, Silence, UnderWay, Work
from relayline.coordinator.sessions.tier import TierFacts, stored_by_all
from relayline.wire.common import bounds
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import HandshakeError, RelaylineError, StageLostError
from relayline.wire.common.sampler_fields import OPTIONS
from relayline.wire.common.tasks import end_task
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")

PASS_BYTES = 16
CURVE_REFRESH_S = 1.0  # between polls of the stages' measurements; batches never wait for it


class Connection:
    """All streams of one epoch. Make it with `Connection.open`."""

    def __init__(
        self,
        epoch: int,
        stages: Sequence[StageClient],
        facts: Sequence[pb.DescribeResponse],
        held: Sequence[Mapping[int, int]],
    ) -> None:
        """`held` has, for each stage, the sessions of the last epoch: {session id: tokens of its history}."""
        self.epoch = epoch
        self.stages, self.facts = stages, facts
        self.held = held_by_all(held)
        self.link: RelayLink
        self.heartbeat = Heartbeat(stages)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def n_lanes(self) -> int:
        """Sessions that every stage can hold."""
        return min(facts.n_lanes for facts in self.facts)

    @property
    def ctx_tokens(self) -> int:
        """Tokens of one session that every stage can hold."""
        return min(facts.ctx_tokens for facts in self.facts)

    @property
    def max_rows(self) -> int:
        """Rows of one frame that every stage accepts."""
        return min(facts.max_rows for facts in self.facts)

    @property
    def mutual_rows_max(self) -> int:
        """Rows that may attend to each other, in one step of every stage; 0: some stage does not know such rows."""
        return self.max_rows if all(facts.takes_mutual_rows for facts in self.facts) else 0

    @property
    def takes_grids(self) -> bool:
        """Whether every stage takes rows with places on several axes."""
        return all(facts.takes_grids for facts in self.facts)

    @property
    def rewinds(self) -> bool:
        """Whether every stage can drop rejected draft tokens."""
        return all(facts.rewinds for facts in self.facts)

    @property
    def rewind_rows(self) -> int:
        """How many rejected draft tokens of a step every stage can drop, where some cannot drop any number of them."""
        return min((facts.rewind_rows for facts in self.facts if not facts.rewinds), default=0)

    @property
    def keeps_state(self) -> bool:
        """Whether some stage can take a lane back to checkpoints alone."""
        return any(facts.keeps_state for facts in self.facts)

    @property
    def options(self) -> frozenset[str]:
        """The options that the last stage's sampler knows."""
        return frozenset(self.facts[-1].options) & OPTIONS

    @property
    def tier(self) -> TierFacts:
        """The prefixes in the tiers of all stages."""
        facts = self.facts
        stored = [{each.key: each.n_tokens for each in stage.stored} for stage in facts]
        return TierFacts(
            stored_by_all(stored),
            is_used=all(stage.stores for stage in facts),
            is_on_disk=all(stage.stores_on_disk for stage in facts),
            token_ns=sum(_price_ns(stage.restore_token_ns) for stage in facts),
            store_from_ns=max(stage.store_from_ns for stage in facts),
        )

    @property
    def instances(self) -> tuple[str, ...]:
        """Each stage's incarnation name; it changes when the stage restarts."""
        return tuple(facts.instance_id for facts in self.facts)

    def stage_costs(self) -> list[StageCost]:
        """Return each stage's measured speed."""
        share = share_host([stage.address for stage in self.stages])
        devices = device_numbers([place_of(facts.place) for facts in self.facts])
        return [
            stage_cost(facts, facts.max_rows, is_per_lane=facts.kv_per_lane, shares_host=shares, device=device)
            for facts, shares, device in zip(self.facts, share, devices, strict=True)
        ]

    def sharing(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return a line for each device that several stages share. `names`: of the stages; without, by number."""
        numbered = [f"stage-{index}" for index in range(len(self.facts))]
        return tuple(sharing([place_of(facts.place) for facts in self.facts], names or numbered))

    @classmethod
    async def open(
        cls,
        addresses: Sequence[str],
        pipeline: PipelineFile,
        *,
        route_id: int,
        epoch: int,
        wire_dtype: int,
        security: LinkSecurity = PLAINTEXT,
        who: Sequence[Identity | None] = (),
        revocations: Revocations | None = None,
        name: str = "",
        stage_names: Sequence[str] = (),
        wants_rows: bool = False,
        gives_grants: bool = False,
        on_return: Callable[[pb.ReturnResponse], None],
        on_lost: Callable[[RelaylineError], None],
        on_heard: Callable[[int], None] = lambda index: None,
    ) -> Connection:
        """Check, configure (downstream first) and connect every stage; `who` names each stage.

        `on_heard` is called with the index of a stage whenever it gives a sign of life. `wants_rows`: stage 0 gets rows
        of images. `gives_grants`: the last stage links to stage 0. Raises HandshakeError when stages do not fit the
        pipeline or each other, StageLostError when one cannot be reached, UnauthenticatedError when either side refuses
        the other, NotReadyError when one stops or restarts in the meantime. After an error nothing stays open.
        """
        stages = [
            StageClient(address, security, peer, revocations.generation(peer) if revocations and peer else 0)
            for address, peer in zip(addresses, who or [None] * len(addresses), strict=True)
        ]
        n_passes = len(stages) + (gives_grants and len(stages) > 1)  # the last one is of the link back to stage 0
        passes = [secrets.token_hex(PASS_BYTES) for _ in range(n_passes)]
        try:
            if revocations is not None:
                await check_servers(addresses, security, revocations)
            facts = await _describe_all(stages, on_heard)
            check_stages(addresses, facts, pipeline, wants_rows=wants_rows)
            if revocations is not None:
                await tell(stages, revocations)
            held: list[dict[int, int]] = []
            for index in reversed(range(len(stages))):
                request = _order(index, addresses, facts, pipeline, passes, wire_dtype)
                request.route_id, request.epoch = route_id, epoch
                request.pipeline_name = name
                request.stage_name = stage_names[index] if index < len(stage_names) else ""
                held.append(await stages[index].configure(request))
            connection = cls(epoch, stages, facts, held)
            subscription = pb.ReturnRequest(route_id=route_id, epoch=epoch)
            await asyncio.gather(
                *(
                    stage.listen(
                        subscription,
                        on_return,
                        functools.partial(_lost_at, index, on_lost),
                        functools.partial(on_heard, index),
                        passes[index],
                    )
                    for index, stage in enumerate(stages)
                )
            )
            hello = _hello(pipeline, route_id, epoch)
            connection.link = await RelayLink.open(addresses[0], hello, on_lost, security, passes[0], is_watched=False)
            if revocations is not None:
                connection.push_revocations(revocations, security, on_lost)
            await connection.heartbeat.first()
        except BaseException:
            await asyncio.gather(*(stage.close() for stage in stages), return_exceptions=True)
            raise
        return connection

    def keep_costs(self, audiences: Sized, update: Callable[[list[StageCost], list[Held]], None]) -> None:
        """Let `refresh_costs` and the heartbeat run for as long as this connection stands."""
        self._tasks.append(asyncio.create_task(refresh_costs(self, audiences, update)))
        self._tasks.append(asyncio.create_task(self.heartbeat.keep(audiences)))

    async def statuses(self, *, with_recent: bool = False) -> list[pb.StatusResponse | None]:
        """Ask every stage for its counters and its latest steps (with_recent: and waits); None: no answer."""
        asking = (stage.status(with_recent=with_recent, with_steps=True) for stage in self.stages)
        return list(await asyncio.gather(*asking))

    def keep_watch(
        self,
        route_id: int,
        under_way: Callable[[], UnderWay],
        is_idle: Callable[[], bool],
        on_silent: Callable[[set[int]], None],
        on_lost: Callable[[RelaylineError], None],
    ) -> None:
        """Let `watch_silence` run for as long as this connection stands."""
        watching = watch_silence(self, route_id, under_way, is_idle, on_silent, on_lost)
        self._tasks.append(asyncio.create_task(watching))

    def push_revocations(
        self, revocations: Revocations, security: LinkSecurity, on_lost: Callable[[RelaylineError], None]
    ) -> None:
        """Let `coordinator.engine.revoking.push_revocations` run for as long as this connection stands."""
        self._tasks.append(asyncio.create_task(push_revocations(revocations, self.stages, security, on_lost)))

    async def close(self) -> None:
        """Close every stream of this epoch; what sessions hold stays at the stages for a while."""
        await asyncio.gather(*map(end_task, self._tasks))
        await self.link.close()
        await asyncio.gather(*(stage.close() for stage in self.stages), return_exceptions=True)


def _order(
    index: int,
    addresses: Sequence[str],
    facts: Sequence[pb.DescribeResponse],
    pipeline: PipelineFile,
    passes: Sequence[str],
    wire_dtype: int,
) -> pb.ConfigureRequest:
    """Return a stage's place in the pipeline: its neighbours, and the credentials that they show each other.

    passes: one for each stage, and one more if the last stage is to send tokens back to stage 0.
    """
    is_first, is_last = index == 0, index + 1 == len(addresses)
    links_back = len(passes) > len(addresses)
    return pb.ConfigureRequest(
        protocol_version=bounds.PROTOCOL_VERSION,
        pipeline_id=pipeline.pipeline_id,
        stage_index=index,
        next_address="" if is_last else addresses[index + 1],
        wire_dtype=pb.Dtype.Name(wire_dtype),
        instance_id=facts[index].instance_id,
        upstream_pass=passes[index],
        next_pass="" if is_last else passes[index + 1],
        upstream_name=facts[index - 1].name if index else "",
        back_pass=passes[-1] if links_back and (is_first or is_last) else "",
        first_address=addresses[0] if links_back and is_last else "",
        last_name=facts[-1].name if links_back and is_first else "",
    )


def _hello(pipeline: PipelineFile, route_id: int, epoch: int) -> pb.LinkOpen:
    """Return the coordinator's first message on its stream to stage 0."""
    return pb.LinkOpen(
        protocol_version=bounds.PROTOCOL_VERSION,
        route_id=route_id,
        epoch=epoch,
        pipeline_id=pipeline.pipeline_id,
        source_sha256=pipeline.source.sha256,
        next_layer=0,
        n_embd=pipeline.n_embd,
        dtype=pb.DTYPE_TOKENS,
    )


def _lost_at(index: int, on_lost: Callable[[RelaylineError], None], error: RelaylineError) -> None:
    error.stage_index = index
    on_lost(error)


async def _describe_all(
    stages: Sequence[StageClient], on_heard: Callable[[int], None] = lambda index: None
) -> list[pb.DescribeResponse]:
    """Ask every stage, and hear them all out before the first failure is raised: each may have its own to tell.

    Meanwhile, those that have answered keep giving signs of life. Nothing else asks them while one stage is waited for,
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
        for task in (*asking, *hearing):
            task.cancel()
        await asyncio.gather(*asking, *hearing, return_exceptions=True)


async def refresh_costs(
    connection: Connection, audiences: Sized, update: Callable[[list[StageCost], list[Held]], None]
) -> None:
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
            update(*await _costs_now(connection))
        except Exception:  # a bug of ours; streams continue with the earlier plans
            if not is_failing:  # each second would fill the log
                log.exception("reading the stages' measured speeds failed; trying again")
            is_failing = True
        else:
            is_failing = False


async def watch_silence(
    connection: Connection,
    route_id: int,
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
        works = await _works_now(connection, route_id)
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


async def _works_now(connection: Connection, route_id: int) -> list[Work] | None:
    """Ask every stage for its state of the route; None unless all answer, in this epoch."""
    asked = (stage.status(with_recent=False, route_id=route_id) for stage in connection.stages)
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


def stage_cost(
    reported: pb.DescribeResponse | pb.StatusResponse,
    rows_max: int,
    host_ns: int = HOST_STEP_NS,
    *,
    is_per_lane: bool = False,
    shares_host: bool = False,
    device: int = -1,
) -> StageCost:
    """Read a stage's reported speed, and add the cost of a step outside the native decode."""
    return StageCost(
        CostCurve((point.n_rows, point.cost_ns + host_ns) for point in reported.decode_curve),
        CostCurve((point.n_rows, point.cost_ns + host_ns) for point in reported.prefill_curve),
        rows_max,
        _price_ns(reported.context_ns),
        _price_ns(reported.context_tiled_ns),
        is_per_lane=is_per_lane,
        takes_lanes_apart=reported.takes_lanes_apart,
        runs_ahead=reported.runs_ahead,
        shares_host=shares_host,
        device=device,
    )


def place_of(place: pb.Place) -> Place:
    """Return the place that a stage's description names."""
    gpus = {device.id: f"{device.name} ({device.description})" for device in place.devices}
    return Place(place.host_id, gpus, frozenset(place.cores), place.n_threads)


def share_host(addresses: Sequence[str]) -> list[bool]:
    """Return of each address whether another is of the same host, by its name."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    return [hosts.count(host) > 1 for host in hosts]


def _price_ns(price_ns: float) -> float:
    """Return a price for planning; 0.0 (unknown) if it is not a usable number."""
    return max(0.0, price_ns) if math.isfinite(price_ns) else 0.0


def check_stages(
    addresses: Sequence[str],
    facts: Sequence[pb.DescribeResponse],
    pipeline: PipelineFile,
    *,
    wants_rows: bool = False,
) -> None:
    """Check the stages' descriptions against the pipeline, in order. `wants_rows`: stage 0 gets rows of images.

    Raises HandshakeError.
    """
    if len(addresses) != len(pipeline.stages):
        raise HandshakeError(
            f"the pipeline has {len(pipeline.stages)} stages, but {len(addresses)} addresses were given"
        )
    for index, (address, fact) in enumerate(zip(addresses, facts, strict=True)):
        if fact.pipeline_id != pipeline.pipeline_id:
            what = "another model" if fact.source_sha256 != pipeline.source.sha256 else "another split of this model"
            raise HandshakeError(f"{address} holds {what}; start it with an artifact of this pipeline")
        if fact.stage_index != index:
            raise HandshakeError(
                f"stages are in the wrong order: {address} is stage {fact.stage_index} "
                f"(layers {fact.layer_start}-{fact.layer_end - 1}), but is number {index} in --stages"
            )
        if fact.n_embd != pipeline.n_embd:
            raise HandshakeError(f"{address} has rows of {fact.n_embd} values, the pipeline {pipeline.n_embd}")
        if fact.kv_per_lane != facts[0].kv_per_lane:  # see wire.common.kv_layout
            raise HandshakeError(
                f"{address} and {addresses[0]} lay out their KV cells differently; start all stages with the same "
                "--kv-layout, per-lane or unified"
            )
        _check_rope(addresses[0], facts[0], address, fact)
    if wants_rows and not facts[0].takes_rows:
        text = "cannot take image rows; run this version of relayline there, or start the coordinator without --mmproj"
        raise HandshakeError(f"{addresses[0]} {text}")


def _check_rope(first_address: str, first: pb.DescribeResponse, address: str, fact: pb.DescribeResponse) -> None:
    """Hold which set of rope factors a stage takes against the first stage's (see wire.common.rope_factors)."""
    if fact.rope_original_tokens != first.rope_original_tokens:
        text = "choose rope factors differently; run the same version on both"
        raise HandshakeError(f"{address} and {first_address} {text}")
    limit = fact.rope_original_tokens
    if limit and (fact.ctx_tokens > limit) != (first.ctx_tokens > limit):
        raise HandshakeError(
            f"{address} has lanes of {fact.ctx_tokens} tokens and {first_address} of {first.ctx_tokens}; this model "
            f"has other rope factors for lanes of more than {limit} tokens, so start all stages with the same --ctx"
        )
