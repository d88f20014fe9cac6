"""The parts of the comparison beyond "N streams on each system": delays, a long prompt, arrivals, hand-set groups."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from benches import report
from benches.compared import Run
from benches.peers import Kernels
from benches.reference import prompts_for
from benches.servers import llama_rpc, relayline_linked, relayline_up, up_has_flag
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target, client
from relayline.deploy.models.splits import split_for

if TYPE_CHECKING:
    from benches.compare import Bench

DELAY_STAGES = 4
DELAYED_RPC = f"{DELAY_STAGES} workers of RPC"
LONG_PROMPT = -1  # its index among the bench's prompts
RUNNING_STREAMS = 4  # during the long prompt
# Tokens of each running stream before the long prompt comes. With 250 before a prompt of 2,000 tokens there are some
# 1,000 intervals. (Of 250 intervals the p99 is the third largest: 177 ms in one run and 251 in another with the same
# median.)
QUIET_TOKENS_MIN, QUIET_PART = 64, 8
RUNNING_TOKENS_MAX = 1_500  # a running stream is cancelled once the long prompt has its first token


# --- relayline's own figures ------------------------------------------------------------------------------------


async def pipeline_status(
    session: aiohttp.ClientSession, target: Target, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return GET /v1/pipeline, with the overlap since an earlier reading; empty for a server without it."""
    if target.dialect != "openai":
        return {}
    since = {"since_ns": str(before["now_ns"])} if before else {}
    async with session.get(f"{target.url}/v1/pipeline", params=since) as response:
        status: dict[str, Any] = await response.json()
        return status


def _difference(old: dict[str, Any], new: dict[str, Any], name: str) -> dict[str, int]:
    """Return the increase of each key of a histogram, without keys that did not increase."""
    earlier = old.get(name, {})
    counts = {key: int(n) - int(earlier.get(key, 0)) for key, n in new.get(name, {}).items()}
    return {key: n for key, n in counts.items() if n > 0}


def _travelled_in(histogram: dict[str, int]) -> float:
    """Return the size of the step that the average member travelled in: mean over members, not over steps."""
    n_members = sum(int(size) * n for size, n in histogram.items())
    return sum(int(size) ** 2 * n for size, n in histogram.items()) / n_members if n_members else 0.0


def pipeline_figures(before: dict[str, Any], after: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """Return the difference of two readings of GET /v1/pipeline. Fields that a version lacks are left out.

    `batch_mean` of a stage counts frames (one per session), so a prompt does not look like a batch; `rows_mean` counts
    rows. `computing_mean` is the mean number of stages inside a native step over the run, prompts included. `overlap`
    is the share of the time with any stage computing in which two or more were, and `overlap_covers` the share of the
    time between the readings that it covers, since stages remember a bounded number of steps. Both are left out if the
    second reading did not name the first: its overlap would include other runs.
    """
    if not after.get("stages"):
        return {}
    stages: list[dict[str, Any]] = []
    busy_ns = 0
    for old, new in zip(before["stages"], after["stages"], strict=True):
        rows, sessions = _difference(old, new, "steps_by_rows"), _difference(old, new, "steps_by_sessions")
        busy_ns += new.get("busy_ns", 0) - old.get("busy_ns", 0)
        stages.append(
            {
                "steps_by_rows": rows,
                "steps_by_sessions": sessions,
                "rows_mean": _travelled_in(rows),
                "batch_mean": _travelled_in(sessions),
                "close_reasons": _difference(old, new, "close_reasons"),
            }
        )
    figures: dict[str, Any] = {"stages": stages, "plan": after.get("plan")}
    if wall_s > 0:
        figures["computing_mean"] = busy_ns / 1e9 / wall_s
    return figures | _overlap_of(before, after)


def _overlap_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    since_ns, shares = after.get("overlap_since_ns"), after.get("overlap")
    if since_ns is None or since_ns < before["now_ns"] or not shares:
        return {}
    covers = (after["now_ns"] - since_ns) / (after["now_ns"] - before["now_ns"])
    return {"overlap": shares["2+"], "overlap_covers": covers}


# --- parts ------------------------------------------------------------------------------------------------------------


async def open_loop(bench: Bench, session: aiohttp.ClientSession, name: str, target: Target) -> None:
    """Poisson arrivals at one rate."""
    plan = bench.plan

    async def ask() -> list[Request]:
        prompts = bench.prompts[: plan.open_requests]
        return await load.open_loop(
            session, target, prompts, rate_per_s=plan.open_rate_per_s, n_tokens=plan.n_tokens, seed=1
        )

    run = await bench.measure(session, "open", name, target, 0, 0, ask)
    run.extra["rate_per_s"] = plan.open_rate_per_s


async def delays(bench: Bench) -> None:
    """Four stages with one thread each, a delaying proxy before every stage; llama.cpp's RPC in the same way."""
    plan = bench.plan
    directory = split_for(bench.path, DELAY_STAGES, None, None)
    artifacts = [directory / stage.file for stage in load_pipeline(directory).stages]
    setup = dataclasses.replace(bench.setup, n_stages=DELAY_STAGES, n_threads=1)
    flags = ["--policy", "auto"] if up_has_flag("--policy") else []
    repeats = 1 if plan.repeat_minutes else plan.repeats
    for delay_ms in plan.delays_ms:
        name, delay_s = f"delay-{delay_ms:g}", delay_ms / 1e3
        linked = relayline_linked(name, flags, setup, directory, artifacts, delay_s)
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(client())
            systems = {f"{DELAY_STAGES} stages": await stack.enter_async_context(linked)}
            if "rpc" in plan.systems:
                rival = llama_rpc(f"{name}-rpc", setup, bench.peers[Kernels.SHIPPED], delay_s)
                systems[DELAYED_RPC] = await stack.enter_async_context(rival)
            for target, _ in systems.values():
                await load.closed_loop(session, target, bench.prompts, n_streams=1, n_tokens=4)
            for repeat in range(repeats):
                for n_streams in (n for n in plan.delay_streams if n <= setup.n_lanes):
                    for system, (target, proxies) in systems.items():
                        for proxy in proxies:
                            proxy.measure_anew()
                        run = await bench.measure(session, "delay", system, target, n_streams, repeat)
                        n_pieces = sum(proxy.n_pieces for proxy in proxies)
                        measured_ms = 1e3 * sum(proxy.held_s for proxy in proxies) / max(1, n_pieces)
                        run.extra |= {"delay_ms": delay_ms, "delay_measured_ms": measured_ms}


async def prefill_during_decode(bench: Bench) -> None:
    """Inter-token latency of running streams while a long prompt is read, against their quiet latency.

    Each system is measured once, without repeats: one run takes minutes and covers hundreds of tokens.
    """
    plan = bench.plan
    room = bench.plan.n_prompt + RUNNING_TOKENS_MAX
    setup = dataclasses.replace(bench.setup, n_lanes=RUNNING_STREAMS + 1, ctx_tokens=max(room, plan.prefill_tokens + 8))
    for name in (name for name in plan.systems if name in ("auto", "drain", "rpc", "unsplit")):
        async with bench.system(name, setup) as target, client() as session:
            await _one_long_prompt(bench, session, name, target, 0)


class _Progress:
    """Waits until every running stream has a number of tokens."""

    def __init__(self, running: list[Request]) -> None:
        self._running = running
        self._wanted: list[int] = [0] * len(running)
        self._reached = asyncio.Event()

    def on_token(self, _: Request) -> None:
        """Check whether every stream has its count."""
        if all(len(request.tokens) >= n for request, n in zip(self._running, self._wanted, strict=True)):
            self._reached.set()

    async def reach(self, wanted: list[int], tasks: list[asyncio.Task[Request]]) -> None:
        """Return once each stream has its count, or a stream has ended (with an error, or at its limit)."""
        self._wanted = wanted
        self._reached.clear()
        waiting = asyncio.create_task(self._reached.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


async def _one_long_prompt(
    bench: Bench, session: aiohttp.ClientSession, name: str, target: Target, repeat: int
) -> None:
    plan = bench.plan
    long_prompt = prompts_for(1, plan.prefill_tokens, plan.shape.n_vocab, seed=1_000 + repeat)[0]
    running = [Request(at, RUNNING_TOKENS_MAX, time.monotonic_ns()) for at in range(RUNNING_STREAMS)]
    progress = _Progress(running)
    tasks = [
        asyncio.create_task(
            load.complete(session, target, bench.prompts[request.prompt_index], request, progress.on_token)
        )
        for request in running
    ]
    long = Request(LONG_PROMPT, 1, 0)
    bench.more_prompts[LONG_PROMPT] = long_prompt
    ended: list[asyncio.Task[Request]] = []
    try:
        quiet_tokens = max(QUIET_TOKENS_MIN, plan.prefill_tokens // QUIET_PART)
        await progress.reach([quiet_tokens] * len(running), tasks)
        long.due_ns = time.monotonic_ns()
        await load.complete(session, target, long_prompt, long)
        # The interval that the prompt's last chunk lengthened ends with each stream's next token.
        await progress.reach([len(request.tokens) + 1 for request in running], tasks)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()  # a client that disconnects frees its lane
        await asyncio.gather(*tasks, return_exceptions=True)
    keep_long_prompt(bench, name, repeat, running, long, n_ended=len(ended))


def keep_long_prompt(
    bench: Bench, name: str, repeat: int, running: list[Request], long: Request, n_ended: int = 0
) -> None:
    """Reduce one long-prompt run: latencies before the prompt came and while it was read, and their ratios.

    `n_ended` running streams ended before they were cancelled, which left the others more of the machine.
    """

    ended_ns = long.token_ns[0] if long.token_ns else time.monotonic_ns()
    quiet, during = quiet_and_prefill_ms(running, long.due_ns, ended_ns)
    p50, p99 = ((load.percentile(quiet, share), load.percentile(during, share)) for share in (0.5, 0.99))
    checked = [_shortened(request) for request in running]
    run = Run("prefill", name, RUNNING_STREAMS, repeat, load.summarise(running), {}, [*checked, long])
    run.extra = {
        "prompt_tokens": bench.plan.prefill_tokens,
        "ttft_ms": (ended_ns - long.due_ns) / 1e6,
        "quiet_itl_p50_ms": p50[0],
        "quiet_itl_p99_ms": p99[0],
        "beside_itl_p50_ms": p50[1],
        "beside_itl_p99_ms": p99[1],
        "itl_p50_ratio": p50[1] / p50[0] if p50[0] else float("nan"),
        "itl_p99_ratio": p99[1] / p99[0] if p99[0] else float("nan"),
        "n_quiet": len(quiet),
        "n_beside": len(during),
    }
    if not long.is_complete:
        run.fault = f"long prompt: {long.error or 'no token'}"
    elif n_ended:
        run.fault = f"{n_ended} of the running streams ended before the long prompt was read"
    bench.runs.append(run)
    report.progress(run)


def quiet_and_prefill_ms(running: list[Request], due_ns: int, ended_ns: int) -> tuple[list[float], list[float]]:
    """Return the intervals between tokens of running streams while no prompt was read, and while one was.

    The prompt was sent at `due_ns` and had its first token at `ended_ns`. Intervals count as quiet only from the moment
    every stream had its first token. Until then the streams' own prompts are read, which lengthens intervals as well.
    """
    all_began_ns = max((request.token_ns[0] if request.token_ns else due_ns for request in running), default=due_ns)
    quiet: list[float] = []
    during: list[float] = []
    for request in running:
        for interval_ms, began_ns, at_ns in zip(
            load.intervals_ms(request), request.token_ns, request.token_ns[1:], strict=False
        ):
            if at_ns <= due_ns:
                if began_ns >= all_began_ns:
                    quiet.append(interval_ms)
            elif began_ns < ended_ns:  # an interval that only reaches into the prefill waited for it too
                during.append(interval_ms)
    return quiet, during


def _shortened(request: Request) -> Request:
    """Return the part of a stream's answer to compare, for a stream that was cancelled on purpose: everything until
    then.

    A cancelled stream has no error. A stream that failed keeps its error, so that the run does not count: its end left
    the others more of the machine.
    """
    return dataclasses.replace(request, n_tokens=len(request.tokens))


def sweep_points(n_streams: int) -> list[tuple[int, int]]:
    """Return the (groups, rows) pairs worth trying by hand for N streams: groups in powers of two."""
    groups = [g for g in (1, 2, 4, 8) if g <= n_streams]
    return [(g, -(-n_streams // g)) for g in groups]


async def sweep(bench: Bench) -> None:
    """Hand-set groups x rows, each in turns with the automatic choice at the same number of streams."""
    plan = bench.plan
    if not up_has_flag("--groups"):
        bench.note("this relayline has no --groups: the sweep by hand was left out")
        return
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(client())
        automatic = await stack.enter_async_context(bench.system("auto"))
        for n_streams in plan.streams:
            for n_groups, n_rows in sweep_points(n_streams):
                flags = ["--no-share", "--policy", "auto", "--groups", str(n_groups), "--group-rows", str(n_rows)]
                async with relayline_up(f"sweep-{n_groups}x{n_rows}", flags, bench.setup) as target:
                    await load.closed_loop(session, target, bench.prompts, n_streams=1, n_tokens=4)
                    turns = [("auto", automatic), (f"{n_groups}x{n_rows}", target)]
                    for repeat in range(plan.repeats):
                        runs = {
                            name: await bench.measure(session, "sweep", name, whom, n_streams, repeat)
                            for name, whom in (turns[::-1] if repeat % 2 else turns)
                        }
                        by_hand = runs[turns[1][0]]
                        by_hand.extra["against_auto"] = by_hand.summary.tok_s / runs["auto"].summary.tok_s
