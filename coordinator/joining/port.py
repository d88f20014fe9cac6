"""The ports of joining: where stages join, and where hosts get the certificates for that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from relayline.coordinator.engine.membership import Membership, Place
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.announcing import announced
from relayline.coordinator.joining.config import JoinConfig
from relayline.coordinator.joining.enrol import enrol_address_of as enrol_address_of
from relayline.coordinator.joining.enrol import serve_enrolment
from relayline.coordinator.joining.inviting import AddPlace, Inviter
from relayline.coordinator.joining.members import SERVICE, MemberService
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.joining.survey import SurveyService
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.common.versions import version_of
from relayline.wire.links.listening import Listener
from relayline.wire.links.security import LinkSecurity, address_of
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

SHUTDOWN_GRACE_S = 2.0

OnMember = Callable[[Place], None]


@contextlib.asynccontextmanager
async def serve_joining(
    config: JoinConfig,
    directory: Path,
    file: PipelineFile,
    roster: JoinedRoster,
    security: LinkSecurity,
    on_service: Callable[[JoinService], None] = lambda service: None,
) -> AsyncIterator[tuple[str, str]]:
    """Let stages join, and hosts enrol if the configuration says how, for the length of a with block.

    Yields where (host:port), the second empty without enrolment. `on_service` gets what answers there, before any
    stage can come. Raises StartError, UsageError.
    """
    service = JoinService(config, directory, file, roster, security)
    on_service(service)
    with contextlib.closing(service.used):
        async with _served(service, config, roster, security) as addresses:
            yield addresses


@contextlib.asynccontextmanager
async def serve_survey(
    config: JoinConfig, slices: Mapping[str, Sequence[pb.SurveySlice]], security: LinkSecurity, on_member: OnMember
) -> AsyncIterator[tuple[SurveyService, str, str]]:
    """Survey the hosts of stages before there is a plan, for the length of a with block.

    `slices`: what each stage measures, by its name. Yields the survey, and where (host:port) stages join and hosts
    enrol. `on_member` hears of every change of a stage's state until the block ends. Raises StartError, UsageError.
    """
    roster = make_roster(config, on_member)
    service = SurveyService(config, roster, slices, security)
    async with _served(service, config, roster, security) as (address, enrol_address):
        try:
            yield service, address, enrol_address
        finally:
            roster.on_change = lambda place: None  # that all leave now is as it should be


@contextlib.asynccontextmanager
async def _served(
    service: MemberService, config: JoinConfig, roster: JoinedRoster, security: LinkSecurity
) -> AsyncIterator[tuple[str, str]]:
    listener = Listener(security, "the coordinator")
    roster.ask_of_revoked(listener.guard.revocations.is_revoked)
    listener.server.add_generic_rpc_handlers((service.handlers(),))
    if config.reflection:
        listener.add_reflection(SERVICE)
    try:
        port = listener.add_port(config.host, config.port, "--join-listen (in a manifest: coordinator.joinPort)")
        await listener.server.start()
        address = address_of(config.host, port)
        async with (
            serve_enrolment(config.enrol, security, address) as enrol_address,
            announced(config.enrol, security, roster, enrol_address),
        ):
            yield address, enrol_address
    finally:
        service.close()
        await listener.stop(SHUTDOWN_GRACE_S)
        await service.end()


def make_inviter(config: JoinConfig | None, roster: JoinedRoster | None, add: AddPlace) -> Inviter | None:
    """Return what makes join lines over HTTP, None where hosts do not enrol. Set its address once they can."""
    if config is None or roster is None or config.enrol is None:
        return None
    return Inviter(config.enrol.authority, roster.names, add, config.fixed, is_announced=config.enrol.announce)


def make_roster(config: JoinConfig, on_member: OnMember = lambda place: None) -> JoinedRoster:
    """Return the places that stages may take, all of them free. `on_member` hears of every change of a place."""
    names = [stage.name for stage in config.stages]
    membership = Membership(names, version_of(), time.monotonic_ns(), config.holders)
    roster = JoinedRoster(membership)
    roster.on_change = on_member
    return roster
