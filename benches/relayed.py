"""What a hop to a relayed stage costs: a bare grpc.aio stream with an envelope's bytes, direct and through the relay.

As in `hop_floor`, the time is from before the write in one process to after the read in another. The relay is a process
of its own, and the tunnel's end is in the process that reads, as in a stage. All are on loopback, in plaintext. Blocks
of the two ways alternate; the lowest median of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
import grpc.aio
import uvloop

from benches.hop_floor import METHOD, _stamp, rounds_us
from relayline.coordinator.relay.child import RelayChild
from relayline.coordinator.relay.config import RelayConfig
from relayline.stage.joining.tunnel import Tunnel
from relayline.wire.links import rpc
from relayline.wire.links.security import PLAINTEXT

ROWS = (1, 8, 32)
ROW_BYTES = 4_096 * 2


async def _read(relay: str) -> None:
    """Serve until stdin closes; prints the own port and that of the relay."""
    handler = grpc.stream_stream_rpc_method_handler(_stamp, None, None)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("relayline.bench", {"Stamp": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def opened(there: int) -> None:
        print(port, there, flush=True)

    holding = asyncio.create_task(Tunnel(relay, "bench", PLAINTEXT, port).keep_open(opened))
    await asyncio.to_thread(sys.stdin.read)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await server.stop(None)


async def _measure(blocks: int, rounds: int) -> None:
    child = RelayChild(RelayConfig(), PLAINTEXT)
    pipe = asyncio.subprocess.PIPE
    relay = f"127.0.0.1:{await child.port()}"
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.relayed", "--read-behind", relay, stdin=pipe, stdout=pipe
    )
    assert reader.stdout is not None
    assert reader.stdin is not None
    ports = (await reader.stdout.readline()).split()
    channels = {
        way: rpc.open_channel(f"127.0.0.1:{int(port)}") for way, port in zip(("direct", "relayed"), ports, strict=True)
    }
    calls = {
        way: channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)()
        for way, channel in channels.items()
    }
    print("rows  direct us  relayed us  ratio")
    for rows in ROWS:
        found: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(blocks):
            for way, call in calls.items():
                found[way].append(await rounds_us(call, bytes(rows * ROW_BYTES), rounds))
        direct, relayed = (min(found[way]) for way in ("direct", "relayed"))
        print(f"{rows:4}  {direct:9.0f}  {relayed:10.0f}  {relayed / direct:5.2f}")
    for call in calls.values():
        call.cancel()
    await asyncio.gather(*(channel.close() for channel in channels.values()))
    reader.stdin.close()
    await reader.wait()
    await child.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="alternating blocks of each way")
    parser.add_argument("--rounds", type=int, default=200, help="messages in a block")
    parser.add_argument("--read-behind", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read_behind:
        uvloop.run(_read(given.read_behind))
        return
    uvloop.run(_measure(given.blocks, given.rounds))


if __name__ == "__main__":
    main()
