"""relayline against itself and against llama.cpp over HTTP: `python -m benches.compare [--quick]`.

One GGUF, and the same cores for every system. All servers are up at once, and only the one under test works. The
systems take turns at one number of streams (several times if the streams are few), then at the next number; then all of
it is repeated. So a drifting machine affects all systems alike. The bench compares ratios of medians over these runs.

llama.cpp's programs are measured as they ship. `--systems` can name them once more as `rpc+kernels` and
`unsplit+kernels`: built with the kernels of relayline's own stages, so that the difference left is splitting and
batching.

A run counts only if every request was answered with the right number of tokens and every answer agrees with the unsplit
model's. The unsplit model is computed by the same build of llama.cpp as the system (see reference.py). Runs that do not
count are listed with the reason, and no figure includes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from benches import interrupt, machine, parts, plot, report, stages
from benches.arguments import number, numbers, some_of
from benches.compared import Plan, Run
from benches.models import MIXES, SHAPES, model
from benches.pace import Pace, turns_of
from benches.peers import Kernels, Peers, PeersUnavailableError, build_peers, find_peers
from benches.reference import Answer, Prompt, expected_answers, judge, near_tie, prompts_for, score
from benches.servers import Setup, llama_rpc, llama_server, relayline_up, up_has_flag
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target, client
from relayline.wire.common.kv_layout import KV_LAYOUTS

POLICIES = ("auto", "single", "drain")
RIVALS: dict[str, Kernels] = {
    "rpc": Kernels.SHIPPED,
    "unsplit": Kernels.SHIPPED,
    "rpc+kernels": Kernels.OURS,
    "unsplit+kernels": Kernels.OURS,
    parts.DELAYED_RPC: Kernels.SHIPPED,
}
LABELS = {
    "auto": "relayline, automatic",
    "single": "relayline, batching off",
    "drain": "relayline, plain drain",
    "rpc": "llama.cpp RPC",
    "unsplit": "llama-server, unsplit",
    "rpc+kernels": "llama.cpp RPC + our kernels",
    "unsplit+kernels": "llama-server, unsplit + our kernels",
}
UNLESS_NAMED = (*POLICIES, "rpc", "unsplit")  # the systems of a normal run; the others need a second build of llama.cpp

HYBRID_SYSTEMS = ("auto", "single")


class Bench:
    """The state of one comparison: prompts, expected answers, and the runs so far."""

    def __init__(self, plan: Plan, log_dir: Path, peers: Mapping[Kernels, Peers]) -> None:
        self.plan, self.peers = plan, peers
        self.path = model(plan.shape, plan.mix)
        self.setup = Setup(
            model=self.path,
            n_stages=plan.n_stages,
            n_lanes=max(plan.streams),
            ctx_tokens=plan.n_prompt + plan.n_tokens + 8,
            cores=plan.cores,
            log_dir=log_dir,
            kv_layout=plan.kv_layout,
            gpu_layers=plan.gpu_layers,
        )
        n_prompts = max(max(plan.streams) * plan.rounds, plan.open_requests)
        self.prompts: list[Prompt] = prompts_for(n_prompts, plan.n_prompt, plan.shape.n_vocab)
        self.more_prompts: dict[int, Prompt] = {}  # prompts that belong to one part alone
        self.answers: list[tuple[int, ...]] = []
        self.runs: list[Run] = []
        self.notes: list[str] = []  # parts that were left out, with the reason

    def note(self, text: str) -> None:
        """Keep and print a note for the reader of the results."""
        self.notes.append(text)
        print(f"note: {text}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def system(self, name: str, setup: Setup | None = None) -> AsyncIterator[Target]:
        """Run one system by its short name. Raises ValueError for a name that is not in LABELS."""
        if name not in LABELS:
            raise ValueError(f"there is no system {name!r}")
        setup = setup or self.setup
        if name in POLICIES:
            flags = ["--no-share", *(["--policy", name] if up_has_flag("--policy") else [])]
            async with relayline_up(name, flags, setup) as target:
                yield target
            return
        peers = self.peers[RIVALS[name]]
        if name.startswith("rpc"):
            async with llama_rpc(name, setup, peers) as (target, _):
                yield target
        else:
            flags = ["--n-gpu-layers", "all" if setup.gpu_layers < 0 else str(setup.gpu_layers)]
            async with llama_server(name, flags, setup, peers, n_threads=len(setup.cores)) as target:
                yield target

    async def measure(
        self,
        session: aiohttp.ClientSession,
        part: str,
        system: str,
        target: Target,
        n_streams: int,
        repeat: int,
        ask: Callable[[], Awaitable[list[Request]]] | None = None,
    ) -> Run:
        """Measure one point (N streams in a closed loop unless `load` says otherwise) and keep it."""
        before = await parts.pipeline_status(session, target)
        if ask is None:
            requests = await load.closed_loop(
                session, target, self.prompts, n_streams=n_streams, n_tokens=self.plan.n_tokens,
                requests_per_stream=self.plan.rounds,
            )  # fmt: skip
        else:
            requests = await ask()
        summary = load.summarise(requests)
        after = await parts.pipeline_status(session, target, before)
        figures = parts.pipeline_figures(before, after, summary.wall_s)
        run = Run(part, system, n_streams, repeat, summary, figures, requests)
        self.runs.append(run)
        report.progress(run)
        return run

    async def judge_all(self) -> None:
        """Decide which runs count.

        Each is compared with the unsplit model, computed by the same build of llama.cpp as the system. Answers that are
        not exact are scored by it, each distinct one once.
        """
        for libraries in dict.fromkeys(self._libraries_of(run) for run in self.runs):
            await self._judge_runs([run for run in self.runs if self._libraries_of(run) == libraries], libraries)

    def _libraries_of(self, run: Run) -> Path | None:
        return self.peers[Kernels.SHIPPED].directory if RIVALS.get(run.system) is Kernels.SHIPPED else None

    async def _judge_runs(self, runs: Sequence[Run], libraries: Path | None) -> None:
        answers, n_threads = self.answers, len(self.plan.cores)
        if libraries is not None:
            answers = await expected_answers(self.path, self.prompts, self.plan.n_tokens, n_threads, libraries)
        doubtful = {
            (request.prompt_index, tuple(request.tokens))
            for run in runs
            for request in run.requests
            if request.is_complete and tuple(request.tokens) != expected(answers, request)
        }
        pairs = sorted(doubtful)
        prompts = {**dict(enumerate(self.prompts)), **self.more_prompts}
        gaps = await score(self.path, [(prompts[at], answer) for at, answer in pairs], n_threads, libraries)
        known = dict(zip(pairs, gaps, strict=True))
        for run in runs:
            self._judge(run, answers, known)

    def _judge(self, run: Run, answers: Sequence[Answer], known: dict[tuple[int, Answer], list[float]]) -> None:
        for request in run.requests:
            if not request.is_complete:
                got = request.error or f"{len(request.tokens)} of {request.n_tokens} tokens"
                run.fault = run.fault or f"prompt {request.prompt_index}: {got}"
                continue
            answer = tuple(request.tokens)
            gaps = known.get((request.prompt_index, answer))
            verdict = judge(answer, expected(answers, request), gaps, near_tie(self.plan.mix))
            run.n_exact += verdict.n_exact == len(answer)
            run.worst_gap = max(run.worst_gap, verdict.worst_gap)
            if not verdict.agrees:
                where = f"prompt {request.prompt_index} differs from token {verdict.n_exact} on"
                run.fault = run.fault or f"{where}, {verdict.worst_gap:.2f} deviations below the best"


def expected(answers: Sequence[Answer], request: Request) -> Answer | None:
    """Return the first n_tokens of the unsplit model's answer; None if fewer are known."""
    known = answers[request.prompt_index] if request.prompt_index >= 0 else ()
    return known[: request.n_tokens] if request.n_tokens <= len(known) else None


async def by_streams(bench: Bench) -> None:
    """Every system at every number of streams, in turns."""
    plan = bench.plan
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(client())
        targets = {name: await stack.enter_async_context(bench.system(name)) for name in plan.systems}
        for target in targets.values():  # first steps build graphs and touch pages
            await load.closed_loop(session, target, bench.prompts, n_streams=min(2, max(plan.streams)), n_tokens=4)
        began_ns = time.monotonic_ns()
        pace = Pace(began_ns + plan.repeat_minutes * 60 * 10**9 if plan.repeat_minutes else None)
        for repeat in range(plan.repeats):
            for point, n_streams in enumerate(plan.streams):
                if not pace.has_time(n_streams, repeat, now_ns := time.monotonic_ns()):
                    continue
                for turn in range(turns_of(n_streams)):
                    first = (repeat + point + turn) % len(targets)  # so that no system is always first
                    in_turn = [*targets.items()][first:] + [*targets.items()][:first]
                    await _at_one_point(bench, session, in_turn, n_streams, repeat)
                pace.took(n_streams, time.monotonic_ns() - now_ns)
        if pace.left_out:
            few = ", ".join(f"{n_streams} streams (#{repeat})" for n_streams, repeat in pace.left_out)
            bench.note(f"no time for these repeats within {plan.repeat_minutes} minutes: {few}")
        if plan.open_rate_per_s:
            for name in (name for name in targets if name in ("auto", "rpc", "unsplit")):
                await parts.open_loop(bench, session, name, targets[name])


async def _at_one_point(
    bench: Bench, session: aiohttp.ClientSession, targets: Sequence[tuple[str, Target]], n_streams: int, repeat: int
) -> None:
    for name, target in targets:
        run = await bench.measure(session, "streams", name, target, n_streams, repeat)
        if name == "auto" and bench.plan.rounds == 1:
            reports = await stages.ask(await parts.pipeline_status(session, target))
            run.extra |= stages.figures(reports, run.requests, bench.plan.n_prompt)


async def run(bench: Bench) -> None:
    """Measure every part of the plan, then judge."""
    plan = bench.plan
    bench.answers = await expected_answers(bench.path, bench.prompts, plan.n_tokens, len(plan.cores))
    await by_streams(bench)
    if plan.delays_ms:
        await parts.delays(bench)
    if plan.prefill_tokens:
        await parts.prefill_during_decode(bench)
    if plan.sweep:
        await parts.sweep(bench)
    await bench.judge_all()


def usual_shape(options: argparse.Namespace) -> str:
    """Return the name of the shape that is measured where none is named."""
    plain, hybrid = ("toy", "toy-hybrid") if options.quick else ("llama-1b", "qwen35-0.8b")
    return hybrid if options.hybrid else plain


def systems_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the systems to measure; for a hybrid, by default, only batching on and off."""
    return tuple(options.systems) or (HYBRID_SYSTEMS if options.hybrid else UNLESS_NAMED)


@dataclasses.dataclass(frozen=True)
class Usual:
    """What is measured where the command line does not say."""

    streams: tuple[int, ...]
    repeats: int
    n_tokens: int
    delays_ms: tuple[float, ...]
    delay_streams: tuple[int, ...]
    prefill_tokens: int
    open_rate_per_s: float
    open_requests: int


FULL = Usual((1, 2, 4, 8, 16, 32), 2, 32, (0.0, 1.0, 10.0), (1, 8, 32), 2_000, 1.0, 16)
QUICK = Usual((1, 4), 1, 16, (0.0, 1.0), (4,), 128, 20.0, 6)


def plan_of(options: argparse.Namespace, peers: Mapping[Kernels, Peers]) -> Plan:
    """Return the plan that the command line asks for."""
    usual = QUICK if options.quick else FULL
    has_streams_alone = options.only_streams or options.hybrid
    cores = tuple(sorted(os.sched_getaffinity(0))[: options.cores])
    wanted = systems_of(options)
    return Plan(
        shape=SHAPES[options.shape or usual_shape(options)],
        mix=options.type,
        streams=options.streams or usual.streams,
        repeats=options.repeats or usual.repeats,
        repeat_minutes=options.repeat_minutes,
        n_tokens=options.tokens or usual.n_tokens,
        n_prompt=options.prompt,
        rounds=options.rounds,
        n_stages=2,
        kv_layout=options.kv_layout,
        gpu_layers=options.gpu_layers,
        cores=cores,
        systems=tuple(name for name in wanted if name in POLICIES or RIVALS[name] in peers),
        delays_ms=() if has_streams_alone else usual.delays_ms,
        delay_streams=options.delay_streams or usual.delay_streams,
        prefill_tokens=options.long_prompt or (0 if has_streams_alone else usual.prefill_tokens),
        open_rate_per_s=0.0 if has_streams_alone or options.no_arrivals else usual.open_rate_per_s,
        open_requests=usual.open_requests,
        sweep=options.sweep,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; impossible arguments end it with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m benches.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model and few points: checks the bench itself")
    parser.add_argument("--shape", choices=list(SHAPES), default=None)
    hybrid = "a model with recurrent states: batching on against off by streams alone; leaves hybrid.json"
    parser.add_argument("--hybrid", action="store_true", help=hybrid)
    parser.add_argument("--type", choices=list(MIXES), default="q4_0")
    parser.add_argument("--streams", type=numbers, default=(), help="such as 1,2,4")
    parser.add_argument("--systems", type=some_of(LABELS), default=(), help=f"some of {','.join(LABELS)}")
    parser.add_argument("--prompt", type=number, default=16, help="tokens of every prompt")
    parser.add_argument("--tokens", type=number, default=0, help="of every answer")
    parser.add_argument("--rounds", type=number, default=1, help="requests of each stream, one after the other")
    parser.add_argument("--repeats", type=number, default=0)
    in_time = "skip repeats that would end later than this many minutes after the first began; delays run once"
    parser.add_argument("--repeat-minutes", type=number, default=0, help=in_time)
    delayed = "such as 1,8; streams through delayed links"
    parser.add_argument("--delay-streams", type=numbers, default=(), help=delayed)
    parser.add_argument("--long-prompt", type=number, default=0, help="tokens of the prompt beside running streams")
    layout = "of the KV cache of relayline's stages"
    parser.add_argument("--kv-layout", choices=KV_LAYOUTS, default="auto", help=layout)
    gpu = "layers of each stage, and of the unsplit server, on a GPU; -1 for all"
    parser.add_argument("--gpu-layers", type=int, default=0, help=gpu)
    parser.add_argument("--no-arrivals", action="store_true", help="without Poisson arrivals")
    parser.add_argument("--cores", type=number, default=2, help="cores that every system gets")
    parser.add_argument("--sweep", action="store_true", help="also groups x rows set by hand (several minutes more)")
    parser.add_argument(
        "--only-streams", action="store_true", help="without delays, arrivals and, unless given, a long prompt"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    return parser.parse_args(argv)


def wanted_kernels(options: argparse.Namespace) -> list[Kernels]:
    """Return the builds of llama.cpp that the chosen systems need."""
    return list(dict.fromkeys(RIVALS[name] for name in systems_of(options) if name in RIVALS))


def peers_for(options: argparse.Namespace) -> dict[Kernels, Peers]:
    """Return the peers. A quick run takes them only if they are built already."""
    try:
        found = {
            kernels: find_peers(kernels) if options.quick else build_peers(options.cores, kernels)
            for kernels in wanted_kernels(options)
        }
    except PeersUnavailableError as error:
        print(f"note: llama.cpp's servers are left out: {error}", file=sys.stderr)
        return {}
    return {kernels: peers for kernels, peers in found.items() if peers is not None}


async def main() -> int:
    """Run the comparison; exit code 1 if a run did not count."""
    options = parse()
    peers = peers_for(options)
    out, is_smoke = options.out / ("hybrid" if options.hybrid else "compare"), options.quick
    wants_peers = bool(wanted_kernels(options))
    return await compare(plan_of(options, peers), peers, out, wants_peers=wants_peers, is_smoke=is_smoke)


async def compare(
    plan: Plan, peers: Mapping[Kernels, Peers], out: Path, *, wants_peers: bool, is_smoke: bool = False
) -> int:
    """Measure a plan, show it and leave `out`.json and .png; exit code 1 if a run did not count."""
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        bench = Bench(plan, Path(logs), peers)
        if not peers and wants_peers:
            bench.note("llama.cpp's servers were not measured (`python -m benches.peers` builds them)")
        try:
            await run(bench)
        except BaseException:
            _show_logs(Path(logs))
            raise
    results = report.results(bench.plan, bench.runs, facts, bench.notes)
    machine.write_json(out.with_suffix(".json"), results)
    report.show(results, LABELS)
    plot.compare(results, LABELS, out.with_suffix(".png"))
    # A smoke run checks that relayline and the bench work. The rivals' answers are in the table all the same.
    return int(any(run.fault for run in bench.runs if not (is_smoke and run.system in RIVALS)))


def _show_logs(directory: Path) -> None:
    if isinstance(sys.exception(), asyncio.CancelledError):  # interrupted: the exit code has no reader
        return
    for log in sorted(directory.glob("*.log")):
        lines: Sequence[str] = log.read_text(errors="replace").splitlines()[-5:]
        print("\n".join(f"[{log.stem}] {line}" for line in lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(interrupt.run(main()))
