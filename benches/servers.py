"""Starts and ends the measured systems in the same way: relayline in its variants, llama-server, llama.cpp's RPC. A
server runs on the given cores only, and its output goes to a log file. It ends with its `async with` block, also after
an exception. This module measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from benches import stages
from benches.peers import Peers
from benches.proxy import DelayProxy, delayed
from relayline.deploy.cli.load import Target
from relayline.deploy.machine.ports import free_port
from relayline.wire.links.security import TOKEN_VARIABLE

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 45.0  # relayline drains running requests first
POLL_S = 0.05
RELAYLINE = (sys.executable, "-m", "relayline.deploy.cli")


class ServerError(Exception):
    """A server that did not come up. The text names it and its last log line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all servers of one comparison share."""

    model: Path
    n_stages: int
    n_lanes: int  # streams at once; llama-server's slots
    ctx_tokens: int  # of one stream
    cores: tuple[int, ...]  # the only ones a server may use
    log_dir: Path
    kv_layout: str = "auto"  # of relayline's stages
    n_threads: int = 0  # of one stage; 0: the cores divided by the stages, at least 1
    gpu_layers: int = 0  # of each stage, and of llama-server alone, on a GPU; -1 for all

    @property
    def stage_threads(self) -> int:
        """Threads of one stage."""
        return self.n_threads or max(1, len(self.cores) // self.n_stages)


def _start(
    name: str, command: Sequence[str], setup: Setup, stdin: int, stdout: int | None, token: str = ""
) -> subprocess.Popen[bytes]:
    """Start a process on the set-up's cores; its errors (and output, unless asked for) go to NAME.log."""
    before = os.sched_getaffinity(0)
    log = (setup.log_dir / f"{name}.log").open("ab")
    try:
        os.sched_setaffinity(0, setup.cores)  # inherited by the child; this thread goes back at once
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env={**os.environ, TOKEN_VARIABLE: token} if token else None,
            start_new_session=True,  # Ctrl-C reaches the bench alone, which ends its servers in order
        )
    finally:
        os.sched_setaffinity(0, before)
        log.close()


@contextlib.asynccontextmanager
async def process(
    name: str, command: Sequence[str], setup: Setup, *, reads_stdout: bool = False, token: str = ""
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run one process for the length of a with block."""
    stdout = subprocess.PIPE if reads_stdout else None
    child = _start(name, command, setup, subprocess.PIPE, stdout, token)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        try:
            # A second Ctrl-C must not interrupt this: otherwise processes would be left behind.
            await asyncio.shield(asyncio.to_thread(child.wait, STOP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _failure(name: str, child: subprocess.Popen[bytes], setup: Setup) -> ServerError:
    lines = (setup.log_dir / f"{name}.log").read_text(errors="replace").splitlines()
    telling = [line for line in lines if "error" in line.lower()] or lines or ["it printed nothing"]
    return ServerError(f"{name} did not start (exit code {child.poll()}): {telling[-1].strip()}")


@contextlib.asynccontextmanager
async def relayline(
    name: str, arguments: Sequence[str], setup: Setup, token: str = ""
) -> AsyncIterator[dict[str, str]]:
    """Run one relayline command until it is ready; yields its ready event. `token` is its join token."""
    async with process(name, [*RELAYLINE, *arguments, "--json"], setup, reads_stdout=True, token=token) as child:
        assert child.stdout is not None
        async with asyncio.timeout(READY_TIMEOUT_S):
            line = await asyncio.to_thread(child.stdout.readline)
            while arguments[0] == "up" and line and json.loads(line)["event"] != "ready":
                line = await asyncio.to_thread(child.stdout.readline)  # it prints one event for each process first
        if not line:
            await asyncio.to_thread(child.wait)
            raise _failure(name, child, setup)
        yield json.loads(line)


def _engine_flags(setup: Setup) -> list[str]:
    return ["--ctx", str(setup.ctx_tokens), "--lanes", str(setup.n_lanes), "--threads", str(setup.stage_threads),
            "--kv-layout", setup.kv_layout, "--gpu-layers", str(setup.gpu_layers)]  # fmt: skip


@contextlib.asynccontextmanager
async def relayline_up(name: str, flags: Sequence[str], setup: Setup) -> AsyncIterator[Target]:
    """Run a whole pipeline by `relayline up`."""
    arguments = ["up", str(setup.model), "--stages", str(setup.n_stages), "--http", "127.0.0.1:0",
                 "--state-dir", str(setup.log_dir / f"{name}-state"), "--verbose"]  # fmt: skip
    async with relayline(name, [*arguments, *_engine_flags(setup), *flags], setup, stages.TOKEN) as ready:
        yield Target(ready["url"], "openai", ready["model"])


@contextlib.asynccontextmanager
async def relayline_linked(
    name: str, flags: Sequence[str], setup: Setup, pipeline_dir: Path, artifacts: Sequence[Path], delay_s: float
) -> AsyncIterator[tuple[Target, list[DelayProxy]]]:
    """Run a pipeline stage by stage, with a delaying proxy before every stage.

    The addresses that neighbours and coordinator are given are the proxies', so every message between two processes
    passes one. Messages pass the proxies with a delay of 0 as well, so that runs differ by the delay alone.
    """
    # A coordinator-only flag would be refused by a stage.
    stage_flags = [part for at in range(0, len(flags), 2) if flags[at] == "--policy" for part in flags[at : at + 2]]
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        for index, artifact in enumerate(artifacts):
            arguments = ["stage", "--artifact", str(artifact), "--listen", "127.0.0.1:0", "--exit-with-stdin"]
            stage = relayline(f"{name}-stage-{index}", [*arguments, *_engine_flags(setup), *stage_flags], setup)
            addresses.append((await stack.enter_async_context(stage))["address"])
        proxies = await stack.enter_async_context(delayed(addresses, delay_s))
        arguments = ["serve", "--pipeline", str(pipeline_dir), "--stages", ",".join(p.address for p in proxies)]
        serve = relayline(f"{name}-serve", [*arguments, "--http", "127.0.0.1:0", "--exit-with-stdin", *flags], setup)
        ready = await stack.enter_async_context(serve)
        yield Target(ready["url"], "openai", ready["model"]), proxies


@contextlib.asynccontextmanager
async def llama_server(
    name: str, flags: Sequence[str], setup: Setup, peers: Peers, n_threads: int
) -> AsyncIterator[Target]:
    """Run llama-server with one slot per lane, continuous batching on, prompt caches off."""
    port = free_port()
    command = [
        str(peers.server), "--model", str(setup.model), "--host", "127.0.0.1", "--port", str(port),
        "--ctx-size", str(setup.n_lanes * setup.ctx_tokens), "--parallel", str(setup.n_lanes), "--cont-batching",
        "--threads", str(n_threads), "--threads-batch", str(n_threads),
        "--cache-ram", "0", "--no-cache-prompt", "--fit", "off", *flags,
    ]  # fmt: skip
    async with process(name, command, setup) as child:
        await _healthy(name, child, f"http://127.0.0.1:{port}", setup)
        yield Target(f"http://127.0.0.1:{port}", "llama")


@contextlib.asynccontextmanager
async def llama_server_with(name: str, flags: Sequence[str], setup: Setup, peers: Peers) -> AsyncIterator[str]:
    """Run llama-server with these flags and no others; yields its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(peers.server), "--model", str(setup.model), "--host", "127.0.0.1", "--port", str(port), *flags]
    async with process(name, command, setup) as child:
        await _healthy(name, child, url, setup)
        yield url


async def _healthy(name: str, child: subprocess.Popen[bytes], url: str, setup: Setup) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(READY_TIMEOUT_S):
        while True:
            if child.poll() is not None:
                raise _failure(name, child, setup)
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_S)


async def _listening(name: str, child: subprocess.Popen[bytes], port: int, setup: Setup) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            if child.poll() is not None:
                raise _failure(name, child, setup)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(POLL_S)
                continue
            writer.close()
            await writer.wait_closed()
            return


@contextlib.asynccontextmanager
async def llama_rpc(
    name: str, setup: Setup, peers: Peers, delay_s: float | None = None
) -> AsyncIterator[tuple[Target, list[DelayProxy]]]:
    """Run llama-server over one `ggml-rpc-server` per stage, behind a delaying proxy each unless `delay_s` is None.

    There are no other links to delay: workers exchange data by way of llama-server.
    """
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        for index in range(setup.n_stages):
            port = free_port()
            command = [str(peers.rpc_server), "--host", "127.0.0.1", "--port", str(port)]
            command += ["--threads", str(setup.stage_threads)]
            worker = f"{name}-worker-{index}"
            child = await stack.enter_async_context(process(worker, command, setup))
            await _listening(worker, child, port, setup)
            addresses.append(f"127.0.0.1:{port}")
        proxies = [] if delay_s is None else await stack.enter_async_context(delayed(addresses, delay_s))
        addresses = [proxy.address for proxy in proxies] or addresses
        # Every layer and the head on the workers: the server itself only samples, so one thread is enough.
        flags = ["--rpc", ",".join(addresses), "--n-gpu-layers", "999"]
        if setup.gpu_layers:  # otherwise it would put some layers on the GPU itself
            flags += ["--device", ",".join(f"RPC{index}" for index in range(setup.n_stages))]
        yield await stack.enter_async_context(llama_server(name, flags, setup, peers, n_threads=1)), proxies


@functools.cache
def up_has_flag(flag: str) -> bool:
    """Return whether this relayline's `up` knows a flag."""
    shown = subprocess.run([*RELAYLINE, "up", "--help"], capture_output=True, text=True, check=True).stdout
    return flag in shown
