"""The life of the connection: how an epoch begins, what ends it, and the time between two epochs.

    connect ---> Connection of epoch n stands ---> Conductor.connected: sessions start again
       ^                                                  |
       |                                           frames out, answers in
       |                                                  |
       |         a link or a stage is lost, a stage reports its route broken, a message is missing, a bug of ours
       |                                                  v
       +--- close everything of epoch n <--- Conductor.lost: sessions pause, nothing of epoch n is listened to

Losing a link or a stage ends an epoch, not a request. The first report of a loss counts (`lose`); later ones of the
same epoch change nothing. Then everything of the epoch is closed, and new attempts are made until one stands
(`coordinator.engine.reconnect`). Each attempt has its own epoch number, so stages refuse messages of earlier attempts.
Requests that wait longer than `recovery_timeout_s` fail. `coordinator.engine.conductor` decides which requests start
again, wait, or end with an error. Rows of a history that every stage still holds are not sent again.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from relayline.coordinator.engine.balance import Balance
from relayline.coordinator.engine.conductor import Conductor
from relayline.coordinator.engine.connection import Connection, EpochEvents, EpochTerms, Peers
from relayline.coordinator.engine.descriptions import device_lines
from relayline.coordinator.engine.instructions import Instruction
from relayline.coordinator.engine.pipeline_config import PipelineConfig
from relayline.coordinator.engine.reconnect import Reconnector
from relayline.coordinator.engine.roster import Roster
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.telemetry_control import greet
from relayline.coordinator.engine.token_sender import TokenSender
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.observe.losses import lost_stage
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.frame import Frame
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, RelaylineError
from relayline.wire.common.phase import Phase
from relayline.wire.common.process import first_of
from relayline.wire.links.revocation import Revocations
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")

Carry = Callable[[Iterable[Instruction]], None]


class Epochs:
    """The connections of one pipeline, one after the other."""

    def __init__(
        self,
        config: PipelineConfig,
        file: PipelineFile,
        roster: Roster,
        conductor: Conductor,
        observer: Observer,
        carry: Carry,
        on_return: Callable[[pb.ReturnResponse], None],
    ) -> None:
        """`carry` carries out the conductor's instructions; `on_return` takes the stages' answers.

        Raises UsageError for a list of revoked credentials that cannot be used.
        """
        self._config, self._roster = config, roster
        self.file = file
        """The split that the next epoch serves."""
        self.is_planned = False
        """Whether the epoch that ends now ends on purpose."""
        self.on_ended: Callable[[], None] = lambda: None
        """Called when everything of an epoch is closed, before the next one is begun."""
        self.on_stands: Callable[[], None] = lambda: None
        """Called when an epoch stands, before requests go on."""
        self._conductor, self._observer = conductor, observer
        self._carry, self._on_return = carry, on_return
        self._revocations = Revocations(config.security)
        self._route_id = secrets.randbits(63)
        self._reconnector = Reconnector(
            config,
            roster,
            self._open,
            lambda: bool(conductor.readers),
            lambda error: self._fail_all(error),
            conductor.availability.refused,
        )
        self.connection: Connection | None = None
        self.stage_names = config.stage_names
        """What people call the stages of the next epoch, in layer order; empty where they have no names."""
        self.balance = Balance(lambda: self.stage_names)
        self._sender: TokenSender | None = None
        self._lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self._attempt: asyncio.Timeout | None = None  # to begin an epoch; ends when it is given up
        self._is_given_up = False
        self.rested: Callable[[], Awaitable[None]] = _at_once
        """Returns once an epoch may be begun: not while the stages hold nothing."""
        roster.watch(self.lose, self._on_heard)

    @property
    def route_id(self) -> int:
        """The number by which stages know this coordinator's epochs."""
        return self._route_id

    @property
    def stages(self) -> Sequence[StageClient]:
        """The stages that are connected now, in layer order."""
        return self.connection.stages if self.connection else ()

    async def run(self, stopping: asyncio.Event, idle: asyncio.Event) -> None:
        """Connect, serve and recover until `stopping` is set; then drain until `idle` is.

        Raises StartError or HandshakeError if the pipeline never became ready.
        """
        stop = asyncio.ensure_future(stopping.wait())
        looking = asyncio.create_task(self._look())
        try:
            while not stop.done():
                connected = asyncio.ensure_future(self._connect())
                try:
                    await first_of(stop, connected)
                finally:
                    if not connected.done():
                        connected.cancel()
                        await asyncio.gather(connected, return_exceptions=True)
                if connected.cancelled():
                    break
                connected.result()
                await first_of(stop, self._lost)
                if self._lost.done():
                    await self.disconnect(self._lost.result())
            await self.drain(idle)
        finally:
            stop.cancel()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self._teardown()

    # --- an epoch begins ----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Begin an epoch, from the start again whenever that is given up."""
        is_first, self._is_given_up = self._conductor.availability.phase is Phase.LOADING, True
        while self._is_given_up:
            self._is_given_up = False
            try:
                async with asyncio.timeout(None) as self._attempt:
                    connection = await self._connected(is_first=is_first)
            except TimeoutError:
                if not self._is_given_up:
                    raise
            finally:
                self._attempt = None
            if self._is_given_up:
                await self._teardown()
        self.resume(connection)

    def give_up(self) -> None:
        """Stop trying to begin an epoch, if one is being begun: the next attempt waits until the stages have `rested`.

        What has been waited for until now no longer counts.
        """
        if self._attempt is not None and not self._is_given_up:
            self._is_given_up = True
            self._attempt.reschedule(asyncio.get_running_loop().time())

    async def _connected(self, *, is_first: bool) -> Connection:
        await self.rested()
        connection = await self._reconnector.connect(is_first=is_first)
        self.connection = connection
        for index, facts in enumerate(connection.facts):
            self._on_heard(index)
            self._conductor.availability.serves(index, facts.instance_id)
        await greet(connection.stages, self._observer.pushed_level)
        return connection

    async def _open(self, addresses: tuple[str, ...]) -> Connection:
        """Make one attempt to connect."""
        self._lost = asyncio.get_running_loop().create_future()
        file, config = self.file, self._config
        peers = Peers(
            addresses,
            config.security,
            self._roster.identities(),
            self._revocations,
            config.name,
            self.stage_names,
        )
        terms = EpochTerms(
            self._route_id,
            self._conductor.begin_epoch(),
            config.wire_dtype,
            wants_rows=bool(config.serving.mmproj),
            known_prefixes=self._conductor.prefixes.known_keys(),
            gives_grants=config.schedule.grant_steps > 0,
            adapters=config.adapter_keys,
            inner_layers=config.inner_layers,
        )
        connection = await Connection.open(peers, file, terms, EpochEvents(self._on_return, self.lose, self._on_heard))
        if file is not self.file:
            await connection.close()
            raise NotReadyError("layers were moved meanwhile")
        return connection

    def resume(self, connection: Connection) -> None:
        """All stages are connected: let requests continue."""
        conductor, observer = self._conductor, self._observer
        self._sender = TokenSender(
            connection.link, conductor.epoch, self.lose, observer.passes.sent, observer.record_of
        )
        instructions = conductor.connected(connection.merged(), time.monotonic_ns())
        scheduler = conductor.scheduler
        connection.keep_costs(conductor.readers, self.balance.refresh(scheduler, self.file))
        connection.keep_watch(scheduler.under_way, self._is_sent, self._on_silent)
        observer.connected(len(self.file.stages), connection.statuses, connection.heartbeat.offsets_ns)
        for line in device_lines(connection.facts, self.stage_names):
            log.warning("%s", line)
        self.on_stands()
        self.ready.set()
        self._carry(instructions)

    # --- while it stands ----------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Frame]) -> None:
        """Send frames as one envelope; where nothing stands they are lost, and the next epoch replays them."""
        if self._sender is not None:
            now_ns = time.monotonic_ns()
            self._sender.push(frames, self._observer.sent(frames, now_ns), now_ns)

    def note(self, notes: Mapping[int, bytes]) -> None:
        """Let stage 0 keep notes on stored prefixes, by key."""
        if self.connection is not None:
            self.connection.noting.push(notes)

    def lose(self, error: RelaylineError) -> None:
        """End the epoch; only its first error counts."""
        if not self._lost.done():
            self._lost.set_result(error)

    @property
    def lost(self) -> asyncio.Future[RelaylineError]:
        """Why the epoch that is the latest was lost, once it is."""
        return self._lost

    async def _look(self) -> None:
        """Log which stages do not answer, and refuse requests that have waited long enough for one."""
        while True:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            self._carry(self._conductor.look(time.monotonic_ns()))

    def _on_heard(self, index: int) -> None:
        if line := self._conductor.availability.heard(index, time.monotonic_ns()):
            log.info("%s", line)

    def _is_sent(self) -> bool:
        return self._sender is not None and self._sender.is_idle()

    def _on_silent(self, session_ids: Iterable[int]) -> None:
        self._carry(self._conductor.silent(session_ids, len(self.file.stages), time.monotonic_ns()))

    # --- it ends ------------------------------------------------------------------------------------------------------

    async def disconnect(self, error: RelaylineError) -> None:
        """The epoch was lost: pause, and close everything of it."""
        now_ns = time.monotonic_ns()
        self.ready.clear()
        stage = lost_stage(error, [stage.address for stage in self.stages], self.stage_names)
        self._observer.lost(error.message, now_ns, stage)
        is_planned, self.is_planned = self.is_planned, False
        self._carry(self._conductor.lost(error, now_ns, is_planned=is_planned))
        await self._teardown()
        self.on_ended()

    async def _teardown(self) -> None:
        if self._sender is not None:
            await self._sender.close()
            self._sender = None
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    def _fail_all(self, error: RelaylineError) -> None:
        self._carry(self._conductor.fail_all(error, time.monotonic_ns()))

    async def drain(self, idle: asyncio.Event) -> None:
        """Let running requests end, bounded by DRAIN_TIMEOUT_S, then end the rest."""
        self._conductor.availability.enter(Phase.DRAINING, time.monotonic_ns())
        self.ready.clear()
        if self._sender is not None:  # otherwise nothing would end them
            done = asyncio.ensure_future(idle.wait())
            await asyncio.wait((done, self._lost), timeout=bounds.DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
        self._fail_all(NotReadyError("the server is shutting down"))
        if self._sender is not None and not self._lost.done():
            await self._sender.flush(bounds.HANDSHAKE_TIMEOUT_S)
            if self.connection is not None:
                await self.connection.noting.flush(bounds.HANDSHAKE_TIMEOUT_S)


async def _at_once() -> None:
    """Return: nothing keeps an epoch from being begun."""
