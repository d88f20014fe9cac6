"""The relay's process: bytes of other stages' connections pass here, and not through the loop that schedules.

Its first line on stdin is `Start`, as JSON; it ends when stdin does. On stdout it writes a line of `Event` once it
listens, and about every second while its figures change.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from relayline.coordinator.relay.config import RelayConfig
from relayline.coordinator.relay.service import Relay
from relayline.wire.common import logs
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.process import end_with_stdin, run, settle
from relayline.wire.common.tasks import set_within
from relayline.wire.links.carrying import MESSAGE_BYTES_MAX
from relayline.wire.links.listening import Listener
from relayline.wire.links.security import LinkSecurity

REPORT_EVERY_S = 1.0
SHUTDOWN_GRACE_S = 1.0


class Start(msgspec.Struct, frozen=True):
    """What the relay is to be."""

    host: str
    port: int
    ports: dict[str, int]
    before: dict[str, int]
    """Ports of stages, by name, at the process that ran before."""
    files: list[str]
    """CA, certificate and key; none: plaintext."""
    token: str
    token_file: str
    insecure: bool
    log_json: bool
    verbose: bool


class Event(msgspec.Struct, frozen=True):
    """What the relay says. At most one of the three is set; none where it relays no stage any more."""

    port: int = 0
    """It listens, for tunnels, at this port."""
    problem: str = ""
    """It cannot listen, and ends."""
    stages: dict[str, dict[str, int]] = {}
    """Figures by stage, see `Relay.figures`."""


def main() -> None:
    """Relay until stdin ends."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    logs.setup("relay", as_json=start.log_json, verbose=start.verbose)
    end_with_stdin()
    try:
        run(lambda stopping: _serve(start, stopping))
    except RelaylineError as error:
        _say(Event(problem=error.message))
        sys.exit(1)


async def _serve(start: Start, stopping: asyncio.Event) -> None:
    ca, cert, key = map(Path, start.files) if start.files else (None, None, None)
    token_file = Path(start.token_file) if start.token_file else None
    security = LinkSecurity(ca, cert, key, start.token, start.insecure, token_file)
    relay = Relay(RelayConfig(start.host, start.port, ports=start.ports), start.before)
    listener = Listener(security, "the relay", MESSAGE_BYTES_MAX)
    listener.server.add_generic_rpc_handlers((relay.handlers(),))
    try:
        port = listener.add_port(start.host, start.port, "--relay-listen (in a manifest: coordinator.relayPort)")
        await listener.server.start()
        _say(Event(port=port))
        settle()
        await _report(relay, stopping)
    finally:
        await relay.close()
        await listener.stop(SHUTDOWN_GRACE_S)


async def _report(relay: Relay, stopping: asyncio.Event) -> None:
    said: dict[str, dict[str, int]] = {}
    while not stopping.is_set():
        await set_within(stopping, REPORT_EVERY_S)
        if (figures := relay.figures()) != said:
            said = figures
            _say(Event(stages=figures))


def _say(event: Event) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        logging.getLogger("relayline.relay").debug("the coordinator has gone")


if __name__ == "__main__":
    main()
