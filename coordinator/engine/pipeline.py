"""The coordinator's engine room: carries events to the conductor, and carries out its instructions.

Every decision is made in `coordinator.engine.conductor`; `coordinator.engine.epochs` begins and ends connections. The
rest is the seam to the HTTP side (streams, descriptions) and to telemetry. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from relayline.coordinator.drafting.messages import ToDrafter
from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.epochs import Epochs
from relayline.coordinator.engine.instructions import (
    Dispatch,
    Draft,
    Ended,
    Generated,
    Instruction,
    Log,
    Lose,
    Note,
    Progressed,
    Replayed,
    Send,
    Started,
    Tell,
    TryLanes,
    Wake,
)
from relayline.coordinator.engine.moves import Moves
from relayline.coordinator.engine.pipeline_config import PipelineConfig as PipelineConfig
from relayline.coordinator.engine.roster import Roster, StaticRoster
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.observe.description import describe_pipeline, describe_stages, overlap_since
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import GenerationRequest, Slot, TokenEvent
from relayline.coordinator.sessions.request_log import RequestRecord, SessionRecord, StreamRecord
from relayline.coordinator.sessions.slots import slots_of
from relayline.coordinator.sessions.streams import Audience, SessionStream
from relayline.coordinator.sessions.tenants import ANYONE, Tenant
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.phase import Phase as Phase
from relayline.wire.envelopes.session_ids import ADAPTER_SHIFT
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")


class Pipeline:
    """One served pipeline; implements coordinator.sessions.generation.Generator."""

    def __init__(
        self,
        config: PipelineConfig,
        file: PipelineFile,
        is_end: Callable[[int], bool],
        roster: Roster | None = None,
        observer: Observer | None = None,
        ends_message: Callable[[int], bool] | None = None,
    ) -> None:
        """`is_end` and `ends_message` as of Conductor. Raises UsageError for a list of revoked credentials that cannot
        be used.
        """
        self.config = config
        self._roster = roster or StaticRoster(config.addresses, config.names)
        self._observer = observer or Observer()
        names = [str(stage.get("name") or f"stage {index}") for index, stage in enumerate(self._roster.describe())]
        session_ids = itertools.count(secrets.randbits(ADAPTER_SHIFT - 32) << 32)
        decided, now_ns = _decided(config, file, names), time.monotonic_ns()
        self.conductor = Conductor(decided, is_end, session_ids, now_ns, ends_message)
        self.tenants = self.conductor.admission.of_tenants
        self.epochs = Epochs(config, file, self._roster, self.conductor, self._observer, self.carry, self.on_return)
        self._audiences: dict[int, Audience] = {}  # by session id, until its last event is delivered
        self.moves = Moves(
            self.conductor, self._roster.names() or names, file.n_layers, file.cuts, self._roster.holders
        )
        self.planned: dict[str, Any] | None = None
        """Who got which layers and why, for `describe`; None: not known."""
        self.on_settling: Callable[[], None] = lambda: None
        """Called after each answer while in-flight frames are to settle, see `moves`."""
        self.tell_drafter: Callable[[list[ToDrafter]], None] = lambda messages: None
        """Carries messages to the model that drafts, see coordinator.engine.draft_seam."""
        self.check_awake: Callable[[Tenant], None] = lambda tenant: None
        """Raises NotReadyError for a new request that would keep awake what is to sleep."""
        self.on_opened: Callable[[], None] = lambda: None
        """Called when a request was admitted, see coordinator.joining.sleeper."""
        self.describe_sleep: Callable[[int], dict[str, object] | None] = lambda now_ns: None
        """Returns how deep it sleeps; None where it never does."""
        self.describe_hosts: Callable[[int], dict[str, dict[str, object]]] = lambda now_ns: {}
        """Returns facts of places by name, as of hosts that come and go, see coordinator.joining.hosts."""
        self.describe_batches: Callable[[], dict[str, int]] = dict
        """Returns the counts of files and batches, see coordinator.http.batches."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def file(self) -> PipelineFile:
        """The split that is served."""
        return self.epochs.file

    # --- the HTTP side's view -----------------------------------------------------------------------------------------

    @property
    def ctx_tokens(self) -> int:
        """Tokens that one stream may hold; 0 until the stages have been connected."""
        return self.conductor.admission.ctx_tokens

    @property
    def n_lanes(self) -> int:
        """Streams that may run at once."""
        return self.conductor.admission.n_lanes

    @property
    def phase(self) -> Phase:
        """The present state for clients."""
        return self.conductor.availability.phase

    @property
    def epoch(self) -> int:
        """The epoch that stands, or is being begun."""
        return self.conductor.epoch

    @property
    def ready(self) -> asyncio.Event:
        """Set while all stages are connected and requests are taken."""
        return self.epochs.ready

    def is_ready(self) -> bool:
        """Return whether a request would start now."""
        return self.phase is Phase.READY

    def check_ready(self) -> None:
        """Raise NotReadyError unless a request would be admitted now: also while a lost stage is waited for."""
        self.conductor.availability.check(time.monotonic_ns())

    def check_room(self, tenant: Tenant = ANYONE) -> None:
        """Raise OverloadedError where the line is full for this tenant."""
        self.conductor.check_room(time.monotonic_ns(), tenant)

    def slots(self) -> list[Slot]:
        """Return what each lane does."""
        return slots_of(self.conductor.admission, may_draft=self.config.serving.draft_tokens != 0)

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> SessionStream:
        """Admit and start a request; see Generator.open."""
        now_ns = time.monotonic_ns()
        self.check_awake(request.tenant)
        opened, instructions = self.conductor.open(request, now_ns)
        session_id = opened.session_id
        if opened.is_joined:
            stream_record = self._observer.joined(self._observer.record_of(session_id), request, now_ns, record)
        else:
            self._audiences[session_id] = Audience(session_id)
            stream_record = self._observer.admitted(SessionRecord(), session_id, request, now_ns, record)
        audience = self._audiences[session_id]
        stream = SessionStream(functools.partial(self._leave, audience, stream_record))
        stream_record.stop = stream.stop
        audience.join(stream)
        self.carry(instructions)
        self.on_opened()
        return stream

    def _leave(self, audience: Audience, record: StreamRecord, stream: SessionStream) -> None:
        record.stop = None
        if stream not in audience.streams:
            return
        now_ns = time.monotonic_ns()
        audience.streams.remove(stream)
        if not audience.streams:
            self._audiences.pop(audience.session_id, None)
        self._observer.left(record, now_ns)
        self.carry(self.conductor.left(audience.session_id, now_ns))

    @property
    def stages(self) -> Sequence[StageClient]:
        """The stages that are connected now, in layer order."""
        return self.epochs.stages

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        """Return topology and live counters; see Generator.describe."""
        conductor, connection = self.conductor, self.epochs.connection
        asking = (self._status(index, stage, with_recent) for index, stage in enumerate(self.stages))
        statuses = await asyncio.gather(*asking)
        now_ns = time.monotonic_ns()
        live = {
            "now_ns": now_ns,
            **self._observer.figures(),
            **conductor.availability.describe(now_ns),
            "epoch": conductor.epoch,
            **conductor.admission.figures(),
            "keys": self._observer.usage.figures(self.tenants()),
            "shared_requests": conductor.readers.n_joined,
            "prefixes": conductor.prefixes.figures(),
            "stored_prefixes": conductor.prefixes.tier.figures(),
            "plan": conductor.scheduler.describe(),
            "grants": conductor.grants.figures(),
            "draft_model": conductor.drafted.figures(),
            "imbalance": self.epochs.balance.describe(now_ns),
            "link": connection.link.figures() if connection else {},
            "missing": self._roster.missing(),
            "layers": self.moves.describe(now_ns),
            "certificate_expires_unix_s": self.config.security.certificate_expires_unix_s(),
            "planned": self.planned,
            "sleep": self.describe_sleep(now_ns),
            "batches": self.describe_batches(),
        }
        hosts = self.describe_hosts(now_ns)
        known = [
            conductor.availability.describe_stage(index, now_ns) | entry | hosts.get(str(entry.get("name")), {})
            for index, entry in enumerate(self._roster.describe())
        ]
        stages = describe_stages(self.file, self._roster.addresses(), statuses, known)
        idle = {"idle": [entry | hosts.get(str(entry["name"]), {}) for entry in self._roster.describe_idle()]}
        return describe_pipeline(self.file, live, stages, statuses) | overlap_since(statuses, since_ns, now_ns) | idle

    async def _status(self, index: int, stage: StageClient, with_recent: bool) -> pb.StatusResponse | None:
        is_doubted = self.conductor.availability.is_doubted(index)
        return None if is_doubted else await stage.status(with_recent=with_recent, with_memory=True)

    async def run(self, stopping: asyncio.Event) -> None:
        """Connect, serve and recover until `stopping` is set; then drain.

        Raises StartError or HandshakeError if the pipeline never became ready.
        """
        await self.epochs.run(stopping, self._idle)

    # --- events in, instructions out ----------------------------------------------------------------------------------

    def on_return(self, message: pb.ReturnResponse) -> None:
        """Take a stage's answer."""
        if message.epoch != self.epoch:
            return
        now_ns = time.monotonic_ns()
        for passed in message.progress:
            self._observer.progressed(passed.session_id, passed.position, now_ns)
        self._observer.back_ns = now_ns - message.sent_ns if message.sent_ns else None
        self.carry(self.conductor.returned(message, now_ns))
        self._observer.returned(message, now_ns)
        self._observer.summarised(message.summaries)
        if self.moves.is_settling:
            self.on_settling()

    def dispatch(self) -> None:
        """Send the frames that may leave now."""
        self.carry(self.conductor.dispatch(time.monotonic_ns()))

    def try_lanes(self) -> None:
        """Ask again for lanes that another coordinator had."""
        self.carry(self.conductor.try_lanes(time.monotonic_ns()))

    def carry(self, instructions: Iterable[Instruction]) -> None:
        """Carry out the conductor's instructions."""
        now_ns = time.monotonic_ns()
        for instruction in instructions:
            # Each token has one of both. A `match` over all kinds takes as long as carrying them out.
            if isinstance(instruction, Tell):
                self._tell(instruction.session_id, instruction.event)
            elif isinstance(instruction, Generated):
                self._generated(instruction, now_ns)
            else:
                self._carry_out(instruction)
        if self.conductor.readers:
            self._idle.clear()
        else:
            self._idle.set()

    def _tell(self, session_id: int, event: TokenEvent | RelaylineError) -> None:
        audience = self._audiences.get(session_id)
        if audience is None:  # its last reader has left
            return
        audience.put(event)
        if isinstance(event, RelaylineError) or event.finish_reason is not None:
            del self._audiences[session_id]

    def _generated(self, generated: Generated, now_ns: int) -> None:
        observer = self._observer
        record = observer.record_of(generated.session_id)
        observer.token(record, generated.position, generated.finish_reason, now_ns, is_drafted=generated.is_drafted)

    def _carry_out(self, instruction: Instruction) -> None:
        loop = asyncio.get_running_loop()
        match instruction:
            case Send(frames):
                self.epochs.send(frames)
            case Progressed(session_id, progress):
                if (audience := self._audiences.get(session_id)) is not None:
                    audience.progressed(progress)
            case Note(notes):
                self.epochs.note(notes)
            case Dispatch():
                loop.call_soon(self.dispatch)
            case Lose(error):
                self.epochs.lose(error)
            case Draft(messages):
                self.tell_drafter(messages)
            case Wake(after_s):
                loop.call_later(after_s, self.dispatch)
            case TryLanes(after_s):
                loop.call_later(after_s, self.try_lanes)
            case Log(level, text, fields, bug):
                log.log(level, "%s", text, extra={"fields": dict(fields)} if fields else None, exc_info=bug)
            case Started() | Replayed() | Ended():
                self._note(instruction)

    def _note(self, instruction: Started | Replayed | Ended) -> None:
        """Let telemetry know what happened to a session."""
        now_ns, observer = time.monotonic_ns(), self._observer
        record = observer.record_of(instruction.session_id)
        match instruction:
            case Started(_, n_copied):
                observer.started(record, now_ns)
                record.n_copied = n_copied
            case Replayed(_, why):
                observer.replayed(record, why, now_ns)
            case Ended(_, error):
                if error is not None:
                    record.error, record.error_text = error.label, error.message
                observer.ended(record, now_ns)


def _decided(config: PipelineConfig, file: PipelineFile, stage_names: Sequence[str]) -> ConductorConfig:
    return ConductorConfig(
        schedule=config.schedule,
        stage_names=tuple(stage_names),
        n_vocab=file.n_vocab,
        share=config.serving.share,
        prefix_lanes=config.serving.prefix_lanes,
        waiting_max=config.serving.queue,
        lost_wait_s=min(config.serving.lost_wait_s, config.recovery_timeout_s),
    )
