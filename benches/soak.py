"""Stages die while streams are running: `python -m benches.soak [--minutes 3] [--seed 1] [--lanes 10] [--adapters]`, or
with `--cut-links`.

Streams of the demo model send one request after the other, and some clients leave in the middle of an answer. Meanwhile
stages are killed, ended or stopped for seconds, at random from the seed. Three things must hold. Every request that was
not cancelled gets a complete answer. Every answer, also the read part of a cancelled one, is equal to the unsplit
model's (near-ties are judged as in reference.py). At the end no lane is taken, except by kept prefixes. Prompts repeat,
so with more lanes than streams most of them start from a kept prefix. The bench also reports the pauses between tokens
that clients saw. With --adapters two thirds of the requests choose one of two random LoRA adapters, and their answers
are compared with the unsplit model's under it. With --cut-links stages stay alive, and the connections of one stage to
its neighbours and to the coordinator are cut instead.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from benches import interrupt, machine, parts
from benches.arguments import number
from benches.reference import Prompt
from benches.servers import Setup, relayline_linked
from benches.verdicts import CANCELLED, wrong_answers
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target
from relayline.deploy.launch.demo_run import MODEL
from relayline.deploy.launch.local import running
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.supervisor import Supervisor
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.tiny_adapters import make_adapter
from relayline.wire.common.process import first_of

N_STAGES, N_LANES, N_STREAMS = 3, 10, 16  # some always wait for a lane
CTX_TOKENS, TOKENS_MAX = 256, 80
PROMPT_LENGTHS = (1, 3, 8, 20, 60, 120)
N_PROMPTS = 30
LEAVING_SHARE = 0.15  # of all requests
REQUEST_TIMEOUT_S = 150.0  # longer than requests wait for a stage: a slower one hangs
QUIET_S = 15.0  # at the end, without faults
RESTARTS = RestartPolicy(max_s=2.5, healthy_s=12.0)  # quicker than usual, so that a soak sees more losses
DEATHS_WINDOW_S, DEATHS_MAX = 70.0, RESTARTS.deaths_max - 1  # of one stage: it is given up if it dies more often
ADAPTERS, ADAPTER_STRENGTH = ("one", "two"), 2.0  # so strong that each answer under another one is found to be wrong
KINDS, LINK_KINDS = ("kill", "kill", "end", "stop"), ("cut",)
Inflict = Callable[["Fault"], Awaitable[bool]]  # returns whether there was a process


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a stage."""

    at_s: float  # since the start
    kind: str  # kill: SIGKILL; end: SIGTERM; stop: SIGSTOP, for stopped_s; cut: its connections
    stage: int
    stopped_s: float


def faults_of(seed: int, minutes: float, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Yield the faults in order: one every few seconds, and none so often that the stage is given up. Pure."""
    rng = random.Random(seed)
    deaths_s: dict[int, list[float]] = collections.defaultdict(list)
    at_s = 0.0
    while (at_s := at_s + rng.uniform(1.0, 11.0)) < 60 * minutes - QUIET_S:
        fault = Fault(at_s, rng.choice(kinds), rng.randrange(N_STAGES), rng.uniform(0.2, 4.0))
        if fault.kind in ("kill", "end"):
            recent = [death_s for death_s in deaths_s[fault.stage] if at_s - death_s < DEATHS_WINDOW_S]
            if len(recent) >= DEATHS_MAX:
                continue
            deaths_s[fault.stage] = [*recent, at_s]
        yield fault


async def inflict(pipeline: Supervisor, fault: Fault) -> bool:
    """Apply the fault to the stage's current process; returns whether there was one."""
    child = pipeline.stage(fault.stage)
    if child.exited.is_set():
        return False
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "stop":
            os.kill(child.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.stopped_s)
            finally:
                os.kill(child.pid, signal.SIGCONT)
        else:
            os.kill(child.pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        return True
    return False


@contextlib.asynccontextmanager
async def supervised(
    n_lanes: int, adapters: Mapping[str, Path]
) -> AsyncIterator[tuple[Target, Inflict, asyncio.Future[None]]]:
    """Run a pipeline whose stages are started again; the future is done when a stage is given up."""
    settings: dict[str, Any] = {"ctx_tokens": CTX_TOKENS, "n_lanes": n_lanes, "share": False, "prefix_lanes": n_lanes}
    if adapters:
        settings["lora"] = ",".join(f"{name}={path}" for name, path in adapters.items())
    manifest = with_stages(smallest_manifest(MODEL, **settings), StageFlags(N_STAGES, n_threads=1), 0)
    async with running(manifest, lambda _, __: None, policy=RESTARTS) as (pipeline, ready):
        target = Target(ready["url"], "openai", ready["model"], cache_prompt=True)
        yield target, functools.partial(inflict, pipeline), pipeline.failed


@contextlib.asynccontextmanager
async def linked(n_lanes: int) -> AsyncIterator[tuple[Target, Inflict, asyncio.Future[None]]]:
    """Run a pipeline whose stages are reached through proxies that can be cut."""
    split = split_for(MODEL, N_STAGES, None, None)
    artifacts = [split / stage.file for stage in load_pipeline(split).stages]
    with tempfile.TemporaryDirectory() as logs:
        setup = Setup(MODEL, N_STAGES, n_lanes, CTX_TOKENS, tuple(sorted(os.sched_getaffinity(0))), Path(logs))
        async with relayline_linked("soak", serve_flags(n_lanes), setup, split, artifacts, 0.0) as (target, proxies):

            async def cut(fault: Fault) -> bool:
                await proxies[fault.stage].cut()
                return True

            keeping = dataclasses.replace(target, cache_prompt=True)
            yield keeping, cut, asyncio.get_running_loop().create_future()


def serve_flags(n_lanes: int) -> tuple[str, ...]:
    """Return the coordinator's configuration."""
    return ("--no-share", "--prefix-lanes", str(n_lanes))


class Soak:
    """One soak: its requests and its answers."""

    def __init__(
        self,
        seed: int,
        minutes: float,
        n_lanes: int = N_LANES,
        *,
        cuts_links: bool = False,
        adapters: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self.seed, self.minutes, self.n_lanes, self.cuts_links = seed, minutes, n_lanes, cuts_links
        self.adapters = adapters
        rng = random.Random(seed)
        lengths = [rng.choice(PROMPT_LENGTHS) for _ in range(N_PROMPTS)]
        self.prompts: list[Prompt] = [tuple(rng.randrange(256, 450) for _ in range(length)) for length in lengths]
        self.requests: list[Request] = []
        self.inflicted: collections.Counter[str] = collections.Counter()

    async def run(self) -> dict[str, Any]:
        """Run it; returns GET /v1/pipeline at the end."""
        serving = linked(self.n_lanes) if self.cuts_links else supervised(self.n_lanes, self.adapters)
        async with serving as (target, inflict, failed), load.client() as session:
            work = asyncio.create_task(self._talk(inflict, session, target))
            try:
                await first_of(work, failed)
                if failed.done():
                    failed.result()
                await work
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            return await self._at_rest(session, target)

    async def _talk(self, inflict: Inflict, session: aiohttp.ClientSession, target: Target) -> None:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._chaos(inflict, began_s))
            for index in range(N_STREAMS):
                group.create_task(self._stream(session, target, began_s, index))

    async def _at_rest(self, session: aiohttp.ClientSession, target: Target) -> dict[str, Any]:
        """Return GET /v1/pipeline once no stage holds a lane, or after QUIET_S. When the last token arrives, closes are
        still in flight, and the stage with the last fault may not be back.
        """
        until_s = time.monotonic() + QUIET_S
        while True:
            picture = await parts.pipeline_status(session, target)
            if not kept_lanes(picture) or time.monotonic() > until_s:
                return picture
            await asyncio.sleep(0.1)

    async def _chaos(self, inflict: Inflict, began_s: float) -> None:
        for fault in faults_of(self.seed, self.minutes, LINK_KINDS if self.cuts_links else KINDS):
            await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
            if await inflict(fault):
                self.inflicted[fault.kind] += 1
                print(f"{fault.at_s:6.1f} s: {fault.kind} stage {fault.stage}", file=sys.stderr, flush=True)

    async def _stream(self, session: aiohttp.ClientSession, target: Target, began_s: float, index: int) -> None:
        rng = random.Random(f"{self.seed} {index}")
        while time.monotonic() < began_s + 60 * self.minutes:
            request = Request(rng.randrange(N_PROMPTS), rng.randint(2, TOKENS_MAX), time.monotonic_ns())
            if self.adapters:
                request.fields = rng.choice(({}, *({"model": name} for name in self.adapters)))
            leaves_after = rng.randint(1, request.n_tokens) if rng.random() < LEAVING_SHARE else 0
            self.requests.append(request)
            await self._ask(session, target, request, leaves_after)

    async def _ask(self, session: aiohttp.ClientSession, target: Target, request: Request, leaves_after: int) -> None:
        asking: asyncio.Task[Request]

        def on_token(asked: Request) -> None:
            if leaves_after and len(asked.tokens) >= leaves_after:
                asking.cancel()

        prompt = self.prompts[request.prompt_index]
        asking = asyncio.create_task(load.complete(session, target, prompt, request, on_token))
        try:
            done, _ = await asyncio.wait([asking], timeout=REQUEST_TIMEOUT_S)
        finally:
            asking.cancel()
        if not done:
            request.error = f"no end after {REQUEST_TIMEOUT_S:.0f} s"
        elif asking.cancelled():
            request.error = CANCELLED


def random_adapters(directory: Path) -> dict[str, Path]:
    """Make a LoRA adapter for each of the names."""
    return {
        name: make_adapter(MODEL, directory / f"{name}.gguf", seed=seed, strength=ADAPTER_STRENGTH)
        for seed, name in enumerate(ADAPTERS)
    }


async def wrong_by_adapter(soak: Soak) -> list[str]:
    """Return one line for each wrong answer, judged by the model under the adapter that its request chose."""
    wrong: list[str] = []
    for name in ("", *soak.adapters):
        chosen = [request for request in soak.requests if request.fields.get("model", "") == name]
        found = await wrong_answers(MODEL, "q4_0", soak.prompts, chosen, soak.adapters.get(name))
        wrong += [f"adapter {name}, {line}" for line in found] if name else found
    return wrong


def kept_lanes(picture: dict[str, Any]) -> list[str]:
    """Return one line for each stage of GET /v1/pipeline that holds lanes, or does not report them. Pure."""
    return [
        f"stage {stage['index']} keeps {stage.get('lanes_used', 'an unknown number of')} lanes"
        for stage in picture["stages"]
        if stage.get("lanes_used", 1)
    ]


async def main(argv: Sequence[str] | None = None) -> int:
    """Soak, judge, report; exit code 1 where a request failed, an answer was wrong or a lane was kept."""
    parser = argparse.ArgumentParser(prog="python -m benches.soak", description=__doc__)
    parser.add_argument("--minutes", type=number, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of faults, prompts and clients that leave")
    parser.add_argument("--lanes", type=number, default=N_LANES, help=f"of each stage; there are {N_STREAMS} streams")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--cut-links", action="store_true", help="cut links instead of killing stages")
    how.add_argument("--adapters", action="store_true", help="two thirds of the requests choose a LoRA adapter")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        made = random_adapters(Path(scratch)) if options.adapters else {}
        soak = Soak(options.seed, options.minutes, options.lanes, cuts_links=options.cut_links, adapters=made)
        picture = await soak.run()
        wrong = kept_lanes(picture) + await wrong_by_adapter(soak)
    report(soak, picture, wrong, options.out)
    return int(bool(wrong))


def report(soak: Soak, picture: dict[str, Any], wrong: list[str], out: Path) -> None:
    """Write the results, and print them."""
    pauses_ms = [pause for request in soak.requests for pause in load.intervals_ms(request)]
    results = {
        "machine": machine.facts(),
        "seed": soak.seed,
        "minutes": soak.minutes,
        "lanes": soak.n_lanes,
        "adapters": len(soak.adapters),
        "faults": dict(soak.inflicted),
        "epochs": picture["epoch"],
        "requests": len(soak.requests),
        "copied_tokens": picture["copied_tokens"],
        "cancelled": sum(request.error == CANCELLED for request in soak.requests),
        "tokens": sum(len(request.tokens) for request in soak.requests),
        "pause_ms": {f"p{share}": load.percentile(pauses_ms, share / 100) for share in (50, 99, 100)},
        "wrong": wrong,
    }
    machine.write_json(out / "soak.json", results)
    pause_ms = results["pause_ms"]
    assert isinstance(pause_ms, dict)
    print(
        f"{results['requests']} requests, {results['cancelled']} of them cancelled, {results['tokens']} tokens; "
        f"faults {dict(soak.inflicted)}, {picture['epoch']} epochs begun; "
        f"{picture['copied_tokens']} tokens of prompts copied\n"
        f"between tokens: p50 {pause_ms['p50']:.0f} ms, p99 {pause_ms['p99']:.0f} ms, at most {pause_ms['p100']:.0f} ms"
    )
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
