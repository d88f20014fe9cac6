"""The pause that readers notice when a stage or a link fails: `python -m benches.pauses [--quick]`.

All streams begin at once. When each has a set number of tokens, the last stage gets SIGKILL and is started again, and
all stages read every unfinished stream's history again. With `--cut-link` the link to the last stage is cut instead,
and streams resume from the stages' caches. A stream's pause is the longest time between two of its tokens from then on.
Policies take turns, each run with new processes. Every answer must be complete and equal to the unsplit model's;
otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.arguments import number, numbers, some_of
from benches.models import MIXES, SHAPES, model
from benches.reference import Prompt, prompts_for
from benches.servers import Setup, relayline_linked
from benches.verdicts import wrong_answers
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target
from relayline.deploy.launch.local import running
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_stages
from relayline.deploy.models.splits import split_for
from relayline.wire.common.process import first_of

N_STAGES = 2
POLICIES = ("auto", "drain", "single")
POLL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """The figures of one loss. Times are seconds since the kill."""

    policy: str
    n_streams: int
    n_paused: int  # unfinished streams
    n_read: int  # tokens read again: whole histories after a kill, the reported number after a cut
    ready_s: float  # until the pipeline had all stages again
    pauses_s: tuple[float, ...]  # of each paused stream
    done_s: float  # until the last answer


@dataclasses.dataclass(frozen=True, slots=True)
class Breakable:
    """A running pipeline, and a way to break it."""

    target: Target
    break_it: Callable[[], Awaitable[None]]
    failed: asyncio.Future[None]  # done when the pipeline will not come back


def pause_s(request: Request, killed_ns: int) -> float:
    """Return the longest time between two tokens of an answer of which the later came after the kill. Pure."""
    gaps_ns = [
        later - earlier
        for earlier, later in zip(request.token_ns, request.token_ns[1:], strict=False)
        if later > killed_ns
    ]
    return max(gaps_ns, default=0) / 1e9


def loss_of(
    policy: str,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    killed_ns: int,
    back_ns: int,
    n_rows: int | None = None,
) -> Loss:
    """Reduce one run to the figures that its readers notice. Pure.

    `n_rows`: rows that the busiest stage has computed since its start, if no stage was started again.
    """
    n_received = [sum(at_ns <= killed_ns for at_ns in request.token_ns) for request in requests]
    paused = [at for at, request in enumerate(requests) if n_received[at] < request.n_tokens]
    if n_rows is None:
        again = sum(len(prompts[requests[at].prompt_index]) + n_received[at] for at in paused)
    else:
        again = n_rows - sum(len(prompts[request.prompt_index]) + len(request.tokens) - 1 for request in requests)
    return Loss(
        policy=policy,
        n_streams=len(requests),
        n_paused=len(paused),
        n_read=again,
        ready_s=(back_ns - killed_ns) / 1e9,
        pauses_s=tuple(pause_s(requests[at], killed_ns) for at in paused),
        done_s=(max(request.token_ns[-1] for request in requests if request.token_ns) - killed_ns) / 1e9,
    )


async def epoch_of(session: aiohttp.ClientSession, target: Target) -> int:
    """Return how often the pipeline has been connected; 0 while it is not."""
    async with session.get(target.url + "/health") as reply:
        if reply.status != 200:
            return 0
    async with session.get(target.url + "/v1/pipeline") as reply:
        return int((await reply.json())["epoch"])


async def most_rows(session: aiohttp.ClientSession, target: Target) -> int:
    """Return how many rows the stage that has computed most of them has."""
    async with session.get(target.url + "/v1/pipeline") as reply:
        return max(int(stage["rows"]) for stage in (await reply.json())["stages"])


async def back_again(session: aiohttp.ClientSession, target: Target, epoch: int) -> int:
    """Wait until the coordinator has noticed the loss and all stages are back; returns when that was.

    The epoch reveals it: a link may be back before a reading shows the loss.
    """
    while True:
        if await epoch_of(session, target) > epoch:
            return time.monotonic_ns()
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def to_kill(path: Path, policy: str, n_lanes: int, ctx_tokens: int) -> AsyncIterator[Breakable]:
    """Run a pipeline whose last stage can be killed and is started again."""
    settings: dict[str, Any] = {"ctx_tokens": ctx_tokens, "n_lanes": n_lanes, "policy": policy}
    manifest = with_stages(smallest_manifest(path, **settings), StageFlags(N_STAGES), 0)
    async with running(manifest, lambda _, __: None) as (pipeline, ready):

        async def kill() -> None:
            os.kill(pipeline.stage(-1).pid, signal.SIGKILL)

        yield Breakable(Target(ready["url"], "openai", ready["model"]), kill, pipeline.failed)


@contextlib.asynccontextmanager
async def to_cut(path: Path, policy: str, n_lanes: int, ctx_tokens: int) -> AsyncIterator[Breakable]:
    """Run a pipeline whose last stage is reached through a proxy that can be cut."""
    directory = split_for(path, N_STAGES, None, None)
    artifacts = [directory / stage.file for stage in load_pipeline(directory).stages]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as logs:
        setup = Setup(path, N_STAGES, n_lanes, ctx_tokens, cores, Path(logs))
        async with relayline_linked("pauses", ("--policy", policy), setup, directory, artifacts, 0.0) as (
            target,
            proxies,
        ):
            yield Breakable(target, proxies[-1].cut, asyncio.get_running_loop().create_future())


async def lose(
    path: Path, policy: str, prompts: Sequence[Prompt], n_before: int, n_tokens: int, *, cuts_link: bool
) -> tuple[Loss, list[Request]]:
    """Run one pipeline, break it when all streams have n_before tokens, and return its figures."""
    ctx_tokens = max(map(len, prompts)) + n_tokens
    serving = (to_cut if cuts_link else to_kill)(path, policy, len(prompts), ctx_tokens)
    async with serving as pipeline, load.client() as session:
        target = pipeline.target
        requests = [Request(at, n_tokens, time.monotonic_ns()) for at in range(len(prompts))]
        all_talk = asyncio.Event()

        def on_token(_: Request) -> None:
            if min(len(request.tokens) for request in requests) >= n_before:
                all_talk.set()

        asked = (load.complete(session, target, prompts[at], request, on_token) for at, request in enumerate(requests))
        asking = asyncio.gather(*asked)
        talking = asyncio.create_task(all_talk.wait())
        await first_of(talking, asking)
        if not talking.done():
            talking.cancel()
            raise SystemExit(next(request.error for request in requests if request.error))
        epoch = await epoch_of(session, target)
        killed_ns = time.monotonic_ns()
        await pipeline.break_it()
        watching = asyncio.create_task(back_again(session, target, epoch))
        await first_of(watching, pipeline.failed)
        if pipeline.failed.done():
            watching.cancel()
            pipeline.failed.result()
        await asking
        n_rows = await most_rows(session, target) if cuts_link else None
    return loss_of(policy, requests, prompts, killed_ns, watching.result(), n_rows), requests


def show(losses: Sequence[Loss]) -> None:
    """Print one line for each loss."""
    table = Table("streams", "policy", "paused", "tokens read again", "all stages back s", "mean pause s", "longest",
                  "all done s", title="after the loss")  # fmt: skip
    for loss in losses:
        table.add_row(
            str(loss.n_streams), loss.policy, str(loss.n_paused), str(loss.n_read), f"{loss.ready_s:.1f}",
            f"{statistics.mean(loss.pauses_s):.1f}", f"{max(loss.pauses_s):.1f}", f"{loss.done_s:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)


async def main(argv: Sequence[str] | None = None) -> int:
    """Break pipelines, judge the answers, report."""
    parser = argparse.ArgumentParser(prog="python -m benches.pauses", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model, a few tokens: checks the bench itself")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--type", choices=MIXES, default="q4_0")
    parser.add_argument("--streams", type=numbers, default=(4, 8), help="such as 4,8")
    parser.add_argument("--policies", type=some_of(POLICIES), default=("auto", "drain"), help="in turns")
    parser.add_argument("--prompt", type=number, default=100, help="tokens of each prompt")
    parser.add_argument("--before", type=number, default=50, help="tokens that every stream has before the kill")
    parser.add_argument("--tokens", type=number, default=200, help="of each answer")
    parser.add_argument("--cut-link", action="store_true", help="cut the link to the last stage, which lives on")
    parser.add_argument("--repeats", type=number, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if options.tokens <= options.before:
        parser.error("--tokens: answers must go on after the kill, so give more than --before")
    if options.quick:
        options.shape, options.streams, options.repeats = "toy", (3,), 1
    path = model(SHAPES[options.shape], options.type)
    prompts = prompts_for(max(options.streams), options.prompt, SHAPES[options.shape].n_vocab)
    losses: list[Loss] = []
    requests: list[Request] = []
    for n_streams in options.streams:
        for _ in range(options.repeats):
            for policy in options.policies:
                some = prompts[:n_streams]
                loss, asked = await lose(path, policy, some, options.before, options.tokens, cuts_link=options.cut_link)
                losses.append(loss)
                requests += asked
    wrong = await wrong_answers(path, options.type, prompts, requests)
    facts = {"machine": machine.facts(), "model": path.stem, "losses": [dataclasses.asdict(loss) for loss in losses]}
    machine.write_json(options.out / "pauses.json", facts | {"wrong": wrong})
    show(losses)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
