"""The lower bound of a hop on this machine: a bare grpc.aio stream with the same bytes, and one thread wake-up.

The stream only carries bytes: no envelope, frames, credit or decode thread. It is timed like the hop's `wire` part,
from before the write in one process to after the read in another. Both processes run uvloop, as stages do. The next
message leaves after the answer to the last one, so cores sleep as long as they do in a hop. A wake-up is the cost of
handing over to a waiting thread or event loop. A hop has two of them outside gRPC: decode thread to event loop, and
back.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import grpc
import grpc.aio
import uvloop

from relayline.deploy.cli.load import percentile
from relayline.wire.links import rpc

WARM_ROUNDS = 30
STAMP_BYTES = 8
METHOD = "/relayline.bench/Stamp"


async def _stamp(requests: Any, context: Any) -> None:
    """Answer every message with the moment at which it had been read."""
    while isinstance(await context.read(), bytes):
        await context.write(time.monotonic_ns().to_bytes(STAMP_BYTES, "big"))


async def serve() -> None:
    """Serve until stdin closes; prints the port."""
    handler = grpc.stream_stream_rpc_method_handler(_stamp, None, None)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("relayline.bench", {"Stamp": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def one_way_us(sizes: list[int], n_rounds: int) -> dict[int, float]:
    """Return the p50 of a message's way from process to process, by message size. Run it under uvloop."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.hop_floor", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        port = int(await child.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(METHOD)()
            found = {size: await rounds_us(call, bytes(size), n_rounds) for size in sizes}
            await call.done_writing()
    finally:
        child.stdin.close()
        await child.wait()
    return found


async def rounds_us(call: Any, message: bytes, n_rounds: int) -> float:
    """Return the p50 of a message's one-way time. The other end answers with the moment at which it had read it."""
    took_us: list[float] = []
    for _ in range(WARM_ROUNDS + n_rounds):
        began_ns = time.monotonic_ns()
        await call.write(message)
        arrived_ns = int.from_bytes(await call.read(), "big")
        took_us.append((arrived_ns - began_ns) / 1e3)
    return percentile(took_us[WARM_ROUNDS:], 0.5)


def wake_us(n_rounds: int) -> float:
    """Return the p50 of waking a thread that waits for a condition."""
    changed, woken_ns = threading.Condition(), [0]
    signal, done = threading.Event(), threading.Event()

    def sleeper() -> None:
        for _ in range(WARM_ROUNDS + n_rounds):
            with changed:
                signal.set()
                changed.wait()
                woken_ns[0] = time.perf_counter_ns()
            done.set()

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    took_us: list[float] = []
    for _ in range(WARM_ROUNDS + n_rounds):
        signal.wait()
        signal.clear()
        with changed:
            began_ns = time.perf_counter_ns()
            changed.notify()
        done.wait()
        done.clear()
        took_us.append((woken_ns[0] - began_ns) / 1e3)
    thread.join()
    return percentile(took_us[WARM_ROUNDS:], 0.5)


if __name__ == "__main__":
    uvloop.run(serve())
