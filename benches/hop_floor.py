"""What no hop can be quicker than here: a bare grpc.aio stream with the same bytes, and one wake-up of a thread.

The stream does nothing but carry: no envelope, no frames, no credit, no decode thread. Half a round trip of it is what
gRPC's Python binding costs one way. A wake-up is what handing over to another, sleeping thread or event loop costs; a
hop has two of ours (decode thread to event loop, event loop to decode thread) beside those inside gRPC.
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

from deploy.load import percentile
from wire import rpc

PAUSE_S = 0.003  # between rounds, about a native step: cores fall asleep in it as they do in service
WARM_ROUNDS = 30
METHOD = "/relayline.bench/Echo"


async def _echo(requests: Any, context: Any) -> None:
    """Answer every message with one byte, except those of two bytes."""
    while isinstance(message := await context.read(), bytes):
        if len(message) != 2:
            await context.write(b"1")


async def serve() -> None:
    """Serve until stdin closes; prints the port."""
    handler = grpc.stream_stream_rpc_method_handler(_echo, None, None)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("relayline.bench", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def one_way_us(sizes: list[int], n_rounds: int) -> dict[int, float]:
    """Return the p50 of half a round trip, by message size: the message one way, a byte back."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benches.hop_floor", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        port = int(await child.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(METHOD)()
            found = {size: await _rounds(call, bytes(size), n_rounds) for size in [1, *sizes]}
            await call.done_writing()
    finally:
        child.stdin.close()
        await child.wait()
    # A byte takes found[1] / 2 either way; what is left of a round trip is the message's own way.
    return {size: found[size] - found[1] / 2 for size in sizes}


async def _rounds(call: Any, message: bytes, n_rounds: int) -> float:
    took_us: list[float] = []
    for _ in range(WARM_ROUNDS + n_rounds):
        await asyncio.sleep(PAUSE_S)
        began_ns = time.perf_counter_ns()
        await call.write(message)
        await call.read()
        took_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return percentile(took_us[WARM_ROUNDS:], 0.5)


def wake_us(n_rounds: int) -> float:
    """Return the p50 of waking a thread that waits for a condition."""
    changed, woken_ns = threading.Condition(), [0]
    told, done = threading.Event(), threading.Event()

    def sleeper() -> None:
        for _ in range(WARM_ROUNDS + n_rounds):
            with changed:
                told.set()
                changed.wait()
                woken_ns[0] = time.perf_counter_ns()
            done.set()

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    took_us: list[float] = []
    for _ in range(WARM_ROUNDS + n_rounds):
        told.wait()
        told.clear()
        time.sleep(PAUSE_S)  # the other thread's core falls asleep
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
