"""Where a stage says that it serves: its own address, or its port at the relay, once the tunnel is open."""

from __future__ import annotations

import asyncio
import logging

from relayline.stage.joining.client import Member
from relayline.stage.joining.config import JoinConfig
from relayline.stage.joining.tunnel import Tunnel
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.tasks import end_task
from relayline.wire.links.security import address_of, host_of
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")


def relay_of(member: Member, config: JoinConfig) -> str:
    """Return the address (host:port) of the coordinator's relay. Raises NotReadyError where it has none."""
    if not member.relay_port:
        raise NotReadyError(
            "the coordinator is of an older version, which has no relay: upgrade it, or leave out --relay"
        )
    return address_of(host_of(config.coordinator), member.relay_port)


class Reporting:
    """The reports of a stage that serves on one port, to one coordinator after the other. An async context manager."""

    def __init__(self, config: JoinConfig, port: int) -> None:
        """`port`: where this stage listens."""
        self._config, self._port = config, port
        self._member: Member | None = None
        self._instance_id = ""
        self._tunnel: Tunnel | None = None
        self._holding: asyncio.Task[None] | None = None

    async def serving(self, member: Member, instance_id: str) -> None:
        """Report that this instance serves; of a relayed stage, again whenever its tunnel has been opened.

        Raises NotReadyError where a relayed stage's coordinator has no relay.
        """
        self._member, self._instance_id = member, instance_id
        if not self._config.is_relayed:
            await self._report(self._config.reported_host(), self._port)
            return
        address = relay_of(member, self._config)
        if self._tunnel is None or self._tunnel.address != address:
            await self._end_tunnel()
            port = self._tunnel.port if self._tunnel is not None else 0
            self._tunnel = Tunnel(address, self._config.name, self._config.security, self._port, port)
            self._holding = asyncio.create_task(self._tunnel.keep_open(self._opened))
        elif self._tunnel.is_open:
            await self._opened(self._tunnel.port)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Done only once the relay has refused the tunnel for good."""
        return self._holding if self._holding is not None else asyncio.get_running_loop().create_future()

    async def _opened(self, port: int) -> None:
        log.info("reached through the relay", extra={"fields": {"port": port}})
        await self._report(host_of(self._config.coordinator), port)

    async def _report(self, host: str, port: int) -> None:
        if self._member is not None:
            await self._member.report(serving=pb.StageServing(host=host, port=port, instance_id=self._instance_id))

    async def _end_tunnel(self) -> None:
        if self._holding is not None:
            await end_task(self._holding)
            self._holding = None

    async def __aenter__(self) -> Reporting:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_tunnel()
